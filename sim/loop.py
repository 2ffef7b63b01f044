"""The replay loop: requests arrive, the engine plans, the backend prices, the clock moves.

One SimPy process serves, one walks the open-loop arrivals, and each closed-loop arrival is one of
its own. A step is one event, however many repetitions stand in it. Time is integer nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from sim.clock import Arrivals, Flight, fly, lay_out, name_requests
from sim.engine import Engine
from sim.recorder import Recorder
from sim.step import Step, StepBackend
from traces.trace import Trace

LAST = 2
"""Event priority of planning: arrivals at the same time come first (SimPy's normal is 1)."""


class StuckError(RuntimeError):
    """Requests are unfinished, nothing can be computed and nothing more will arrive."""


def replay(
    engine: Engine,
    trace: Trace,
    backend: StepBackend,
    recorder: Recorder,
    *,
    host_ns: int = 0,
    leap: bool = True,
) -> int:
    """Run ``trace`` to its end; the number of SimPy events. Raises ``StuckError``.

    ``host_ns`` is the engine's own time a step: added without async scheduling, hidden while
    another step runs with it. ``leap`` False takes every step by itself; records are the same.
    """
    return _Replay(engine, trace, backend, recorder, host_ns, leap).run()


class _Replay:
    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        backend: StepBackend,
        recorder: Recorder,
        host_ns: int,
        leap: bool,
    ) -> None:
        self.engine, self.trace, self.backend, self.recorder = engine, trace, backend, recorder
        self.host_ns, self.leap = host_ns, leap
        self.env = simpy.Environment(initial_time=0)
        self.arrivals = Arrivals(trace)
        self.flights: deque[Flight] = deque()
        self.free_ns = 0
        self.idle: Any = None
        self.events = 0

    def run(self) -> int:
        """The whole replay."""
        self.env.process(self._walk_open_arrivals())
        self.env.process(self._serve())
        self.env.run()
        if self.engine.unfinished or self.arrivals.left:
            raise self._stuck()
        return self.events

    def _stuck(self) -> StuckError:
        held = name_requests(self.trace, self.arrivals.held())
        waits = f"; waiting for others: {held}" if held else ""
        return StuckError(
            f"{self.engine.unfinished} requests are in the engine and none of them can be computed "
            f"at {self.env.now / 1e9:.3f} s: the pool is too small for the one at the head{waits}"
        )

    # ---------------------------------------------------------------- arrivals
    def _walk_open_arrivals(self) -> Generator[Any, Any, None]:
        for time_ns, request in self.arrivals.open:
            if time_ns > self.env.now:
                self.events += 1
                yield self.env.timeout(time_ns - self.env.now)
            self._arrive(request)

    def _arrive_later(self, time_ns: int, request: int) -> Generator[Any, Any, None]:
        self.events += 1
        yield self.env.timeout(time_ns - self.env.now)
        self._arrive(request)

    def _arrive(self, request: int) -> None:
        reason = self.engine.reject_reason(request)
        if reason is not None:
            self.recorder.rejected(request, reason, self.env.now)
            self._release(request)
            return
        self.recorder.arrived(request, self.env.now)
        self.engine.arrive(request)
        if self.idle is not None:
            self.env.schedule(self.idle, priority=LAST)
            self.idle = None

    def _release(self, request: int) -> None:
        """Let go of those that waited for ``request``."""
        for time_ns, dependant in self.arrivals.finish(request, self.env.now):
            if time_ns <= self.env.now:
                self._arrive(dependant)
            else:
                self.env.process(self._arrive_later(time_ns, dependant))

    # ---------------------------------------------------------------- the server
    def _serve(self) -> Generator[Any, Any, None]:
        yield self._at(self.env.now)
        while True:
            while len(self.flights) < self.engine.depth:
                step = self.engine.plan(self.env.now)
                if step is None:
                    break
                self._launch(step)
            if self.flights:
                flight = self.flights.popleft()
                yield self._at(flight.last_ns)
                self._land(flight)
            elif self.arrivals.left == 0 or (
                self.engine.unfinished and self.env.peek() == float("inf")
            ):
                return
            else:
                self.idle = self._event()
                yield self.idle

    def _event(self) -> Any:
        event = self.env.event()
        event._ok, event._value = True, None
        return event

    def _at(self, time_ns: int) -> Any:
        """An event at ``time_ns``, after all arrivals of that time."""
        event = self._event()
        self.env.schedule(event, priority=LAST, delay=max(0, time_ns - self.env.now))
        self.events += 1
        return event

    def _launch(self, step: Step) -> None:
        now = self.env.now
        if not self.leap and step.repeat > 1:
            self.engine.take(step, 1)
        durations = self.backend.run(step).durations_ns
        earlier = [f.last_ns for f in self.flights]
        depth = self.engine.depth
        stretch = lay_out(durations, now, self.free_ns, self.host_ns, earlier, depth)
        if step.repeat > 1:
            horizon = self.env.peek()
            seen = int(np.searchsorted(stretch.planned_ns, horizon, side="left"))
            self.engine.take(step, max(1, min(step.repeat, seen)))
        self.recorder.planned(step, now)
        self.flights.extend(fly(step, stretch, depth))
        self.free_ns = self.flights[-1].last_ns

    def _land(self, flight: Flight) -> None:
        finished = self.engine.commit(flight.step)
        self.recorder.done(flight.step, flight.start_ns, flight.finish_ns, finished)
        for request in finished:
            self._release(request)


_NO_TIME = np.zeros(1, np.int64)


def serial(engine: Engine, trace: Trace, recorder: Recorder) -> None:
    """Hits only: requests in file order, each finishing before the next, without a clock."""
    for request in range(len(trace)):
        reason = engine.reject_reason(request)
        if reason is not None:
            recorder.rejected(request, reason, 0)
            continue
        recorder.arrived(request, 0)
        engine.arrive(request)
        while engine.unfinished:
            step = engine.plan(0)
            if step is None:
                raise StuckError(f"request {trace.ids[request]!r} does not fit the pool")
            if step.repeat > 1:
                engine.take(step, step.repeat)
            recorder.planned(step, 0)
            recorder.done(step, 0, _NO_TIME, engine.commit(step))
