"""Properties of the engines on random small traces: stepping, bytes, hits, no look ahead."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import policies
from sim.engine import Engine
from sim.loop import replay, serial
from sim.pool.engine import PoolEngine
from sim.records import Records
from sim.step import Step, StepResult
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

settings.register_profile(
    "engine",
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FEW = settings(settings.get_profile("engine"))

HOSTED = [
    (name, version)
    for name in policies.names()
    for version in ("vllm-0.33", "vllm-0.28", "pool")
    if version in policies.load(name).engines
]
EVERY_HOST = pytest.mark.parametrize(("name", "version"), HOSTED)
BOTH_WAYS = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


class Constant:
    """Every step takes as long as its tokens and its context say, so that gaps differ."""

    def run(self, step: Step) -> StepResult:
        each = np.arange(step.repeat, dtype=np.int64) * len(step.decodes)
        return StepResult(1000 + 10 * step.tokens + step.decode_context_tokens + each)


@st.composite
def traces(draw: st.DrawFn, most: int = 7) -> Trace:
    """Requests out of four shared texts, bursts, and sessions whose turns follow one another."""
    requests: list[Request] = []
    for s in range(draw(st.integers(1, most))):
        shared = Run(draw(st.integers(0, 3)) << 20, draw(st.integers(1, 90)))
        history, base = [shared], (s + 10) << 20
        for t in range(draw(st.integers(1, 3))):
            own = Run(base + t * 10_000, draw(st.integers(0, 40)))
            answer = draw(st.integers(1, 60))
            output = Run(base + t * 10_000 + 5_000, answer)
            arrival = draw(st.one_of(st.just(0), st.integers(0, 200_000)))
            requests.append(
                Request(
                    id=f"{s}-{t}",
                    prompt=(*history, own) if own.length else tuple(history),
                    output_tokens=answer,
                    output=(output,),
                    arrival_ns=None if t else arrival,
                    after=(f"{s}-{t - 1}",) if t else (),
                    think_ns=draw(st.sampled_from([0, 700, 50_000])) if t else 0,
                )
            )
            history += [own, output] if own.length else [output]
    return from_requests(requests)


def engine(
    trace: Trace,
    name: str,
    version: str,
    in_flight: bool,
    blocks: int = 200,
    caching: bool = True,
    **settings_: int,
) -> Engine:
    policy = policies.load(name)
    number = "0.33" if version == "pool" else version.removeprefix("vllm-")
    options = VllmOptions(
        version=number,
        enable_prefix_caching=caching,
        async_scheduling=in_flight,
        max_num_batched_tokens=settings_.get("budget", 64),
        max_num_seqs=settings_.get("seats", 4),
        max_model_len=4096,
    )
    if version == "pool":
        return PoolEngine(trace, identify(trace), policy, options)
    config = {
        "layers": "M*",
        "block_size": 16,
        "num_blocks": blocks,
        "mode": policy.layout(version).mode,
        "max_model_len": 4096,
        "enable_prefix_caching": caching,
    }
    sizes = geometry_of_case(config, number)
    return VllmEngine(trace, identify(trace), sizes, policy, options)


def timed(trace: Trace, made: Engine, leap: bool) -> Records:
    records = Records(trace)
    replay(made, trace, Constant(), records, host_ns=50, leap=leap)
    made.check()
    return records


def in_series(trace: Trace, name: str, version: str, **more: int) -> Records:
    records = Records(trace)
    made = engine(trace, name, version, False, **more)  # type: ignore[arg-type]
    serial(made, trace, records)
    made.check()
    return records


def tight(name: str) -> list[int]:
    """Pools of blocks in which requests get in but cannot all stay; ``all`` keeps more blocks."""
    return [36, 44, 200] if name == "all" else [22, 40, 200]


def gaps(records: Records) -> list[int]:
    size, times = records.token_gaps()
    return sorted(np.repeat(size, times).tolist())


# ------------------------------------------------------------------ 1: leaping is stepping
@EVERY_HOST
@BOTH_WAYS
def test_leaping_and_stepping_leave_the_same(name: str, version: str, in_flight: bool) -> None:
    leapt = [0]

    @FEW
    @given(traces(), st.sampled_from(tight(name)), st.sampled_from([4, 8]))
    def agree(trace: Trace, blocks: int, seats: int) -> None:
        made = [engine(trace, name, version, in_flight, blocks, seats=seats) for _ in range(2)]
        a, b = (timed(trace, one, leap) for one, leap in zip(made, (True, False), strict=True))
        assert a.requests().equals(b.requests())
        assert gaps(a) == gaps(b)
        assert made[0].ledger.frame().equals(made[1].ledger.frame())
        leapt[0] += len(b.steps) - len(a.steps)

    agree()
    assert leapt[0] > 0


@EVERY_HOST
@BOTH_WAYS
def test_leaping_is_stepping_under_preemption(name: str, version: str, in_flight: bool) -> None:
    if version == "pool":
        pytest.skip("pool has no budget, so nothing is preempted")
    preempted = 0
    for own in (3, 9, 14):
        trace = from_requests(
            Request(str(i), (Run(0, 30), Run((i + 1) << 20, own + i)), 120, arrival_ns=i * 900)
            for i in range(6)
        )
        made = [engine(trace, name, version, in_flight, 36, seats=6) for _ in range(2)]
        a, b = (timed(trace, one, leap) for one, leap in zip(made, (True, False), strict=True))
        assert a.requests().equals(b.requests())
        assert gaps(a) == gaps(b)
        preempted += sum(a.preemptions)
    assert preempted > 0


# ------------------------------------------------------------------ 2: bytes
@EVERY_HOST
@BOTH_WAYS
@FEW
@given(trace=traces(), blocks=st.sampled_from([22, 60]))
def test_invariants_hold_after_every_step(
    name: str, version: str, in_flight: bool, trace: Trace, blocks: int
) -> None:
    made = engine(trace, name, version, in_flight, blocks)
    coming = [r for r in range(len(trace)) if made.reject_reason(r) is None]
    flights: deque[Step] = deque()
    arrived = 0
    while arrived < len(coming) or made.unfinished or flights:
        if arrived < len(coming):
            made.arrive(coming[arrived])
            arrived += 1
        while len(flights) < made.depth and (step := made.plan(0)) is not None:
            if step.repeat > 1:
                made.take(step, 1)
            made.check()
            assert step.cached_bytes >= 0 and step.used_bytes >= 0
            if version != "pool":
                assert step.used_bytes <= made.capacity_bytes
            flights.append(step)
        assert flights or arrived < len(coming), "planned nothing with requests unfinished"
        if flights:
            made.commit(flights.popleft())
            made.check()


# ------------------------------------------------------------------ 3: a hit is real
def sequence(trace: Trace, r: int) -> list[int]:
    """Addresses of the prompt and of the output but its last token, which is never computed."""
    runs = [run for part in trace.runs_of(r) for run in part]
    return [a for run in runs for a in range(run.address, run.address + run.length)][:-1]


def longest(trace: Trace, order: list[int]) -> dict[int, int]:
    """Longest common prefix of each prompt with any earlier sequence, token by token."""
    found: dict[int, int] = {}
    for i, r in enumerate(order):
        own, best = sequence(trace, r)[: int(trace.prompt_tokens[r])], 0
        for other in (sequence(trace, e) for e in order[:i]):
            same = 0
            while same < min(len(own), len(other)) and own[same] == other[same]:
                same += 1
            best = max(best, same)
        found[r] = best
    return found


def order_of(records: Records) -> list[int]:
    return [a.request for _, a in records.admissions if not a.resumed]


@FEW
@given(traces())
def test_the_oracle_hits_all_that_is_shared_but_the_last_token(trace: Trace) -> None:
    records = in_series(trace, "oracle", "pool")
    order = order_of(records)
    assert sorted(order) == list(range(len(trace)))
    for r, shared in longest(trace, order).items():
        assert records.hit_tokens[r] == min(shared, int(trace.prompt_tokens[r]) - 1)


@EVERY_HOST
@FEW
@given(trace=traces(), blocks=st.sampled_from([22, 200]))
def test_a_hit_is_real(name: str, version: str, trace: Trace, blocks: int) -> None:
    records, best = (
        in_series(trace, name, version, blocks=blocks),
        in_series(trace, "oracle", "pool"),
    )
    order = [r for r in order_of(best) if r not in records.reasons]
    assert order_of(records) == order
    for r, shared in longest(trace, order).items():
        hit, matched = records.hit_tokens[r], records.matched_tokens[r]
        assert 0 <= hit <= matched <= shared
        assert hit <= int(trace.prompt_tokens[r]) - 1
        assert hit <= best.hit_tokens[r]


def repeated(count: int = 3) -> Trace:
    return from_requests(
        Request(str(i), (Run(0, 90), Run((i + 1) << 20, 10)), 5) for i in range(count)
    )


@EVERY_HOST
def test_what_can_hit_does(name: str, version: str) -> None:
    hits = in_series(repeated(), name, version).hit_tokens
    assert (hits[-1] > 0) == (name != "none")


@pytest.mark.parametrize("version", ["vllm-0.33", "vllm-0.28"])
@pytest.mark.parametrize("name", [n for n in policies.names() if n != "oracle"])
def test_with_caching_off_nothing_hits(name: str, version: str) -> None:
    if version not in policies.load(name).engines:
        pytest.skip(f"{name} does not run on {version}")
    records = in_series(repeated(), name, version, caching=False)
    assert records.hit_tokens == [0, 0, 0] == records.matched_tokens


# ------------------------------------------------------------------ 4: the future never leaks
def cut(trace: Trace, order: list[int], count: int) -> tuple[Trace, list[int]]:
    keep = sorted(order[:count])
    return from_requests(trace.request(r) for r in keep), keep


@EVERY_HOST
@FEW
@given(trace=traces(), blocks=st.sampled_from([22, 200]), data=st.data())
def test_the_future_changes_nothing(
    name: str, version: str, trace: Trace, blocks: int, data: st.DataObject
) -> None:
    whole = in_series(trace, name, version, blocks=blocks)
    order = order_of(in_series(trace, "oracle", "pool"))
    head, keep = cut(trace, order, data.draw(st.integers(1, len(order))))
    part = in_series(head, name, version, blocks=blocks)
    for column in ("hit_tokens", "matched_tokens", "branch_tokens", "preemptions"):
        now = getattr(part, column)
        assert now == [getattr(whole, column)[r] for r in keep], column
    count = len(part.steps)
    assert part.steps == whole.steps[:count]


# ------------------------------------------------------------------ 6: settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "0.29", "known are 0.33, 0.28"),
        ("max_num_batched_tokens", 0, "from 1 up"),
        ("max_num_seqs", 0, "from 1 up"),
        ("max_num_seqs", -3, "from 1 up"),
        ("max_model_len", 1, "from 2 up"),
        ("watermark", 1.0, "from 0 to below 1"),
        ("watermark", -0.1, "from 0 to below 1"),
        ("long_prefill_token_threshold", -1, "from 0 up"),
        ("num_speculative_blocks", -1, "from 0 up"),
    ],
)
def test_impossible_settings_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        VllmOptions(**{name: value})  # type: ignore[arg-type]
    assert str(value) in str(error.value)


def test_the_smallest_settings_are_allowed() -> None:
    made = VllmOptions(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=2, watermark=0.0)
    assert made.largest_chunk == 1
    assert VllmOptions(long_prefill_token_threshold=40).largest_chunk == 40
