"""Token hit rate against memory, hits only, of a whole trace or of a sample of its prefix roots.

None of the engines' evictions has the inclusion property (docs/curves.md), so sizes cannot share
one pass. They share what does not depend on memory: the trace, its identities, its roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from numpy.typing import NDArray

from experiments.cli_errors import UsageError
from experiments.config import Experiment, memory_bytes
from experiments.engines import Point, host, kv_bytes_per_token, serving, sized
from experiments.points import points_of
from experiments.simulate import load_trace
from sim.ledger import Ledger
from sim.loop import StalledError, serial
from sim.records import Hits
from sim.sglang.pools import EngineCrashError
from traces.identity import Prefixes
from traces.sampling import chosen, part, roots
from traces.shared import shared_lengths
from traces.trace import Ints, Trace


@dataclass(frozen=True)
class Sample:
    """What is replayed instead of the trace. ``groups`` are the roots of its requests, ``shared``
    their tokens that came before in the trace, ``ceiling`` the share of those in the whole trace,
    ``load`` the sample's share of all tokens.
    """

    trace: Trace
    prefixes: Prefixes
    groups: Ints
    shared: Ints
    ceiling: float
    rate: float
    load: float


def sizes(text: str, points: int) -> list[int]:
    """``points`` sizes in bytes, in equal ratios, of ``4GiB:128GiB``; or those of a list
    ``4GiB,8GiB``. Raises ``UsageError``."""
    if ":" not in text:
        return sorted({memory_bytes(part) for part in text.split(",")})
    ends = [memory_bytes(part) for part in text.split(":")]
    if len(ends) != 2 or not 0 < ends[0] < ends[1] or points < 2:
        raise UsageError(
            f"memory is {text!r} with {points} points; expected FROM:TO, FROM above 0 and below "
            "TO, and two points or more"
        )
    return [int(b) for b in np.geomspace(ends[0], ends[1], points).round()]


def sample(experiment: Experiment, rate: float, seed: int) -> Sample:
    """The requests below about ``rate`` of the trace's prefix roots. Raises ``UsageError``."""
    trace, prefixes = load_trace(experiment.trace, experiment.seeds[0])
    groups, _ = roots(trace, prefixes)
    try:
        which = np.flatnonzero(chosen(groups, rate, seed))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not len(which):
        raise UsageError(f"a rate of {rate} leaves none of {len(trace):,} requests; try a larger")
    shared = shared_lengths(trace, prefixes, outputs=True)
    ceiling = float(shared.sum() / max(1, trace.prompt_tokens.sum()))
    some = (trace, prefixes) if rate == 1 else part(trace, prefixes, which)
    tokens = trace.prompt_tokens + trace.output_tokens
    load = float(tokens[which].sum() / tokens.sum())
    return Sample(*some, groups[which], shared[which], ceiling, rate, load)


def curve(
    experiment: Experiment, memory: Sequence[int], rate: float, seed: int = 0, jobs: int = 1
) -> pd.DataFrame:
    """A row per policy and size: token hit rate, and its standard error by the choice of roots.

    ``rejected`` counts requests too long for a size; where an engine could not start, or would
    crash, there is no rate, and ``why`` says so.
    """
    points = [
        p for size in memory
        for p in points_of(experiment.model_copy(update={"memory": f"{size}B", "sweep": {}}))
    ]  # fmt: skip
    if jobs == 1:
        made = sample(experiment, rate, seed)
        return pd.DataFrame([_row(p, made) for p in points])
    work = Parallel(n_jobs=jobs)(
        delayed(_rows)(points[i::jobs], experiment, rate, seed) for i in range(jobs)
    )
    rows = [row for several in work for row in several]
    order = {(p.policy.shown, memory_bytes(p.experiment.memory)): i for i, p in enumerate(points)}
    rows.sort(key=lambda row: order[row["policy"], row["memory_bytes"]])
    return pd.DataFrame(rows)


def _rows(
    points: list[Point], experiment: Experiment, rate: float, seed: int
) -> list[dict[str, object]]:
    made = sample(experiment, rate, seed)
    return [_row(point, made) for point in points]


def _row(point: Point, made: Sample) -> dict[str, object]:
    whole = memory_bytes(point.experiment.memory)
    rate = error = float("nan")
    rejected, why = len(made.trace), ""
    try:
        hits, served = _replay(_scaled(point, made), made)
    except (ValueError, StalledError, EngineCrashError) as refusal:
        why = str(refusal)
    else:
        rate, error = _rate(hits, served, made)
        rejected = int(len(served) - served.sum())
    return {
        "policy": point.policy.shown,
        "memory_bytes": whole,
        "memory_gib": round(whole / 2**30, 3),
        "token_hit_rate": rate,
        "standard_error": error,
        "requests": len(made.trace),
        "rejected": rejected,
        "why": why,
    }


def _rate(hits: Ints, served: NDArray[np.bool_], made: Sample) -> tuple[float, float]:
    """Token hit rate over requests served; of a sample, its standard error as well.

    A sample says which share of what was there before is hit; how much was there, the whole trace
    says. That leaves far less to chance than hits over the sample's own prompts.
    """
    if made.rate == 1:
        return float(hits.sum() / max(1, made.trace.prompt_tokens[served].sum())), 0.0
    found, error = estimate(hits, np.where(served, made.shared, 0), made.groups, made.rate)
    return found * made.ceiling, error * made.ceiling


def _scaled(point: Point, made: Sample) -> Point:
    """The sample's share of the memory. A running request is as large in it as in the whole, so
    only what is left beside one is scaled."""
    if made.rate == 1:
        return point
    whole, own = memory_bytes(point.experiment.memory), footprint(point, made.trace)
    size = own + made.load * max(whole - own, 0)
    experiment = point.experiment.model_copy(update={"memory": f"{int(size)}B"})
    return Point(experiment, point.policy, point.axes, point.seed)


def footprint(point: Point, trace: Trace) -> int:
    """Bytes that a request of mean length holds while it runs: its KV, and two states."""
    flags = serving(point)
    model, geometry = sized(point.experiment.model, flags)
    tokens = float((trace.prompt_tokens + trace.output_tokens).mean())
    kv = kv_bytes_per_token(model, flags.tp, flags.kv_dtype)
    return int(tokens * kv) + 2 * geometry.state_bytes * model.count("M")


def _replay(point: Point, made: Sample) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Hit tokens of each request, and which were served."""
    recorder = Hits(made.trace)
    hosted = host(point, made.trace, made.prefixes, Ledger(on=False))
    serial(hosted.engine, made.trace, recorder)
    served = np.ones(len(made.trace), bool)
    served[list(recorder.reasons)] = False
    return np.array(recorder.hit_tokens, np.int64), served


def estimate(hits: Ints, shared: Ints, groups: Ints, rate: float) -> tuple[float, float]:
    """Hit tokens / shared tokens, and the standard error of that ratio over the choice of roots.

    Roots are drawn without replacement, whole: the usual linearised variance of a ratio of sums.
    """
    total = int(shared.sum())
    if not total:
        return 0.0, 0.0
    ratio = float(hits.sum() / total)
    _, which = np.unique(groups, return_inverse=True)
    rest = np.bincount(which, hits) - ratio * np.bincount(which, shared)
    count = len(rest)
    spread = float((rest**2).sum()) * (1 - rate) * count / max(count - 1, 1)
    return ratio, float(np.sqrt(spread)) / total
