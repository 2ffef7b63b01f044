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
        """The engine's own rule: one state at the end of the chunk where it can leave one
        anywhere, on its grid or at the branch point elsewhere."""
        if limits.anywhere:
            return end, (end,)
        if limits.single:
            return end, one_state(limits)
        return aligned_place(request, start, end, limits)

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

    def report(self, memory: Memory) -> dict[str, float]:
        """Nothing to tell."""
        return {}


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


def aligned_place(
    request: Prefill, start: int, end: int, limits: Limits
) -> tuple[int, Sequence[int]]:
    """``aligned_stop``, with a state there and at the position exported from inside, if any."""
    end = aligned_stop(request, start, end, limits)
    if end == start:
        return end, ()
    return end, (limits.inner, end) if limits.inner else (end,)


def retained(state: State, interval: int | None) -> bool:
    """Whether vLLM's retention interval keeps the state: None keeps all, N those on its grid of
    tokens, and all of them the replay boundary and the branch point. Source: specs/vllm, 7."""
    if interval is None or state.position in (state.replay, state.branch):
        return True
    blocks = interval // state.block_tokens
    return interval > 0 and (blocks <= 1 or state.position // state.block_tokens % blocks == 0)


def checked_interval(interval: int | None) -> None:
    """Raise ``ValueError`` for an interval that no block size allows."""
    if interval is not None and interval < 0:
        raise ValueError(
            f"retention_interval is {interval}; allowed are null (every block boundary), 0 (replay "
            "boundary and branch points only) and multiples of the block; the nearest is 0"
        )


def one_state(limits: Limits) -> tuple[int, ...]:
    """The one state that SGLang exports from a chunk: the branch point if it can be reached, else
    the last grid position. Source: specs/sglang-0.5.23, section 4a."""
    return (limits.inner or limits.tail,)
