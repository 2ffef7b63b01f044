"""The replay loop: arrivals, and one server that plans steps, waits for them and reads them.

One event of the clock a step (or a stretch of equal steps), one an arrival, none a token. At
equal times arrivals come before the server, so a plan sees whatever arrives at its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from typing import Protocol, runtime_checkable

import numpy as np
import simpy
from simpy.events import URGENT, Event

from sim.clock import Arrivals, Flight, Stretch, fly, lay_out, name_requests
from sim.engine import Engine
from sim.recorder import HitRecorder, Recorder
from sim.step import Admission, Step, StepBackend
from traces.trace import Trace


class StalledError(RuntimeError):
    """The engine has unfinished requests, plans nothing, and nothing is left to happen."""


def replay(
    engine: Engine,
    trace: Trace,
    backend: StepBackend,
    recorder: Recorder,
    *,
    host_ns: int = 0,
    leap: bool = True,
    until_ns: int | None = None,
) -> None:
    """Run the whole trace against the clock.

    ``host_ns`` is the host's time a step: before it where nothing is in flight, behind the step
    in flight otherwise. ``leap`` takes stretches of equal steps at once; records are the same
    without (a backend that measures needs ``leap=False``, its durations are not known ahead).
    From ``until_ns`` on nothing arrives and nothing is planned; what is in flight is read.

    Raises ``StalledError`` if requests can never finish, ``ValueError`` if some wait for each
    other.
    """
    if host_ns < 0:
        raise ValueError(f"host_ns is {host_ns}, must be 0 or more")
    _Replay(engine, trace, backend, recorder, host_ns, leap, until_ns).run()


class _Replay:
    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        backend: StepBackend,
        recorder: Recorder,
        host_ns: int,
        leap: bool,
        until_ns: int | None,
    ) -> None:
        self.engine, self.trace, self.backend, self.recorder = engine, trace, backend, recorder
        self.host_ns, self.leap, self.until_ns = host_ns, leap, until_ns
        self.env = simpy.Environment(0)
        self.arrivals = Arrivals(trace)
        self.flights: deque[Flight] = deque()
        self.free_ns = 0
        self.decided_ns = -1
        self.open: dict[int, None] = {}
        self.wake: Event | None = None

    def run(self) -> None:
        self.env.process(self._arrive_open())
        self.env.process(self._serve())
        self.env.run()
        if self.until_ns is None:
            _all_finished(self.trace, self.open, self.arrivals)

    # Arrivals

    def _arrive_open(self) -> Generator[Event, None, None]:
        for at, request in self.arrivals.open:
            if self._over(at):
                return
            if at > self.env.now:
                yield self._at(at)
            self._arrive(request)

    def _at(self, at: int) -> Event:
        """An event at ``at`` that comes before the server's at the same time."""
        event = Event(self.env)
        event._ok, event._value = True, None
        self.env.schedule(event, URGENT, at - int(self.env.now))
        return event

    def _arrive(self, request: int) -> None:
        now, arriving = int(self.env.now), [request]
        for one in arriving:
            reason = self.engine.reject_reason(one)
            if reason is None:
                self.open[one] = None
                self.recorder.arrived(one, now)
                self.engine.arrive(one)
            else:
                self.recorder.rejected(one, reason, now)
                arriving += self._released(one)
        if self.wake is not None and not self.wake.triggered:
            self.wake.succeed()

    def _released(self, finished: int) -> list[int]:
        """Requests that arrive now because ``finished`` did; later ones are scheduled."""
        now, due = int(self.env.now), []
        for at, request in self.arrivals.finish(finished, now):
            if at <= self.decided_ns:
                raise RuntimeError(
                    f"request {self.trace.ids[request]!r} arrives at {at} ns, but the engine let "
                    f"equal steps be planned to {self.decided_ns} ns over the finish of "
                    f"{self.trace.ids[finished]!r}; `repeat` must be 1 then"
                )
            if self._over(at):
                continue
            if at <= now:
                due.append(request)
            else:
                self._later(at, request)
        return due

    def _later(self, at: int, request: int) -> None:
        call: Callable[[Event], None] = lambda _: self._arrive(request)  # noqa: E731
        callbacks = self._at(at).callbacks
        assert callbacks is not None
        callbacks.append(call)

    def _over(self, at: int) -> bool:
        return self.until_ns is not None and at >= self.until_ns

    # The server

    def _serve(self) -> Generator[Event, None, None]:
        flights, depth, env = self.flights, self.engine.depth, self.env
        while True:
            while len(flights) < depth and not self._over(int(env.now)) and self._plan():
                pass
            if flights:
                wait = flights[0].last_ns - int(env.now)
                if wait > 0:
                    yield env.timeout(wait)
                self._read(flights.popleft())
            elif self._over(int(env.now)):
                return
            else:
                self.wake = env.event()
                yield self.wake
                self.wake = None

    def _plan(self) -> bool:
        step = self.engine.plan(int(self.env.now))
        if step is None:
            return False
        if not (step.decodes or step.chunks or step.preempted):
            raise StalledError(f"step {step.index} does nothing, so time would stand still")
        for flight in self._run(step):
            self.recorder.planned(flight.step, flight.planned_ns)
            self.flights.append(flight)
        self.free_ns = self.flights[-1].last_ns
        return True

    def _run(self, step: Step) -> Iterable[Flight]:
        now = int(self.env.now)
        if step.repeat > 1 and self.leap:
            return self._stretch(step, now)
        if step.repeat > 1:
            self.engine.take(step, 1)
            step.repeat = 1
        start = max(self.free_ns, now + self.host_ns)
        return (Flight(step, now, start, self.backend.run(step).durations_ns + start),)

    def _stretch(self, step: Step, now: int) -> list[Flight]:
        """As many repetitions as would be planned before anything else happens, at least one."""
        horizon, most = self._horizon(), step.repeat
        if horizon is not None:
            step.repeat = min(most, self._guess(step, horizon - now))
        times, taken = self._lay_out(step, now), step.repeat
        if horizon is not None:
            taken = max(1, int(np.searchsorted(times.planned_ns, horizon, "left")))
        step.repeat = most
        self.engine.take(step, taken)
        step.repeat = taken
        if taken > 1:
            self.decided_ns = int(times.planned_ns[taken - 1])
        return fly(step, times, self.engine.depth)

    def _guess(self, step: Step, room_ns: int) -> int:
        """About how many repetitions fit; too few only costs another plan."""
        step.repeat, most = 1, step.repeat
        one = int(self.backend.run(step).durations_ns[0])
        step.repeat = most
        return room_ns // max(1, one) + self.engine.depth + 1

    def _lay_out(self, step: Step, now: int) -> Stretch:
        durations = self.backend.run(step).durations_ns
        earlier = [flight.last_ns for flight in self.flights]
        return lay_out(durations, now, self.free_ns, self.host_ns, earlier, self.engine.depth)

    def _horizon(self) -> int | None:
        """When the next arrival known now happens, or planning ends; None for never."""
        times = [int(self.env.peek())] if self.env.peek() < float("inf") else []
        if self.until_ns is not None:
            times.append(self.until_ns)
        return min(times, default=None)

    def _read(self, flight: Flight) -> None:
        finished = self.engine.commit(flight.step)
        self.recorder.done(flight.step, flight.start_ns, flight.finish_ns, finished)
        for request in finished:
            self.open.pop(request, None)
            for due in self._released(request):
                self._arrive(due)


