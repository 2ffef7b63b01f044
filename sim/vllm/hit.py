"""What a lookup found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Hit:
    """``tokens`` are reusable, ``matched`` is how far the KV agrees, ``branch`` the branch point
    marked for this request (0 for none). ``kv[j]`` are the hit blocks of attention group ``j``,
    ``states`` the block of the restored state in every state group, at column ``column``; ``event``
    counts the ledger's events before the lookup."""

    tokens: int = 0
    matched: int = 0
    branch: int = 0
    kv: list[list[int]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    column: int = 0
    event: int = 0
