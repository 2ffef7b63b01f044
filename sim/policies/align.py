"""A state wherever a chunk ends on a block boundary: all kept, or one every N tokens.
Source: vLLM's mode ``align`` with ``prefix_cache_retention_interval`` unset or N."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base, aligned_stop
from sim.policy import Layout, Limits, Memory, Prefill, State


@dataclass(frozen=True)
class Policy(Base):
    """Keeps states on multiples of ``retention_interval`` tokens (None: on every block
    boundary), the replay boundary and branch points."""

    retention_interval: int | None = None

    def __post_init__(self) -> None:
        if self.retention_interval is not None and self.retention_interval < 0:
            raise ValueError(
                f"retention_interval is {self.retention_interval}; allowed are null (every block "
                "boundary), 0 (replay boundary and branch points only) and multiples of the block"
            )

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
        end = aligned_stop(request, start, end, limits)
        return end, (limits.inner, end) if limits.inner else (end,)

    def publish(self, memory: Memory, state: State) -> bool:
        """On the interval's grid, at the replay boundary and at the branch point."""
        interval = self.retention_interval
        if interval is None or state.position in (state.replay, state.branch):
            return True
        blocks = interval // state.block_tokens
        on_grid = blocks <= 1 or state.position // state.block_tokens % blocks == 0
        return interval > 0 and on_grid
