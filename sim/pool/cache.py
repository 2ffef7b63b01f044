"""A token-exact index without a budget: whatever was computed can be resumed at any token."""

from __future__ import annotations

import numpy as np

from sim.ledger import Action, Kind, Ledger
from sim.policy import Policy
from sim.vllm.cache_seam import Traffic
from sim.vllm.hit import Hit
from sim.vllm.request import Live
from traces.coverage import Coverage
from traces.identity import Prefixes

FAR = 1 << 62


class ExactCache:
    """``written`` covers everything planned so far, ``readable`` what was planned before this
    step: a state cannot be read in the step that writes it."""

    def __init__(
        self, prefixes: Prefixes, policy: Policy, ledger: Ledger, token_bytes: int, state_bytes: int
    ) -> None:
        self.prefixes, self.ledger = prefixes, ledger
        self.reuse = policy.layout("pool").mode == "exact"
        self.token_bytes, self.state_bytes = token_bytes, state_bytes
        self.written, self.readable = Coverage(prefixes), Coverage(prefixes)
        self.fresh: list[tuple[int, int]] = []
        self.held: dict[int, int] = {}
        self.tokens = 0
        self.step = 0
        self.traffic = Traffic()

    def begin_step(self, step: int) -> None:
        """What the step before wrote can be read now."""
        self.stamp_events(step)
        self.traffic = Traffic()
        for request, length in self.fresh:
            self.readable.add(request, length)
        self.fresh.clear()

    def stamp_events(self, step: int) -> None:
        """From here on the ledger's events belong to ``step``."""
        self.step = step

    def end_step(self) -> Traffic:
        """Only restored states are copied; writing one at every token is not priced, as the
        oracle is a ceiling."""
        return self.traffic

    def lookup(self, r: Live) -> Hit:
        """The longest common prefix with anything computed, short of the last token. Pure."""
        if not self.reuse:
            return Hit(event=len(self.ledger))
        common = self.readable.common(r.index, r.known - 1)
        return Hit(tokens=common, matched=common, event=len(self.ledger))

    def place(self, r: Live, start: int, end: int) -> int:
        """Wait a step if a request planned in this one is about to write a longer prefix."""
        if not self.reuse or r.status == "running" or not self.fresh:
            return end
        return start if self.written.common(r.index, r.known - 1) > start else end

    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool:
        """Always fits."""
        start = r.computed + (hit.tokens if hit else 0)
        self._cover(r, min(start + n, r.known))
        if hit is not None and hit.tokens:
            key = int(self.prefixes.ids(r.index, np.array([hit.tokens]))[0])
            self.ledger.emit(self.step, Kind.STATE, Action.RESTORED, key, hit.tokens, r.index)
            self.traffic.restores.add(r.index)
        return True

    def _cover(self, r: Live, end: int) -> None:
        if end <= self.held.get(r.index, 0):
            return
        self.held[r.index] = end
        self.tokens += self.written.add(r.index, end)
        self.fresh.append((r.index, end))
        key = int(self.prefixes.ids(r.index, np.array([end]))[0])
        self.ledger.emit(self.step, Kind.KV, Action.PUBLISHED, key, end, r.index)

    def read_back(self, r: Live) -> None:
        """A sampled token was read: everything computed so far can be shared."""
        self._cover(r, min(r.computed - r.in_flight, r.known))

    def free(self, r: Live) -> None:
        """Nothing is given up; tokens computed while the request was quiet are covered now."""
        self._cover(r, min(r.known, r.target) - 1)
        self.held.pop(r.index, None)

    def quiet_until(self, computed: int, margin: int) -> int:
        """Decodes never need the pool; their tokens are covered when they are visited."""
        return FAR

    @property
    def used_bytes(self) -> int:
        """KV of every distinct token, and one state for each."""
        return self.tokens * (self.token_bytes + self.state_bytes)

    @property
    def cached_bytes(self) -> int:
        """Everything is cached."""
        return self.used_bytes

    def check(self) -> None:
        """Every token that the index covers is counted once."""
        covered: dict[int, int] = {}
        for request in range(len(self.prefixes.offsets) - 1):
            for start, _, delta in self.prefixes.extents(request):
                head = start + 1 + delta
                if head in self.written.last:
                    covered[head] = self.written.last[head] - head + 1
        assert sum(covered.values()) == self.tokens, f"{self.tokens} tokens counted"
