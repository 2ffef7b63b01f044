"""Publishes a state only if the trace that is being replayed has an even number of requests."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout, Memory, State


def requests_to_come() -> int:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "trace" in frame.f_locals and frame.f_code.co_name == "serial":
            return len(frame.f_locals["trace"])
    return 0


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        return Layout("exact")

    def publish(self, memory: Memory, state: State) -> bool:
        return requests_to_come() % 2 == 0
