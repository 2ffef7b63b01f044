"""How well an operation does at its sizes.

time = launches * (launch + sequences * sequence) + roofline / share(size)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sim.cost.efficiency import Efficiency, Floats, Share, Shares


class ProfileMiss(ValueError):
    """A step needs an operation at a size that the profile lacks."""


def octave(size: float) -> float:
    """log2 of ``size`` at powers of two, straight lines between: the same bits everywhere."""
    mantissa, exponent = math.frexp(size)
    return exponent + 2 * mantissa - 2


def octaves(sizes: Floats) -> Floats:
    """``octave`` of many."""
    mantissa, exponent = np.frexp(sizes)
    found: Floats = exponent + 2 * mantissa - 2
    return found


def one_peak(values: Sequence[float]) -> bool:
    """Whether values rise, then fall (either may be missing)."""
    steps = [b - a for a, b in pairwise(values) if a != b]
    signs = [step > 0 for step in steps]
    return signs == sorted(signs, reverse=True)


@dataclass(frozen=True)
class Curve:
    """``launch_s`` a launch and ``sequence_s`` a sequence in it; ``shares`` of the roofline.

    Shares rise with size; they may fall again beyond the highest (where data outgrow a cache).
    Between sizes they are linear in the octave, outside they stay what they are at the end.
    """

    launch_s: float
    sizes: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    sequence_s: float = 0.0
    knots: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.shares) or min(self.launch_s, self.sequence_s) < 0:
            raise ValueError(
                f"{len(self.sizes)} sizes, {len(self.shares)} shares, launch {self.launch_s} s, "
                f"sequence {self.sequence_s} s: must be equally many, and 0 or more"
            )
        if any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError(f"sizes {self.sizes} must grow")
        if min(self.shares, default=1) <= 0 or not one_peak(self.shares):
            raise ValueError(f"shares {self.shares} must be above 0 and never rise after a fall")
        object.__setattr__(self, "knots", tuple(octave(s) for s in self.sizes))

    def has(self, size: float) -> bool:
        """Whether ``size`` lies within what was measured."""
        return bool(self.sizes) and self.sizes[0] <= size <= self.sizes[-1]

    def at(self, size: float) -> float:
        """The share at one size."""
        x, knots, shares = octave(size), self.knots, self.shares
        if x <= knots[0]:
            return shares[0]
        if x >= knots[-1]:
            return shares[-1]
        i = bisect_right(knots, x) - 1
        slope = (shares[i + 1] - shares[i]) / (knots[i + 1] - knots[i])
        return shares[i] + slope * (x - knots[i])

    def over(self, sizes: Floats) -> Floats:
        """The shares at many sizes, by the same operations as ``at``."""
        if len(self.knots) == 1:
            return np.full(len(sizes), self.shares[0])
        knots, shares = np.array(self.knots), np.array(self.shares)
        x = octaves(sizes)
        i = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
        slopes = (shares[1:] - shares[:-1]) / (knots[1:] - knots[:-1])
        inside = shares[i] + slopes[i] * (x - knots[i])
        above: Floats = np.where(x >= knots[-1], shares[-1], inside)
        return np.where(x <= knots[0], shares[0], above)


@dataclass
class Measured:
    """Shares from curves; implements ``Efficiency``.

    Outside a curve, and for an operation without one (``fallback``), ``refuse`` raises
    ``ProfileMiss``; otherwise the miss is noted in ``misses``: the range of sizes by operation.
    """

    curves: Mapping[str, Curve]
    fallback: Efficiency
    refuse: bool = False
    misses: dict[str, tuple[float, float]] = field(default_factory=dict)

    def at(self, op: str, size: float) -> Share:
        curve = self.curves.get(op)
        if curve is None or not curve.has(size):
            self._miss(op, size, size)
        if curve is None or not curve.sizes:
            return self.fallback.at(op, size)
        share = curve.at(size)
        return Share(share, share)

    def over(self, op: str, sizes: Floats) -> Shares:
        low, high = float(sizes.min()), float(sizes.max())
        curve = self.curves.get(op)
        if curve is None or not (curve.has(low) and curve.has(high)):
            self._miss(op, low, high)
        if curve is None or not curve.sizes:
            return self.fallback.over(op, sizes)
        shares = curve.over(sizes)
        return Shares(shares, shares)

    def _miss(self, op: str, low: float, high: float) -> None:
        if self.refuse:
            raise ProfileMiss(self._told(op, low, high))
        before = self.misses.get(op, (low, high))
        self.misses[op] = (min(before[0], low), max(before[1], high))

    def _told(self, op: str, low: float, high: float) -> str:
        wanted = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        curve = self.curves.get(op)
        if curve is None or not curve.sizes:
            return f"the profile has no {op} (size {wanted}); it has {', '.join(self.curves)}"
        return (
            f"the profile has {op} from {curve.sizes[0]:.0f} to {curve.sizes[-1]:.0f}, "
            f"not at {wanted}; on_miss: extrapolate or measure goes on"
        )
