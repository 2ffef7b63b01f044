"""Replays a case that was kept."""

from __future__ import annotations

from sim.check.case import OPERATIONS, Case
from sim.check.hosts import HOSTS, Host
from sim.check.phases import PHASES, run_phase
from sim.check.violation import Violation


def replayed(case: Case, host: Host | None = None) -> Violation | None:
    """What the case breaks now, None if every invariant holds. Raises ``ValueError``."""
    if host is None and case.engine not in HOSTS:
        raise ValueError(f"no engine is called {case.engine!r}; known are {', '.join(HOSTS)}")
    wrong = [o for o in case.operations if o not in OPERATIONS]
    if wrong:
        raise ValueError(f"operation {wrong[0]!r}; allowed are {', '.join(OPERATIONS)}")
    for phase in PHASES:
        try:
            run_phase(phase, case, host or HOSTS[case.engine])
        except Violation as violation:
            return violation
    return None
