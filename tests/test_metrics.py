"""Figures of a run against brute force over its requests and tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sim.ledger import Action, Cause, Kind, Ledger
from sim.metrics import hit_rates, occupancy, spread, summary, warm_from_ns, weighted_spread
from sim.records import Records
from sim.step import Admission
from traces.trace import Request, Run, from_requests

S = 10**9


def filled(seed: int, n: int = 40) -> Records:
    """Random requests, every seventh rejected, with a step of a second every second."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 500, (n, 2)).tolist()
    found = Records(
        from_requests(Request(str(i), (Run(i << 20, p),), o) for i, (p, o) in enumerate(lengths))
    )
    for r, (prompt, output) in enumerate(lengths):
        at = int(rng.integers(0, 50 * S))
        if r % 7 == 6:
            found.rejected(r, "too long", at)
            continue
        found.arrived_ns[r] = at
        found.admitted_ns[r] = at + int(rng.integers(0, 3 * S))
        found.first_token_ns[r] = found.admitted_ns[r] + int(rng.integers(1, 2 * S))
        found.finished_ns[r] = found.first_token_ns[r] + (output - 1) * int(
            rng.integers(S // 1000, S // 10)
        )
        found.matched_tokens[r] = int(rng.integers(0, prompt))
        found.hit_tokens[r] = int(rng.integers(0, found.matched_tokens[r] + 1)) * (r % 3 > 0)
    found.steps = [
        (i, 1, i * S, (i + 1) * S, 0, 1, 1, 0, min(900, 10 * i), min(1000, 20 * i))
        for i in range(60)
    ]
    return found


def rates(found: Records, from_ns: int = 0) -> dict[str, float]:
    """By hand, request by request."""
    hits = total = some = n = 0
    mean = 0.0
    for r, at in enumerate(found.admitted_ns):
        if at < 0 or at < from_ns:
            continue
        prompt, hit = int(found.trace.prompt_tokens[r]), found.hit_tokens[r]
        hits, total, some, n, mean = (
            hits + hit,
            total + prompt,
            some + (hit > 0),
            n + 1,
            mean + hit / prompt,
        )
    return {
        "token_hit_rate": hits / total,
        "request_hit_rate": some / n,
        "mean_request_hit_rate": mean / n,
    }


@pytest.mark.parametrize("seed", range(5))
def test_hit_rates_whole_and_warm(seed: int) -> None:
    found = filled(seed)
    row = summary(found, capacity_bytes=1000)
    assert warm_from_ns(found, 1000) == 48 * S
    assert row["warm_from_s"] == 48
    for name, value in rates(found).items():
        assert row[name] == pytest.approx(value, rel=1e-12)
    for name, value in rates(found, 20 * S).items():
        later = hit_rates(found.requests().query("admitted_ns >= 20000000000"))
        assert later[name] == pytest.approx(value, rel=1e-12)


def test_the_three_rates_differ() -> None:
    rows = pd.DataFrame(
        {"admitted_ns": [0, 0, -1], "prompt_tokens": [900, 100, 50], "hit_tokens": [0, 50, 0]}
    )
    assert hit_rates(rows) == {
        "token_hit_rate": 0.05, "request_hit_rate": 0.5, "mean_request_hit_rate": 0.25,
    }  # fmt: skip
    assert all(np.isnan(v) for v in hit_rates(rows[2:]).values())


def test_a_pool_that_never_fills_is_warm_from_the_start() -> None:
    found = filled(0)
    row = summary(found, capacity_bytes=10**9)
    assert row["warm_from_s"] == 0
    assert row["warm_token_hit_rate"] == row["token_hit_rate"]


def test_warm_counts_requests_admitted_from_then_on() -> None:
    found = filled(1)
    row = summary(found, capacity_bytes=500)
    assert row["warm_from_s"] == 24
    for name, value in rates(found, 24 * S).items():
        assert row[f"warm_{name}"] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_weighted_percentiles_are_those_of_every_gap_written_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    gaps, weights = rng.integers(1, 10**8, n), rng.integers(1, 50, n)
    every = np.sort(np.repeat(gaps, weights)) / 1e9
    row = weighted_spread(gaps, weights, "itl")
    assert row["itl_mean_s"] == pytest.approx(float(every.mean()), rel=1e-12)
    assert row["itl_max_s"] == every[-1]
    for key, q in {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}.items():
        assert row[f"itl_{key}_s"] == float(np.quantile(every, q, method="inverted_cdf"))


def test_no_values_are_no_number() -> None:
    nothing = np.zeros(0, np.int64)
    assert set(spread(np.zeros(0), "ttft")) == set(spread(np.ones(1), "ttft"))
    assert all(np.isnan(v) for v in weighted_spread(nothing, nothing, "itl").values())


@pytest.mark.parametrize("seed", range(3))
def test_times_goodput_and_counts(seed: int) -> None:
    found = filled(seed)
    row = summary(found, ttft_limit_s=1.5, tpot_limit_s=0.06)
    ttft, tpot, met = [], [], 0
    served = [r for r, at in enumerate(found.finished_ns) if at >= 0]
    for r in served:
        first = (found.first_token_ns[r] - found.arrived_ns[r]) / S
        later = int(found.trace.output_tokens[r]) - 1
        each = (found.finished_ns[r] - found.first_token_ns[r]) / S / later if later else 0.0
        ttft.append(first)
        if later:
            tpot.append(each)
        met += first <= 1.5 and each <= 0.06
    span = (max(found.finished_ns) - min(found.arrived_ns)) / S
    assert 0 < met < len(served)
    assert row["goodput_requests_per_s"] == pytest.approx(met / span)
    assert row["requests_per_s"] == pytest.approx(len(served) / span)
    assert row["ttft_p90_s"] == pytest.approx(float(np.quantile(ttft, 0.9)))
    assert row["tpot_mean_s"] == pytest.approx(sum(tpot) / len(tpot))
    queued = [found.admitted_ns[r] - found.arrived_ns[r] for r in served]
    assert row["queue_max_s"] == pytest.approx(max(queued) / S)
    assert (row["requests"], row["finished"], row["rejected"]) == (40, 35, 5)
    assert row["recompute_tokens"] == sum(found.matched_tokens) - sum(found.hit_tokens)


def test_lookups_after_a_preemption_are_counted_apart() -> None:
    found = filled(0)
    found.admissions = [
        (0, Admission(0, 5, 9, 0, False)),
        (4, Admission(0, 3, 7, 0, True)),
        (6, Admission(1, 2, 2, 0, True)),
    ]
    row = summary(found)
    assert (row["relookup_hit_tokens"], row["relookup_recompute_tokens"]) == (5, 4)
    assert row["token_hit_rate"] == pytest.approx(rates(found)["token_hit_rate"])


def test_occupancy_is_weighted_by_time() -> None:
    found = filled(0)
    found.steps = [(0, 1, 0, S, 0, 0, 0, 0, 100, 0), (1, 1, S, 4 * S, 0, 0, 0, 0, 500, 0)]
    assert occupancy(found, 1000) == {"pool_used_mean": pytest.approx(0.4), "pool_used_max": 0.5}
    assert occupancy(found, 0) == {}


def test_the_first_eviction_under_pressure_is_full_too() -> None:
    """Where running requests keep what is cached below 95 % of the pool, as in SGLang's trees."""
    found, ledger = filled(0), Ledger()
    log = found.step_log()
    at = int(log.step.iloc[len(log) // 3])
    ledger.emit(0, Kind.STATE, Action.DROPPED, 1, 1, cause=Cause.POLICY)
    assert warm_from_ns(found, 10**9, ledger) == 0
    ledger.emit(at, Kind.STATE, Action.DROPPED, 1, 1, cause=Cause.PRESSURE)
    assert warm_from_ns(found, 10**9, ledger) == int(log.start_ns.iloc[len(log) // 3])
    assert summary(found, capacity_bytes=10**9, ledger=ledger)["warm_from_s"] > 0
