"""An idle round of SGLang's loop is followed by the next one at once."""

from __future__ import annotations

import pytest

from sim import policies
from sim.ledger import Ledger
from sim.sglang.engine import SglangEngine
from sim.sglang.options import SglangOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests


@pytest.mark.parametrize("version", ["0.5.23", "0.5.18"])
def test_a_batch_that_was_full_of_requests_now_finished_does_not_stall(version: str) -> None:
    """0.5.18 sees that its batch has emptied only in the round that plans nothing."""
    rows = [Request(str(i), (Run(0, 1),), 2, arrival_ns=0) for i in range(3)]
    trace = from_requests(rows)
    options = SglangOptions(version, mamba_slots=24, max_running=2, overlap=False)
    engine = SglangEngine(trace, identify(trace), policies.load("semantic-only"), options, Ledger())
    for request in range(3):
        engine.arrive(request)
    finished = []
    while engine.unfinished:
        step = engine.plan(0)
        assert step is not None
        finished += engine.commit(step)
    assert sorted(finished) == [0, 1, 2]
