"""How long what is reused has lain there: in time, and in tokens that came in meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.identity import Prefixes
from traces.trace import UNKNOWN, Ints, Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Reuse:
    """Over the requests that share something: since the latest earlier prompt with all that is
    shared, the seconds between both arrivals (None where arrivals are unknown), and the prompt
    tokens that no earlier prompt had of the requests between them. The 50th, 90th and 99th
    percentiles. A cache that holds so many tokens beside what it reuses would keep it."""

    gap_s: tuple[float, ...] | None
    new_tokens: tuple[int, ...]


def reuse(trace: Trace, prefixes: Prefixes, shared: Ints) -> Reuse:
    """When and how many tokens ago ``shared`` was last a part of a prompt."""
    last = latest_with(prefixes, trace.prompt_tokens, shared)
    some = np.flatnonzero(last != UNKNOWN)
    fresh = np.r_[0, np.cumsum(trace.prompt_tokens - shared)]
    between = fresh[some] - fresh[last[some] + 1]
    timed = bool(len(some)) and bool((trace.arrival_ns != UNKNOWN).all())
    gaps = (trace.arrival_ns[some] - trace.arrival_ns[last[some]]) / 1e9
    return Reuse(
        gap_s=tuple(float(x) for x in np.percentile(gaps, PERCENTILES)) if timed else None,
        new_tokens=_percentiles(between),
    )


def _percentiles(values: Ints) -> tuple[int, ...]:
    if not len(values):
        return (0,) * len(PERCENTILES)
    return tuple(round(float(x)) for x in np.percentile(values, PERCENTILES))


def latest_with(prefixes: Prefixes, prompt: Ints, shared: Ints) -> Ints:
    """The latest earlier request whose prompt begins with the first ``shared`` tokens of each;
    ``UNKNOWN`` where nothing is shared.

    On every chain a stack holds who reached how far: later ones lie on top, and whoever is
    reached over by a later one is gone.
    """
    stacks: dict[int, list[tuple[int, int]]] = {}
    out = np.full(len(prompt), UNKNOWN, np.int64)
    for r, (length, part) in enumerate(zip(prompt.tolist(), shared.tolist(), strict=True)):
        for start, end, delta in prefixes.extents(r):
            if start >= length:
                break
            stack = stacks.setdefault(start + 1 + delta, [])
            if start < part <= end:
                out[r] = _reaching(stack, part + delta)
            reach = min(end, length) + delta
            while stack and stack[-1][0] <= reach:
                stack.pop()
            stack.append((reach, r))
    return out


def _reaching(stack: Sequence[tuple[int, int]], id: int) -> int:
    """The topmost entry that reaches ``id``; reaches fall from the bottom to the top."""
    low, high = 0, len(stack)
    while low < high:
        middle = (low + high) // 2
        if stack[middle][0] >= id:
            low = middle + 1
        else:
            high = middle
    return stack[low - 1][1] if low else UNKNOWN
