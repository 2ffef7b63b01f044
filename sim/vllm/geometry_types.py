"""The result of vLLM's sizing: blocks, pages, groups and the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A KV cache group: layers that share one block table. ``kind``: ``mamba`` or ``attention``."""

    kind: str
    layers: tuple[int, ...]
    block_tokens: int
    page_bytes: int
    max_memory_usage_bytes: int


@dataclass(frozen=True)
class Geometry:
    """``block_tokens`` is the attention block, ``state_block_tokens`` the Mamba block,
    ``scheduler_block_tokens`` and ``unit_tokens`` (hash block) as vLLM resolves them.
    ``checkpoint_alignment``: positions inside a chunk at which layers can export a state are
    multiples of it from the chunk's start; None if they cannot export."""

    block_tokens: int
    state_block_tokens: int | None
    scheduler_block_tokens: int
    unit_tokens: int
    num_blocks: int
    groups: tuple[Group, ...]
    state_bytes: int
    page_bytes: int
    bytes_per_block: int
    checkpoint_alignment: int | None
