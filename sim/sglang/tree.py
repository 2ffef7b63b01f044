"""The radix tree of KV and states: nodes, splits, locks, recency and eviction.

A node holds the KV of its edge and at most one state, the one exactly at its end. Recency of KV is
a stamp that only grows; of states, the order of a list. Sources: specs/sglang-0.5.23, sections 1,
2, 6 and 8; specs/sglang-0.5.18, sections 1 to 7.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from sim.sglang.content import Content
from sim.sglang.rules import Rules

TICK = 1 << 20


class Node:
    """``content`` is that of a request that inserted it; ``last`` the id of the prefix at ``end``.
    ``key`` is its place among its parent's children: the id at the end of its first page."""

    __slots__ = (
        "children", "content", "end", "key", "kv_locks", "last", "parent", "queued", "stamp",
        "state", "state_locks",
    )  # fmt: skip

    def __init__(self, parent: Node | None, content: Content, end: int, key: int, stamp: int):
        self.parent, self.content, self.end, self.key, self.stamp = parent, content, end, key, stamp
        self.last = content.id(end) if end else 0
        self.children: dict[int, Node] = {}
        self.state = False
        self.kv_locks = self.state_locks = 0
        self.queued = False

    @property
    def start(self) -> int:
        """Where its edge begins."""
        return self.parent.end if self.parent is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens of its edge."""
        return self.end - self.start


class Lock:
    """What a request holds: the KV from ``node`` to the root, and its state if ``state``."""

    __slots__ = ("node", "state")

    def __init__(self, node: Node, state: bool) -> None:
        self.node, self.state = node, state


class Tree:
    """``dropped`` is told of every node or state that goes: (node, its KV too)."""

    def __init__(
        self, page: int, rules: Rules, dropped: Callable[[Node, bool], None] = lambda *_: None
    ) -> None:
        self.page, self.rules, self.dropped = page, rules, dropped
        self.root = Node(None, Content([], []), 0, 0, 0)
        self.root.kv_locks = self.root.state_locks = 1
        self.clock = 0
        self.states: OrderedDict[Node, None] = OrderedDict()  # least recent first
        self.leaves: list[tuple[int, Node]] = []
        self.kv_tokens = self.kv_locked_tokens = 0
        self.evicted_kv = self.evicted_states = 0

    @property
    def kv_evictable_tokens(self) -> int:
        """KV of nodes without a lock."""
        return self.kv_tokens - self.kv_locked_tokens

    def _tick(self) -> int:
        self.clock += TICK
        return self.clock

    # ---------------------------------------------------------------- lookup
    def match_and_split(self, content: Content, limit: int, length: int) -> tuple[Node, Node]:
        """The deepest node that agrees with ``content`` within ``limit`` tokens, and the deepest
        with a state on the way to it (the root if there is none).

        A lookup changes the tree: an edge that agrees in part is split, the usable node becomes
        the most recent state, and its path the most recent KV. ``length`` is that of the whole
        sequence: MambaRadixCache picks the first edge by it, so a limit just below one page cuts
        that edge at 0 and leaves an empty node.
        """
        page, node, best = self.page, self.root, self.root
        if self.rules.cascade and 0 < limit < page <= length:
            self._cut_at_nothing(content)
        while node.end + page <= limit:
            child = node.children.get(content.id(node.end + page))
            if child is None:
                break
            if child.end <= limit and self._agrees(content, child):
                node = child
                if node.state:
                    best = node
                continue
            node = self._split(child, self._agreement(content, child, limit))
            break
        if limit >= page or (self.rules.cascade and limit):
            self._refresh(best)
        return node, best

    def _agrees(self, content: Content, child: Node) -> bool:
        """Whether ``content`` goes on along the whole edge."""
        return child.end == child.start or content.id(child.end) == child.last

    def _cut_at_nothing(self, content: Content) -> None:
        child = self.root.children.get(content.id(self.page))
        if child is not None and child.tokens:
            self._split(child, 0)

    def _agreement(self, content: Content, child: Node, limit: int) -> int:
        start = child.start
        shared = content.common(child.content, start + self.page, min(limit, child.end))
        return start + (shared - start) // self.page * self.page

    def _refresh(self, best: Node) -> None:
        if best.state:
            self.states.move_to_end(best)
        stamp = self._tick()
        node: Node | None = best
        while node is not None:
            node.stamp = stamp
            stamp -= 1
            node = node.parent

    def _split(self, child: Node, at: int) -> Node:
        """Cut ``child`` at ``at``; it stays the lower part and keeps its state and state lock."""
        parent = child.parent
        assert parent is not None
        upper = Node(parent, child.content, at, child.key, self._tick())
        upper.kv_locks = child.kv_locks
        parent.children[child.key] = upper
        child.parent, child.key = upper, child.content.id(at + self.page)
        upper.children[child.key] = child
        child.stamp = self._tick()
        if child.state and self.rules.split_refreshes:
            self.states.move_to_end(child)
        return upper

    # ---------------------------------------------------------------- insert
    def insert(self, content: Content, length: int) -> tuple[Node, int, bool]:
        """Put the KV up to ``length`` tokens and the state there into the tree: the node at its
        end, how many tokens of KV stood already, and whether the state did."""
        page, node = self.page, self.root
        while node.end < length:
            child = node.children.get(content.id(node.end + page))
            if child is None:
                break
            child.stamp = self._tick()
            if child.end <= length and self._agrees(content, child):
                node = child
            else:
                node = self._split(child, self._agreement(content, child, length))
        already = node.end
        if already < length:
            node = self._add_leaf(node, content, length)
        elif node is not self.root:
            node.stamp = self._tick()
        exists = node.state or node is self.root
        if not exists:
            node.state = True
            self.states[node] = None
        elif self.rules.refresh_duplicate and node.state and already == length:
            self.states.move_to_end(node)
        return node, already, exists

    def _add_leaf(self, parent: Node, content: Content, length: int) -> Node:
        key = content.id(parent.end + self.page)
        leaf = Node(parent, content, length, key, self._tick())
        parent.children[key] = leaf
        self.kv_tokens += leaf.tokens
        self._offer(leaf)
        return leaf

    # ---------------------------------------------------------------- locks
    def lock(self, node: Node, state: bool = True) -> Lock:
        """Pin the KV of the path, and the node's state if ``state`` and the version counts it."""
        counted = state and node is not self.root and (node.state or self.rules.lock_tombstones)
        if counted:
            node.state_locks += 1
        walk = node
        while walk.parent is not None:
            if walk.kv_locks == 0:
                self.kv_locked_tokens += walk.tokens
            walk.kv_locks += 1
            walk = walk.parent
        return Lock(node, counted)

    def unlock(self, lock: Lock) -> None:
        """Undo ``lock``."""
        self.unlock_state(lock)
        walk = lock.node
        while walk.parent is not None:
            walk.kv_locks -= 1
            if walk.kv_locks == 0:
                self.kv_locked_tokens -= walk.tokens
            walk = walk.parent
        self._offer(lock.node)

    def unlock_state(self, lock: Lock) -> None:
        """Give up the state of ``lock`` alone."""
        if lock.state:
            lock.node.state_locks -= 1
            lock.state = False
            self._offer(lock.node)

    # ---------------------------------------------------------------- eviction
    def evictable_leaf(self, node: Node) -> bool:
        """No child and no lock of any kind."""
        return not (node.children or node.kv_locks or node.state_locks or node.parent is None)

    def _offer(self, node: Node) -> None:
        if not node.queued and self.evictable_leaf(node):
            node.queued = True
            heappush(self.leaves, (node.stamp, node))

    def _oldest_leaf(self) -> Node | None:
        """Stamps only grow, so an entry with an old one goes back with its node's."""
        leaves = self.leaves
        while leaves:
            stamp, node = heappop(leaves)
            node.queued = False
            if not self.evictable_leaf(node) or node.content is DEAD:
                continue
            if stamp == node.stamp:
                return node
            self._offer(node)
        return None

    def evict_kv(self, tokens: int) -> int:
        """Delete the least recent leaves, states and all, until ``tokens`` are free: how many."""
        freed = 0
        while freed < tokens and (node := self._oldest_leaf()) is not None:
            freed += self.delete_leaf(node)
        return freed

    def evict_states(self, count: int) -> tuple[int, int]:
        """Drop the least recent states without a lock; a leaf's KV goes with it: (states, KV)."""
        states = tokens = 0
        while states < count and (node := next(self.candidates(), None)) is not None:
            states += 1
            if self.evictable_leaf(node):
                tokens += self.delete_leaf(node)
            else:
                self.drop_state(node)
                self.evicted_states += 1
        return states, tokens

    def candidates(self) -> Iterator[Node]:
        """Nodes whose state has no lock, least recent first."""
        return (node for node in self.states if not node.state_locks)

    def drop_state(self, node: Node) -> None:
        """The KV stays and keeps matching."""
        node.state = False
        del self.states[node]
        self.dropped(node, False)

    def delete_leaf(self, node: Node) -> int:
        """Remove a leaf and, in trees that cascade, state-less parents that it leaves childless:
        the tokens of KV that are free now."""
        freed = 0
        while True:
            freed += node.tokens
            self._remove(node)
            parent = node.parent
            assert parent is not None
            if not (self.rules.cascade and not parent.state and self.evictable_leaf(parent)):
                break
            node = parent
        self._offer(parent)
        self.evicted_kv += freed
        return freed

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self.kv_tokens -= node.tokens
        if node.state:
            node.state = False
            del self.states[node]
            self.evicted_states += 1
        self.dropped(node, True)
        node.content = DEAD

    # ---------------------------------------------------------------- paths and checks
    def holders(self, tail: Node) -> list[Node]:
        """Nodes with a state from the root to ``tail``, shallowest first."""
        out = []
        node: Node | None = tail
        while node is not None:
            if node.state:
                out.append(node)
            node = node.parent
        return out[::-1]

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Counters, order lists and locks agree with the nodes."""
        tokens = locked = states = 0
        for node in self.nodes():
            assert node.parent is not None and node.parent.end <= node.end
            assert node.parent.children[node.key] is node
            tokens += node.tokens
            locked += node.tokens if node.kv_locks else 0
            states += node.state
            assert node.kv_locks >= max((c.kv_locks for c in node.children.values()), default=0)
            assert not node.state or node in self.states
            assert node.state or node.children or not self.rules.cascade
        assert (tokens, locked) == (self.kv_tokens, self.kv_locked_tokens)
        assert states == len(self.states)


DEAD = Content([], [])