@runtime_checkable
class Lone(Protocol):
    """An engine that can serve the only request it has without planning steps."""

    def serve(self, request: int) -> Admission | None:
        """Serve it to its end; how it was admitted, or None if the loop must plan its steps."""


def serial(engine: Engine, trace: Trace, recorder: Recorder) -> None:
    """Hits only: each request finishes before the next arrives, and no step takes any time.

    Requests come in the order of their arrival times; one that waits for others comes its think
    time after theirs. Raises as ``replay`` does.
    """
    arrivals = Arrivals(trace)
    coming = list(arrivals.open)
    hears = recorder if isinstance(recorder, HitRecorder) else None
    alone = engine.serve if hears and isinstance(engine, Lone) else None
    while coming:
        now, request = heappop(coming)
        reason = engine.reject_reason(request)
        if reason is None:
            recorder.arrived(request, now)
            engine.arrive(request)
            if hears and alone and (told := alone(request)):
                hears.admitted(told)
            _drain(engine, trace, recorder, request, now)
        else:
            recorder.rejected(request, reason, now)
        for later in arrivals.finish(request, now):
            heappush(coming, later)
    _all_finished(trace, {}, arrivals)


def _drain(engine: Engine, trace: Trace, recorder: Recorder, request: int, now: int) -> None:
    if not engine.unfinished:
        return
    flights: deque[Step] = deque()
    once = np.array([now], np.int64)
    while engine.unfinished or flights:
        while len(flights) < engine.depth and (step := engine.plan(now)) is not None:
            for part in _whole(engine, step):
                recorder.planned(part, now)
                flights.append(part)
        if not flights:
            raise _stalled(trace, [request])
        step = flights.popleft()
        finished = engine.commit(step)
        recorder.done(step, now, once.repeat(step.repeat) if step.repeat > 1 else once, finished)


def _whole(engine: Engine, step: Step) -> Iterable[Step]:
    if step.repeat == 1:
        return (step,)
    engine.take(step, step.repeat)
    if engine.depth == 1:
        return (step,)
    nothing = np.zeros(step.repeat, np.int64)
    return [f.step for f in fly(step, Stretch(nothing, nothing, nothing), engine.depth)]


def _all_finished(trace: Trace, unfinished: dict[int, None], arrivals: Arrivals) -> None:
    if unfinished:
        raise _stalled(trace, list(unfinished))
    if held := arrivals.held():
        raise ValueError(f"requests wait for each other: {name_requests(trace, held)}")


def _stalled(trace: Trace, requests: list[int]) -> StalledError:
    return StalledError(
        f"the engine plans nothing though requests are unfinished and nothing else will happen: "
        f"{name_requests(trace, requests)}; the pool is too small for them: give it more memory"
    )
