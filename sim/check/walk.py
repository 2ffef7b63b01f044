"""One run of a case step by step, every step and every event judged against the naive model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.check.case import Case
from sim.check.hosts import Facts, Host
from sim.check.judge import Judge
from sim.check.violation import fail, require
from sim.clock import Stretch, fly
from sim.engine import Engine
from sim.ledger import Action, Cause, Kind, Ledger
from sim.policy import Policy
from sim.step import Step
from traces.identity import identify

MOST_STEPS = 20_000


@dataclass
class Log:
    """What a run decided, comparable, and how often the interesting things happened."""

    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[int, ...]] = field(default_factory=list)
    steps: int = 0
    hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    finished: list[int] = field(default_factory=list)


def decided(step: Step) -> tuple[Any, ...]:
    """A step as a value, without what leaping changes."""
    chunks = tuple((c.request, c.start, c.tokens, c.samples, c.restored) for c in step.chunks)
    admitted = tuple((a.request, a.hit, a.matched, a.branch, a.resumed) for a in step.admitted)
    return (step.index, chunks, tuple(step.decodes), admitted, tuple(step.preempted),
            step.used_bytes, step.cached_bytes)  # fmt: skip


def events_of(ledger: Ledger, keys: bool = True) -> list[tuple[int, ...]]:
    """The ledger as values; ``keys`` False leaves the ids out, which a longer trace may change."""
    columns = [ledger.step, ledger.kind, ledger.action, ledger.cause, ledger.request,
               ledger.position]  # fmt: skip
    return list(zip(*columns, *([ledger.key] if keys else []), strict=True))


def walk(case: Case, host: Host, policy: Policy, *, judged: bool, probe: bool = False) -> Log:
    """Drive the engine through the case's operations, then to the end.

    ``judged``: against the naive model. ``probe``: every pure lookup is called before each plan.
    """
    return _Walk(case, host, policy, judged, probe).run()


class _Walk:
    def __init__(self, case: Case, host: Host, policy: Policy, judged: bool, probe: bool) -> None:
        trace = case.trace()
        prefixes = identify(trace)
        self.host, self.probe, self.ledger, self.log = host, probe, Ledger(), Log()
        self.engine: Engine = host.build(case, policy, trace, prefixes, self.ledger, True)
        self.facts: Facts = host.facts(self.engine, case)
        self.judge = Judge(trace, prefixes, self.facts, self.ledger) if judged else None
        rows = range(len(trace))
        self.accepted = [r for r in rows if self.engine.reject_reason(r) is None]
        self.coming = deque(self.accepted)
        self.flights: deque[Step] = deque()
        self.operations = case.operations

    def run(self) -> Log:
        try:
            for operation in self._operations():
                getattr(self, f"_{operation}")()
            self._end()
        except self.host.crashes:
            pass  # as the engine itself would; what came before was judged
        self.log.events = events_of(self.ledger)
        self._count()
        return self.log

    def _operations(self) -> Iterator[str]:
        yield from self.operations
        while self.coming or self.engine.unfinished or self.flights:
            if self.coming:
                yield "arrive"
            before = len(self.flights)
            yield "plan"
            stuck = not (self.flights or self.coming)
            if stuck:
                names = f"{self.engine.unfinished} requests unfinished"
                fail("finish", f"nothing is planned with {names} and nothing in flight")
            if len(self.flights) == before or len(self.flights) >= self.engine.depth:
                yield "read"

    # ---------------------------------------------------------------- operations
    def _arrive(self) -> None:
        if self.coming:
            self.engine.arrive(self.coming.popleft())

    def _plan(self) -> None:
        self._next(whole=False)

    def _leap(self) -> None:
        self._next(whole=True)

    def _next(self, whole: bool) -> None:
        if len(self.flights) >= self.engine.depth:
            return
        if self.probe and self.facts.lookup is not None:
            self.facts.lookup()
        step = self.engine.plan(0)
        if step is None:
            self._after()
            return
        if step.repeat > 1:
            self.engine.take(step, step.repeat if whole else 1)
        self.log.steps += step.repeat
        if self.log.steps > MOST_STEPS:
            fail("finish", f"not done after {MOST_STEPS} steps")
        self.log.decisions.append((*decided(step), step.repeat))
        if self.judge is not None:
            self.judge.planned(step, self.engine.capacity_bytes)
        self._fly(step)
        self._after()

    def _fly(self, step: Step) -> None:
        if step.repeat > 1 and self.engine.depth > 1:
            zeros = np.zeros(step.repeat, np.int64)
            parts = fly(step, Stretch(zeros, zeros, zeros), self.engine.depth)
            self.flights.extend(part.step for part in parts)
        else:
            self.flights.append(step)

    def _read(self) -> None:
        if not self.flights:
            return
        finished = self.engine.commit(self.flights.popleft())
        self.log.finished += finished
        if self.judge is not None:
            self.judge.read(finished)
        self._after()

    def _after(self) -> None:
        if self.judge is not None:
            self.engine.check()

    # ---------------------------------------------------------------- the end
    def _end(self) -> None:
        done = sorted(self.log.finished)
        require(done == self.accepted, "finish", f"finished {done}, accepted {self.accepted}")
        held = self.facts.held_bytes()
        require(held == 0, "held", f"{held} bytes are held with no request left")

    def _count(self) -> None:
        log, ledger = self.log, self.ledger
        log.hits = sum(a[1] > 0 for d in log.decisions for a in d[3])
        log.preemptions = sum(len(d[4]) for d in log.decisions)
        pressed = zip(ledger.kind, ledger.action, ledger.cause, strict=True)
        log.evictions = sum(
            kind in (Kind.STATE, Kind.KV) and action == Action.DROPPED and cause == Cause.PRESSURE
            for kind, action, cause in pressed
        )
