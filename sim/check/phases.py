"""The runs that one case goes through; each raises ``Violation``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sim import policies
from sim.attribution import attribute
from sim.check.case import Case
from sim.check.hosts import Host
from sim.check.naive import Names
from sim.check.violation import fail, require
from sim.check.walk import Log, decided, events_of, walk
from sim.check.watched import as_violation, watched
from sim.ledger import Action, Cause, Kind, Ledger
from sim.loop import StalledError, replay, serial
from sim.policy import Policy
from sim.records import Records
from sim.step import Step, StepResult
from traces.identity import Prefixes, identify
from traces.trace import Trace

HOST_NS = 50


class Constant:
    """A step takes as long as its tokens and its context say. A ``StepBackend``."""

    def run(self, step: Step) -> StepResult:
        """Nanoseconds of every repetition."""
        each = np.arange(step.repeat, dtype=np.int64) * len(step.decodes)
        return StepResult(1000 + 10 * step.tokens + step.decode_context_tokens + each)


class Told(Records):
    """Records that keep every step as a value."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.decisions: list[tuple[Any, ...]] = []

    def planned(self, step: Step, now_ns: int) -> None:
        """Admissions, and the step itself."""
        super().planned(step, now_ns)
        self.decisions.append(decided(step))


class Served:
    """An engine that has served a case's first ``count`` requests, with its records."""

    def __init__(
        self, case: Case, host: Host, policy: Policy, how: str, count: int | None = None
    ) -> None:
        self.trace = case.trace(count)
        self.prefixes: Prefixes = identify(self.trace)
        self.ledger, self.records = Ledger(), Told(self.trace)
        engine = host.build(case, policy, self.trace, self.prefixes, self.ledger, how != "off")
        self.facts = host.facts(engine, case)
        try:
            if how in ("leap", "step"):
                self.run(engine, leap=how == "leap")
            else:
                serial(engine, self.trace, self.records)
            self.crashed = False
            engine.check()
        except host.crashes:
            self.crashed = True
        except StalledError as error:
            fail("finish", str(error))

    def run(self, engine: Any, leap: bool) -> None:
        """Against a clock."""
        replay(engine, self.trace, Constant(), self.records, host_ns=HOST_NS, leap=leap)


# -------------------------------------------------------------------------------- phases
def stepwise(case: Case, host: Host) -> Log:
    """Every step and event against the naive model."""
    return walk(case, host, loaded(case), judged=True)


def again(case: Case, host: Host) -> None:
    """The same run twice, with another capacity in between and lookups in the second."""
    policy = loaded(case)
    first = walk(case, host, policy, judged=False)
    other = replace(case, memory_bytes=case.other_bytes)
    if case.other_bytes:
        walk(other, host, policy, judged=False)
    second = walk(case, host, policy, judged=False, probe=True)
    _same(first.decisions, second.decisions, "same", "the second run")
    _same(first.events, second.events, "same", "the ledger of the second run")


def in_series(case: Case, host: Host) -> None:
    """One request after another: hits, attribution, and the future cut off."""
    whole = Served(case, host, loaded(case), "serial")
    _attribution(case, whole)
    _never_seen(whole)
    part = Served(case, host, loaded(case), "serial", case.cut)
    told = f"with the trace cut after {case.cut} requests"
    _same(part.records.decisions, whole.records.decisions, "future", told, prefix=True)
    now, then = (events_of(s.ledger, keys=False) for s in (part, whole))
    _same(now, then, "future", f"the ledger {told}", prefix=True)


def leaping(case: Case, host: Host) -> None:
    """Against a clock, stretch by stretch and step by step."""
    a, b = (Served(case, host, loaded(case), how) for how in ("leap", "step"))
    if a.crashed or b.crashed:
        require(a.crashed == b.crashed, "leap", "one of leaping and stepping crashed the engine")
        return
    same = a.records.requests().equals(b.records.requests())
    require(same, "leap", "records of requests differ between leaping and stepping")
    require(_gaps(a.records) == _gaps(b.records), "leap", "gaps between tokens differ")
    _same(events_of(a.ledger), events_of(b.ledger), "leap", "the ledger")
    _attribution(case, b)


