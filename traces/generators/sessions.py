"""What chat and agentic sessions have in common: lengths from a fit, or exactly one value."""

from __future__ import annotations

import numpy as np

from traces.generators.quantiles import Quantiles, constant
from traces.trace import Ints


def chosen(value: float | None, fitted: Quantiles) -> Quantiles:
    """Exactly ``value`` where the user gave one, else what the fit says."""
    return fitted if value is None else constant(float(value))


def tokens(rng: np.random.Generator, lengths: Quantiles, n: int) -> Ints:
    """``n`` lengths of at least one token."""
    return np.maximum(lengths.integers(rng, n), 1)


def nanoseconds(rng: np.random.Generator, seconds: Quantiles, n: int) -> Ints:
    """``n`` times."""
    return np.rint(seconds.sample(rng, n) * 1e9).astype(np.int64)
