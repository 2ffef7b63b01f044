"""A part of a trace that stands for the whole: all requests below some of its prefix roots.

Requests that share anything beyond what nearly all of them share are kept or left together, so the
hits inside the sample are those that the same requests have in the whole trace. Source of the idea:
SHARDS (Waldspurger et al., FAST 2015), which samples single blocks by hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.identity import Prefixes
from traces.order import take
from traces.trace import Ints, Trace

LARGEST_SHARE = 0.02
DEPTHS = tuple(1 << k for k in range(21))
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def roots(trace: Trace, prefixes: Prefixes, largest: float = LARGEST_SHARE) -> tuple[Ints, int]:
    """The root of each request, and its depth in tokens: the smallest power of two at which no
    root has more than ``largest`` of the prompt tokens, or else the largest below all prompts.

    A prompt shorter than that is its own root with others equal to it.
    """
    whole, longest = int(trace.prompt_tokens.sum()), int(trace.prompt_tokens.max(initial=1))
    for depth in DEPTHS:
        found = _at(trace, prefixes, depth)
        _, which = np.unique(found, return_inverse=True)
        most = np.bincount(which, trace.prompt_tokens).max(initial=0)
        if most <= largest * whole or depth * 2 > longest:
            return found, depth
    return found, depth


def _at(trace: Trace, prefixes: Prefixes, depth: int) -> Ints:
    """The id of each prompt's first ``depth`` tokens, or of all of it where it is shorter."""
    length = np.minimum(trace.prompt_tokens, depth)
    counts = np.diff(prefixes.offsets)
    short = prefixes.ends < np.repeat(length, counts)
    before = np.r_[0, np.cumsum(short)]
    row = prefixes.offsets[:-1] + before[prefixes.offsets[1:]] - before[prefixes.offsets[:-1]]
    row = np.minimum(row, len(prefixes.deltas) - 1)
    return np.where(length > 0, length + prefixes.deltas[row], -1)


def chosen(groups: Ints, rate: float, seed: int = 0) -> NDArray[np.bool_]:
    """Which requests are in the sample: about ``rate`` of the roots, by a hash of root and seed.

    A smaller rate with the same seed chooses among what a larger one does. Raises ``ValueError``
    for a rate that is not above 0 and at most 1.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate is {rate}, allowed: above 0, at most 1")
    with np.errstate(over="ignore"):
        h = groups.astype(np.uint64) + np.uint64(seed * _MIX[0] % (1 << 64))
        h = (h ^ (h >> np.uint64(30))) * np.uint64(_MIX[1])
        h = (h ^ (h >> np.uint64(27))) * np.uint64(_MIX[2])
        h ^= h >> np.uint64(31)
    return np.asarray((h >> np.uint64(11)).astype(np.float64) < rate * 2.0**53)


def part(trace: Trace, prefixes: Prefixes, which: Ints) -> tuple[Trace, Prefixes]:
    """The requests ``which`` (rising row numbers), with the identities they have in the whole."""
    counts = np.diff(prefixes.offsets)[which]
    rows = np.repeat(prefixes.offsets[which] - np.r_[0, np.cumsum(counts)[:-1]], counts)
    rows += np.arange(len(rows))
    offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
    return take(trace, which), Prefixes(offsets, prefixes.ends[rows], prefixes.deltas[rows])
