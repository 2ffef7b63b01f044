"""The state columns that one allocation fills, and the copies that go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div

if TYPE_CHECKING:
    from sim.vllm.cache import VllmCache


class StateTake:
    """The state columns that one allocation fills, the same in every state group."""

    def __init__(self, cache: VllmCache, r: Live, tokens: int) -> None:
        self.cache, self.r = cache, r
        spec = cache.options.num_speculative_blocks
        required = ceil_div(tokens, cache.shape.state_block) + spec
        held = r.state_columns
        self.tail = r.state_tail
        self.taken: list[list[int]] = []
        self.columns: list[int] = []
        self.idle = False
        if not cache.shape.align:
            self.columns = list(range(held, required))
            self.length = max(held, required)
            return
        exported = r.checkpoint is not None
        if required <= held and self.tail is None and not exported:
            self.idle = True
            r.started = True
            return
        if r.started or held:
            r.last_state = held - 1 - (spec if r.started else 0)
        first = max(required - spec - 1 - exported, held) if held < required - spec - 1 else held
        self.columns = list(range(first, required))
        self.length = max(held, required)

    def take(self, group: int, j: int) -> None:
        """Pop the blocks of one state group."""
        if self.idle:
            return
        cache, pool, r = self.cache, self.cache.pool, self.r
        fresh = pool.take(len(self.columns) + (self.tail is not None))
        if self.tail is not None:
            column, sources = self.tail
            source, copy = sources[j], fresh.pop(0)
            if r.started:
                self._move_keys(source, copy)
            else:
                r.states[column][j] = copy
                pool.ref[copy] += 1
            cache.copies.append((group, source, copy))
        self.taken.append(fresh)

    def _move_keys(self, source: int, copy: int) -> None:
        """The key of a running state goes to a copy, since the step will overwrite the source."""
        pool = self.cache.pool
        keys, tokens = pool.keys_of(source), pool.tokens[source]
        pool.drop(source)
        for key in keys:
            pool.put(key, copy, tokens)
        pool.ref[source] += 1
        own = pool.key[copy]
        if own is not None:
            self.cache.keys.now.add(own)

    def finish(self) -> None:
        """Enter the new columns into the table."""
        if self.idle:
            return
        r = self.r
        for i, column in enumerate(self.columns):
            r.states[column] = [fresh[i] for fresh in self.taken]
        self._count_copies()
        r.state_columns = self.length
        r.started = True
        r.state_tail = None

    def _count_copies(self) -> None:
        """In ``align`` the running state moves to each new column; the other modes read the old
        column and write the new one."""
        r, traffic = self.r, self.cache.traffic
        if not self.cache.shape.align or not r.state_columns or not (self.columns or self.tail):
            return
        if r.started:
            traffic.state_copies += 1
        else:
            traffic.restores.add(r.index)
