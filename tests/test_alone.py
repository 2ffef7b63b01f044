"""A request served alone, without steps, leaves what it leaves when its steps are planned."""

from __future__ import annotations

import numpy as np
import pytest

from sim import policies
from sim.ledger import Ledger
from sim.loop import serial
from sim.recorder import Recorder
from sim.records import Hits, Records
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.grid import BATCH, Grids
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

HOSTS = [
    (name, version)
    for name in policies.names()
    for version in ("0.33", "0.28")
    if f"vllm-{version}" in policies.load(name).engines
]


def turns(seed: int, count: int = 40) -> Trace:
    """Prompts out of a few shared texts, cut anywhere, with outputs that later ones go on from."""
    rng, rows = np.random.default_rng(seed), []
    past: list[tuple[Run, ...]] = []
    for i in range(count):
        base = (i + 10) << 20
        start: tuple[Run, ...] = (Run(int(rng.integers(0, 3)) << 12, int(rng.integers(1, 300))),)
        if past and rng.random() < 0.5:
            start = past[int(rng.integers(0, len(past)))]
        prompt = (*start, Run(base, int(rng.integers(1, 200))))
        output = Run(base + 5000, int(rng.integers(1, 120)))
        rows.append(Request(str(i), prompt, output.length, (output,)))
        past.append((*prompt, output))
    return from_requests(rows)


def made(trace: Trace, name: str, version: str, seed: int, layers: str, **more: int) -> VllmEngine:
    rng, policy = np.random.default_rng(seed), policies.load(name)
    config = {
        "layers": layers,
        "block_size": 16,
        "num_blocks": more.get("blocks", int(rng.choice([200, 400, 900]))),
        "mode": policy.layout(f"vllm-{version}").mode,
        "max_model_len": 4096,
        "enable_prefix_caching": True,
    }
    options = VllmOptions(
        version=version,
        async_scheduling=bool(more.get("in_flight", 0)),
        max_num_batched_tokens=int(rng.choice([40, 64, 500])),
        long_prefill_token_threshold=int(rng.choice([0, 48])),
        max_model_len=4096,
    )
    sizes = geometry_of_case(config, version)
    return VllmEngine(trace, identify(trace), sizes, policy, options, Ledger())


def left(engine: VllmEngine) -> tuple[object, ...]:
    pool = engine.cache.pool
    return pool.free, pool.key, pool.tokens, sorted(pool.where.items()), engine.scheduler.index


@pytest.mark.parametrize(("name", "version"), HOSTS)
@pytest.mark.parametrize("layers", ["M*", "MM*M*"])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_without_steps(name: str, version: str, layers: str, seed: int) -> None:
    trace = turns(seed)
    alone, planned = (made(trace, name, version, seed, layers) for _ in range(2))
    hits, records = Hits(trace), Records(trace)
    serial(alone, trace, hits)
    serial(planned, trace, records)
    alone.check()
    assert hits.hit_tokens == records.hit_tokens
    assert hits.matched_tokens == records.matched_tokens
    assert hits.reasons == records.reasons
    assert alone.ledger.frame().equals(planned.ledger.frame())
    assert left(alone) == left(planned)
    assert name == "none" or sum(hits.hit_tokens) > 0


class Told(Hits):
    """Counts what it is told and how."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.steps = 0

    def planned(self, step: object, now_ns: int) -> None:
        super().planned(step, now_ns)  # type: ignore[arg-type]
        self.steps += 1


def test_only_synchronous_engines_serve_without_steps() -> None:
    trace = turns(0, 5)
    for in_flight in (0, 1):
        told = Told(trace)
        serial(made(trace, "align", "0.33", 0, "M*", in_flight=in_flight), trace, told)
        assert (told.steps > 0) == bool(in_flight)


def test_a_request_that_must_be_preempted_is_left_to_the_scheduler() -> None:
    trace = from_requests([Request("a", (Run(0, 40),), 200), Request("b", (Run(0, 40),), 5)])
    engines = [made(trace, "align", "0.33", 0, "M*", blocks=60) for _ in range(2)]
    hits, records = Told(trace), Records(trace)
    recorders: tuple[Recorder, ...] = (hits, records)
    for engine, recorder in zip(engines, recorders, strict=True):
        take = engine.cache.allocate

        def refuse(r, n, hit, _take=take, **more):  # type: ignore[no-untyped-def]
            short = r.computed == 60 and r.status == "running" and r.lost == 0
            return False if short else _take(r, n, hit, **more)

        engine.cache.allocate = refuse  # type: ignore[method-assign]
        engine.cache.quiet_until = lambda computed, margin: computed  # type: ignore[method-assign]
        serial(engine, trace, recorder)
        engine.check()
    assert records.preemptions[0] == 1
    assert hits.steps > 0
    assert hits.hit_tokens == records.hit_tokens
    assert left(engines[0]) == left(engines[1])


def test_ids_made_in_batches_are_those_of_the_grid() -> None:
    trace = turns(3, BATCH + 9)
    prefixes = identify(trace)
    for step in (1, 7, 64, 5000):
        grids = Grids(prefixes, step)
        for r in np.random.default_rng(step).permutation(len(trace)).tolist():
            assert grids.of(r) == prefixes.grid(r, step)
        assert not grids._made
