"""The block baseline: one node and one whole checkpoint per block of tokens."""

from __future__ import annotations

from collections.abc import Hashable

from sim.marconi_artifact.evict import evict_oldest_leaves
from sim.marconi_artifact.sizes import Sizes
from sim.marconi_artifact.tree import Node, Tokens, Tree


class Blocks:
    """A cache of ``capacity`` bytes in blocks of ``block`` tokens.

    Children are keyed by their tokens. Sequences end in a block that may be partial, a leaf.
    """

    def __init__(self, sizes: Sizes, capacity: float, block: int) -> None:
        self.tree = Tree(sizes)
        self.capacity, self.block = capacity, block
        self.evicts = False

    def lookup(self, tokens: Tokens) -> int:
        """Tokens credited to a prompt; this moves the clock and refreshes what it reads."""
        return self._match(tokens)[0]

    def insert(self, tokens: Tokens) -> None:
        """Keep prompt and output; need is a block short and nothing is too large to admit."""
        tree, sizes = self.tree, self.tree.sizes
        tree.tick()
        _, accessed = self._match(tokens)
        extra = len(tokens) - self.block * accessed
        need = extra / self.block * sizes.checkpoint_bytes + extra * sizes.kv_bytes
        if tree.bytes + need > self.capacity:
            tree.tick()
            self.evicts = True
            evict_oldest_leaves(tree, tree.bytes + need - self.capacity)
        self._add(tokens)

    def _match(self, tokens: Tokens) -> tuple[int, int]:
        """Tokens that agree in whole nodes, and the nodes read, the root among them."""
        tree = self.tree
        tree.tick()
        node, at, accessed = tree.root, 0, 1
        while at < len(tokens):
            child = node.children.get(self._key(tokens, at))
            if child is None or child.edge < self.block:
                break
            node, at, accessed = child, at + self.block, accessed + 1
            node.stamp = tree.clock
        tail = self._tails(node, tokens, at)
        if tail:
            at, accessed = at + tail[0].edge, accessed + 1
        return at, accessed

    def _add(self, tokens: Tokens) -> None:
        tree = self.tree
        node, at = tree.root, 0
        while at < len(tokens):
            key = self._key(tokens, at)
            end = min(at + self.block, len(tokens))
            child = node.children.get(key)
            if child is None:
                tails = self._tails(node, tokens, at)
                if tails:
                    child = self._fill(max(tails, key=lambda tail: tail.edge), tokens, end, key)
                else:
                    child = tree.add(node, tokens, at, end, key)
            node, at = child, end

    def _fill(self, leaf: Node, tokens: Tokens, end: int, key: Hashable) -> Node:
        """Complete a partial block in place; it becomes the last of its parent's children."""
        assert leaf.parent is not None
        del leaf.parent.children[leaf.key]
        leaf.parent.children[key] = leaf
        self.tree.kv_tokens += end - leaf.end
        leaf.tokens, leaf.end, leaf.key, leaf.stamp = tokens, end, key, self.tree.clock
        return leaf

    def _key(self, tokens: Tokens, at: int) -> bytes:
        return tokens[at : at + self.block].tobytes()

    def _tails(self, node: Node, tokens: Tokens, at: int) -> list[Node]:
        """Partial blocks below ``node`` that agree whole, in order of the children."""
        ahead = self._key(tokens, at)
        return [
            child
            for child in node.children.values()
            if child.edge < self.block and ahead.startswith(child.key)  # type: ignore[arg-type]
        ]
