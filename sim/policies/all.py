"""A state at every block boundary, or one every N tokens. Source: vLLM 0.28's mode ``all``,
whose blocks are rounded up to the scan's chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base, checked_interval, retained
from sim.policy import Layout, Limits, Memory, Prefill, State


@dataclass(frozen=True)
class Policy(Base):
    """Every block holds the state at its end; ``retention_interval`` N keeps one every N tokens
    besides the replay boundary and branch points, 0 only those, None all."""

    retention_interval: int | None = None

    def __post_init__(self) -> None:
        checked_interval(self.retention_interval)

    @property
    def engines(self) -> Sequence[str]:
        """Only 0.28 has this mode."""
        return ("vllm-0.28",)

    def layout(self, engine: str) -> Layout:
        """A state in every block."""
        return Layout("all", dense=True)

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """Chunks are not split; a state at each block boundary passed."""
        block = limits.block_tokens
        return end, range((start // block + 1) * block, end + 1, block)

    def publish(self, memory: Memory, state: State) -> bool:
        """On the interval's grid, at the replay boundary and at the branch point."""
        return retained(state, self.retention_interval)
