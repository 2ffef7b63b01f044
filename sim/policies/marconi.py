"""Checkpoints at the branch point and the last decoded token; the one whose reuse would save the
fewest FLOP a byte, and was used longest ago, goes first. Source: Marconi (arXiv 2411.19379), with
the faults of its published artifact mended (docs/policies.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from sim.policies.base import Base
from sim.policy import Layout, Limits, Memory, Prefill, State, View

ALPHAS = tuple(round(0.1 * i, 1) for i in range(21))
JUDGED = 500
EFFICIENCIES = ("parent", "full")


@dataclass(frozen=True)
class Policy(Base):
    """Drops the candidate with at most one checkpoint below it that has the smallest
    ``alpha * norm(FLOP per byte) + norm(1 / age)``.

    ``alpha``: a number, ``tune`` (0 at first, then the best of 0 to 2 on the requests so far), or
    null: least recently used. ``efficiency``: bytes back to the checkpoint above (``parent``), or
    of the whole path as published (``full``). ``multiplier``: tuning waits for that many times
    the requests that had finished before the first eviction.
    """

    alpha: float | Literal["tune"] | None = "tune"
    efficiency: str = "parent"
    multiplier: int = 5

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str) and self.alpha != "tune":
            raise ValueError(
                f"alpha is {self.alpha!r}; allowed are numbers from 0, 'tune' and null; the "
                "nearest is 'tune'"
            )
        if self.alpha not in (None, "tune") and not float(self.alpha or 0) >= 0:
            raise ValueError(f"alpha is {self.alpha}; allowed are numbers from 0; the nearest is 0")
        if self.efficiency not in EFFICIENCIES:
            raise ValueError(
                f"efficiency is {self.efficiency!r}; allowed are {' and '.join(EFFICIENCIES)}; the "
                "default is 'parent'"
            )
        if self.multiplier < 1:
            raise ValueError(
                f"multiplier is {self.multiplier}; allowed are 1 and more; the nearest is 1"
            )

    @property
    def engines(self) -> Sequence[str]:
        """The pool: no engine has checkpoints at any position with one budget."""
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        """Token-exact."""
        return Layout("exact")

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """The branch point; the engine offers the last decoded token's state itself."""
        return end, (request.branch,) if start < request.branch <= end else ()

    def begin(self, view: View) -> Memory:
        """Scores of all checkpoints, and the requests so far, to tune on."""
        return None if self.alpha is None else _Scores(view, self)

    def victim(self, memory: Memory, candidates: Sequence[State], now_ns: int) -> State | None:
        """The smallest score; least recently used if alpha is null or all have forks below."""
        if memory is None:
            return None
        if memory.first_eviction < 0:
            memory.first_eviction = max(1, len(memory.history))
        found: State | None = memory.lowest()
        return found

    def observe(self, memory: Memory, event: str, state: State) -> None:
        """Keep the scores' terms true; tune once the window is over."""
        if memory is None:
            return
        if event == "dropped":
            memory.remove(state)
        elif event == "request admitted":
            memory.count(state)
        elif event == "request finished":
            memory.finished(state.request)
        else:
            memory.put(state)

    def report(self, memory: Memory) -> dict[str, float]:
        """Alpha in the end, when it was found, and token hit rates before and after that."""
        return {} if memory is None else memory.report()


