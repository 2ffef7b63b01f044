"""What a run left behind, as columns: one row per request, one per planned step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.step import Admission, Step
from traces.trace import Trace

NEVER = -1
STEP_COLUMNS = (
    "step", "repeat", "start_ns", "end_ns", "prefill_tokens", "decodes", "running", "waiting",
    "used_bytes", "cached_bytes",
)  # fmt: skip


class Hits:
    """Lookups at first admission alone, for a serial pass without a clock. A ``Recorder``."""

    def __init__(self, trace: Trace) -> None:
        self.hit_tokens = [0] * len(trace)
        self.matched_tokens = [0] * len(trace)
        self.reasons: dict[int, str] = {}

    def arrived(self, request: int, now_ns: int) -> None:
        """Nothing to keep."""

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        """The request can never be served."""
        self.reasons[request] = reason

    def planned(self, step: Step, now_ns: int) -> None:
        """What each first lookup reused and matched."""
        for a in step.admitted:
            if not a.resumed:
                self.admitted(a)

    def admitted(self, admission: Admission) -> None:
        """What the first lookup reused and matched."""
        self.hit_tokens[admission.request] = admission.hit
        self.matched_tokens[admission.request] = admission.matched

    def done(
        self, step: Step, start_ns: int, finish_ns: NDArray[np.int64], finished: Sequence[int]
    ) -> None:
        """Nothing to keep."""


class Records:
    """Implements ``sim.recorder.Recorder``. Times are nanoseconds, -1 where it never happened."""

    def __init__(self, trace: Trace) -> None:
        n = len(trace)
        self.trace = trace
        self.arrived_ns = [NEVER] * n
        self.admitted_ns = [NEVER] * n
        self.first_token_ns = [NEVER] * n
        self.finished_ns = [NEVER] * n
        self.finished_step = [NEVER] * n
        self.hit_tokens = [0] * n
        self.matched_tokens = [0] * n
        self.branch_tokens = [0] * n
        self.preemptions = [0] * n
        self.relookup_hit_tokens = [0] * n
        self.reasons: dict[int, str] = {}
        self.admissions: list[tuple[int, Admission]] = []
        self.steps: list[tuple[int, ...]] = []
        self._gaps: list[NDArray[np.int64]] = []
        self._weights: list[NDArray[np.int64]] = []
        self._single_gaps: list[int] = []
        self._single_weights: list[int] = []
        self._last_ns = 0
        self._paused: dict[int, int] = {}

    # ---------------------------------------------------------------- what the loop tells
    def arrived(self, request: int, now_ns: int) -> None:
        """The request entered the waiting queue."""
        self.arrived_ns[request] = now_ns

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        """The request can never be served."""
        self.arrived_ns[request] = now_ns
        self.reasons[request] = reason

    def planned(self, step: Step, now_ns: int) -> None:
        """Admissions happen when the step is planned."""
        for a in step.admitted:
            self.admissions.append((step.index, a))
            if a.resumed:
                self.relookup_hit_tokens[a.request] += a.hit
                continue
            self.admitted_ns[a.request] = now_ns
            self.hit_tokens[a.request] = a.hit
            self.matched_tokens[a.request] = a.matched
            self.branch_tokens[a.request] = a.branch

    def done(
        self, step: Step, start_ns: int, finish_ns: NDArray[np.int64], finished: Sequence[int]
    ) -> None:
        """Tokens came out at each finish."""
        first, last = int(finish_ns[0]), int(finish_ns[-1])
        for r in step.preempted:
            self.preemptions[r] += 1
        for r in (*step.paused, *step.preempted):
            if self.first_token_ns[r] != NEVER:
                self._paused.setdefault(r, self._last_ns)
        for r in step.fresh:
            self._fresh(r, first)
        samples = len(step.decodes) + sum(1 for c in step.chunks if c.samples)
        steady = samples - len(step.fresh)
        if steady:
            self._single_gaps.append(first - self._last_ns)
            self._single_weights.append(steady)
        if step.repeat > 1:
            self._gaps.append(np.diff(finish_ns))
            self._weights.append(np.full(step.repeat - 1, samples, np.int64))
        for r in finished:
            self.finished_ns[r] = last
            self.finished_step[r] = step.index + step.repeat - 1
        prefill = sum(c.tokens for c in step.chunks)
        self.steps.append(
            (step.index, step.repeat, start_ns, last, prefill, len(step.decodes), step.running,
             step.waiting, step.used_bytes, step.cached_bytes)
        )  # fmt: skip
        self._last_ns = last

    def _fresh(self, request: int, now_ns: int) -> None:
        if self.first_token_ns[request] == NEVER:
            self.first_token_ns[request] = now_ns
        elif request in self._paused:
            self._single_gaps.append(now_ns - self._paused.pop(request))
            self._single_weights.append(1)

    # ---------------------------------------------------------------- as columns
    def token_gaps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Gaps between consecutive tokens of a request (ns) and how often each occurred."""
        single = np.array(self._single_gaps, np.int64)
        weights = np.array(self._single_weights, np.int64)
        return np.concatenate([single, *self._gaps]), np.concatenate([weights, *self._weights])

    def requests(self) -> pd.DataFrame:
        """One row per request; token counts and nanoseconds, -1 for never."""
        trace = self.trace
        columns = {
            "request": np.arange(len(trace)),
            "id": list(trace.ids),
            "session": trace.session,
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": trace.output_tokens,
            "arrived_ns": self.arrived_ns,
            "admitted_ns": self.admitted_ns,
            "first_token_ns": self.first_token_ns,
            "finished_ns": self.finished_ns,
            "hit_tokens": self.hit_tokens,
            "matched_tokens": self.matched_tokens,
            "branch_tokens": self.branch_tokens,
            "preemptions": self.preemptions,
            "relookup_hit_tokens": self.relookup_hit_tokens,
        }
        frame = pd.DataFrame(columns)
        frame["rejected"] = [self.reasons.get(r, "") for r in range(len(trace))]
        return frame

    def step_log(self) -> pd.DataFrame:
        """One row per planned step (a stretch of equal steps is one row)."""
        table = np.array(self.steps, np.int64).reshape(-1, len(STEP_COLUMNS))
        return pd.DataFrame(table, columns=list(STEP_COLUMNS))
