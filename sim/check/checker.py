"""Hunts for a case that breaks an invariant, and makes it small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException

from sim.check.case import Case
from sim.check.draw import cases
from sim.check.hosts import HOSTS, Host
from sim.check.phases import PHASES, run_phase
from sim.check.violation import Violation
from sim.policies import load
from sim.policy import Policy

EXAMPLES = 60
# Shrinking stops after so many tries; what is left is small enough by then.
MOST_SHRINKS = 400


@dataclass
class Report:
    """What the search on one engine saw; ``violation`` and ``case`` are None where all held."""

    engine: str
    examples: int = 0
    requests: int = 0
    steps: int = 0
    hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    violation: Violation | None = None
    case: Case | None = None
    tries: int = field(default=0, repr=False)


def hosts_of(policy: Policy, only: list[str] | None = None) -> list[Host]:
    """The engines that host the policy, among ``only`` if given. Raises ``ValueError``."""
    for name in only or ():
        if name not in HOSTS:
            raise ValueError(f"no engine is called {name!r}; known are {', '.join(HOSTS)}")
        if name not in policy.engines:
            raise ValueError(f"cannot run on {name}; it can on {', '.join(policy.engines)}")
    found = [h for n, h in HOSTS.items() if n in (only or policy.engines)]
    if not found:
        named = ", ".join(policy.engines) or "none"
        raise ValueError(f"names no known engine ({named}); known are {', '.join(HOSTS)}")
    return found


def search(
    host: Host, policy: str, parameters: dict[str, Any] | None = None, examples: int = EXAMPLES
) -> Report:
    """Check ``policy`` on ``host`` with ``examples`` drawn cases; the same ones every time."""
    report = Report(host.name)
    load(policy, **(parameters or {}))

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(cases(host, policy, parameters or {}))
    def hunt(case: Case) -> None:
        _try(case, host, report)

    try:
        hunt()
    except (Violation, HypothesisException):
        # A search that stopped early replays its case, which then passes: what was found stands.
        if report.violation is None:
            raise
    return report


def _try(case: Case, host: Host, report: Report) -> None:
    """One case. After the first violation only that invariant counts, in the run that broke it."""
    found = report.violation
    if found is None:
        report.examples += 1
        report.requests += len(case.requests)
    elif report.tries >= MOST_SHRINKS:
        return
    report.tries += found is not None
    for phase in PHASES if found is None else (found.phase,):
        try:
            log = run_phase(phase, case, host)
        except Violation as violation:
            if found is not None and violation.invariant != found.invariant:
                return
            report.violation, report.case = violation, case
            raise
        if log is not None and found is None:
            report.steps += log.steps
            report.hits += log.hits
            report.preemptions += log.preemptions
            report.evictions += log.evictions
