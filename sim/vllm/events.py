"""What the cache manager tells the ledger of states and of KV."""

from __future__ import annotations

from sim.ledger import Action, Cause, Kind, Ledger
from sim.vllm.request import Live
from sim.vllm.shape import Shape

_KV, _STATE = int(Kind.KV), int(Kind.STATE)


class CacheEvents:
    """``live`` are the prefix ids of states that every state group holds; a state is lost with the
    first of its parts, KV with the key of the first attention group."""

    def __init__(self, shape: Shape, ledger: Ledger) -> None:
        self.shape, self.ledger = shape, ledger
        self.live: set[int] = set()
        self.step = 0

    def lost(self, gone: list[tuple[int, int]]) -> None:
        """Keys, each with its tokens, whose last block went under pressure, in order."""
        if not self.ledger.on:
            return
        live, width, kv = self.live, self.shape.num_groups, self.shape.kv_groups
        first = kv[0] if kv else -1
        kinds: list[int] = []
        keys: list[int] = []
        positions: list[int] = []
        for key, tokens in gone:
            prefix, group = divmod(key, width)
            if group == first:
                kinds.append(_KV)
            elif prefix in live and group not in kv:
                live.discard(prefix)
                kinds.append(_STATE)
            else:
                continue
            keys.append(prefix)
            positions.append(tokens)
        if keys:
            self.ledger.extend(self.step, kinds, Action.DROPPED, Cause.PRESSURE, keys, positions)

    def replaced(self, key: int, tokens: int) -> None:
        """A state's block got another key, or none, and no other block has this one."""
        prefix, group = divmod(key, self.shape.num_groups)
        if self.ledger.on and group not in self.shape.kv_groups and prefix in self.live:
            self.live.discard(prefix)
            state, gone, why = Kind.STATE, Action.DROPPED, Cause.ENGINE
            self.ledger.emit(self.step, state, gone, prefix, tokens, cause=why)

    def state_published(self, r: Live, position: int) -> None:
        """Every part of the state has its key, unless it had before."""
        if self.ledger.on and (prefix := self._prefix(r, position)) not in self.live:
            self.live.add(prefix)
            self._state(Action.PUBLISHED, r, position)

    def state_declined(self, r: Live, position: int) -> None:
        """The policy does not want the state reusable; nothing is lost if another holds it."""
        if self.ledger.on and self._prefix(r, position) not in self.live:
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
