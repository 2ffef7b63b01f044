"""One integer for every distinct token prefix of a trace.

The sequences (prompt, then output) form a radix tree. Its nodes get contiguous ranges of ids so
that a node's first child goes on where the node ends: a *chain*. A request is then a short list
of extents, each the head of one chain, and ``id(p) = p + delta`` inside an extent. Ids are
compared for equality only.

Where addresses are already chained (every address has one predecessor in the whole trace, as in
hashed formats) they are the ids, and no tree is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traces.trace import Ints, Trace


@dataclass(frozen=True)
class Prefixes:
    """Extents of every request (CSR): in row ``k``, prefix lengths up to ``ends[k]`` have the id
    ``length + deltas[k]``. Every extent starts at the head of a chain, so equal first ids mean
    the same chain.
    """

    offsets: Ints
    ends: Ints
    deltas: Ints

    def extents(self, request: int) -> list[tuple[int, int, int]]:
        """``(start, end, delta)`` of each extent: ``start < p <= end`` has id ``p + delta``."""
        rows = slice(int(self.offsets[request]), int(self.offsets[request + 1]))
        ends = self.ends[rows].tolist()
        return list(zip([0, *ends[:-1]], ends, self.deltas[rows].tolist(), strict=True))

    def ids(self, request: int, lengths: NDArray[np.int64]) -> Ints:
        """Ids of the prefixes of the given lengths (>= 1, at most the sequence's length)."""
        rows = slice(int(self.offsets[request]), int(self.offsets[request + 1]))
        where = np.searchsorted(self.ends[rows], lengths, side="left")
        return np.asarray(lengths + self.deltas[rows][where], np.int64)

    def grid(self, request: int, step: int) -> list[int]:
        """Ids of the prefixes of length ``step``, ``2 * step``, … of a whole sequence."""
        rows = slice(int(self.offsets[request]), int(self.offsets[request + 1]))
        last = int(self.ends[rows][-1]) if rows.stop > rows.start else 0
        out: list[int] = self.ids(request, np.arange(step, last + 1, step, dtype=np.int64)).tolist()
        return out

    def common(self, a: int, b: int) -> int:
        """Length of the longest common prefix of the sequences of requests ``a`` and ``b``."""
        shared = 0
        for (s, e, d), (_, e2, d2) in zip(self.extents(a), self.extents(b), strict=False):
            if d != d2:
                break
            shared = min(e, e2)
            if e != e2 or s > shared:
                break
        return shared


def identify(trace: Trace) -> Prefixes:
    """Prefix identities of all prompts and outputs of ``trace``."""
    if is_chained(trace):
        return _from_addresses(trace.run_offsets, trace.run_address, trace.run_length)
    offsets, address, length = _tree_runs(trace)
    return _from_addresses(offsets, address, length)


def is_chained(trace: Trace) -> bool:
    """True if every address has one predecessor, so that an address names a whole prefix."""
    starts, lengths = trace.run_address, trace.run_length
    if not len(starts):
        return True
    before = np.empty_like(starts)
    before[1:] = starts[:-1] + lengths[:-1] - 1
    first = trace.run_offsets[:-1][np.diff(trace.run_offsets) > 0]
    before[first] = -1
    order = np.argsort(starts, kind="stable")
    s, b = starts[order], before[order]
    if np.any((s[1:] == s[:-1]) & (b[1:] != b[:-1])):
        return False
    # no run may pass through another run's start: count runs open strictly around each start
    inner_from = np.sort(starts + 1)
    inner_to = np.sort(starts + lengths)
    distinct = s[np.r_[True, s[1:] != s[:-1]]]
    opened = np.searchsorted(inner_from, distinct, side="right")
    closed = np.searchsorted(inner_to, distinct, side="right")
    return bool(np.all(opened == closed))


def _from_addresses(offsets: Ints, address: Ints, length: Ints) -> Prefixes:
    """Extents of chained runs: the id of a prefix is the address after its last token."""
    total = np.cumsum(length)
    counts = np.diff(offsets)
    base = np.r_[0, total][offsets[:-1]]
    ends = total - np.repeat(base, counts)
    return Prefixes(offsets=offsets, ends=ends, deltas=address + length - ends)


class _Node:
    __slots__ = ("address", "base", "children", "length", "parent")

    def __init__(self, address: int, length: int, parent: _Node | None) -> None:
        self.address, self.length, self.parent = address, length, parent
        self.children: dict[int, _Node] = {}
        self.base = 0

    def split(self, at: int) -> _Node:
        """Cut after ``at`` tokens; the new upper part takes this node's place in the tree."""
        assert self.parent is not None
        upper = _Node(self.address, at, self.parent)
        self.parent.children[self.address] = upper
        self.address += at
        self.length -= at
        self.parent = upper
        upper.children[self.address] = self
        return upper


def _insert(root: _Node, runs: list[tuple[int, int]]) -> _Node:
    """Walk ``runs`` down the tree, adding what is missing; the node at the end of the sequence."""
    node = root
    for address, length in runs:
        while length:
            child = node.children.get(address)
            if child is None:
                child = _Node(address, length, node)
                node.children[address] = child
            elif length < child.length:
                child = child.split(length)
            node = child
            address += child.length
            length -= child.length
    return node


def _tree_runs(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Chained runs (offsets, address, length) from the radix tree of all sequences."""
    root = _Node(-1, 0, None)
    offsets = trace.run_offsets.tolist()
    runs = list(zip(trace.run_address.tolist(), trace.run_length.tolist(), strict=True))
    leaves = [_insert(root, runs[a:b]) for a, b in pairwise(offsets)]
    _number(root)
    out: list[tuple[int, int]] = []
    new_offsets = [0]
    for leaf in leaves:
        out.extend(_path(leaf))
        new_offsets.append(len(out))
    table = np.array(out, np.int64).reshape(-1, 2)
    return np.array(new_offsets, np.int64), table[:, 0], table[:, 1]


def _number(root: _Node) -> None:
    """Preorder ids; a gap of one before every chain but the first child's keeps chains apart."""
    fresh = 0
    stack = [(child, False) for child in reversed(root.children.values())]
    while stack:
        node, goes_on = stack.pop()
        fresh += 0 if goes_on else 1
        node.base = fresh
        fresh += node.length
        children = list(node.children.values())
        stack.extend((child, False) for child in reversed(children[1:]))
        if children:
            stack.append((children[0], True))


def _path(leaf: _Node) -> list[tuple[int, int]]:
    """Runs from the root to the end of ``leaf``, consecutive ids merged."""
    nodes: list[_Node] = []
    node: _Node | None = leaf
    while node is not None and node.length:
        nodes.append(node)
        node = node.parent
    out: list[tuple[int, int]] = []
    for n in reversed(nodes):
        if out and out[-1][0] + out[-1][1] == n.base:
            out[-1] = (out[-1][0], out[-1][1] + n.length)
        else:
            out.append((n.base, n.length))
    return out
