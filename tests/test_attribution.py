"""Every reason for a token that was no hit, on histories small enough to follow by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import policies
from sim.attribution import REASONS, attribute, lost_at_preemption
from sim.ledger import Action, Cause, Kind, Ledger
from sim.loop import replay
from sim.records import Records
from sim.step import Admission, Step, StepResult
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.registry import read_trace
from traces.trace import Request, Run, Trace, from_requests

BLOCK = 16
FAR = 10**6


@dataclass
class Constant:
    """Every step takes a microsecond."""

    def run(self, step: Step) -> StepResult:
        return StepResult(np.full(step.repeat, 1000, np.int64))


def shared(
    prefix: int, own: int, name: str, at: int = 0, content: int = 1, out: int = 2
) -> Request:
    """``prefix`` tokens of common ``content``, then ``own`` tokens of the request's own."""
    runs = (Run(content << 32, prefix), Run((100 + hash_of(name)) << 32, own))
    return Request(name, tuple(r for r in runs if r.length), out, arrival_ns=at)


def hash_of(name: str) -> int:
    return sum(ord(c) * 257**i for i, c in enumerate(name))


def served(
    requests: list[Request],
    policy: str = "semantic-only",
    num_blocks: int = 1000,
    layers: str = "M*",
    version: str = "0.33",
    unit: int | None = None,
    **options: Any,
) -> tuple[pd.DataFrame, Records, Ledger]:
    """Reasons, records and ledger of a replay on blocks of 16 tokens."""
    trace = from_requests(requests)
    mode = policies.load(policy).layout(f"vllm-{version}").mode
    config = {"layers": layers, "block_size": BLOCK, "num_blocks": num_blocks, "mode": mode}
    config["prefix_match_unit"] = unit
    geometry = geometry_of_case(config, version)
    opts = VllmOptions(**{"version": version, "async_scheduling": False, **options})
    prefixes, records, ledger = identify(trace), Records(trace), Ledger()
    engine = VllmEngine(trace, prefixes, geometry, policies.load(policy), opts, ledger)
    replay(engine, trace, Constant(), records)
    engine.check()
    reasons = attribute(
        trace, prefixes, records, ledger,
        grid_tokens=geometry.unit_tokens, block_tokens=BLOCK, reuse=mode != "none",
    )  # fmt: skip
    return reasons, records, ledger


def reasons_of(frame: pd.DataFrame, request: int) -> dict[str, int]:
    """The reasons that have tokens."""
    return {str(k): int(v) for k, v in frame.loc[request].items() if v}


def test_the_first_request_saw_nothing() -> None:
    frame, _, _ = served([shared(40, 10, "a")])
    assert reasons_of(frame, 0) == {"never_seen": 49, "last_token": 1}


def test_a_repeated_prompt_hits_and_the_rest_of_its_block_is_below() -> None:
    frame, _, _ = served([shared(40, 0, "a"), shared(40, 0, "b", FAR)])
    assert reasons_of(frame, 1) == {"hit": 32, "below_block": 7, "last_token": 1}


def test_a_branch_finds_kv_without_a_checkpoint_and_the_third_hits() -> None:
    frame, _, _ = served([shared(40, 60, n, i * FAR) for i, n in enumerate("abc")])
    own = {"never_seen": 59, "last_token": 1}
    assert reasons_of(frame, 1) == {"no_checkpoint": 32, "below_block": 8, **own}
    assert reasons_of(frame, 2) == {"hit": 32, "below_block": 8, **own}


def test_a_prefix_shorter_than_a_block_is_below_it_once_computed() -> None:
    frame, _, _ = served([shared(10, 60, n, i * FAR) for i, n in enumerate("ab")])
    assert reasons_of(frame, 1) == {"below_block": 10, "never_seen": 59, "last_token": 1}


