"""What the cache manager tells the ledger of states and of KV."""

from __future__ import annotations

from sim.ledger import Action, Cause, Kind, Ledger
from sim.vllm.request import Live
from sim.vllm.shape import Shape


class CacheEvents:
    """``live`` are the prefix ids of states that every state group holds; a state is lost with the
    first of its parts, KV with the key of the first attention group."""

    def __init__(self, shape: Shape, ledger: Ledger) -> None:
        self.shape, self.ledger = shape, ledger
        self.live: set[int] = set()
        self.step = 0

    def lost(self, key: int, tokens: int) -> None:
        """The last block of ``key`` went under pressure."""
        if not self.ledger.on:
            return
        prefix, group = divmod(key, self.shape.num_groups)
        if self.shape.kv_groups and group == self.shape.kv_groups[0]:
            kind = Kind.KV
        elif prefix in self.live and group not in self.shape.kv_groups:
            self.live.discard(prefix)
            kind = Kind.STATE
        else:
            return
        self.ledger.emit(self.step, kind, Action.DROPPED, prefix, tokens, cause=Cause.PRESSURE)

    def state_published(self, r: Live, position: int) -> None:
        """Every part of the state has its key, unless it had before."""
        if self.ledger.on and (prefix := self._prefix(r, position)) not in self.live:
            self.live.add(prefix)
            self._state(Action.PUBLISHED, r, position)

    def state_declined(self, r: Live, position: int) -> None:
        """The policy does not want the state reusable."""
        if self.ledger.on:
            self.live.discard(self._prefix(r, position))
            self._state(Action.DROPPED, r, position, Cause.POLICY)

    def state_restored(self, r: Live, position: int) -> None:
        """A prefill resumes from the state."""
        if self.ledger.on:
            self._state(Action.RESTORED, r, position)

    def kv_published(self, r: Live, position: int) -> None:
        """All KV of the request up to ``position`` has keys."""
        if self.ledger.on:
            key = self._prefix(r, position)
            self.ledger.emit(self.step, Kind.KV, Action.PUBLISHED, key, position, r.index)

    def _prefix(self, r: Live, position: int) -> int:
        return r.keys[position // self.shape.unit - 1]

    def _state(self, action: Action, r: Live, position: int, cause: Cause = Cause.NONE) -> None:
        prefix = self._prefix(r, position)
        self.ledger.emit(self.step, Kind.STATE, action, prefix, position, r.index, cause)
