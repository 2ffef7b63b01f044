"""The waiting queue and the order in which it is tried.

Sources: specs/sglang-0.5.23, sections 3 and 12; specs/sglang-0.5.18, section 3.
"""

from __future__ import annotations

from sim.sglang.cache import SglangCache
from sim.sglang.request import Live
from sim.sglang.tree import Node

REFRESH_EVERY, LONGEST_SORTED, SHARED = 32, 128, 32


class Waiting:
    """Requests in the order in which the next pass tries them."""

    def __init__(self, cache: SglangCache) -> None:
        self.cache = cache
        self.policy = cache.options.schedule_policy if cache.reuse else "fcfs"
        self.queue: list[Live] = []
        self.passes = 0

    def put_in_order(self) -> None:
        """Sort for the pass that comes now. Looks requests up, which changes the tree."""
        policy = self.policy
        if policy == "lpm" and len(self.queue) > LONGEST_SORTED:
            policy = "none"
        if policy in ("lpm", "dfs-weight"):
            late = self._look_up()
            if policy == "lpm":
                self.queue.sort(key=lambda r: 1 if r in late else -min(r.prefix, r.fill - 1))
            else:
                self.queue = _by_weight(self.cache.tree.root, self.queue)
        elif self._refreshes():
            for r in reversed(self.queue[:LONGEST_SORTED]):
                self.cache.touch(r)

    def _refreshes(self) -> bool:
        if not (self.queue and self.cache.options.waiting_refresh):
            return False
        if not (self.cache.rules.refresh_waiting and self.cache.reuse):
            return False
        self.passes += 1
        return self.passes % REFRESH_EVERY == 1

    def _look_up(self) -> set[Live]:
        """Match every request; those that had better wait for another with the same beginning."""
        late: set[Live] = set()
        heads: set[int] = set()
        for r in self.queue:
            self.cache.match_waiting(r)
            if r.prefix > SHARED or r.fill < SHARED:
                continue
            head = r.content.id(SHARED)
            if head in heads:
                late.add(r)
            heads.add(head)
        return late

    def drop(self, admitted: list[Live]) -> None:
        """Take the admitted requests out."""
        gone = set(admitted)
        self.queue = [r for r in self.queue if r not in gone]


def _by_weight(root: Node, queue: list[Live]) -> list[Live]:
    """Deepest first, subtrees with more waiting requests before others."""
    ending: dict[Node, list[Live]] = {}
    for r in queue:
        ending.setdefault(r.node, []).append(r)
    weight: dict[Node, int] = {}
    for node in ending:
        walk: Node | None = node
        while walk is not None:
            weight[walk] = weight.get(walk, 0) + len(ending[node])
            walk = walk.parent
    order: list[Live] = []
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order += ending.get(node, ())
            continue
        stack.append((node, True))
        children = [child for child in node.children.values() if child in weight]
        children.sort(key=lambda child: -weight[child])
        stack.extend((child, False) for child in reversed(children))
    return order
