"""What the scheduler decided: a plan, and a step that has not been read back."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.step import Admission
from sim.vllm.hit import Hit
from sim.vllm.request import Live


@dataclass(slots=True)
class Flight:
    """A planned step that has not been read back: tokens and sampling of the busy requests."""

    left: int
    busy: dict[Live, tuple[int, bool]] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What one schedule call decided, before it becomes a ``Step``."""

    scheduled: dict[Live, int] = field(default_factory=dict)
    admitted: list[tuple[Live, Hit, bool]] = field(default_factory=list)
    preempted: list[Live] = field(default_factory=list)


def admission(r: Live, hit: Hit, resumed: bool) -> Admission:
    """What a step says of a lookup that was acted on."""
    return Admission(r.index, hit.tokens, hit.matched, hit.branch, resumed, hit.event, r.lost)
