"""The artifact's two ways to make room."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from sim.marconi_artifact.tree import Node, Tree

Floats = NDArray[np.float64]


def evict_oldest_leaves(tree: Tree, want: float) -> None:
    """Leaves by last access until ``want`` bytes are free (V1 and the block baseline).

    Ties fall as the heap's structure has it, which is the artifact's behaviour too: the heap is
    built from the leaves in preorder.
    """
    sizes = tree.sizes
    heap = [node for node in tree.preorder() if not node.children]
    heapq.heapify(heap)
    freed = 0
    while freed < want and heap:
        leaf = heapq.heappop(heap)
        tree.remove(leaf)
        freed += sizes.checkpoint_bytes + sizes.kv_bytes * leaf.edge
        parent = leaf.parent
        if parent is not None and parent is not tree.root and not parent.children:
            heapq.heappush(heap, parent)


def evict_by_score(tree: Tree, want: float, alpha: float, exact_booking: bool) -> None:
    """Nodes of at most one child by FLOPs per byte and recency until ``want`` bytes seem free.

    "Seem": for a leaf the artifact books the edge of its last candidate, not of the victim, so
    that the tree may stay larger than it should (V2 and V3); ``exact_booking`` mends this.
    """
    sizes = tree.sizes
    queue = _Candidates(tree)
    freed = 0
    while freed < want and queue.left:
        victim, last = queue.lowest(alpha)
        if victim.children:
            queue.merged(victim, tree.merge(victim))
            freed += sizes.checkpoint_bytes
        else:
            booked = victim if exact_booking else last
            freed += sizes.checkpoint_bytes + sizes.kv_bytes * booked.edge
            tree.remove(victim)
            queue.removed(victim)


class _Candidates:
    """Columns over the nodes of one eviction in preorder, kept up to date as nodes go."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.nodes = tree, tree.preorder()
        self.left = len(self.nodes)
        for place, node in enumerate(self.nodes):
            node.place = place
        self.open = np.array([len(node.children) <= 1 for node in self.nodes], bool)
        self.worth = np.array([self._worth(node) for node in self.nodes], np.float64)
        stamps = np.array([node.stamp for node in self.nodes], np.int64)
        self.recency: Floats = 1 / (tree.clock - stamps)

    def lowest(self, alpha: float) -> tuple[Node, Node]:
        """The first candidate of lowest score, and the last candidate of all."""
        which = np.flatnonzero(self.open)
        score = alpha * _normed(self.worth[which]) + _normed(self.recency[which])
        return self.nodes[which[score.argmin()]], self.nodes[which[-1]]

    def merged(self, node: Node, child: Node) -> None:
        """``node`` took the place of its only ``child``."""
        self.left -= 1
        self.open[child.place] = False
        self.open[node.place] = len(node.children) <= 1
        self.worth[node.place] = self._worth(node)
        self.recency[node.place] = 1 / (self.tree.clock - node.stamp)

    def removed(self, leaf: Node) -> None:
        """``leaf`` is gone."""
        self.left -= 1
        self.open[leaf.place] = False
        parent = leaf.parent
        if parent is not None and parent is not self.tree.root:
            self.open[parent.place] = len(parent.children) <= 1

    def _worth(self, node: Node) -> float:
        if node.worth is None:
            node.worth = self.tree.sizes.worth(node.end, node.edge)
        return node.worth


def _normed(values: Floats) -> Floats:
    """From 0 at the smallest to 1 at the largest; all 1 where all are equal."""
    low, high = values.min(), values.max()
    if low == high:
        return np.ones_like(values)
    return np.asarray((values - low) / (high - low), np.float64)