def off(case: Case, host: Host) -> None:
    """With caching off."""
    if not host.can_be_off:
        return
    records = Served(case, host, loaded(case), "off").records
    found = [r for r, hit in enumerate(records.hit_tokens) if hit]
    require(not found, "off", f"requests {found} hit with caching off")


PHASES: dict[str, Callable[[Case, Host], Log | None]] = {
    "stepwise": stepwise,
    "again": again,
    "series": in_series,
    "leap": leaping,
    "off": off,
}


def loaded(case: Case) -> Policy:
    """The case's policy, made anew, its answers looked at."""
    return watched(policies.load(case.policy, **case.parameters))


def run_phase(name: str, case: Case, host: Host) -> Log | None:
    """One phase; whatever goes wrong is a ``Violation`` that names it."""
    try:
        return PHASES[name](case, host)
    except Exception as error:
        violation = as_violation(error)
        violation.phase = name
        raise violation from None


# -------------------------------------------------------------------------------- comparisons
def _same(a: list[Any], b: list[Any], invariant: str, told: str, *, prefix: bool = False) -> None:
    """``a`` equals ``b``, or begins it."""
    for i, x in enumerate(a):
        if i >= len(b) or x != b[i]:
            was = b[i] if i < len(b) else "nothing"
            fail(invariant, f"{told} differs at entry {i}: {x} and {was}")
    require(prefix or len(a) == len(b), invariant, f"{told}: {len(a)} entries and {len(b)}")


def _gaps(records: Records) -> list[int]:
    size, times = records.token_gaps()
    return sorted(np.repeat(size, times).tolist())


def _attribution(case: Case, served: Served) -> None:
    """Sums, hits, and no reason that the ledger knows nothing of."""
    if served.crashed:
        return
    facts, records, ledger = served.facts, served.records, served.ledger
    reuse = loaded(case).layout(case.engine).mode != "none"
    try:
        table = attribute(
            served.trace, served.prefixes, records, ledger,
            grid_tokens=facts.grid, block_tokens=facts.block, reuse=reuse,
        )  # fmt: skip
    except AssertionError as error:
        fail("attribution", str(error))
    require(table["hit"].tolist() == records.hit_tokens, "attribution", "hits differ from records")
    require(bool((table >= 0).all(axis=None)), "attribution", "a reason has less than no tokens")
    causes = set(zip(ledger.kind, ledger.action, ledger.cause, strict=True))
    for reason, kind, cause in (
        ("kv_evicted", Kind.KV, Cause.PRESSURE),
        ("state_evicted", Kind.STATE, Cause.PRESSURE),
        ("policy_dropped", Kind.STATE, Cause.POLICY),
    ):
        tokens = int(table[reason].sum())
        known = not reuse or (kind, Action.DROPPED, cause) in causes
        told = f"{tokens} tokens are {reason}, and the ledger has no such event"
        require(not tokens or known, "attribution", told)
    served.records.decisions.append(("never seen", *table["never_seen"].tolist()))


def _never_seen(served: Served) -> None:
    """In series, what was never seen is what no earlier request shares."""
    if served.crashed:
        return
    told = served.records.decisions.pop()[1:]
    names = Names(served.trace, served.prefixes)
    order = [a.request for _, a in served.records.admissions if not a.resumed]
    for i, r in enumerate(order):
        n = int(served.trace.prompt_tokens[r])
        shared = min(n - 1, max((names.common(r, e) for e in order[:i]), default=0))
        words = f"request {r}: {told[r]} tokens never seen, {n - 1 - shared} by the model"
        require(told[r] == n - 1 - shared, "attribution", words)
        if served.facts.everywhere:
            computed = min(n - 1, max((_reach(names, r, e) for e in order[:i]), default=0))
            hit = served.records.hit_tokens[r]
            require(hit == computed, "ceiling", f"request {r} hits {hit} of {computed} shared")


def _reach(names: Names, r: int, earlier: int) -> int:
    """What ``r`` shares with an earlier request, its last token apart: that is never computed."""
    return min(names.common(r, earlier), len(names.of[earlier]) - 2)
