"""The SGLang engine: measured hits, leaps, bytes after every step, policies and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim import models, policies
from sim.attribution import attribute
from sim.cost.device import load
from sim.cost.modelled import ModelledBackend
from sim.ledger import Action, Cause, Kind, Ledger
from sim.loop import replay, serial
from sim.records import Records
from sim.sglang.engine import SglangEngine
from sim.sglang.options import SglangOptions
from sim.step import Step
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

BACKEND = ModelledBackend(models.load("nemotron-h-8b"), load("h200"))


def sharing(shared: int, own: int = 200, count: int = 3) -> Trace:
    """Requests with a common beginning, one after another."""
    return from_requests(
        Request(
            str(i), (Run(0, shared), Run((i + 1) << 32, own)), 4, after=(str(i - 1),) if i else ()
        )
        for i in range(count)
    )


def sessions(seed: int) -> Trace:
    """Sessions whose turns extend one another, some closed loop, some with times of their own."""
    rng, requests = np.random.default_rng(seed), []
    for s in range(int(rng.integers(3, 12))):
        base = (s % 3 + 1) << 32
        history = [Run(base, int(rng.integers(10, 700)))]
        for t in range(int(rng.integers(1, 5))):
            at = ((s + 10) << 32) + t * 100_000
            own, answer = Run(at, int(rng.integers(1, 300))), int(rng.integers(1, 150))
            output = Run(at + 50_000, answer)
            requests.append(
                Request(
                    id=f"{s}-{t}",
                    prompt=(*history, own),
                    output_tokens=answer,
                    output=(output,),
                    arrival_ns=None if rng.random() < 0.5 else int(rng.integers(0, 3e8)),
                    after=(f"{s}-{t - 1}",) if t else (),
                    think_ns=int(rng.choice([0, 1000, 10**7])),
                )
            )
            history += [own, output]
    return from_requests(requests)


def engine(trace: Trace, policy: str = "semantic-only", **options: Any) -> SglangEngine:
    parameters = options.pop("parameters", {})
    made = policies.load(policy, **parameters)
    settings = SglangOptions(**{"context_len": 100_000, **options})
    return SglangEngine(
        trace, identify(trace), made, settings, kv_bytes_per_token=2, state_bytes=1000,
        int8_bytes=300,
    )  # fmt: skip


def hits(trace: Trace, policy: str = "semantic-only", **options: Any) -> list[int]:
    records, made = Records(trace), engine(trace, policy, **options)
    serial(made, trace, records)
    made.check()
    return records.hit_tokens


MEASURED = {
    (900, 64): [0, 0, 896],
    (900, 256): [0, 0, 768],
    (1280, 64): [0, 0, 1280],
    (1280, 256): [0, 1280, 1280],
    (4000, 64): [0, 0, 3968],
    (4000, 256): [0, 0, 3840],
}


@pytest.mark.parametrize("version", ["0.5.23", "0.5.18"])
@pytest.mark.parametrize(("shared", "grid"), MEASURED)
def test_hits_of_a_shared_beginning_as_measured(version, shared, grid):
    assert hits(sharing(shared), version=version, mamba_chunk=grid) == MEASURED[shared, grid]


def test_no_buffer_and_no_radix_cache_never_hit_a_shared_beginning():
    assert hits(sharing(900), strategy="no_buffer") == [0, 0, 0]
    assert hits(sharing(900), "none") == [0, 0, 0]


def test_chunks_leave_states_on_the_way():
    assert hits(sharing(1300), chunked_prefill_size=512) == [0, 1024, 1280]


class Watch:
    """A recorder that checks the engine after every plan and every read."""

    def __init__(self, made: SglangEngine, trace: Trace) -> None:
        self.made, self.records = made, Records(trace)

    def arrived(self, request: int, now_ns: int) -> None:
        self.records.arrived(request, now_ns)

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        self.records.rejected(request, reason, now_ns)

    def planned(self, step: Step, now_ns: int) -> None:
        self.made.check()
        assert 0 <= step.cached_bytes <= step.used_bytes <= self.made.capacity_bytes
        self.records.planned(step, now_ns)

    def done(self, step: Step, start_ns: int, finish_ns: Any, finished: Any) -> None:
        self.made.check()
        self.records.done(step, start_ns, finish_ns, finished)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tight kv": {"kv_tokens": 6000},
    "tight slots": {"mamba_slots": 15},
    "pages": {"page_size": 16, "kv_tokens": 6400},
    "no buffer": {"strategy": "no_buffer", "kv_tokens": 6000, "mamba_slots": 12},
    "lazy": {"strategy": "extra_buffer_lazy", "track_interval": 64, "mamba_slots": 20},
    "int8": {"int8": True, "mamba_slots": 20, "int8_slots": 12},
    "no overlap": {"overlap": False, "kv_tokens": 5000},
    "lpm": {"schedule_policy": "lpm", "kv_tokens": 6000},
    "mamba": {"version": "0.5.18", "tree": "mamba", "kv_tokens": 6000, "mamba_slots": 20},
    "old": {"version": "0.5.18", "kv_tokens": 6000},
    "no cache": {"radix_cache": False, "kv_tokens": 5000},
}


def timed(trace: Trace, leap: bool, **options: Any) -> tuple[Records, Ledger]:
    made = engine(trace, **options)
    watch = Watch(made, trace)
    replay(made, trace, BACKEND, watch, host_ns=BACKEND.host_ns, leap=leap)
    return watch.records, made.ledger


@pytest.mark.parametrize("name", SETTINGS)
def test_leaping_is_stepping_and_bytes_add_up(name):
    longer = 0
    for seed in range(4):
        trace = sessions(seed)
        a, b = (timed(trace, leap, **SETTINGS[name]) for leap in (True, False))
        longer += len(b[0].steps) - len(a[0].steps)
        pd.testing.assert_frame_equal(a[0].requests(), b[0].requests())
        pd.testing.assert_frame_equal(a[1].frame(), b[1].frame())
        gaps = [np.repeat(*r.token_gaps()) for r in (a[0], b[0])]
        assert sorted(gaps[0].tolist()) == sorted(gaps[1].tolist())
    assert longer > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_prompt_token_has_one_reason(name):
    trace = sessions(1)
    records, made = Records(trace), engine(trace, **SETTINGS[name])
    replay(made, trace, BACKEND, records, host_ns=BACKEND.host_ns)
    reasons = attribute(
        trace, made.prefixes, records, made.ledger, grid_tokens=made.options.grid,
        block_tokens=made.options.page_size, reuse=made.options.radix_cache, tree=True,
    )  # fmt: skip
    assert (reasons.sum(axis=1) == trace.prompt_tokens).all()
    assert (reasons["hit"] == records.hit_tokens).all()


def test_pressure_is_attributed_to_what_went():
    """Three prompts in a pool for two: the first is gone when it comes back, KV and state."""
    rows = [(0, 600), (1, 600), (2, 600), (0, 600)]
    trace = from_requests(
        Request(str(i), (Run(c << 32, n), Run((i + 9) << 32, 40)), 1,
                after=(str(i - 1),) if i else ())
        for i, (c, n) in enumerate(rows)
    )  # fmt: skip
    made, records = engine(trace, kv_tokens=1700), Records(trace)
    serial(made, trace, records)
    reasons = attribute(
        trace, made.prefixes, records, made.ledger, grid_tokens=64, block_tokens=1, tree=True
    )
    assert records.hit_tokens == [0, 0, 0, 0]
    assert reasons["kv_evicted"].tolist() == [0, 0, 0, 600]


def test_matched_kv_without_a_state_is_no_checkpoint():
    trace = sharing(900)
    made, records = engine(trace), Records(trace)
    serial(made, trace, records)
    reasons = attribute(
        trace, made.prefixes, records, made.ledger, grid_tokens=64, block_tokens=1, tree=True
    )
    assert reasons["no_checkpoint"].tolist() == [0, 900, 4]


def long_session(turns: int = 8) -> Trace:
    history, requests = [Run(0, 300)], []
    for t in range(turns):
        own = Run((t + 1) << 32, 200)
        output = Run(((t + 1) << 32) + 10_000, 100)
        after = (str(t - 1),) if t else ()
        requests.append(Request(str(t), (*history, own), 100, output=(output,), after=after))
        history += [own, output]
    return from_requests(requests)


def test_the_path_cap_keeps_the_deepest_states():
    trace = long_session()
    caps = {}
    for cap in (1, 2, 4, 100):
        records = Records(trace)
        made = engine(trace, "path-capped", parameters={"cap": cap})
        serial(made, trace, records)
        caps[cap] = len(made.cache.tree.states)
        assert records.hit_tokens == hits(trace)  # a session only needs its deepest state
        dropped = made.ledger.frame().query(
            f"kind == {Kind.STATE} and action == {Action.DROPPED} and cause == {Cause.POLICY}"
        )
        assert len(dropped) == made.cache.policy_dropped
    free = len(engine_states(trace))
    assert caps[1] <= caps[2] <= caps[4] < caps[100] == free


def engine_states(trace: Trace) -> list[int]:
    made = engine(trace)
    serial(made, trace, Records(trace))
    return [node.end for node in made.cache.tree.states]


def test_mamba_radix_cache_never_had_a_path_cap():
    with pytest.raises(ValueError, match="no release combined"):
        engine(sharing(10), "path-capped", version="0.5.18", tree="mamba")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "no_buffer", "page_size": 16}, "page_size 1"),
        ({"strategy": "no_buffer", "overlap": True}, "no overlap"),
        ({"strategy": "extra_buffer_lazy", "overlap": False}, "overlap"),
        ({"page_size": 48}, "nearest is 32"),
        ({"chunked_prefill_size": 100, "page_size": 16}, "nearest valid choice is 96"),
        ({"track_interval": 100, "page_size": 16}, "nearest valid choice is 96"),
        ({"tree": "mamba"}, "allowed are unified"),
        ({"strategy": "auto"}, "allowed are no_buffer"),
        ({"mamba_slots": 4}, "one request needs 5"),
        ({"kv_tokens": 0}, "1 or more"),
        ({"version": "0.5.18", "tree": "mamba", "skip_decode_lock": True}, "tree unified"),
    ],
)
def test_what_the_engine_refuses_at_start_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SglangOptions(**options)


def test_requests_that_never_fit_are_rejected_with_the_reason():
    trace = sharing(900)
    assert "pool has 1000" in (engine(trace, kv_tokens=1000).reject_reason(0) or "")
    assert "context_len" in (engine(trace, context_len=1000).reject_reason(0) or "")
    assert engine(trace).reject_reason(0) is None


def test_a_crash_of_the_engine_is_told_by_point(tmp_path):
    from experiments import config
    from experiments.cli_errors import UsageError
    from experiments.points import points_of
    from experiments.simulate import run_point

    file = tmp_path / "crash.yaml"
    file.write_text(
        "name: crash\ndescription: no int8 slot is ever free\nmemory: 20GiB\n"
        "engine: {version: sglang-0.5.23, sglang: {max_mamba_cache_size: 20,\n"
        "  enable_int8_mamba_checkpoint: true, int8_mamba_ckpt_size: 1}}\n"
        "trace:\n  generator: shared_prefix\n"
        "  parameters: {groups: 4, repeats: 1, prefix_tokens: 600, output_tokens: 50}\n"
    )
    (point,) = points_of(config.load(file))
    with pytest.raises(UsageError, match=r"semantic-only: sglang-0.5.23 would crash: Can not"):
        run_point(point)