@dataclass
class _Scores:
    """A row of each array is one checkpoint. ``open``: it may go, and at most one checkpoint lies
    directly below it. ``hit`` and ``prompt`` count tokens before tuning and after."""

    view: View
    policy: Policy
    alpha: float = 0.0
    tuned_at: int = -1
    admitted: int = 0
    first_eviction: int = -1
    clock: int = 0
    history: list[int] = field(default_factory=list)
    hit: list[int] = field(default_factory=lambda: [0, 0])
    prompt: list[int] = field(default_factory=lambda: [0, 0])
    row_of: dict[int, int] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tunes = self.policy.alpha == "tune"
        if isinstance(self.policy.alpha, (int, float)):
            self.alpha = float(self.policy.alpha)
        self.worth = np.zeros(64)
        self.stamp = np.zeros(64, np.int64)
        self.open = np.zeros(64, np.bool_)

    # ---------------------------------------------------------------- rows
    def put(self, state: State) -> None:
        """Add the checkpoint, or bring its row up to date."""
        row = self.row_of.get(state.key)
        if row is None:
            row = self.row_of[state.key] = len(self.states)
            self.states.append(state)
            if row == len(self.open):
                self._grow()
        self.worth[row] = self._worth(state)
        self.stamp[row] = state.stamp
        self.open[row] = not state.pinned and state.children <= 1
        self.clock = max(self.clock, state.stamp)

    def remove(self, state: State) -> None:
        """The last row takes the place of the checkpoint's."""
        row, last = self.row_of.pop(state.key), self.states.pop()
        end = len(self.states)
        if row < end:
            self.states[row] = last
            self.row_of[last.key] = row
            for column in (self.worth, self.stamp, self.open):
                column[row] = column[end]

    def _grow(self) -> None:
        self.worth = np.concatenate([self.worth, self.worth])
        self.stamp = np.concatenate([self.stamp, self.stamp])
        self.open = np.concatenate([self.open, self.open])

    def _worth(self, state: State) -> float:
        """FLOP that its reuse saves beside the checkpoint above it, for each byte."""
        view, edge = self.view, state.position - state.parent
        kept = edge if self.policy.efficiency == "parent" else state.position
        saved = _flops(view, state.position) - _flops(view, state.parent)
        return saved / max(1, view.state_bytes + view.kv_bytes_per_token * kept)

    def lowest(self) -> State | None:
        """The candidate with the smallest score, of equals the least recently used, or None."""
        rows = np.flatnonzero(self.open[: len(self.states)])
        if not len(rows):
            return None
        score = _normed(1.0 / (1 + self.clock - self.stamp[rows]))
        if self.alpha:
            score += self.alpha * _normed(self.worth[rows])
        rows = rows[score == score.min()]
        return self.states[int(rows[np.argmin(self.stamp[rows])])]

    # ---------------------------------------------------------------- tuning
    def count(self, state: State) -> None:
        """A request was admitted with a hit of ``position``."""
        after = int(self.tuned_at >= 0)
        self.hit[after] += state.position
        self.prompt[after] += state.prompt_tokens
        self.admitted += 1

    def finished(self, request: int) -> None:
        """Once the window is over, take the alpha that would have saved most on it."""
        if not self.tunes or self.tuned_at >= 0:
            return
        self.history.append(request)
        window = self.policy.multiplier * self.first_eviction
        if self.first_eviction > 0 and len(self.history) >= window:
            self.alpha, self.tuned_at = self._best(), self.admitted

    def _best(self) -> float:
        if self.view.rehearse is None:
            return 0.0
        saved = []
        for alpha in ALPHAS:
            hits = self.view.rehearse(replace(self.policy, alpha=alpha), self.history)
            saved.append(sum(_flops(self.view, hit) for hit in hits[-JUDGED:]))
        return ALPHAS[saved.index(max(saved))]

    def report(self) -> dict[str, float]:
        """For the summary; -1 where tuning never came, NaN where there were no requests."""
        out: dict[str, float] = {"alpha": self.alpha}
        if self.tunes:
            out["tuned_at_request"] = self.tuned_at
            for name, hit, prompt in zip(
                ("bootstrap", "tuned"), self.hit, self.prompt, strict=True
            ):
                out[f"{name}_token_hit_rate"] = hit / prompt if prompt else float("nan")
        return out


def _flops(view: View, tokens: int) -> float:
    return view.flops_per_token * tokens + view.flops_per_pair * tokens * (tokens + 1) / 2


def _normed(
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Between 0 and 1; all 1 where all are equal."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.ones(len(values))
