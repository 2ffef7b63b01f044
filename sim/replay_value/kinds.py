"""Kinds of checkpoints and how often each is used: 36 of them, and their ages.

A kind is what a checkpoint is (branch point, prompt end, answer end, other), how many checkpoints
lie directly below it (0, 1, more) and how often it was used so far (0, 1, more).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TYPES, STEPS = 4, 9
KINDS = TYPES * STEPS
PRIOR = 2.0
EDGES = np.array(
    sorted({1, 2, 3, *(1 << k for k in range(2, 18)), *(3 << k for k in range(1, 16))})
)
EDGES = EDGES[:34]
WIDTHS = np.diff(np.append(EDGES, 2 * EDGES[-1])).astype(float)


def kind_of(what: int, children: int, uses: int) -> int:
    """The number of a kind; ``what`` is 0 branch, 1 prompt end, 2 answer end, 3 other."""
    return what * STEPS + min(children, 2) * 3 + min(uses, 2)


class Rates(Protocol):
    """How likely a use is per unit of time, up to a factor that all share."""

    def tick(self, kinds: Ints, ages: Ints) -> None:
        """A request came: every checkpoint was there for it."""

    def used(self, kind: int, age: int) -> None:
        """A checkpoint was used."""

    def of(self, kinds: Ints, ages: Ints) -> Floats:
        """The rate of each checkpoint, its age counted in."""


class Alike:
    """Every kind alike: the longer unused, the less likely."""

    def tick(self, kinds: Ints, ages: Ints) -> None:
        """Nothing to learn."""

    def used(self, kind: int, age: int) -> None:
        """Nothing to learn."""

    def of(self, kinds: Ints, ages: Ints) -> Floats:
        """One over the age."""
        return 1.0 / ages


class ByKind:
    """Rates ``w(kind) / age``: uses over exposure, drawn to those of the nine kinds that leave out
    what a checkpoint is, and these to the overall rate."""

    def __init__(self) -> None:
        self.uses, self.exposure = np.zeros(KINDS), np.zeros(KINDS)
        self.weights = np.ones(KINDS)
        self._stale = True

    def tick(self, kinds: Ints, ages: Ints) -> None:
        """Exposure of one over its age for each."""
        if len(kinds):
            self.exposure += np.bincount(kinds, 1.0 / ages, KINDS)
        self._refresh()

    def used(self, kind: int, age: int) -> None:
        """Counts for the kind that it had; weights follow at the next request."""
        self.uses[kind] += 1

    def of(self, kinds: Ints, ages: Ints) -> Floats:
        """The kind's weight over the age."""
        return np.asarray(self.weights[kinds] / ages)

    def _refresh(self) -> None:
        overall = (self.uses.sum() + 1) / (self.exposure.sum() + 10)
        uses, exposure = (c.reshape(TYPES, STEPS).sum(0) for c in (self.uses, self.exposure))
        steps = (uses + PRIOR) / (exposure + PRIOR / overall)
        self.weights = (self.uses + PRIOR) / (self.exposure + PRIOR / np.tile(steps, TYPES))


class ByAge:
    """Rates ``w(kind) * f(age)``, both learned: f on bins of age, by the other's expectation. A
    checkpoint's rate is the best ratio, over horizons, of its chance of use to the time held."""

    def __init__(self) -> None:
        bins = len(EDGES)
        self.uses, self.exposure = np.zeros((KINDS, bins)), np.zeros((KINDS, bins))
        self.shape, self.weights = 0.2 / EDGES, np.ones(KINDS)
        self.requests = 0
        self.table = self._index()

    def tick(self, kinds: Ints, ages: Ints) -> None:
        """One more unit of time in its bin for each."""
        if len(kinds):
            at = kinds * len(EDGES) + self._bins(ages)
            self.exposure += np.bincount(at, minlength=self.exposure.size).reshape(
                self.exposure.shape
            )
        self.requests += 1
        if self.requests <= 200 or self.requests % 50 == 0:
            self._learn()

    def used(self, kind: int, age: int) -> None:
        """Counts for the kind and the age that it had."""
        self.uses[kind, self._bins(np.array([age]))[0]] += 1

    def of(self, kinds: Ints, ages: Ints) -> Floats:
        """From the table of kinds and bins."""
        return np.asarray(self.table[kinds, self._bins(ages)])

    def _bins(self, ages: Ints) -> Ints:
        return np.searchsorted(EDGES, ages, side="right") - 1

    def _learn(self) -> None:
        for _ in range(2):
            expected = self.exposure @ self.shape
            self.weights = (self.uses.sum(1) + 0.5) / (expected + 0.5)
            weighted, used = self.weights @ self.exposure, self.uses.sum(0)
            before = 0.2
            for b in range(len(EDGES)):
                prior = before if b == 0 else before * EDGES[b - 1] / EDGES[b]
                before = self.shape[b] = (used[b] + 2) / (weighted[b] + 2 / prior)
        self.table = self._index()

    def _index(self) -> Floats:
        """Per kind and bin: the largest over horizons of chance of use / expected time held."""
        rates = self.weights[:, None] * self.shape[None, :]
        best = np.zeros_like(rates)
        for first in range(len(EDGES)):
            width = WIDTHS[first:].copy()
            width[0] /= 2
            rate = rates[:, first:]
            stays = np.exp(-rate * width)
            reached = np.cumprod(np.concatenate([np.ones((KINDS, 1)), stays[:, :-1]], 1), 1)
            held = np.cumsum(reached * (1 - stays) / rate, 1)
            best[:, first] = ((1 - reached * stays) / held).max(1)
        return best


RATES: dict[str, type[Alike] | type[ByKind] | type[ByAge]] = {
    "none": Alike,
    "kind": ByKind,
    "age": ByAge,
}
