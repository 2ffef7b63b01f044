"""The replay loop against a small engine: arrivals, order, leaping, stalls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sim import models
from sim.cost.device import load
from sim.cost.modelled import ModelledBackend
from sim.ledger import Ledger
from sim.loop import StalledError, replay, serial
from sim.records import Records
from sim.step import Admission, Chunk, Step, StepResult
from traces.trace import Request, Run, Trace, from_requests


class Fifo:
    """First come first served: chunked prefill, decodes one token a step, no cache.

    Equal steps repeat to the next finish or multiple of ``block`` tokens; not while a step in
    flight finishes a request, nor while one that waits could be admitted.
    """

    def __init__(
        self, trace: Trace, depth: int = 1, seats: int = 2, budget: int = 8, block: int = 7
    ) -> None:
        self.depth, self.seats, self.budget, self.block = depth, seats, budget, block
        self.ledger, self.capacity_bytes = Ledger(), 0
        self.prompt, self.output = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.computed = [0] * len(trace)
        self.promised = [0] * len(trace)
        self.read = [0] * len(trace)
        self.sampled: set[int] = set()
        self.index = 0
        self.longest = 100

    def arrive(self, request: int) -> None:
        self.waiting.append(request)

    def reject_reason(self, request: int) -> str | None:
        return "too long" if self.prompt[request] > self.longest else None

    def plan(self, now_ns: int) -> Step | None:
        step, left = Step(self.index), self.budget
        todo = [r for r in self.running if self.promised[r] < self.output[r]]
        while self.waiting and len(self.running) < self.seats:
            r = self.waiting.pop(0)
            self.running.append(r)
            todo.append(r)
            step.admitted.append(Admission(r, 0, 0, 0, False))
        for r in todo:
            left -= self._compute(step, r, left)
        if not (step.chunks or step.decodes):
            return None
        self._describe(step)
        steady = len(step.decodes) == len(self.running) and not step.chunks
        if steady and (not self.waiting or len(self.running) == self.seats):
            step.repeat = min(self._steps_left(r) for r in step.decodes)
        self.index += 1
        return step

    def _compute(self, step: Step, r: int, left: int) -> int:
        new = min(left, max(1, self.prompt[r] - self.computed[r]))
        if not new:
            return 0
        samples = self.computed[r] + new >= self.prompt[r]
        if self.computed[r] >= self.prompt[r]:
            step.decodes.append(r)
            step.decode_context_tokens += self.computed[r] + 1
        else:
            step.chunks.append(Chunk(r, self.computed[r], new, samples))
        self.computed[r] += new
        self.promised[r] += samples
        return new

    def _describe(self, step: Step) -> None:
        now = {*step.decodes, *(c.request for c in step.chunks if c.samples)}
        step.fresh = sorted(now - self.sampled)
        over = {r for r in self.sampled if self.promised[r] == self.output[r]}
        step.paused = sorted(self.sampled - now - over)
        self.sampled = now
        step.running, step.waiting = len(self.running), len(self.waiting)

    def _steps_left(self, r: int) -> int:
        to_block = self.block - self.computed[r] % self.block
        return min(1 + self.output[r] - self.promised[r], 1 + to_block)

    def take(self, step: Step, repeat: int) -> None:
        assert 1 <= repeat <= step.repeat
        self.index += repeat - 1
        for r in step.decodes:
            self.computed[r] += repeat - 1
            self.promised[r] += repeat - 1

    def commit(self, step: Step) -> Sequence[int]:
        finished = []
        for r in [*step.decodes, *(c.request for c in step.chunks if c.samples)]:
            self.read[r] += step.repeat
            if self.read[r] == self.output[r]:
                self.running.remove(r)
                finished.append(r)
        return finished

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def check(self) -> None:
        assert all(p >= r for p, r in zip(self.promised, self.read, strict=True))


class Slope:
    """Durations that depend on everything a step computes, in multiples of ``unit``."""

    def __init__(self, unit: int = 10) -> None:
        self.unit, self.calls = unit, 0

    def run(self, step: Step) -> StepResult:
        self.calls += 1
        prefill = sum(c.tokens for c in step.chunks)
        context = step.decode_context_tokens + len(step.decodes) * np.arange(step.repeat)
        return StepResult((1 + prefill + len(step.decodes) + context // 5) * self.unit)


class Told:
    """Everything the loop tells, one entry a step even if steps came as a stretch."""

    def __init__(self) -> None:
        self.all: list[tuple[object, ...]] = []
        self.steps: list[tuple[object, ...]] = []
        self.plans: list[tuple[int, int]] = []

    def arrived(self, request: int, now_ns: int) -> None:
        self.all.append(("arrived", request, now_ns))

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        self.all.append(("rejected", request, reason, now_ns))

    def planned(self, step: Step, now_ns: int) -> None:
        self.all += [("admitted", a.request, now_ns) for a in step.admitted]
        self.plans.append((step.index, now_ns))

    def done(
        self, step: Step, start_ns: int, finish_ns: NDArray[np.int64], finished: Sequence[int]
    ) -> None:
        tokens = (tuple(step.decodes), tuple((c.request, c.tokens) for c in step.chunks))
        for i, at in enumerate(finish_ns.tolist()):
            once = (tuple(step.fresh), tuple(step.paused)) if i == 0 else ((), ())
            self.steps.append((step.index + i, at, tokens, once))
        self.all += [("finished", r, int(finish_ns[-1])) for r in finished]

    def times(self, what: str) -> dict[object, object]:
        return {entry[1]: entry[-1] for entry in self.all if entry[0] == what}


def make(*rows: tuple[int | None, int, int], **more: dict[int, object]) -> Trace:
    """Rows are (arrival, prompt, output); ``after`` and ``think`` by row."""
    after, think = more.get("after", {}), more.get("think", {})
    return from_requests(
        Request(
            id=f"r{i}",
            prompt=(Run(1000 * i, prompt),),
            output_tokens=output,
            arrival_ns=arrival,
            after=tuple(f"r{j}" for j in after.get(i, ())),  # type: ignore[attr-defined]
            think_ns=think.get(i, 0),  # type: ignore[arg-type]
        )
        for i, (arrival, prompt, output) in enumerate(rows)
    )


def told(trace: Trace, leap: bool = True, host_ns: int = 0, **engine: int) -> Told:
    out = Told()
    replay(Fifo(trace, **engine), trace, Slope(), out, host_ns=host_ns, leap=leap)
    return out


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 9))
    ten = st.integers(0, 60).map(lambda x: 10 * x)
    rows = [
        (
            draw(st.none() | ten),
            draw(st.integers(1, 30) | st.just(101)),
            draw(st.integers(1, 40)),
        )
        for _ in range(n)
    ]
    after = {i: draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) for i in range(1, n)}
    return make(*rows, after=after, think={i: draw(ten) for i in range(n)})  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    trace=traces(),
    depth=st.sampled_from([1, 2, 3]),
    seats=st.integers(1, 4),
    budget=st.integers(1, 12),
    host=st.sampled_from([0, 10, 35, 300]),
)
def test_leaping_and_stepping_agree_to_the_bit(
    trace: Trace, depth: int, seats: int, budget: int, host: int
) -> None:
    shape = {"depth": depth, "seats": seats, "budget": budget, "block": 9}
    a, b = told(trace, True, host, **shape), told(trace, False, host, **shape)
    assert a.all == b.all
    assert a.steps == b.steps
    assert set(a.plans) <= set(b.plans)


@pytest.mark.parametrize("depth", [1, 2])
def test_records_agree_with_a_modelled_backend(depth: int) -> None:
    rng = np.random.default_rng(depth)
    rows = [
        (int(t), int(p), int(o))
        for t, p, o in zip(
            np.cumsum(rng.exponential(2e6, 30)),
            rng.integers(1, 90, 30),
            rng.integers(1, 200, 30),
            strict=True,
        )
    ]
    trace = make(*rows)
    backend = ModelledBackend(models.load("nemotron-h-8b"), load("h200"))
    frames, gaps = [], []
    for leap in (True, False):
        records = Records(trace)
        engine = Fifo(trace, depth, seats=8, budget=64, block=64)
        replay(engine, trace, backend, records, host_ns=1_000_000, leap=leap)
        frames.append(records.requests())
        size, weight = records.token_gaps()
        gaps.append(np.sort(np.repeat(size, weight)))
    assert frames[0].equals(frames[1])
    assert np.array_equal(gaps[0], gaps[1])
    assert len(gaps[0]) == int((trace.output_tokens - 1).sum())


def test_an_arrival_at_planning_time_is_seen_by_that_plan() -> None:
    # r0: prefill of 4 tokens takes 50 ns; r1 arrives exactly when the next step is planned.
    out = told(make((0, 4, 3), (50, 2, 1)), seats=2)
    assert out.times("admitted") == {0: 0, 1: 50}
    assert told(make((0, 4, 3), (51, 2, 1)), seats=2).times("admitted")[1] > 50  # type: ignore[operator]


def test_an_arrival_cuts_a_stretch_after_the_steps_already_in_flight() -> None:
    trace = make((0, 1, 60), (1000, 1, 1))
    for depth in (1, 2):
        out = told(trace, depth=depth, block=1000)
        finishes = [int(s[1]) for s in out.steps]  # type: ignore[call-overload]
        admitted = out.times("admitted")[1]
        # Planned at the first finish at or after the arrival.
        assert admitted == min(t for t in finishes if t >= 1000)


def test_arrival_is_the_later_of_its_time_and_the_think_time_after_the_last_finish() -> None:
    rows = [(0, 1, 1), (5, 1, 2), (None, 1, 1), (10_000, 1, 1), (None, 1, 1)]
    trace = make(*rows, after={2: (0, 1), 3: (0,)}, think={2: 7, 3: 1, 4: 99})  # type: ignore[arg-type]
    out = told(trace)
    arrived, finished = out.times("arrived"), out.times("finished")
    assert arrived[2] == max(finished[0], finished[1]) + 7  # type: ignore[type-var, operator]
    assert arrived[3] == 10_000
    assert arrived[4] == 0


def test_a_rejected_request_counts_as_finished_for_its_dependants() -> None:
    trace = make((40, 500, 1), (None, 500, 1), (None, 2, 1), after={1: (0,), 2: (1,)})  # type: ignore[arg-type]
    out = told(trace)
    assert out.all[:3] == [
        ("rejected", 0, "too long", 40),
        ("rejected", 1, "too long", 40),
        ("arrived", 2, 40),
    ]
    assert 2 in out.times("finished")


def test_a_long_chain_of_rejections_needs_no_recursion() -> None:
    n = 3000
    trace = make(*[(0, 500, 1)] * n, after={i: (i - 1,) for i in range(1, n)})  # type: ignore[arg-type]
    assert len(told(trace).times("rejected")) == n


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_decode_is_a_few_events(depth: int) -> None:
    trace, backend = make((0, 1, 100_000)), Slope()
    replay(Fifo(trace, depth, block=10**9), trace, backend, Told())
    assert backend.calls <= 6


def test_host_time_is_added_without_async_and_hidden_with_it() -> None:
    trace = make((0, 1, 5))
    alone = told(trace).times("finished")[0]
    assert told(trace, host_ns=7).times("finished")[0] == alone + 5 * 7  # type: ignore[operator]
    # Two steps in flight: only the first has nothing to hide behind.
    assert told(trace, host_ns=7, depth=2).times("finished")[0] == alone + 7  # type: ignore[operator]
    # A host slower than the device sets the pace: each plan is a finish, two steps back.
    assert told(trace, host_ns=1000, depth=2).times("finished")[0] > alone + 1000  # type: ignore[operator]


def test_until_plans_nothing_from_then_on_and_reads_what_is_in_flight() -> None:
    trace = make((0, 1, 50), (200, 1, 1), (700, 1, 1))
    for depth in (1, 2):
        outs = []
        for leap in (True, False):
            out = Told()
            replay(Fifo(trace, depth), trace, Slope(), out, leap=leap, until_ns=600)
            outs.append(out)
        assert outs[0].all == outs[1].all and outs[0].steps == outs[1].steps
        assert 2 not in outs[0].times("arrived")
        assert all(at < 600 for _, at in outs[0].plans)
        assert max(int(s[1]) for s in outs[0].steps) >= 600  # type: ignore[call-overload]


class Stuck(Fifo):
    def plan(self, now_ns: int) -> Step | None:
        return None


def test_a_stalled_engine_is_an_error_that_names_the_requests() -> None:
    trace = make((0, 1, 1), (5, 1, 1))
    with pytest.raises(StalledError, match=r"'r0', 'r1'.*pool is too small"):
        replay(Stuck(trace), trace, Slope(), Told())
    with pytest.raises(StalledError, match="'r0'"):
        serial(Stuck(trace), trace, Told())


def test_requests_that_wait_for_each_other_are_an_error() -> None:
    trace = make((0, 1, 1), (0, 1, 1), (0, 1, 1), after={1: (2,), 2: (1,)})  # type: ignore[arg-type]
    for run in (lambda e: replay(e, trace, Slope(), Told()), lambda e: serial(e, trace, Told())):
        with pytest.raises(ValueError, match="wait for each other: 'r1', 'r2'"):
            run(Fifo(trace))


class Rash(Fifo):
    """Lets a step repeat while one in flight finishes a request."""

    def plan(self, now_ns: int) -> Step | None:
        step = super().plan(now_ns)
        if step and step.decodes and not step.chunks:
            step.repeat = min(self._steps_left(r) for r in step.decodes)
        return step


def test_a_stretch_planned_over_a_finish_that_others_wait_for_is_an_error() -> None:
    trace = make((0, 1, 50), (0, 1, 3), (None, 1, 1), after={2: (1,)})  # type: ignore[arg-type]
    assert told(trace, depth=2, seats=3).times("finished").keys() == {0, 1, 2}
    with pytest.raises(RuntimeError, match="`repeat` must be 1"):
        replay(Rash(trace, 2, seats=3, block=999), trace, Slope(), Told())


@pytest.mark.parametrize("depth", [1, 2])
def test_serial_runs_one_request_at_a_time_in_order_of_arrival(depth: int) -> None:
    rows = [(30, 20, 9), (10, 3, 1), (None, 200, 1), (None, 5, 5)]
    trace = make(*rows, after={3: (0,)}, think={3: 15})  # type: ignore[arg-type]
    out = Told()
    serial(Fifo(trace, depth), trace, out)
    order = [(e[0], e[1], e[-1]) for e in out.all if e[0] != "admitted"]
    assert order == [
        ("rejected", 2, 0),
        ("arrived", 1, 10),
        ("finished", 1, 10),
        ("arrived", 0, 30),
        ("finished", 0, 30),
        ("arrived", 3, 45),
        ("finished", 3, 45),
    ]
    assert len(out.steps) == sum(
        -(-p // 8) + o - 1 for (_, p, o), i in zip(rows, range(4), strict=True) if i != 2
    )
