"""A state wherever a chunk ends on a block boundary: all kept, or one every N tokens.
Source: vLLM's mode ``align`` with ``prefix_cache_retention_interval`` unset or N."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base, aligned_place, checked_interval, retained
from sim.policy import Layout, Limits, Memory, Prefill, State


@dataclass(frozen=True)
class Policy(Base):
    """Keeps states on multiples of ``retention_interval`` tokens (None: on every block
    boundary), the replay boundary and branch points."""

    retention_interval: int | None = None

    def __post_init__(self) -> None:
        checked_interval(self.retention_interval)

    @property
    def engines(self) -> Sequence[str]:
        """Both vLLM versions."""
        return ("vllm-0.33", "vllm-0.28")

    def layout(self, engine: str) -> Layout:
        """Checkpoints inside every chunk, unless the interval is 0."""
        return Layout("align", dense=self.retention_interval != 0)

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """Chunk ends on block boundaries."""
        return aligned_place(request, start, end, limits)

    def publish(self, memory: Memory, state: State) -> bool:
        """On the interval's grid, at the replay boundary and at the branch point."""
        return retained(state, self.retention_interval)
