"""`replay-value`: what it learns, whom it drops, where it places, against plain sums."""

from __future__ import annotations

import numpy as np
import pytest

from sim import policies
from sim.ledger import Ledger
from sim.loop import serial
from sim.policy import Limits, Prefill, View
from sim.pool.engine import PoolEngine
from sim.records import Hits
from sim.replay_value.kinds import EDGES, KINDS, WIDTHS, ByAge, ByKind, kind_of
from sim.vllm.options import VllmOptions
from traces.generators import generate
from traces.identity import identify
from traces.trace import Trace

STATE, TOKEN = 2_000_000, 1000
VIEW = View("pool", STATE, TOKEN, 1, 10**9)


def hits(trace: Trace, capacity: int, watch=None, **parameters: object) -> float:
    policy = policies.load("replay-value", **parameters)
    options = VllmOptions(async_scheduling=False, max_model_len=1 << 20)
    engine = PoolEngine(
        trace, identify(trace), policy, options, Ledger(on=False), kv_bytes_per_token=TOKEN,
        state_bytes=STATE, capacity_bytes=capacity,
    )  # fmt: skip
    if watch is not None:
        watch(engine)
    recorder = Hits(trace)
    serial(engine, trace, recorder)
    engine.check()
    return sum(recorder.hit_tokens) / int(trace.prompt_tokens.sum())


@pytest.fixture(scope="module")
def sessions() -> Trace:
    return generate("agentic", {"sessions": 40, "fit": "tau_airline", "system_groups": 4}, 0)


# ---------------------------------------------------------------- whom it drops
@pytest.mark.parametrize("learn", ["none", "kind", "age"])
def test_the_choice_is_the_least_value_of_all_candidates(learn: str, sessions: Trace) -> None:
    """Rows are kept up to date as neighbours come and go, as reading every state afresh shows."""
    seen = [0]

    def watch(engine: PoolEngine) -> None:
        memory = engine.cache.memory  # type: ignore[union-attr]
        least = memory.least

        def compared(candidates):
            chosen = least(candidates)
            values = []
            for s in candidates:
                age = 1 + memory.now - max(s.created, s.used)
                kind = kind_of(memory.what[s.key], s.children, s.uses)
                rate = memory.rates.of(np.array([kind]), np.array([age]))[0]
                freed = STATE + TOKEN * s.tokens
                values.append(((s.position - s.parent) * rate / freed, s.position, s.created, s))
            assert min(values, key=lambda v: v[:3])[3] is chosen
            seen[0] += 1
            return chosen

        memory.least = compared

    hits(sessions, 60_000_000, watch, learn=learn)
    assert seen[0] > 200


def test_what_it_learns_keeps_more_than_recency(sessions: Trace) -> None:
    lru = hits(sessions, 60_000_000, order="lru")
    none, kind, age = (hits(sessions, 60_000_000, learn=x) for x in ("none", "kind", "age"))
    assert min(kind, age) > lru + 0.015
    assert none > lru


def test_a_sample_of_candidates_does_about_as_well(sessions: Trace) -> None:
    for capacity in (60_000_000, 150_000_000):
        exact, drawn = (hits(sessions, capacity, sample=n) for n in (None, 16))
        assert abs(exact - drawn) < 0.03
    assert hits(sessions, 60_000_000, sample=16) == hits(sessions, 60_000_000, sample=16)
    assert hits(sessions, 60_000_000, sample=10**6) == hits(sessions, 60_000_000)


# ---------------------------------------------------------------- what it learns
def test_weights_of_kinds_are_the_formula() -> None:
    chance, rates = np.random.default_rng(0), ByKind()
    uses, exposure = [0.0] * KINDS, [0.0] * KINDS
    for _ in range(40):
        kinds, ages = chance.integers(0, KINDS, 30), chance.integers(1, 50, 30)
        rates.tick(kinds, ages)
        for kind, age in zip(kinds.tolist(), ages.tolist(), strict=True):
            exposure[kind] += 1 / age
        told = rates.weights
        overall = (sum(uses) + 1) / (sum(exposure) + 10)
        for kind in range(KINDS):
            alike = range(kind % 9, KINDS, 9)
            step = (sum(uses[k] for k in alike) + 2) / (
                sum(exposure[k] for k in alike) + 2 / overall
            )
            assert told[kind] == pytest.approx((uses[kind] + 2) / (exposure[kind] + 2 / step))
        for kind in chance.integers(0, KINDS, 3).tolist():
            rates.used(kind, 1)
            uses[kind] += 1
    assert np.ptp(rates.weights) > 0.05


def test_kinds_are_36() -> None:
    found = {kind_of(w, c, u) for w in range(4) for c in range(5) for u in range(5)}
    assert found == set(range(KINDS))


def test_bins_of_age() -> None:
    assert EDGES[:9].tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24] and len(EDGES) == 34
    assert (WIDTHS > 0).all()


def test_the_index_of_an_age_is_the_best_horizon() -> None:
    """Against sums in small steps of time."""
    rates = ByAge()
    chance = np.random.default_rng(1)
    rates.shape = chance.uniform(0.001, 0.3, len(EDGES))
    table = rates._index()
    for first in (0, 3, 10):
        best, stays, held = 0.0, 1.0, 0.0
        for b in range(first, len(EDGES)):
            width = WIDTHS[b] / 2 if b == first else WIDTHS[b]
            for _ in range(400):
                step = width / 400
                held += stays * (1 - np.exp(-rates.shape[b] * step)) / rates.shape[b]
                stays *= np.exp(-rates.shape[b] * step)
            best = max(best, (1 - stays) / held)
        assert table[5, first] == pytest.approx(best, rel=1e-6)


# ---------------------------------------------------------------- where it places
@pytest.mark.parametrize(
    ("seen", "generation", "expected"),
    [(0, -1, (99,)), (0, 3, (97,)), (40, -1, (40, 99)), (100, 0, (99, 99)), (7, 500, (1, 7))],
)
def test_placement(seen: int, generation: int, expected: tuple[int, ...]) -> None:
    policy = policies.load("replay-value")
    memory = policy.begin(VIEW)
    request = Prefill(0, 100, 100, 100, 0, generation, seen)
    limits = Limits(1, 1, 0, 0, 8192, 99, anywhere=True)
    end, states = policy.place(memory, request, 0, 100, limits)
    assert end == 100 and sorted(states) == sorted(expected)
    assert all(p > 50 for p in policy.place(memory, request, 50, 100, limits)[1])


@pytest.mark.parametrize(
    ("parameters", "said"),
    [({"learn": "kinds"}, "allowed are none, kind, age"), ({"order": "fifo"}, "value, lru"),
     ({"sample": 0}, "nearest is 1")],
)  # fmt: skip
def test_refused(parameters: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policies.load("replay-value", **parameters)
