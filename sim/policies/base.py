"""Neutral answers of a policy, for policies to build on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policy import Layout, Limits, Memory, Prefill, State, View


@dataclass(frozen=True)
class Base:
    """Hosts nothing, publishes everything, drops nothing, learns nothing."""

    @property
    def engines(self) -> Sequence[str]:
        """Engine versions that can host it."""
        return ()

    def layout(self, engine: str) -> Layout:
        """States at chunk ends on block boundaries."""
        return Layout("align")

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """The whole chunk, one state at its end."""
        return end, (end,)

    def publish(self, memory: Memory, state: State) -> bool:
        """Everything becomes reusable."""
        return True

    def trim(self, memory: Memory, path: Sequence[State]) -> Sequence[State]:
        """Nothing is dropped from a path."""
        return ()

    def victim(self, memory: Memory, candidates: Sequence[State], now_ns: int) -> State | None:
        """The engine's own order."""
        return None

    def begin(self, view: View) -> Memory:
        """Nothing to remember."""
        return None

    def observe(self, memory: Memory, event: str, state: State) -> None:
        """Nothing to learn."""


def aligned_stop(request: Prefill, start: int, end: int, limits: Limits) -> int:
    """Where a chunk ends so that a state falls on the positions a later request can hit.

    vLLM's rule: chunks end on block boundaries as long as a block fits into a chunk, and stop at
    the last block boundary, at the prompt's last key position and at the branch point, unless a
    state can be exported from inside the chunk. Source: specs/vllm, section 9.
    """
    if start >= request.end_tokens:
        return end
    block = limits.block_tokens
    if end < request.end_tokens:
        aligned = end // block * block
        if aligned > start or block <= limits.budget_tokens:
            end = aligned
    stops = []
    if not limits.inner:
        if start % block:
            stops.append((start // block + 1) * block)
        stops.append(limits.last_block)
        if limits.last_block < limits.tail < request.prompt_tokens:
            stops.append(limits.tail)
    if start < request.branch < end:
        stops.append(start + (request.branch - start) // block * block)
    return max(min((s for s in stops if start < s < end), default=end), start)
