"""V1, V2 and V3: a radix tree with checkpoints at branch points and last decoded tokens."""

from __future__ import annotations

from dataclasses import dataclass

from sim.marconi_artifact.evict import evict_by_score, evict_oldest_leaves
from sim.marconi_artifact.sizes import Sizes
from sim.marconi_artifact.tree import Node, Tokens, Tree, common_length


@dataclass(frozen=True, slots=True)
class Match:
    """``overlap`` tokens agree with edges, ``reused`` of them end at a checkpoint, ``last``'s."""

    overlap: int
    reused: int
    last: Node


class Hybrid:
    """A cache of ``capacity`` bytes.

    ``alpha`` None is V1: the oldest leaf goes first, and a visit refreshes the whole path.
    ``exact_booking`` mends the bytes that an eviction by score believes to have freed.
    """

    def __init__(
        self, sizes: Sizes, capacity: float, alpha: float | None, exact_booking: bool = False
    ) -> None:
        self.tree = Tree(sizes)
        self.capacity, self.alpha, self.exact_booking = capacity, alpha, exact_booking
        self.evicts = False

    def emptied(self, alpha: float) -> Hybrid:
        """An empty cache of the same kind under ``alpha``."""
        return Hybrid(self.tree.sizes, self.capacity, alpha, self.exact_booking)

    def lookup(self, tokens: Tokens) -> int:
        """Tokens credited to a prompt; this moves the clock and refreshes what it reads."""
        return self._match(tokens).reused

    def insert(self, tokens: Tokens) -> None:
        """Keep prompt and output, after making room as the artifact reckons it."""
        tree, sizes = self.tree, self.tree.sizes
        tree.tick()
        match = self._match(tokens)
        states = 2 if match.overlap > match.reused else 1
        need = states * sizes.checkpoint_bytes + (len(tokens) - match.overlap) * sizes.kv_bytes
        if tree.bytes + need > self.capacity:
            self._evict(tree.bytes + need - self.capacity)
        self._add(tokens)

    def _match(self, tokens: Tokens) -> Match:
        """Walk down; a mismatch inside an edge does not end the walk (the "phantom match")."""
        tree = self.tree
        tree.tick()
        node = last = tree.root
        overlap = reused = 0
        while overlap < len(tokens):
            child = node.children.get(int(tokens[overlap]))
            if child is None:
                break
            shared = _shared(child, tokens, overlap)
            overlap += shared
            if shared == child.edge:
                reused += shared
                last = child
            if self.alpha is None:
                child.stamp = tree.clock
            node = child
        last.stamp = tree.clock
        return Match(overlap, reused, last)

    def _evict(self, want: float) -> None:
        self.tree.tick()
        self.evicts = True
        if self.alpha is None:
            evict_oldest_leaves(self.tree, want)
        else:
            evict_by_score(self.tree, want, self.alpha, self.exact_booking)

    def _add(self, tokens: Tokens) -> None:
        tree = self.tree
        node, at = tree.root, 0
        while at < len(tokens):
            key = int(tokens[at])
            child = node.children.get(key)
            if child is None:
                tree.add(node, tokens, at, len(tokens), key)
                return
            shared = _shared(child, tokens, at)
            at += shared
            node = child if shared == child.edge else tree.split(child, shared)
            if self.alpha is None:
                node.stamp = tree.clock


def _shared(node: Node, tokens: Tokens, at: int) -> int:
    return common_length(node.tokens[node.start : node.end], tokens[at : at + node.edge])
