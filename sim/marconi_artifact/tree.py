"""A tree of token sequences in which every node but the root owns one checkpoint."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.marconi_artifact.sizes import Sizes

Tokens = NDArray[np.integer[Any]]
LEAF, MERGED = 0, 1


class Node:
    """The edge ``tokens[start:end]``; ``tokens`` is any sequence that runs through the node.

    ``end`` is the node's depth in tokens, ``key`` its place among the parent's children, whose
    order counts where times tie. Nodes compare by last access, for heaps. ``place`` and
    ``worth`` are scratch of the eviction.
    """

    __slots__ = ("children", "end", "key", "parent", "place", "stamp", "start", "tokens", "worth")

    def __init__(
        self, tokens: Tokens, start: int, end: int, stamp: int, parent: Node | None, key: Hashable
    ) -> None:
        self.tokens, self.start, self.end = tokens, start, end
        self.stamp, self.parent, self.key = stamp, parent, key
        self.children: dict[Hashable, Node] = {}
        self.worth: float | None = None
        self.place = -1

    def __lt__(self, other: Node) -> bool:
        return self.stamp < other.stamp

    @property
    def edge(self) -> int:
        """Tokens of the edge."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Eviction:
    """What one eviction took: a ``LEAF``, or the checkpoint between two edges, then ``MERGED``."""

    request: int
    kind: int
    depth: int
    edge: int


class Tree:
    """Nodes, their counts, the logical clock and the evictions so far."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.root = Node(np.empty(0, np.int64), 0, 0, 0, None, None)
        self.clock = self.states = self.kv_tokens = 0
        self.request = -1  # index of the request being served, for the log
        self.evictions: list[Eviction] = []

    @property
    def bytes(self) -> int:
        """Bytes of all checkpoints and KV."""
        return self.states * self.sizes.checkpoint_bytes + self.kv_tokens * self.sizes.kv_bytes

    def tick(self) -> None:
        """One step of the logical clock."""
        self.clock += 1

    def add(self, parent: Node, tokens: Tokens, start: int, end: int, key: Hashable) -> Node:
        """A new leaf, used now."""
        node = Node(tokens, start, end, self.clock, parent, key)
        parent.children[key] = node
        self.states += 1
        self.kv_tokens += end - start
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut ``at`` tokens into the edge; the new upper node takes the place, used now."""
        assert node.parent is not None
        middle = node.start + at
        upper = Node(node.tokens, node.start, middle, self.clock, node.parent, node.key)
        node.parent.children[node.key] = upper
        node.start, node.parent, node.worth = middle, upper, None
        node.key = int(node.tokens[middle])
        upper.children[node.key] = node
        self.states += 1
        return upper

    def remove(self, leaf: Node) -> None:
        """Drop a leaf with its checkpoint and KV."""
        assert leaf.parent is not None
        self._log(LEAF, leaf)
        del leaf.parent.children[leaf.key]
        self.states -= 1
        self.kv_tokens -= leaf.edge

    def merge(self, node: Node) -> Node:
        """Drop the checkpoint of a node with one child and join the edges; the child it took."""
        self._log(MERGED, node)
        (child,) = node.children.values()
        node.tokens, node.end, node.worth = child.tokens, child.end, None
        node.stamp = max(node.stamp, child.stamp)
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        self.states -= 1
        return child

    def preorder(self) -> list[Node]:
        """Every node but the root, each before its children, children in insertion order."""
        out: list[Node] = []
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            out.append(node)
            if node.children:
                stack.extend(reversed(node.children.values()))
        return out

    def _log(self, kind: int, node: Node) -> None:
        self.evictions.append(Eviction(self.request, kind, node.end, node.edge))


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    if not n:
        return 0
    first = int(differs.argmax())
    return first if differs[first] else n
