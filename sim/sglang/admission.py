"""What a prefill batch may still take: the token budgets of one pass over the waiting queue.

A request that decodes reserves its coming tokens times a ratio that starts high and decays; a new
one all of them. Sources: specs/sglang-0.5.23, section 12; specs/sglang-0.5.18, section 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from sim.sglang.cache import SglangCache
from sim.sglang.request import Live

CLIP = 4096


class Verdict(Enum):
    """Whether the next waiting request may be tried."""

    CONTINUE = 0
    NO_TOKEN = 1
    OTHER = 2


class Ratio:
    """Share of its coming tokens that a running request reserves. Source: as above."""

    FIRST, LAST, STEPS = 0.7, 0.7 * 0.14, 600

    def __init__(self) -> None:
        self.now = self.FIRST
        self.decay = (self.FIRST - self.LAST) / self.STEPS

    def decay_steps(self, count: int) -> None:
        """After ``count`` decode steps; one subtraction each, as rounding must be the engine's."""
        while count and self.now > self.LAST:
            self.now = max(self.now - self.decay, self.LAST)
            count -= 1

    def after_retraction(self, outs: int, targets: int, count: int) -> None:
        """What is left needs about this much."""
        self.now = min(1.0, (outs + 20 * count) / (targets + 1))


class Admission:
    """One pass. ``reserved`` are the coming tokens of each running request, in order."""

    def __init__(self, cache: SglangCache, reserved: Iterable[int], ratio: float) -> None:
        options = cache.options
        self.cache, self.page = cache, options.page_size
        self.input_left = options.max_prefill_tokens
        self.chunk_left = options.chunked_prefill_size
        self.later: float = 0
        for tokens in reserved:
            self.later += tokens * ratio
        self.now = 0
        self.batch: list[Live] = []
        self.cut: Live | None = None

    @property
    def _there(self) -> int:
        return self.cache.kv_free + self.cache.tree.kv_evictable_tokens

    @property
    def total_left(self) -> float:
        """Free and evictable KV less what is spoken for."""
        return self._there - self.later

    def verdict(self) -> Verdict:
        """Whether another request may be tried."""
        if self.total_left <= 0 or self._there <= self.now:
            return Verdict.NO_TOKEN
        if self.input_left <= 0 or (self.chunk_left is not None and self.chunk_left <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE

    def add_running(self, r: Live) -> bool:
        """The next chunk of a request in mid-prefill; whether it is cut again."""
        assert self.chunk_left is not None
        left = min(self.chunk_left, int(self.total_left))
        if left <= 0:
            left = self.chunk_left
        rest = r.fill - r.prefix
        r.end = r.prefix + min(rest, left)
        self.batch.append(r)
        self._reserve(r, 0 if rest > left else min(r.target, CLIP))
        return rest > left

    def add(self, r: Live, max_new: int) -> Verdict:
        """Admit ``r`` if it fits; ``max_new`` tokens may still come from it."""
        cache = self.cache
        rest = r.fill - r.prefix
        total = rest + min(max_new, CLIP) + self.page
        if cache.rules.older and total >= self.total_left:
            return Verdict.NO_TOKEN
        if cache.rules.older and self._too_long(rest):
            return Verdict.OTHER
        lock = cache.tree.lock(r.node) if cache.reuse else None
        verdict = self._choose(r, rest, total)
        if verdict is None:
            if lock is not None:
                r.lock = cache.tree.lock(r.node)
            self.batch.append(r)
            self._reserve(r, 0 if r is self.cut else min(r.target, CLIP))
        if lock is not None:
            cache.tree.unlock(lock)
        return self.verdict() if verdict is None else verdict

    def _too_long(self, rest: int) -> bool:
        paged = -(-rest // self.page) * self.page
        return self.chunk_left is None and bool(self.batch) and paged >= self.input_left

    def _choose(self, r: Live, rest: int, total: int) -> Verdict | None:
        """Where the chunk ends; a verdict if it is not admitted."""
        if total >= self.total_left:
            return Verdict.NO_TOKEN
        if self._too_long(rest):
            return Verdict.OTHER
        page, limit = self.page, self.chunk_left
        r.end = r.fill
        if limit is not None and -(-rest // page) * page > limit:
            end = (r.prefix + limit // page * page) // page * page
            if end <= r.prefix:
                return Verdict.OTHER
            r.end, self.cut = end, r
        return None

    def _reserve(self, r: Live, max_new: int) -> None:
        paged = -(-(r.end - r.prefix) // self.page) * self.page
        self.now += paged + self.page
        self.later += paged + self.page + max_new
        self.input_left -= paged
        if self.chunk_left is not None:
            self.chunk_left -= paged
