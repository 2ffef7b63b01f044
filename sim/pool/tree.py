"""A radix tree over prefix ids: whose KV is resident, and who uses it.

A node is a stretch of contiguous ids (one edge); it ends where requests part, where a checkpoint
lies, where a request has got to, or where a chain of ids ends. What a request does costs as many
operations as edges lie on its path. Whoever uses a node uses every node above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Extents = list[tuple[int, int, int]]


class Node:
    """Tokens ``start:end`` of a path; ``last`` is the id of the prefix that ends with it.
    ``locks`` counts the requests that use it, ``state`` is the checkpoint at its end."""

    __slots__ = ("children", "end", "last", "locks", "parent", "start", "state")

    def __init__(self, parent: Node | None, start: int, end: int, last: int) -> None:
        self.parent, self.start, self.end, self.last = parent, start, end, last
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.state: Any = None

    @property
    def first(self) -> int:
        """Id of the prefix that ends with its first token."""
        return self.last - self.end + self.start + 1

    @property
    def tokens(self) -> int:
        """Length of the edge."""
        return self.end - self.start


class Tree:
    """``tokens`` are resident, ``locked_tokens`` of them used by a request. ``gone`` is told of
    every node that is taken out; ``touched`` collects nodes whose stretch may have changed."""

    def __init__(self, gone: Callable[[Node], None]) -> None:
        self.root = Node(None, 0, 0, -1)
        self.tokens = self.locked_tokens = 0
        self.gone = gone
        self.touched: list[Node] = []

    # ---------------------------------------------------------------- lookup
    def find(self, extents: Extents, longest: int) -> tuple[int, Any]:
        """How far KV is resident along a path, at most ``longest``, and the deepest checkpoint on
        that way. Pure."""
        node, at, best = self.root, 0, None
        for _, end, delta in extents:
            end = min(end, longest)
            while at < end:
                child = node.children.get(at + 1 + delta)
                if child is None:
                    return at, best
                if child.end > end:
                    return end, best
                node, at = child, child.end
                if child.state is not None:
                    best = child.state
        return at, best

    # ---------------------------------------------------------------- use
    def lock(self, node: Node | None) -> None:
        """One request more uses the path to ``node``."""
        while node is not None:
            if not node.locks:
                self.locked_tokens += node.tokens
            node.locks += 1
            node = node.parent

    def unlocked(self, node: Node | None) -> int:
        """Tokens on the path to ``node`` that nobody uses."""
        tokens = 0
        while node is not None and not node.locks:
            tokens += node.tokens
            node = node.parent
        return tokens

    def unlock(self, node: Node) -> Node:
        """One request less uses the path to ``node``; KV that leads to no checkpoint and that
        nobody uses goes at once. The node that is left at the end of the path."""
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if not at.locks:
                self.locked_tokens -= at.tokens
            at = at.parent
        return self.prune(node)

    # ---------------------------------------------------------------- growth
    def extend(self, node: Node, extents: Extents, to: int) -> Node:
        """The node that ends at ``to`` tokens, for a request that uses the path to ``node``; it
        uses the new part too."""
        for _, end, delta in extents:
            while node.end < min(end, to):
                stop = min(end, to)
                child = node.children.get(node.end + 1 + delta)
                if child is None:
                    node = self._grow(node, stop, stop + delta)
                    continue
                if child.end > stop:
                    child = self._split(child, stop)
                if not child.locks:
                    self.locked_tokens += child.tokens
                    if child.state is not None:
                        self.touched.append(child)
                child.locks += 1
                node = child
        return node

    def _grow(self, node: Node, end: int, last: int) -> Node:
        tokens = end - node.end
        self.tokens += tokens
        self.locked_tokens += tokens
        alone = node.locks == 1 and not node.children and node.state is None
        if alone and node.parent is not None and node.last + tokens == last:
            node.end, node.last = end, last
            return node
        if len(node.children) == 1:
            self.touched.extend(node.children.values())
        child = Node(node, node.end, end, last)
        child.locks = 1
        node.children[child.first] = child
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut at ``at`` tokens; the upper part, which has the lower one as its child."""
        assert node.parent is not None
        upper = Node(node.parent, node.start, at, node.last - (node.end - at))
        upper.locks = node.locks
        node.parent.children[upper.first] = upper
        node.parent, node.start = upper, at
        upper.children[node.first] = node
        self.touched.append(node)
        return upper

    # ---------------------------------------------------------------- shrinking
    def prune(self, node: Node) -> Node:
        """Take out KV from ``node`` upwards that leads to no checkpoint and that nobody uses; the
        node that is left."""
        while node.parent is not None and not (node.children or node.locks or node.state):
            self.tokens -= node.tokens
            self.gone(node)
            del node.parent.children[node.first]
            node = node.parent
        return self._merge(node)

    def _merge(self, node: Node) -> Node:
        """Join a node that nothing ends at with its only child, if their ids run on."""
        if node.parent is None or node.state is not None or len(node.children) != 1:
            return node
        (child,) = node.children.values()
        if child.locks != node.locks or child.first != node.last + 1:
            return node
        node.parent.children[node.first] = child
        child.start, child.parent = node.start, node.parent
        return child

    # ---------------------------------------------------------------- stretches
    def stretch(self, node: Node) -> int:
        """Tokens that go if the checkpoint at ``node`` does: back to the checkpoint, the fork or
        the used KV above; 0 if anything hangs below it or uses it."""
        if node.children or node.locks:
            return 0
        tokens = 0
        while node.parent is not None:
            tokens += node.tokens
            node = node.parent
            if node.locks or node.state is not None or len(node.children) > 1:
                break
        return tokens

    def states_below(self, node: Node) -> Iterator[Any]:
        """The nearest checkpoints below ``node``."""
        stack = list(node.children.values())
        while stack:
            at = stack.pop()
            if at.state is not None:
                yield at.state
            else:
                stack.extend(at.children.values())

    def check(self) -> None:
        """Raise ``AssertionError`` unless counts, locks and edges agree with the tree."""
        tokens = locked = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.parent is node and child.start == node.end and child.first == first
                assert 0 <= child.locks <= node.locks and child.tokens > 0, f"node at {child.end}"
                assert child.children or child.locks or child.state, "KV that leads nowhere"
                tokens += child.tokens
                locked += child.tokens if child.locks else 0
                stack.append(child)
        assert tokens == self.tokens, f"{self.tokens} tokens counted, {tokens} resident"
        assert locked == self.locked_tokens, f"{self.locked_tokens} tokens counted, {locked} used"
