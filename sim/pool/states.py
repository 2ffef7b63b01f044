"""The checkpoints of the index: who lies above whom, who may go, who goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.policy import State
from sim.pool.tree import Node, Tree

Tell = Callable[[str, State], None]


@dataclass(slots=True, eq=False)
class Checkpoint(State):
    """``above`` is the nearest checkpoint on its path, ``below`` those it is nearest to;
    ``readers`` counts requests that resumed from it and use it, ``place`` is its place among the
    candidates (-1: none), ``fresh`` says that only the step being planned writes it."""

    node: Node = field(default=None)  # type: ignore[assignment]
    above: Checkpoint | None = None
    below: dict[Checkpoint, None] = field(default_factory=dict)
    readers: int = 0
    place: int = -1
    fresh: bool = False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) >> 4


class States:
    """Every checkpoint, those that nobody uses as ``candidates``. ``tell`` hears what happens."""

    def __init__(self, tree: Tree, tell: Tell) -> None:
        self.tree, self.tell = tree, tell
        self.count = self.pinned = 0
        self.candidates: list[Checkpoint] = []
        self.stamp = 0
        self.ages: list[tuple[int, Checkpoint]] = []

    # ---------------------------------------------------------------- coming and going
    def add(self, state: Checkpoint) -> None:
        """Put it at its node, between its neighbours."""
        node = state.node
        node.state = state
        self.count += 1
        above = node.parent
        while above is not None and above.state is None:
            above = above.parent
        state.above = above.state if above is not None else None
        below = list(self.tree.states_below(node)) if node.children else []
        for one in below:
            self._move(one, state)
        if state.above is not None:
            state.above.below[state] = None
            state.above.children = len(state.above.below)
        state.parent = state.above.position if state.above is not None else 0
        state.tokens = self.tree.stretch(node)
        self._stamp(state)
        self._offer(state)
        self.tell("created", state)
        for one in below if state.above is None else [*below, state.above]:
            self.tell("changed", one)

    def drop(self, state: Checkpoint) -> None:
        """Take it out, with the KV that only it needed."""
        self.count -= 1
        self._withdraw(state)
        state.node.state = None
        above = state.above
        changed = list(state.below)
        for one in changed:
            self._move(one, above)
        if above is not None:
            del above.below[state]
            above.children = len(above.below)
            changed.append(above)
        self.tell("dropped", state)
        left = self.tree.prune(state.node)
        for one in changed:
            self.tell("neighbour gone", one)
        self.refresh(left)

    def _move(self, state: Checkpoint, above: Checkpoint | None) -> None:
        if state.above is not None:
            state.above.below.pop(state, None)
            state.above.children = len(state.above.below)
        state.above, state.parent = above, above.position if above is not None else 0
        if above is not None:
            above.below[state] = None
            above.children = len(above.below)

    def refresh(self, node: Node) -> None:
        """Count again what goes with the checkpoint whose stretch leads through ``node``."""
        while node.state is None and len(node.children) == 1:
            (node,) = node.children.values()
        state = node.state
        if state is None:
            return
        tokens = self.tree.stretch(node)
        if tokens != state.tokens:
            state.tokens = tokens
            self.tell("changed", state)

    # ---------------------------------------------------------------- use
    def use(self, state: Checkpoint, tick: int, now_ns: int) -> None:
        """A request resumes from it: it stays until that request lets go."""
        state.readers += 1
        if state.readers == 1:
            self._withdraw(state)
            self.pinned += 1
            state.pinned = True
        state.used, state.used_ns = tick, now_ns
        state.uses += 1
        self._stamp(state)
        self.tell("used", state)

    def release(self, state: Checkpoint) -> None:
        """A request that resumed from it lets go."""
        state.readers -= 1
        if not state.readers:
            self.pinned -= 1
            state.pinned = False
            self._offer(state)
            self.tell("released", state)

    def _stamp(self, state: Checkpoint) -> None:
        self.stamp += 1
        state.stamp = self.stamp

    def _offer(self, state: Checkpoint) -> None:
        state.place = len(self.candidates)
        self.candidates.append(state)
        heapq.heappush(self.ages, (state.stamp, state))

    def _withdraw(self, state: Checkpoint) -> None:
        if state.place < 0:
            return
        last = self.candidates.pop()
        if last is not state:
            self.candidates[state.place] = last
            last.place = state.place
        state.place = -1

    def oldest(self) -> Checkpoint:
        """The candidate that was created or used longest ago."""
        while True:
            stamp, state = self.ages[0]
            if state.place >= 0 and state.stamp == stamp:
                return state
            heapq.heappop(self.ages)

    def check(self) -> None:
        """Raise ``AssertionError`` unless every neighbour and count agrees with the tree."""
        found = 0
        stack: list[tuple[Node, Checkpoint | None]] = [(self.tree.root, None)]
        while stack:
            node, above = stack.pop()
            state = node.state
            if state is not None:
                found += 1
                assert state.node is node and state.position == node.end
                assert state.key == node.last and state.above is above
                assert state.parent == (above.position if above is not None else 0)
                assert set(state.below) == set(self.tree.states_below(node))
                assert state.children == len(state.below)
                assert state.tokens == self.tree.stretch(node), f"{state.tokens} tokens told"
                assert (state.place < 0) == state.pinned == (state.readers > 0)
                assert not state.pinned or node.locks, "a checkpoint in use without its KV"
                above = state
            stack.extend((child, above) for child in node.children.values())
        assert found == self.count == len(self.candidates) + self.pinned
        for i, state in enumerate(self.candidates):
            assert state.place == i and state.node.state is state
