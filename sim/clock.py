"""When requests arrive, and how steps follow one another: integer nanoseconds, no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.step import Step
from traces.trace import Trace

Times = NDArray[np.int64]


class Arrivals:
    """Arrival times of a trace, as they become known.

    A request arrives at its ``arrival_ns`` or ``think_ns`` after the last of its ``after``
    finished, whichever is later; with neither, at 0. ``open`` are those known from the start,
    by time and then by file order.
    """

    def __init__(self, trace: Trace) -> None:
        self.left = len(trace)
        self._trace = trace
        self._waits: list[int] = np.diff(trace.after_offsets).tolist()
        self._dependants = _reverse(trace)
        known = np.maximum(trace.arrival_ns, 0)
        rows = np.flatnonzero(np.diff(trace.after_offsets) == 0)
        order = rows[np.argsort(known[rows], kind="stable")]
        self.open: list[tuple[int, int]] = list(
            zip(known[order].tolist(), order.tolist(), strict=True)
        )

    def finish(self, request: int, now_ns: int) -> Sequence[tuple[int, int]]:
        """(time, request) of those that waited for this one last, in file order."""
        self.left -= 1
        if request not in self._dependants:
            return ()
        ready = []
        for dependant in self._dependants[request]:
            self._waits[dependant] -= 1
            if not self._waits[dependant]:
                think = int(self._trace.think_ns[dependant])
                arrival = int(self._trace.arrival_ns[dependant])
                ready.append((max(now_ns + think, arrival), dependant))
        return ready

    def held(self) -> list[int]:
        """Requests that still wait for others."""
        return [i for i, waits in enumerate(self._waits) if waits]


def _reverse(trace: Trace) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for i in np.flatnonzero(np.diff(trace.after_offsets)).tolist():
        for j in trace.after_of(i):
            out.setdefault(j, []).append(i)
    return out


@dataclass(slots=True)
class Flight:
    """A step in flight: when it was planned, when its first repetition starts, every finish."""

    step: Step
    planned_ns: int
    start_ns: int
    finish_ns: Times

    @property
    def last_ns(self) -> int:
        """When its last repetition finishes."""
        return int(self.finish_ns[-1])


class Stretch(NamedTuple):
    """Equal steps one after another: planning, start and finish time of each."""

    planned_ns: Times
    start_ns: Times
    finish_ns: Times


def lay_out(
    durations: Times, now_ns: int, free_ns: int, host_ns: int, earlier: Sequence[int], depth: int
) -> Stretch:
    """Times of repetitions planned from ``now_ns`` on, with the device busy until ``free_ns``.

    Repetition j is planned when j - depth finishes; ``earlier`` are the finishes of the steps in
    flight before the first. It starts when the device is free and the host has prepared it.
    """
    before = [now_ns] * (depth - 1 - len(earlier)) + list(earlier)
    if depth > 1 and durations.min(initial=host_ns) < host_ns:
        return _one_by_one(durations, now_ns, free_ns, host_ns, before)
    gap = host_ns if depth == 1 else 0
    finish = np.cumsum(durations + gap) + (max(free_ns, now_ns + host_ns) - gap)
    known = np.concatenate([np.array([now_ns, *before], np.int64), finish])
    return Stretch(known[: len(durations)], finish - durations, finish)


def _one_by_one(
    durations: Times, now_ns: int, free_ns: int, host_ns: int, before: list[int]
) -> Stretch:
    planned, start = [now_ns, *before], []
    for j, duration in enumerate(durations.tolist()):
        start.append(max(free_ns, planned[j] + host_ns))
        free_ns = start[-1] + duration
        planned.append(free_ns)
    starts = np.array(start, np.int64)
    return Stretch(np.array(planned[: len(start)], np.int64), starts, starts + durations)


def fly(step: Step, stretch: Stretch, depth: int) -> list[Flight]:
    """The step as flights: all but the last ``depth - 1`` repetitions in one, those one each.

    So the plan after the stretch happens while its last repetitions run, as it would if each
    repetition were a step of its own.
    """
    flights, at, size = [], 0, step.repeat - depth + 1
    while step.repeat > 1 and size < step.repeat:
        head, step = step.split(max(1, size))
        flights.append(_flight(head, stretch, at))
        at, size = at + head.repeat, 1
    return [*flights, _flight(step, stretch, at)]


def _flight(step: Step, stretch: Stretch, at: int) -> Flight:
    finish = stretch.finish_ns[at : at + step.repeat]
    return Flight(step, int(stretch.planned_ns[at]), int(stretch.start_ns[at]), finish)


def name_requests(trace: Trace, requests: Sequence[int]) -> str:
    """The first few of ``requests`` by id, for an error."""
    shown = ", ".join(repr(trace.ids[r]) for r in requests[:5])
    return shown + (f" and {len(requests) - 5} more" if len(requests) > 5 else "")
