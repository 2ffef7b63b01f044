"""Records of steps written by hand: times, gaps between tokens, and tokens after a preemption."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from sim.loop import serial
from sim.policies import load
from sim.records import NEVER, STEP_COLUMNS, Hits, Records
from sim.step import Admission, Chunk, Step
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests


def records(n: int = 2) -> Records:
    return Records(from_requests(Request(str(i), (Run(i << 20, 10),), 4) for i in range(n)))


class Told:
    """Feeds steps to ``Records`` and keeps every token's time apart."""

    def __init__(self, n: int = 2) -> None:
        self.records, self.now = records(n), 0
        self.tokens: dict[int, list[int]] = defaultdict(list)

    def step(self, step: Step, durations: list[int], finished: tuple[int, ...] = ()) -> None:
        start, finish = self.now, self.now + np.cumsum(np.array(durations, np.int64))
        self.records.planned(step, start)
        self.records.done(step, start, finish, finished)
        self.now = int(finish[-1])
        for r in (*step.decodes, *(c.request for c in step.chunks if c.samples)):
            self.tokens[r] += finish.tolist()

    def gaps(self) -> list[int]:
        """Every gap, one by one."""
        return sorted(int(g) for times in self.tokens.values() for g in np.diff(times))


def expanded(found: Records) -> list[int]:
    gaps, weights = found.token_gaps()
    return sorted(np.repeat(gaps, weights).tolist())


def prefill(
    index: int, request: int, *, resumed: bool = False, decodes: tuple[int, ...] = ()
) -> Step:
    return Step(
        index,
        chunks=[Chunk(request, 0, 10, True)],
        decodes=list(decodes),
        admitted=[Admission(request, 3, 5, 5, resumed)],
        fresh=[request],
    )


def test_nothing_has_happened_yet() -> None:
    frame = records().requests()
    times = frame[["arrived_ns", "admitted_ns", "first_token_ns", "finished_ns"]]
    assert (times == NEVER).all(axis=None)
    assert records().step_log().empty
    assert tuple(records().step_log()) == STEP_COLUMNS


def test_a_request_from_arrival_to_its_last_token() -> None:
    told = Told(1)
    told.records.arrived(0, 0)
    told.now = 7
    told.step(prefill(0, 0), [100])
    told.step(Step(1, decodes=[0], repeat=3), [10, 11, 12], finished=(0,))
    row = told.records.requests().loc[0]
    assert (row.arrived_ns, row.admitted_ns, row.first_token_ns, row.finished_ns) == (
        0,
        7,
        107,
        140,
    )
    assert (row.hit_tokens, row.matched_tokens, row.branch_tokens) == (3, 5, 5)
    assert told.records.finished_step == [3]
    assert expanded(told.records) == told.gaps() == [10, 11, 12]
    log = told.records.step_log()
    columns = ["step", "repeat", "start_ns", "end_ns", "prefill_tokens", "decodes"]
    assert log[columns].to_numpy().tolist() == [[0, 1, 7, 107, 10, 0], [1, 3, 107, 140, 0, 1]]


def test_a_newcomer_stretches_the_gap_of_the_others_and_adds_none() -> None:
    told = Told()
    told.step(prefill(0, 0), [100])
    told.step(prefill(1, 1, decodes=(0,)), [60])
    told.step(Step(2, decodes=[0, 1], repeat=2), [10, 20], finished=(0, 1))
    assert expanded(told.records) == told.gaps() == [10, 10, 20, 20, 60]


@pytest.mark.parametrize("preempted", [True, False], ids=["preempted", "paused"])
def test_the_gap_across_a_pause_is_one_gap(preempted: bool) -> None:
    told = Told()
    told.step(prefill(0, 0), [100])
    told.step(prefill(1, 1, decodes=(0,)), [60])
    out = {"preempted": [1]} if preempted else {"paused": [1]}
    told.step(Step(2, decodes=[0], **out), [10])  # type: ignore[arg-type]
    told.step(Step(3, decodes=[0]), [10], finished=(0,))
    if preempted:
        told.step(prefill(4, 1, resumed=True), [80])
    else:
        told.step(Step(4, decodes=[1], fresh=[1]), [80])
    told.step(Step(5, decodes=[1]), [5], finished=(1,))
    assert expanded(told.records) == told.gaps() == [5, 10, 10, 60, 100]
    row = told.records.requests().loc[1]
    assert row.preemptions == int(preempted)
    assert row.first_token_ns == 160


def test_a_lookup_after_a_preemption_stands_apart() -> None:
    told = Told(1)
    told.step(prefill(0, 0), [100])
    again = prefill(1, 0, resumed=True)
    again.admitted = [Admission(0, 8, 9, 0, True)]
    again.preempted = [0]
    told.step(again, [50], finished=(0,))
    row = told.records.requests().loc[0]
    assert (row.hit_tokens, row.matched_tokens, row.relookup_hit_tokens) == (3, 5, 8)
    assert row.admitted_ns == 0
    assert expanded(told.records) == told.gaps() == [50]


def test_a_preemption_before_the_first_token_makes_no_gap() -> None:
    told = Told(1)
    chunk = Step(0, chunks=[Chunk(0, 0, 5, False)], admitted=[Admission(0, 0, 0, 0, False)])
    told.step(chunk, [30])
    told.step(Step(1, preempted=[0]), [1])
    told.step(prefill(2, 0, resumed=True), [40], finished=(0,))
    assert expanded(told.records) == []
    assert told.records.first_token_ns == [71]


def test_a_rejected_request_keeps_its_reason() -> None:
    found = records()
    found.rejected(1, "too long", 9)
    row = found.requests().loc[1]
    assert (row.rejected, row.arrived_ns, row.admitted_ns) == ("too long", 9, NEVER)


def test_hits_alone_are_those_of_the_full_records() -> None:
    trace = from_requests(
        Request(str(i), (Run(0, 70), Run((i + 1) << 32, 9)), 5, arrival_ns=i) for i in range(3)
    )
    seen = []
    for recorder in (Hits(trace), Records(trace)):
        policy = load("semantic-only")
        sizes = geometry_of_case({"layers": "M*", "block_size": 16, "num_blocks": 99}, "0.33")
        options = VllmOptions(async_scheduling=False, max_model_len=90)
        serial(VllmEngine(trace, identify(trace), sizes, policy, options), trace, recorder)
        seen.append((recorder.hit_tokens, recorder.matched_tokens, recorder.reasons))
    assert seen[0] == seen[1]
    assert seen[0][0] == [0, 64, 64]
