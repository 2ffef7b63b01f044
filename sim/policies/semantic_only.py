"""States only where a later request is likely to resume: the replay boundary of each prompt and
branch points; on SGLang the last grid position of each chunk or the branch point.
Source: vLLM 0.33's default, mode ``align`` with retention interval 0; SGLang's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base, aligned_place, one_state, retained
from sim.policy import Layout, Limits, Memory, Prefill, State


@dataclass(frozen=True)
class Policy(Base):
    """Keeps at most two states of a prompt: its replay boundary and its branch point."""

    @property
    def engines(self) -> Sequence[str]:
        """Both versions of vLLM and of SGLang."""
        return ("vllm-0.33", "vllm-0.28", "sglang-0.5.23", "sglang-0.5.18")

    def layout(self, engine: str) -> Layout:
        """A checkpoint inside a chunk only at the prompt's end; a tree on SGLang."""
        return Layout("tree") if engine.startswith("sglang") else Layout("align", dense=False)

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """Chunk ends on block boundaries, and at the branch point."""
        if limits.single:
            return end, one_state(limits)
        return aligned_place(request, start, end, limits)

    def publish(self, memory: Memory, state: State) -> bool:
        """The replay boundary and the branch point."""
        return retained(state, 0)
