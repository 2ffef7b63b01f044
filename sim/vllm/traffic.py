"""What a cache manager moves in one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """State and KV that the cache moves in one step besides what its tokens need.

    ``saves``: states written inside a request's chunk. ``restores``: requests whose restored
    state is copied, since the step would overwrite it. ``state_copies``: other copies of a whole
    state (all layers). ``kv_copied_tokens``: tokens of KV copied, in every attention layer.
    """

    saves: dict[int, int] = field(default_factory=dict)
    restores: set[int] = field(default_factory=set)
    state_copies: int = 0
    kv_copied_tokens: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is moved."""
        moved = self.state_copies or self.kv_copied_tokens
        return bool(moved or self.saves or self.restores)
