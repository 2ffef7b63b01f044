"""Curves from timings, and the error of prices on cases that no curve has seen.

For given overheads the share of each timing follows: roofline / (time - overheads). Shares are
made to rise with size (pool adjacent violators, in the logarithm), or to rise and fall again where
that predicts much better. Overheads, and which of the two, are those with which the curve through
all other sizes best predicts each size left out.
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
from sim.cost.profile import Profile, backend
from sim.cost.profile_cases import Case, Whole
from sim.cost.profile_curve import Curve
from sim.model import Model

FITTED = ("grid", "demand")
COARSE = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
FINER = (0.1, 0.05, 0.025, 0.0125)
MOST = 0.98
WORTH = 0.9  # a fall must bring the error below this share of what it is without
WHOLE = "whole steps"
OVERHEAD = "overhead"
BY_SEQUENCE = ("scan", "conv", "attention_prefill", "attention_decode")


class Point(NamedTuple):
    """A timing beside its roofline: ``floor_s`` is the sum over ``launches`` at full shares,
    ``sequences`` those of all launches (0 where they cost nothing of their own)."""

    size: float
    launches: int
    sequences: int
    floor_s: float
    seconds: float


class Overheads(NamedTuple):
    """Seconds a launch, and a sequence in a launch."""

    launch_s: float
    sequence_s: float

    def of(self, p: Point) -> float:
        """All overheads of a point."""
        return p.launches * self.launch_s + p.sequences * self.sequence_s


def point(shape: Shape, device: Device, dtype: str, case: Case, seconds: float) -> Point:
    """One timing of an operation. Raises ``ValueError`` if the model has none of it."""
    found = cases.terms(shape, case)
    if not found:
        raise ValueError(f"case {case}: the model has no {case.op}")
    floor = 0.0
    for _, count, (flops, moved, vector), _ in found:
        peak = device.vector_flops if vector else device.peak(dtype)
        floor += count * max(flops / peak, moved / device.bandwidth)
    launches = sum(t.launches for t in found)
    each = case.part.sequences if case.op in BY_SEQUENCE else 0
    return Point(found[0].size, launches, launches * each, floor, seconds)


def price(curve: Curve, p: Point) -> float:
    """What the curve says of a point, in seconds."""
    return Overheads(curve.launch_s, curve.sequence_s).of(p) + p.floor_s / curve.at(p.size)


# -------------------------------------------------------------------------------- one operation
def fit(points: Sequence[Point]) -> Curve:
    """The curve through all points of one operation. Raises ``ValueError`` for none."""
    if not points:
        raise ValueError("no points: at least one is needed for a curve")
    rising, falling = (_best(points, peak) for peak in (False, True))
    peak = falling[0] < WORTH * rising[0]
    return _curve(points, (falling if peak else rising)[1], peak)


def _best(points: Sequence[Point], peak: bool) -> tuple[float, Overheads]:
    """The overheads with the least error on sizes left out: a lattice, then ever closer to it."""
    if len({p.size for p in points}) < 3:
        return 0.0, Overheads(0.0, 0.0)  # too few to choose
    varied = len({p.sequences / p.launches for p in points}) > 1

    def trial(launch: float, sequence: float) -> tuple[float, float, float]:
        return _left_out(points, _overheads(points, launch, sequence), peak), launch, sequence

    best = min(trial(a, b) for a in COARSE for b in (COARSE if varied else (0.0,)))
    for step in FINER:
        near = [(_within(best[1] + i * step), _within(best[2] + j * step * varied))
                for i in (-1, 0, 1) for j in ((-1, 0, 1) if varied else (0,))]  # fmt: skip
        best = min(best, *(trial(a, b) for a, b in near))
    return best[0], _overheads(points, best[1], best[2])


def _within(share: float) -> float:
    return min(max(share, 0.0), MOST)


def _overheads(points: Sequence[Point], launch: float, sequence: float) -> Overheads:
    """Overheads as shares of the most that leaves every point some time."""
    launch_s = launch * min(p.seconds / p.launches for p in points)
    left = [(p.seconds - p.launches * launch_s) / p.sequences for p in points if p.sequences]
    return Overheads(launch_s, sequence * min(left, default=0.0))


def _left_out(points: Sequence[Point], overheads: Overheads, peak: bool) -> float:
    """Mean relative error on each size, by a curve through all the others."""
    total, sizes = 0.0, sorted({p.size for p in points})
    for size in sizes:
        curve = _curve([p for p in points if p.size != size], overheads, peak)
        errors = [abs(price(curve, p) / p.seconds - 1) for p in points if p.size == size]
        total += sum(errors) / len(errors)
    return total / len(sizes)


def _curve(points: Sequence[Point], overheads: Overheads, peak: bool) -> Curve:
    logs: dict[float, list[float]] = defaultdict(list)
    for p in points:
        logs[p.size].append(math.log(p.floor_s / (p.seconds - overheads.of(p))))
    sizes = sorted(logs)
    means = [sum(logs[s]) / len(logs[s]) for s in sizes]
    weights = [float(len(logs[s])) for s in sizes]
    values = (one_peaked if peak else never_falling)(means, weights)
    shares = tuple(math.exp(v) for v in values)
    return Curve(overheads.launch_s, tuple(sizes), shares, overheads.sequence_s)


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (weighted squares): pools adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in pools for _ in range(count)]


def one_peaked(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never rises after a fall."""
    best, off = list(values), math.inf
    for cut in range(1, len(values) + 1):
        up = never_falling(values[:cut], weights[:cut])
        down = never_falling(values[cut:][::-1], weights[cut:][::-1])[::-1]
        if down and down[0] > up[-1]:
            continue
        both = zip([*up, *down], values, weights, strict=True)
        found = sum(w * (a - b) ** 2 for a, b, w in both)
        if found < off - 1e-12:
            best, off = [*up, *down], found
    return best


# -------------------------------------------------------------------------------- profiles
def fitted(profile: Profile, model: Model) -> Profile:
    """The profile with curves through its samples, and its errors on those held out."""
    curves = {op: fit(points) for op, points in _points(profile, model, FITTED).items()}
    if rows := _overhead_rows(profile):
        curves[OVERHEAD] = _overhead(rows)
    made = replace(profile, curves=curves, errors={})
    return replace(made, errors=errors(made, model))


def _overhead_rows(profile: Profile) -> list[tuple[int, float]]:
    """Sequences (the case's decodes and one chunk) and seconds of a step's overhead."""
    out = []
    for s in profile.samples:
        case = cases.parse(s.case)
        if s.part in FITTED and isinstance(case, Case) and case.op == OVERHEAD:
            out.append((case.part.sequences + 1, s.median_s))
    return out


def _overhead(rows: Sequence[tuple[int, float]]) -> Curve:
    """A line through the timings, neither part of it below 0."""
    counts, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    spread = float(((counts - counts.mean()) ** 2).sum())
    slope = float(((counts - counts.mean()) * seconds).sum()) / spread if spread else 0.0
    slope = min(max(slope, 0.0), float(seconds.min() / counts.max()))
    return Curve(max(float(np.mean(seconds - slope * counts)), 0.0), sequence_s=slope)


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
        for op, points in sorted(_points(profile, model, ("held",)).items())
        if op in profile.curves
    }
    whole = _whole_ratios(profile, model)
    every = [ratio for found in whole.values() for ratio in found]
    return out | dict(sorted(whole.items())) | ({WHOLE: every} if every else {})


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
