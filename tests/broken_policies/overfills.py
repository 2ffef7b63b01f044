"""Takes the candidates out of the engine's hands, so that nothing can be evicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.policies.base import Base
from sim.policy import Layout, Memory, State


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        return Layout("exact")

    def victim(self, memory: Memory, candidates: Any, now_ns: int) -> State | None:
        return candidates.pop()