def test_a_sharer_that_has_not_computed_is_in_flight() -> None:
    """The first request computes 32 tokens a step; the second comes in its second step."""
    rows = [shared(190, 10, "a"), shared(190, 10, "b", at=1500)]
    frame, records, _ = served(rows, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    assert records.matched_tokens[1] == 160
    assert reasons_of(frame, 1) == {
        "policy_dropped": 160, "in_flight": 30, "never_seen": 9, "last_token": 1,
    }  # fmt: skip


def test_kv_that_was_dropped_is_evicted() -> None:
    """A stranger takes the whole pool but one block between two equal prompts."""
    rows = [shared(40, 0, "a"), shared(0, 310, "z", FAR), shared(40, 0, "b", 2 * FAR)]
    frame, _, ledger = served(rows, num_blocks=24)
    events = ledger.frame()
    assert ((events.kind == Kind.KV) & (events.action == Action.DROPPED)).any()
    assert reasons_of(frame, 2) == {
        "no_checkpoint": 16, "kv_evicted": 16, "below_block": 7, "last_token": 1,
    }  # fmt: skip


def test_a_smaller_stranger_takes_the_state_and_leaves_the_kv() -> None:
    rows = [shared(40, 0, "a"), shared(0, 290, "z", FAR), shared(40, 0, "b", 2 * FAR)]
    frame, _, _ = served(rows, num_blocks=24)
    assert reasons_of(frame, 2) == {"state_evicted": 32, "below_block": 7, "last_token": 1}


def test_nothing_is_evicted_from_a_pool_with_room() -> None:
    rows = [shared(40, 0, "a"), shared(0, 290, "z", FAR), shared(40, 0, "b", 2 * FAR)]
    frame, _, _ = served(rows, num_blocks=1000)
    assert not frame[["kv_evicted", "state_evicted"]].to_numpy().any()


def test_a_policy_that_keeps_nothing_dropped_it() -> None:
    frame, _, _ = served([shared(40, 0, "a"), shared(40, 0, "b", FAR)], policy="none")
    assert reasons_of(frame, 1) == {"policy_dropped": 39, "last_token": 1}


def test_attention_alone_needs_no_checkpoint() -> None:
    frame, _, _ = served([shared(40, 60, n, i * FAR) for i, n in enumerate("ab")], layers="**")
    assert reasons_of(frame, 1) == {
        "hit": 32, "below_block": 8, "never_seen": 59, "last_token": 1,
    }  # fmt: skip


# ------------------------------------------------------------------------------ written ledgers
def written(
    ledger: Ledger, matched: int, first_token_ns: int = 5, hit: int = 0, prefix: int = 70
) -> dict[str, int]:
    """Reasons of a second request of 100 tokens, admitted at 10 ns after the whole ledger."""
    trace = from_requests([shared(prefix, 100 - prefix, n) for n in "ab"])
    records = Records(trace)
    records.admitted_ns, records.first_token_ns = [0, 10], [first_token_ns, 20]
    records.admissions = [
        (0, Admission(0, 0, 0, 0, False, 0)),
        (1, Admission(1, hit, matched, 0, False, len(ledger))),
    ]
    frame = attribute(trace, identify(trace), records, ledger, grid_tokens=BLOCK)
    assert frame.loc[1].sum() == 100
    return {k: v for k, v in reasons_of(frame, 1).items() if k not in ("never_seen", "last_token")}


def ids() -> list[int]:
    """Keys of the prefixes of 16, 32, ... tokens that both requests share."""
    return identify(from_requests([shared(70, 30, n) for n in "ab"])).grid(1, BLOCK)


def published() -> Ledger:
    """The first request's KV and a state at 64."""
    log, keys = Ledger(), ids()
    log.emit(0, Kind.KV, Action.PUBLISHED, keys[3], 96, request=0)
    log.emit(0, Kind.STATE, Action.PUBLISHED, keys[3], 64, request=0)
    return log


def test_state_evicted_up_to_where_it_stood() -> None:
    log = published()
    log.emit(1, Kind.STATE, Action.DROPPED, ids()[2], 48, cause=Cause.PRESSURE)
    assert written(log, 64) == {"state_evicted": 48, "no_checkpoint": 16, "below_block": 6}


def test_state_dropped_by_the_policy_comes_after_eviction() -> None:
    log = published()
    log.emit(1, Kind.STATE, Action.DROPPED, ids()[3], 64, cause=Cause.POLICY)
    assert written(log, 64) == {"policy_dropped": 64, "below_block": 6}
    log.emit(1, Kind.STATE, Action.DROPPED, ids()[1], 32, cause=Cause.PRESSURE)
    assert written(log, 64) == {"state_evicted": 32, "policy_dropped": 32, "below_block": 6}


def test_the_engines_housekeeping_is_no_eviction() -> None:
    log = published()
    log.emit(1, Kind.STATE, Action.DROPPED, ids()[3], 64, cause=Cause.ENGINE)
    assert written(log, 64) == {"no_checkpoint": 64, "below_block": 6}


def test_a_state_that_came_back_is_not_evicted() -> None:
    log = published()
    log.emit(1, Kind.STATE, Action.DROPPED, ids()[3], 64, cause=Cause.PRESSURE)
    log.emit(2, Kind.STATE, Action.PUBLISHED, ids()[3], 64, request=0)
    assert written(log, 64, hit=64) == {"hit": 64, "below_block": 6}


def test_kv_behind_a_gap_counts_as_evicted_and_only_behind_one() -> None:
    log = published()
    assert written(log, 16) == {"no_checkpoint": 16, "below_block": 54}
    log.emit(1, Kind.KV, Action.DROPPED, ids()[1], 32, cause=Cause.PRESSURE)
    assert written(log, 16) == {"no_checkpoint": 16, "kv_evicted": 48, "below_block": 6}


def test_in_flight_comes_before_evicted() -> None:
    log = published()
    log.emit(1, Kind.KV, Action.DROPPED, ids()[0], 16, cause=Cause.PRESSURE)
    assert written(log, 0) == {"kv_evicted": 64, "below_block": 6}
    assert written(log, 0, first_token_ns=11) == {"in_flight": 70}
    assert written(log, 0, first_token_ns=-1) == {"in_flight": 70}


# ------------------------------------------------------------------------------ invariants
ROW = st.tuples(
    st.integers(0, 120), st.integers(1, 80), st.integers(1, 2), st.integers(1, 40),
    st.integers(0, 40_000),
)  # fmt: skip


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(
    st.lists(ROW, min_size=2, max_size=12),
    st.sampled_from(["none", "align", "semantic-only"]),
    st.sampled_from([26, 40, 400]),
    st.booleans(),
    st.sampled_from([None, 4]),
)
def test_every_prompt_token_has_one_reason(
    rows: list[tuple[int, int, int, int, int]],
    policy: str,
    blocks: int,
    in_flight: bool,
    unit: int | None,
) -> None:
    requests = [
        shared(prefix, own, f"r{i}", at, content, out)
        for i, (prefix, own, content, out, at) in enumerate(sorted(rows, key=lambda r: r[-1]))
    ]
    frame, records, _ = served(
        requests, policy, blocks, unit=unit, async_scheduling=in_flight,
        max_num_batched_tokens=64, max_num_seqs=4,
    )  # fmt: skip
    assert list(frame) == list(REASONS)
    assert (frame >= 0).all(axis=None)
    admitted = np.array(records.admitted_ns) >= 0
    prompt = records.trace.prompt_tokens
    assert (frame.sum(axis=1) == np.where(admitted, prompt, 0)).all()
    assert (frame["hit"] == records.hit_tokens).all()
    assert (frame["last_token"] == admitted).all()
    assert frame["never_seen"].tolist() == [unseen(records, r) for r in range(len(requests))]


def unseen(records: Records, request: int) -> int:
    """Prompt tokens but the last that no earlier admitted prompt shares (brute force)."""
    order = [a.request for _, a in records.admissions if not a.resumed]
    if request not in order:
        return 0
    mine = addresses(records.trace, request)[:-1]
    earlier = [addresses(records.trace, r) for r in order[: order.index(request)]]
    longest = max((common(mine, other) for other in earlier), default=0)
    return len(mine) - longest


def addresses(trace: Trace, request: int) -> list[int]:
    return [run.address + i for run in trace.runs_of(request)[0] for i in range(run.length)]


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


MOONCAKE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not here")
def test_what_the_mooncake_trace_never_saw_before_is_what_no_cache_could_hit() -> None:
    """Everybody admitted in file order, the ledger empty: only what was seen counts."""
    trace = read_trace(str(MOONCAKE))
    records = Records(trace)
    records.first_token_ns = records.admitted_ns = list(range(len(trace)))
    records.admissions = [(r, Admission(r, 0, 0, 0, False)) for r in range(len(trace))]
    total = attribute(trace, identify(trace), records, Ledger(), grid_tokens=1040).sum()
    assert total["never_seen"] == 144_793_823 - 12_031 - 54_098_293
    assert total["last_token"] == 12_031


def test_lookups_after_a_preemption_stand_apart() -> None:
    rows = [shared(0, 100, n, i, out=120) for i, n in enumerate("ab")]
    frame, records, _ = served(rows, num_blocks=22)
    assert sum(records.preemptions) > 0
    lost = lost_at_preemption(records.trace, records)
    assert len(lost) == sum(records.preemptions)
    assert (lost.lost_tokens == lost.computed_tokens - lost.hit_tokens).all()
    assert (lost.computed_tokens >= 100).all() and (lost.lost_tokens > 0).all()
    assert (lost.hit_tokens <= lost.matched_tokens).all()
    assert frame["hit"].sum() == 0
    assert (frame.sum(axis=1) == 100).all()
