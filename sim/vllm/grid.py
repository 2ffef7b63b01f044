"""Prefix ids of many requests at once, on the grid of hash units."""

from __future__ import annotations

import numpy as np

from traces.identity import Prefixes
from traces.trace import Ints

BATCH = 64


class Grids:
    """Requests that follow one another in the trace arrive close to each other, so their ids are
    made together. A batch is forgotten when each of its requests was asked for."""

    def __init__(self, prefixes: Prefixes, step: int) -> None:
        self.prefixes, self.step = prefixes, step
        self._made: dict[int, tuple[list[int], Ints]] = {}
        self._left: dict[int, int] = {}

    def of(self, request: int) -> list[int]:
        """Ids of the prefixes of length ``step``, ``2 * step``, … of the whole sequence."""
        batch, row = divmod(request, BATCH)
        if batch not in self._made:
            self._make(batch)
        bounds, ids = self._made[batch]
        self._left[batch] -= 1
        if not self._left[batch]:
            del self._made[batch], self._left[batch]
        out: list[int] = ids[bounds[row] : bounds[row + 1]].tolist()
        return out

    def _make(self, batch: int) -> None:
        p, step = self.prefixes, self.step
        offsets = p.offsets[batch * BATCH : (batch + 1) * BATCH + 1]
        ends, deltas = p.ends[offsets[0] : offsets[-1]], p.deltas[offsets[0] : offsets[-1]]
        rows = offsets - offsets[0]
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1]
        starts[rows[:-1][np.diff(rows) > 0]] = 0
        before = starts // step
        counts = ends // step - before
        total = np.r_[0, np.cumsum(counts)]
        at = np.arange(total[-1]) + np.repeat(before + 1 - total[:-1], counts)
        self._made[batch] = total[rows].tolist(), at * step + np.repeat(deltas, counts)
        self._left[batch] = len(rows) - 1
