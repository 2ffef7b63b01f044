"""The pool engine: refusals, what it counts, and waiting for a longer prefix in the making."""

import pytest

from sim import policies
from sim.loop import serial
from sim.pool.engine import PoolEngine
from sim.records import Records
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests

SHARED = Run(0, 100)


def made(rows, name="oracle", **sizes):
    options = VllmOptions(async_scheduling=False, max_model_len=1000)
    return PoolEngine(rows, identify(rows), policies.load(name), options, **sizes)


def rows(*own, output=4):
    return from_requests(
        Request(str(i), (SHARED, Run((i + 1) << 20, n)), output) for i, n in enumerate(own)
    )


def test_a_policy_for_another_engine_is_refused():
    with pytest.raises(ValueError, match=r"cannot run on pool; it can on vllm-0\.33"):
        made(rows(1), "align")


@pytest.mark.parametrize(
    ("own", "output", "words"), [(901, 4, "more than max_model_len 1000"), (5, 0, "an empty")]
)
def test_what_can_never_be_served_says_why(own, output, words):
    assert words in made(rows(own, output=output)).reject_reason(0)


def test_every_distinct_token_is_counted_once():
    trace, records = rows(10, 20), None
    engine, records = made(trace, kv_bytes_per_token=2, state_bytes=5), Records(trace)
    serial(engine, trace, records)
    # The last token of an output is never computed.
    assert engine.cache.tokens == 100 + (10 + 3) + (20 + 3)
    assert engine.cache.used_bytes == engine.cache.tokens * 7


def test_a_burst_waits_for_the_first_to_write_what_they_share():
    trace = rows(10, 10, 10)
    engine = made(trace)
    for r in range(3):
        engine.arrive(r)
    first = engine.plan(0)
    assert [c.request for c in first.chunks] == [0]
    engine.commit(first)
    assert [(a.request, a.hit) for a in engine.plan(0).admitted] == [(1, 100), (2, 100)]
