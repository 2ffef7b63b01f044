"""A row for every checkpoint, kept true as neighbours come and go, and the choice of who goes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.policy import State, View
from sim.replay_value.kinds import RATES, Rates, kind_of

BRANCH, PROMPT_END, ANSWER_END, OTHER = range(4)


class Learned:
    """``expect`` says where a request's checkpoints will lie, so that they can be told apart."""

    def __init__(self, view: View, learn: str, sample: int | None) -> None:
        self.view, self.sample = view, sample
        self.rates: Rates = RATES[learn]()
        self.random = np.random.default_rng(0)
        self.now = 0
        self.expected: dict[int, tuple[int, int]] = {}
        self.row_of: dict[int, int] = {}
        self.states: list[State] = []
        self.what: dict[int, int] = {}
        self._make(64)

    def _make(self, rows: int) -> None:
        self.gap, self.bytes = np.zeros(rows), np.ones(rows)
        self.last, self.kind = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.free = np.zeros(rows, np.bool_)

    # ---------------------------------------------------------------- what the engine tells
    def expect(self, request: int, branch: int, last: int) -> None:
        """The request's branch point (0: none) and prompt end."""
        self.expected[request] = (branch, last)

    def hear(self, event: str, state: State) -> None:
        """An event of ``Policy.observe``."""
        if event == "request admitted":
            self._tick()
        elif event == "request finished":
            self.expected.pop(state.request, None)
        elif event == "dropped":
            self._remove(state)
        else:
            if event == "created":
                self.what[state.key] = self._type(state)
            elif event == "used":
                row = self.row_of[state.key]
                self.rates.used(int(self.kind[row]), int(1 + self.now - self.last[row]))
            self._put(state)

    def _type(self, state: State) -> int:
        branch, last = self.expected.get(state.request, (0, 0))
        if state.position > state.prompt_tokens:
            return ANSWER_END
        if state.position == branch:
            return BRANCH
        return PROMPT_END if state.position == last else OTHER

    def _tick(self) -> None:
        self.now += 1
        n = len(self.states)
        self.rates.tick(self.kind[:n], 1 + self.now - self.last[:n])

    # ---------------------------------------------------------------- rows
    def _put(self, state: State) -> None:
        row = self.row_of.get(state.key)
        if row is None:
            row = self.row_of[state.key] = len(self.states)
            self.states.append(state)
            if row == len(self.free):
                self._grow()
        self.gap[row] = state.position - state.parent
        self.bytes[row] = self._freed(state)
        self.last[row] = max(state.created, state.used)
        self.kind[row] = kind_of(self.what[state.key], state.children, state.uses)
        self.free[row] = not state.pinned

    def _freed(self, state: State) -> int:
        """Its state, and the KV that nobody else needs."""
        return max(1, self.view.state_bytes + self.view.kv_bytes_per_token * state.tokens)

    def _remove(self, state: State) -> None:
        """The last row takes its place."""
        self.what.pop(state.key)
        row, last = self.row_of.pop(state.key), self.states.pop()
        end = len(self.states)
        if row < end:
            self.states[row] = last
            self.row_of[last.key] = row
            for column in (self.gap, self.bytes, self.last, self.kind, self.free):
                column[row] = column[end]

    def _grow(self) -> None:
        old = (self.gap, self.bytes, self.last, self.kind, self.free)
        self._make(2 * len(self.free))
        for column, before in zip(
            (self.gap, self.bytes, self.last, self.kind, self.free), old, strict=True
        ):
            column[: len(before)] = before

    # ---------------------------------------------------------------- who goes
    def least(self, candidates: Sequence[State]) -> State | None:
        """The checkpoint of least value, of equals the shallower, then the older."""
        if self.sample is not None and len(candidates) > self.sample:
            drawn = self.random.integers(0, len(candidates), self.sample)
            rows = np.unique([self.row_of[candidates[i].key] for i in drawn.tolist()])
        else:
            rows = np.flatnonzero(self.free[: len(self.states)])
        if not len(rows):
            return None
        values = self.gap[rows] * self.rates.of(self.kind[rows], 1 + self.now - self.last[rows])
        values /= self.bytes[rows]
        lowest: list[int] = rows[values == values.min()].tolist()
        if len(lowest) == 1:
            return self.states[lowest[0]]
        equal = [self.states[row] for row in lowest]
        return min(equal, key=lambda s: (s.position, s.created, s.stamp))

    def report(self) -> dict[str, float]:
        """For the summary: checkpoints in the end."""
        return {"checkpoints": float(len(self.states))}
