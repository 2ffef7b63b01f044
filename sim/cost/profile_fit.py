"""Curves from timings, and the error of prices on cases that no curve has seen.

For a launch overhead the share of each timing follows: roofline / (time - launches * overhead).
Shares are made to never fall with size (pool adjacent violators, in the logarithm). The overhead
is the one with which the curve through all other sizes best predicts each size left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sim.cost import profile_cases as cases
from sim.cost.device import Device
from sim.cost.layers import Shape, shape_of
from sim.cost.profile import Profile, Sample, backend
from sim.cost.profile_cases import Case, Whole
from sim.cost.profile_curve import Curve
from sim.model import Model

FITTED = ("grid", "demand")
FRACTIONS = (*(i / 50 for i in range(50)), 0.99)
WHOLE = "whole steps"
OVERHEAD = "overhead"


class Point(NamedTuple):
    """A timing beside its roofline: ``floor_s`` is the sum over ``launches`` at full shares."""

    size: float
    launches: int
    floor_s: float
    seconds: float


def point(shape: Shape, device: Device, dtype: str, case: Case, seconds: float) -> Point:
    """One timing of an operation. Raises ``ValueError`` if the model has none of it."""
    found = cases.terms(shape, case)
    if not found:
        raise ValueError(f"case {case}: the model has no {case.op}")
    floor = 0.0
    for _, count, (flops, moved, vector), _ in found:
        peak = device.vector_flops if vector else device.peak(dtype)
        floor += count * max(flops / peak, moved / device.bandwidth)
    return Point(found[0].size, sum(t.launches for t in found), floor, seconds)


def price(curve: Curve, p: Point) -> float:
    """What the curve says of a point, in seconds."""
    return p.launches * curve.launch_s + p.floor_s / curve.at(p.size)


def fit(points: Sequence[Point]) -> Curve:
    """The curve through all points of one operation. Raises ``ValueError`` for none."""
    if not points:
        raise ValueError("no points: at least one is needed for a curve")
    most = min(p.seconds / p.launches for p in points)
    trials = [(_left_out(points, f * most), f) for f in FRACTIONS]
    best = min(trials)[1]
    return _curve(points, best * most)


def _left_out(points: Sequence[Point], launch_s: float) -> float:
    """Mean relative error on each size, by a curve through all the others."""
    sizes = sorted({p.size for p in points})
    if len(sizes) < 3:
        return launch_s  # too few to choose: no overhead
    total = 0.0
    for size in sizes:
        curve = _curve([p for p in points if p.size != size], launch_s)
        errors = [abs(price(curve, p) / p.seconds - 1) for p in points if p.size == size]
        total += sum(errors) / len(errors)
    return total / len(sizes)


def _curve(points: Sequence[Point], launch_s: float) -> Curve:
    logs: dict[float, list[float]] = defaultdict(list)
    for p in points:
        logs[p.size].append(math.log(p.floor_s / (p.seconds - p.launches * launch_s)))
    sizes = sorted(logs)
    means = [sum(logs[s]) / len(logs[s]) for s in sizes]
    rising = never_falling(means, [len(logs[s]) for s in sizes])
    return Curve(launch_s, tuple(sizes), tuple(math.exp(v) for v in rising))


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (weighted squares): pools adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in pools for _ in range(count)]


# -------------------------------------------------------------------------------- profiles
def fitted(profile: Profile, model: Model) -> Profile:
    """The profile with curves through its samples, and its errors on those held out."""
    curves = {op: fit(points) for op, points in _points(profile, model, FITTED).items()}
    overhead = [s.median_s for s in profile.samples if s.part in FITTED and _is_overhead(s)]
    if overhead:
        curves[OVERHEAD] = Curve(float(np.median(overhead)))
    made = replace(profile, curves=curves, errors={})
    return replace(made, errors=errors(made, model))


def _is_overhead(sample: Sample) -> bool:
    case = cases.parse(sample.case)
    return isinstance(case, Case) and case.op == OVERHEAD


def _points(profile: Profile, model: Model, parts: Iterable[str]) -> dict[str, list[Point]]:
    shape, device, wanted = shape_of(model), profile.machine, set(parts)
    found: dict[str, list[Point]] = {}
    for sample in profile.samples:
        case = cases.parse(sample.case)
        if sample.part in wanted and isinstance(case, Case) and case.op != OVERHEAD:
            made = point(shape, device, profile.dtype, case, sample.median_s)
            found.setdefault(case.op, []).append(made)
    return found


def ratios(profile: Profile, model: Model) -> dict[str, list[float]]:
    """Predicted over measured time of every held-out case: by operation and kind of step."""
    out = {
        op: [price(profile.curves[op], p) / p.seconds for p in points]
        for op, points in _points(profile, model, ("held",)).items()
        if op in profile.curves
    }
    whole = _whole_ratios(profile, model)
    every = [ratio for found in whole.values() for ratio in found]
    return out | whole | ({WHOLE: every} if every else {})


def _whole_ratios(profile: Profile, model: Model) -> dict[str, list[float]]:
    prices, _ = backend(profile, model)
    out: dict[str, list[float]] = {}
    for sample in profile.samples:
        case = cases.parse(sample.case)
        if isinstance(case, Whole):
            predicted = int(prices.run(case.step()).durations_ns[0]) / 1e9
            out.setdefault(case.kind, []).append(predicted / sample.median_s)
    return out


def errors(profile: Profile, model: Model) -> dict[str, Any]:
    """Held-out error by operation and for whole steps, relative to what was measured."""
    return {name: stats(found) for name, found in ratios(profile, model).items()}


def stats(found: Sequence[float]) -> dict[str, float]:
    """Of predicted over measured: mean, 90th percentile and maximum of the error, and the bias."""
    off = np.array(found) - 1
    size = np.abs(off)
    return {
        "n": len(found),
        "mean": float(size.mean()),
        "p90": float(np.quantile(size, 0.9)),
        "max": float(size.max()),
        "bias": float(off.mean()),
    }
