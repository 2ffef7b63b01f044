"""Ceilings of reuse by where states are kept, with unlimited memory and one request at a time.

A prompt can resume at the deepest kept state that lies on it. Compared are a state at every
multiple of a grid, one at the end of every prompt (of block traces: of its last whole block), and
one at every branch point, kept from the request on that reveals it; and their unions.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from traces.identity import Prefixes
from traces.trace import Ints, Trace

GRIDS = (64, 256, 512, 1024, 1040, 4096)


@dataclass(frozen=True)
class Placement:
    """``prefill_ratio`` is prompt tokens computed over those that would be with a state at every
    token (None where that is 0). ``uncached_percentiles`` are the 50th and 90th of the tokens
    computed per request."""

    name: str
    token_hit_rate: float
    prefill_ratio: float | None
    uncached_percentiles: tuple[int, int]


def placements(
    trace: Trace, prefixes: Prefixes, shared: Ints, ends: Ints, grids: Sequence[int] = GRIDS
) -> tuple[Placement, ...]:
    """Every placement over ``trace``; ``shared`` tokens of each prompt stood in an earlier one,
    and a prompt's end counts as being at ``ends``."""
    hits = reachable(prefixes, trace.prompt_tokens, shared, ends, grids)
    return tuple(summed(name, trace.prompt_tokens, shared, hit) for name, hit in hits.items())


def reachable(
    prefixes: Prefixes, prompt: Ints, shared: Ints, ends: Ints, grids: Sequence[int] = GRIDS
) -> dict[str, Ints]:
    """By placement, the tokens of each prompt that a kept state spares."""
    end = _Marks(prefixes).replayed(prompt, end=ends)
    both = _Marks(prefixes).replayed(prompt, end=ends, branch=shared)
    on = {g: np.asarray(shared // g * g, np.int64) for g in grids}
    out = {"exact": shared, **{f"grid {g}": hit for g, hit in on.items()}}
    out |= {"end": end, "end+branch": both}
    for g in (1024, 1040):
        if g in on:
            out[f"end+grid {g}"] = np.maximum(end, on[g])
            out[f"end+branch+grid {g}"] = np.maximum(both, on[g])
    return out


def summed(
    name: str, prompt: Ints, shared: Ints, hit: Ints, only: NDArray[np.bool_] | None = None
) -> Placement:
    """One placement over all requests, or ``only`` some."""
    some = np.ones(len(prompt), bool) if only is None else only
    prompt, shared, hit = prompt[some], shared[some], hit[some]
    total, spared = int(prompt.sum()), int(hit.sum())
    least = total - int(shared.sum())
    middle = np.percentile(prompt - hit, (50, 90)) if len(prompt) else (0, 0)
    return Placement(
        name=name,
        token_hit_rate=spared / total if total else 0.0,
        prefill_ratio=(total - spared) / least if least else None,
        uncached_percentiles=(round(middle[0]), round(middle[1])),
    )


@dataclass
class _Marks:
    """Kept states: prefix ids in order, by the first id of their chain."""

    prefixes: Prefixes
    kept: dict[int, list[int]] = field(default_factory=dict)

    def replayed(self, prompt: Ints, end: Ints, branch: Ints | None = None) -> Ints:
        """The deepest state on each prompt; then states at its ``end`` and its ``branch`` are
        kept (0: none)."""
        out = np.zeros(len(prompt), np.int64)
        places = (end,) if branch is None else (end, branch)
        for r, length in enumerate(prompt.tolist()):
            extents = self.prefixes.extents(r)
            out[r] = self._deepest(extents, length)
            for place in places:
                self._keep(extents, int(place[r]))
        return out

    def _deepest(self, extents: list[tuple[int, int, int]], length: int) -> int:
        for start, end, delta in reversed(extents):
            ids = self.kept.get(start + 1 + delta)
            if ids is None or start >= length:
                continue
            k = bisect_right(ids, min(end, length) + delta)
            if k:
                return ids[k - 1] - delta
        return 0

    def _keep(self, extents: list[tuple[int, int, int]], place: int) -> None:
        for start, end, delta in extents:
            if start < place <= end:
                ids = self.kept.setdefault(start + 1 + delta, [])
                k = bisect_right(ids, place + delta)
                if not k or ids[k - 1] != place + delta:
                    insort(ids, place + delta)
