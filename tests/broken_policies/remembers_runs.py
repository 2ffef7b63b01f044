"""Learns in a place that outlives the run, so the second run is not the first."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout, Memory, State

SEEN: list[int] = []


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool", "vllm-0.33", "sglang-0.5.23")

    def layout(self, engine: str) -> Layout:
        return Layout("exact" if engine == "pool" else "align")

    def publish(self, memory: Memory, state: State) -> bool:
        SEEN.append(state.position)
        return len(SEEN) % 7 > 2
