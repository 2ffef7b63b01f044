"""SGLang's states with a soft limit on how many a root-to-leaf path keeps.
Source: SGLang's ``--mamba-max-states-per-path``; specs/sglang-0.5.23, section 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base, one_state
from sim.policy import Layout, Limits, Memory, Prefill, State


@dataclass(frozen=True)
class Policy(Base):
    """Drops the shallowest states of a path beyond ``cap``; forks, states in use, leaves and the
    new state itself are skipped, so more than ``cap`` may stay."""

    cap: int = 4

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"cap is {self.cap}; allowed are 1 and more; the nearest is 1")

    @property
    def engines(self) -> Sequence[str]:
        """SGLang with the unified tree."""
        return ("sglang-0.5.23", "sglang-0.5.18")

    def layout(self, engine: str) -> Layout:
        """A tree of exact positions on a grid."""
        return Layout("tree")

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """The branch point if it can be reached, else the last grid position."""
        return end, one_state(limits)

    def trim(self, memory: Memory, path: Sequence[State]) -> Sequence[State]:
        """The shallowest that the engine lets go, until ``cap`` are left."""
        return [s for s in path if not s.pinned][: max(0, len(path) - self.cap)]
