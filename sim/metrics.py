"""Figures of a run, computed from its records afterwards. Definitions: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.ledger import Cause, Ledger
from sim.records import Records

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def hit_rates(rows: pd.DataFrame) -> dict[str, float]:
    """Token, request and mean request hit rate of admitted requests (NaN where there are none)."""
    rows = rows[rows.admitted_ns >= 0]
    prompt = rows.prompt_tokens.to_numpy(np.int64)
    hit = rows.hit_tokens.to_numpy(np.int64)
    if not len(rows):
        nan = float("nan")
        return {"token_hit_rate": nan, "request_hit_rate": nan, "mean_request_hit_rate": nan}
    return {
        "token_hit_rate": float(hit.sum() / prompt.sum()),
        "request_hit_rate": float((hit > 0).mean()),
        "mean_request_hit_rate": float((hit / prompt).mean()),
    }


def warm_from_ns(records: Records, capacity_bytes: int, ledger: Ledger | None = None) -> int:
    """When the cache first fills: what is cached reaches 95 % of the pool, or something has to go
    under pressure (where requests' own bytes keep the cache below that); 0 if neither happens."""
    log = records.step_log()
    full = log.cached_bytes >= 0.95 * capacity_bytes if capacity_bytes else log.step < 0
    if ledger is not None and Cause.PRESSURE in ledger.cause:
        full = full | (log.step + log.repeat > ledger.step[ledger.cause.index(Cause.PRESSURE)])
    return int(log.start_ns[full].iloc[0]) if full.any() else 0


def spread(values_s: NDArray[np.float64], name: str) -> dict[str, float]:
    """Mean, percentiles and maximum under ``name_…_s`` (NaN where there is nothing)."""
    if not len(values_s):
        keys = ["mean", *QUANTILES, "max"]
        return {f"{name}_{k}_s": float("nan") for k in keys}
    out = {f"{name}_mean_s": float(values_s.mean())}
    for key, q in QUANTILES.items():
        out[f"{name}_{key}_s"] = float(np.quantile(values_s, q))
    out[f"{name}_max_s"] = float(values_s.max())
    return out


def weighted_spread(
    gaps_ns: NDArray[np.int64], weights: NDArray[np.int64], name: str
) -> dict[str, float]:
    """As ``spread``, of values that occur ``weights`` times; percentiles by the nearest rank."""
    if not len(gaps_ns):
        return spread(np.zeros(0), name)
    order = np.argsort(gaps_ns, kind="stable")
    gaps, reach = gaps_ns[order], np.cumsum(weights[order])
    total = int(reach[-1])
    out = {f"{name}_mean_s": float((gaps_ns * weights).sum() / total / 1e9)}
    for key, q in QUANTILES.items():
        rank = max(1, int(np.ceil(q * total)))
        out[f"{name}_{key}_s"] = float(gaps[np.searchsorted(reach, rank)] / 1e9)
    out[f"{name}_max_s"] = float(gaps[-1] / 1e9)
    return out


def summary(
    records: Records,
    *,
    capacity_bytes: int = 0,
    ledger: Ledger | None = None,
    ttft_limit_s: float = 2.0,
    tpot_limit_s: float = 0.05,
) -> dict[str, float]:
    """Every figure of a run under a name that carries its unit."""
    rows = records.requests()
    done = rows[rows.finished_ns >= 0]
    ttft = _seconds(done.first_token_ns - done.arrived_ns)
    later = np.maximum(done.output_tokens.to_numpy(np.int64) - 1, 1)
    tpot = _seconds(done.finished_ns - done.first_token_ns) / later
    warm = warm_from_ns(records, capacity_bytes, ledger)
    span_s = (int(rows.finished_ns.max()) - int(rows.arrived_ns.min())) / 1e9 if len(done) else 0.0
    again = [a for _, a in records.admissions if a.resumed]
    met = (ttft <= ttft_limit_s) & (tpot <= tpot_limit_s)
    out: dict[str, float] = {
        "requests": len(rows),
        "finished": len(done),
        "rejected": len(records.reasons),
        "prompt_tokens": int(rows.prompt_tokens.sum()),
        "hit_tokens": int(rows.hit_tokens.sum()),
        "recompute_tokens": int((rows.matched_tokens - rows.hit_tokens).sum()),
        "preemptions": int(rows.preemptions.sum()),
        "relookup_hit_tokens": sum(a.hit for a in again),
        "relookup_recompute_tokens": sum(a.matched - a.hit for a in again),
        **hit_rates(rows),
        **{f"warm_{k}": v for k, v in hit_rates(rows[rows.admitted_ns >= warm]).items()},
        "warm_from_s": warm / 1e9,
        **spread(ttft, "ttft"),
        **spread(tpot[done.output_tokens.to_numpy(np.int64) > 1], "tpot"),
        **weighted_spread(*records.token_gaps(), "itl"),
        **spread(_seconds(done.finished_ns - done.arrived_ns), "e2e"),
        **spread(_seconds(done.admitted_ns - done.arrived_ns), "queue"),
        "makespan_s": span_s,
    }
    if span_s:
        out["requests_per_s"] = len(done) / span_s
        out["output_tokens_per_s"] = float(done.output_tokens.sum()) / span_s
        out["goodput_requests_per_s"] = float(met.sum()) / span_s
    return out | occupancy(records, capacity_bytes)


def occupancy(records: Records, capacity_bytes: int) -> dict[str, float]:
    """Share of the pool that requests hold, over time and at most."""
    log = records.step_log()
    time = (log.end_ns - log.start_ns).to_numpy(np.int64)
    if not capacity_bytes or not time.sum():
        return {}
    used = log.used_bytes.to_numpy(np.int64) / capacity_bytes
    return {
        "pool_used_mean": float((used * time).sum() / time.sum()),
        "pool_used_max": float(used.max()),
    }


def _seconds(ns: Sequence[int] | pd.Series) -> NDArray[np.float64]:
    return np.asarray(ns, np.float64) / 1e9
