"""The seam between the scheduler and a cache manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sim.vllm.hit import Hit
from sim.vllm.request import Live


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


class Cache(Protocol):
    """What the scheduler asks of a cache manager."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def cached_bytes(self) -> int: ...

    def begin_step(self, step: int) -> None: ...

    def end_step(self) -> Traffic: ...

    def stamp_events(self, step: int) -> None:
        """From here on the ledger's events belong to ``step``."""

    def lookup(self, r: Live) -> Hit: ...

    def place(self, r: Live, start: int, end: int) -> int: ...

    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool: ...

    def read_back(self, r: Live) -> None: ...

    def free(self, r: Live) -> None: ...

    def quiet_until(self, computed: int, margin: int) -> int:
        """The first count of computed tokens at which a decode would touch the pool again, and
        ``computed`` while effects of the last time are less than ``margin`` tokens old."""
