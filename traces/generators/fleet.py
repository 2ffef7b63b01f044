"""A fleet of recorded conversations: the sessions of a trace file, drawn by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traces.fleet import interleave
from traces.generators.parameters import in_range
from traces.registry import read_trace
from traces.trace import Trace


@dataclass(frozen=True)
class Fleet:
    """``sessions`` conversations (null: each once) of the trace at ``path``, in any ``format``
    (null: detected). Pauses longer than ``idle_cap_s`` are cut to it. ``infer_appends`` is that of
    the format's reader."""

    path: str = ""
    format: str | None = None
    sessions: int | None = None
    idle_cap_s: float | None = None
    infer_appends: bool = False

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is ''; allowed: a trace file, or a folder of WEKA conversations")
        in_range("sessions", self.sessions, 1, 2**24)
        in_range("idle_cap_s", self.idle_cap_s, 0, 1e6)


def fleet(parameters: Fleet, seed: int) -> Trace:
    """The conversations of a file in an order of their own. Raises ``TraceError`` as readers do."""
    p = parameters
    options = {"infer_appends": "on"} if p.infer_appends else {}
    trace = read_trace(p.path, p.format, **options)
    trace = interleave(trace, seed, p.sessions, p.idle_cap_s)
    return replace(trace, notes={**trace.notes, "generator": "fleet", "seed": seed})
