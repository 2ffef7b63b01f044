"""Gives up the state that was used last, whether or not a request still uses it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout, Memory, State, View


@dataclass(frozen=True)
class Policy(Base):
    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        return Layout("exact")

    def begin(self, view: View) -> list[State]:
        return []

    def observe(self, memory: Memory, event: str, state: State) -> None:
        if event == "used":
            memory.append(state)

    def victim(self, memory: Memory, candidates: Sequence[State], now_ns: int) -> State | None:
        return memory[-1] if memory else None
