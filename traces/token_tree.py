"""Token ids to addresses: a radix tree of arrays, compared in bulk.

The tokens are needed while a file is read and dropped with the tree. Addresses are chained: each
names a whole prefix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Runs = list[tuple[int, int]]


class _Node:
    __slots__ = ("address", "children", "tokens")

    def __init__(self, tokens: Tokens, address: int) -> None:
        self.tokens, self.address = tokens, address
        self.children: dict[int, _Node] = {}

    def split(self, at: int) -> None:
        """Keep ``at`` tokens; what follows becomes the only child and goes on in addresses."""
        lower = _Node(self.tokens[at:], self.address + at)
        lower.children = self.children
        self.children = {int(lower.tokens[0]): lower}
        self.tokens = self.tokens[:at]


class TokenTree:
    """All sequences so far; ``add`` names the tokens of one more."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int64), 0)
        self._fresh = 0

    def add(self, tokens: Tokens) -> Runs:
        """``(address, length)`` runs of ``tokens``, equal to those of others as far as these
        have the same tokens."""
        node, at, out = self._root, 0, list[tuple[int, int]]()
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = self._grow(node, tokens[at:])
            shared = common(child.tokens, tokens[at:])
            if shared < len(child.tokens):
                child.split(shared)
            out.append((child.address, shared))
            node, at = child, at + shared
        return out

    def _grow(self, node: _Node, tokens: Tokens) -> _Node:
        child = _Node(tokens, self._fresh)
        self._fresh += len(tokens) + 1  # apart from the next, so that no two runs seem to be one
        node.children[int(tokens[0])] = child
        return child


def common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def cut(runs: Runs, at: int) -> tuple[Runs, Runs]:
    """The first ``at`` tokens of ``runs``, and the rest."""
    head: Runs = []
    tail: Runs = []
    for address, length in runs:
        n = min(length, at)
        if n:
            head.append((address, n))
        if length > n:
            tail.append((address + n, length - n))
        at -= n
    return head, tail
