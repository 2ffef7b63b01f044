"""A distribution drawn through the quantiles of a real trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.trace import Ints

Floats = NDArray[np.float64]
_NORMAL = NormalDist()
_TAIL = 6.0
_HALF_NORMAL_MEAN = 0.3989422804014327  # of max(z, 0)


@dataclass(frozen=True)
class Quantiles:
    """Positive values whose logarithm is piecewise linear in the normal score ``z``.

    One straight line is a lognormal; nodes bend it through the quantiles that are known. Values
    stay within ``low`` and ``high``.
    """

    scores: tuple[float, ...]
    logs: tuple[float, ...]
    low: float
    high: float

    def at(self, z: Floats) -> Floats:
        """Values at normal scores ``z`` (0 is the median)."""
        return np.clip(np.exp(np.interp(z, self.scores, self.logs)), self.low, self.high)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        """``n`` independent values."""
        return self.at(rng.standard_normal(n))

    def integers(self, rng: np.random.Generator, n: int) -> Ints:
        """``n`` independent values, rounded."""
        return np.rint(self.sample(rng, n)).astype(np.int64)


def through(levels: Sequence[float], values: Sequence[float], low: float, high: float) -> Quantiles:
    """The distribution with the given values at the given levels; its end slopes go on."""
    scores = [_NORMAL.inv_cdf(q) for q in levels]
    logs = [log(v) for v in values]
    first, last = (_slope(scores, logs, 0), _slope(scores, logs, len(scores) - 2))
    below = logs[0] + first * (-_TAIL - scores[0])
    above = logs[-1] + last * (_TAIL - scores[-1])
    return Quantiles((-_TAIL, *scores, _TAIL), (below, *logs, above), low, high)


def _slope(scores: Sequence[float], logs: Sequence[float], k: int) -> float:
    return (logs[k + 1] - logs[k]) / (scores[k + 1] - scores[k])


def from_summary(summary: Mapping[str, float], low: float = 1.0) -> Quantiles:
    """Through median, p90 and p99; below the median the slope that makes the log mean ``mu``."""
    values = [summary["median"], summary["p90"], summary["p99"]]
    upper = through((0.5, 0.9, 0.99), values, low, summary["max"])
    levels = 0.5 + (np.arange(500) + 0.5) / 1000
    above = float(np.log(upper.at(np.array([_NORMAL.inv_cdf(q) for q in levels]))).mean())
    median = log(summary["median"])
    slope = max(0.0, (0.5 * (median + above) - summary["mu"]) / _HALF_NORMAL_MEAN)
    logs = (median - _TAIL * slope, *upper.logs[1:])
    return Quantiles(upper.scores, logs, low, summary["max"])


def constant(value: float) -> Quantiles:
    """Always ``value``."""
    return Quantiles((-_TAIL, _TAIL), (0.0, 0.0), value, value)


@cache
def fits() -> Mapping[str, Any]:
    """Summary statistics of real traces, by trace name (data/fits.json names the sources)."""
    text = (files("traces") / "data" / "fits.json").read_text(encoding="utf-8")
    return {k: v for k, v in json.loads(text).items() if not k.startswith("_")}
