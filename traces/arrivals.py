"""Arrival times for traces that have none, in integer nanoseconds.

Open loop: whole sessions start at times of their own, later turns wait for the turn before.
Closed loop: a fixed number of users, each of whom starts the next session when the last is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traces.order import leaves, nominal_ns, roots, take
from traces.trace import UNKNOWN, Ints, Trace

_SECOND = 1e9
_LATEST = float(2**62)


@dataclass(frozen=True)
class OpenLoop:
    """``rate`` starts per second, the first at 0; ``cv`` is the gaps' coefficient of variation.

    0 is a fixed gap, 1 a Poisson process, more is burstier: gaps are Gamma distributed.
    """

    rate: float
    cv: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _bounds("rate", self.rate, 1e-9, 1e9)
        _bounds("cv", self.cv, 0.0, 1e3)
        _bounds("seed", self.seed, 0, 2**63)

    def starts(self, n: int) -> Ints:
        """``n`` start times."""
        gaps = _gamma(np.random.default_rng(self.seed), 1 / self.rate, self.cv, max(n - 1, 0))
        times = np.concatenate(([0.0], np.cumsum(gaps)))[:n] * _SECOND
        if n and times[-1] > _LATEST:
            raise ValueError(f"{n} starts at rate {self.rate} last over 2**62 ns; raise the rate")
        return np.rint(times).astype(np.int64)


@dataclass(frozen=True)
class ClosedLoop:
    """``users`` at a time, each waiting ``think_s`` (Gamma with ``think_cv``) between sessions.

    Session ``k`` belongs to user ``k % users``, so that who waits for whom is fixed beforehand.
    """

    users: int
    think_s: float = 0.0
    think_cv: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _bounds("users", self.users, 1, 2**31)
        _bounds("think_s", self.think_s, 0.0, 1e6)
        _bounds("think_cv", self.think_cv, 0.0, 1e3)
        _bounds("seed", self.seed, 0, 2**63)

    def thinks(self, n: int) -> Ints:
        """``n`` think times."""
        rng = np.random.default_rng(self.seed)
        return np.rint(_gamma(rng, self.think_s, self.think_cv, n) * _SECOND).astype(np.int64)


Arrivals = OpenLoop | ClosedLoop


def fixed(rate: float) -> OpenLoop:
    """``rate`` starts per second, evenly spaced."""
    return OpenLoop(rate, 0.0)


def poisson(rate: float, seed: int = 0) -> OpenLoop:
    """``rate`` starts per second on average, without memory."""
    return OpenLoop(rate, 1.0, seed)


def gamma(rate: float, cv: float, seed: int = 0) -> OpenLoop:
    """``rate`` starts per second on average, in bursts where ``cv`` is above 1."""
    return OpenLoop(rate, cv, seed)


def closed_loop(
    users: int, think_s: float = 0.0, *, think_cv: float = 0.0, seed: int = 0
) -> ClosedLoop:
    """``users`` who start their next session ``think_s`` after their last one is over."""
    return ClosedLoop(users, think_s, think_cv, seed)


def with_arrivals(trace: Trace, arrivals: Arrivals, *, replace_times: bool = False) -> Trace:
    """``trace`` with start times for the requests that wait for no other.

    The order becomes that of the *nominal* times: start plus think times, as if nothing took
    time to serve. Raises ``ValueError`` where the trace has times, unless ``replace_times``.
    """
    if not replace_times and np.any(trace.arrival_ns != UNKNOWN):
        i = int(np.flatnonzero(trace.arrival_ns != UNKNOWN)[0])
        raise ValueError(
            f"request {trace.ids[i]!r} already arrives at {int(trace.arrival_ns[i])} ns; allowed: "
            "a trace without times, or replace_times"
        )
    blank = replace(trace, arrival_ns=np.full(len(trace), UNKNOWN, np.int64))
    if isinstance(arrivals, ClosedLoop):
        timed = _close(blank, arrivals)
    else:
        first = roots(blank)
        times = blank.arrival_ns.copy()
        times[first] = arrivals.starts(len(first))
        timed = replace(blank, arrival_ns=times)
    return take(timed, np.argsort(nominal_ns(timed), kind="stable"))


def scale(trace: Trace, factor: float) -> Trace:
    """``trace`` with all arrival times multiplied: 2 is half the rate. Think times stay."""
    _bounds("factor", factor, 1e-9, 1e9)
    known = trace.arrival_ns != UNKNOWN
    times = np.where(known, trace.arrival_ns, 0) * factor
    if times.size and times.max() > _LATEST:
        raise ValueError(f"factor is {factor}; the last arrival would lie beyond 2**62 ns")
    scaled = np.where(known, np.rint(times).astype(np.int64), UNKNOWN)
    return replace(trace, arrival_ns=scaled, notes={**trace.notes, "arrival_scale": factor})


def limit(trace: Trace, n: int) -> Trace:
    """The first ``n`` requests in file order; waits for requests behind the cut are dropped."""
    _bounds("n", n, 0, 2**62)
    return take(trace, np.arange(min(n, len(trace))))


def _close(trace: Trace, loop: ClosedLoop) -> Trace:
    """Every root beyond the first ``users`` waits for all leaves of the root ``users`` before."""
    first = roots(trace)
    last = leaves(trace, first)
    thinks = trace.think_ns.copy()
    thinks[first[loop.users :]] = loop.thinks(max(len(first) - loop.users, 0))
    times = trace.arrival_ns.copy()
    times[first[: loop.users]] = 0
    waits: list[Sequence[int]] = [trace.after_of(i) for i in range(len(trace))]
    for before, root in zip(first.tolist(), first[loop.users :].tolist(), strict=False):
        waits[root] = last[before] or [before]
    return replace(
        trace,
        arrival_ns=times,
        think_ns=thinks,
        after_offsets=np.cumsum([0, *(len(w) for w in waits)], dtype=np.int64),
        after=np.array([j for w in waits for j in w], np.int64),
    )


def _gamma(rng: np.random.Generator, mean: float, cv: float, n: int) -> NDArray[np.float64]:
    """``n`` Gamma values of the given mean and coefficient of variation (0: all equal)."""
    if cv == 0 or mean == 0:
        return np.full(n, mean)
    return rng.gamma(1 / cv**2, mean * cv**2, n)


def _bounds(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        nearest = high if value > high else low
        raise ValueError(f"{name} is {value}; allowed: {low} to {high}; nearest: {nearest}")
