"""Counts a reader of every state that is used and never lets go, so its bytes never come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.policies.base import Base
from sim.policy import Layout, Memory


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        return Layout("exact")

    def observe(self, memory: Memory, event: str, state: Any) -> None:
        if event == "used":
            state.readers += 1
