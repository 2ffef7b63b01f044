"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NO_OTHER_TRACE = ("trace.generator=null", "trace.requests=[]", "trace.parameters={}",
                  "trace.arrivals=null")  # fmt: skip


def replaced(trace: Path | None, settings: Sequence[str] | None) -> list[str]:
    """Overrides of an experiment: those given, and another trace in place of its own."""
    overrides = list(settings or [])
    if trace is not None:
        overrides += [f"trace.path={trace}", *NO_OTHER_TRACE]
    return overrides
