"""Claims a state beyond the end of the chunk, so that a hit would reach what nobody computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout, Limits, Memory, Prefill


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        return Layout("exact")

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        return end, (end + 3,)
