"""The replay loop with the vLLM engine: leaping and stepping leave the same records and events."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sim import models, policies
from sim.cost.device import load
from sim.cost.modelled import ModelledBackend
from sim.ledger import Ledger
from sim.loop import replay, serial
from sim.records import Records
from sim.vllm.engine import VllmEngine
from sim.vllm.model_geometry import Serving, geometry_of_model
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

MODEL = models.load("nemotron-h-8b")
BACKEND = ModelledBackend(MODEL, load("h200"))


def sessions(seed: int) -> Trace:
    """Sessions whose turns extend one another, some closed loop, some with times of their own."""
    rng, requests = np.random.default_rng(seed), []
    for s in range(int(rng.integers(3, 10))):
        base = (s + 1) << 32
        history = [Run(base, int(rng.integers(10, 6000)))]
        for t in range(int(rng.integers(1, 5))):
            at = base + (t + 1) * 100_000
            own, answer = Run(at, int(rng.integers(1, 500))), int(rng.integers(1, 300))
            output = Run(at + 50_000, answer)
            requests.append(
                Request(
                    id=f"{s}-{t}",
                    prompt=(*history, own),
                    output_tokens=answer,
                    output=(output,),
                    arrival_ns=None if rng.random() < 0.5 else int(rng.integers(0, 5e9)),
                    after=(f"{s}-{t - 1}",) if t else (),
                    think_ns=int(rng.choice([0, 1000, 10**8])),
                )
            )
            history += [own, output]
    return from_requests(requests)


def engine(trace: Trace, memory_mib: int, seats: int, in_flight: bool) -> VllmEngine:
    sizes = geometry_of_model(MODEL, Serving(memory_bytes=memory_mib << 20, max_model_len=131072))
    options = VllmOptions(max_num_seqs=seats, max_model_len=131072, async_scheduling=in_flight)
    return VllmEngine(trace, identify(trace), sizes, policies.load("semantic-only"), options)


def run(
    trace: Trace, leap: bool, memory_mib: int, seats: int, in_flight: bool
) -> tuple[Records, Ledger]:
    records, served = Records(trace), engine(trace, memory_mib, seats, in_flight)
    replay(served, trace, BACKEND, records, host_ns=BACKEND.host_ns, leap=leap)
    served.check()
    return records, served.ledger


def spread(records: Records) -> pd.Series[int]:
    gaps, times = records.token_gaps()
    return pd.Series(np.sort(np.repeat(gaps, times)))


@pytest.mark.parametrize("in_flight", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("memory_mib", [900, 40_000])
def test_leaping_and_stepping_agree(memory_mib: int, in_flight: bool) -> None:
    preempted = leapt = 0
    for seed in range(6):
        trace, seats = sessions(seed), (4, 8, 64)[seed % 3]
        (a, x), (b, y) = (run(trace, leap, memory_mib, seats, in_flight) for leap in (True, False))
        assert a.requests().equals(b.requests())
        assert x.frame().equals(y.frame())
        assert spread(a).equals(spread(b))
        served = a.requests().query("finished_ns >= 0")
        # Every gap of a request lies between its first token and its last.
        whole = int((served["finished_ns"] - served["first_token_ns"]).sum())
        assert int(spread(a).sum()) == whole
        preempted, leapt = preempted + sum(a.preemptions), leapt + len(b.steps) - len(a.steps)
    assert leapt > 1000
    assert (preempted > 0) == (memory_mib == 900)


def test_serial_serves_everybody_without_a_clock() -> None:
    trace = sessions(1)
    records = Records(trace)
    serial(engine(trace, 40_000, 8, True), trace, records)
    frame = records.requests()
    assert (frame["finished_ns"] >= 0).all()
    assert (frame["finished_ns"] == frame["arrived_ns"]).all()
    assert frame["hit_tokens"].sum() > 0
