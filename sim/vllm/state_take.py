"""The state columns that one allocation fills, and the copies that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.vllm.request import Live

if TYPE_CHECKING:
    from sim.vllm.cache import VllmCache


class StateTake:
    """The state columns that one allocation fills, the same in every state group."""

    def __init__(self, cache: VllmCache, r: Live, tokens: int) -> None:
        self.cache, self.r = cache, r
        spec = cache.options.num_speculative_blocks
        required = -(-tokens // cache.shape.state_block) + spec
        held = r.state_columns
        self.tail = r.state_tail
        self.taken: list[list[int]] = []
        self.columns: Sequence[int] = ()
        self.idle = False
        self.started = r.started
        if not cache.shape.align:
            self.columns = range(held, required)
            self.length = max(held, required)
            return
        exported = r.checkpoint is not None
        if required <= held and self.tail is None and not exported:
            self.idle = True
            return
        if r.started or held:
            r.last_state = held - 1 - (spec if r.started else 0)
        first = max(required - spec - 1 - exported, held) if held < required - spec - 1 else held
        self.columns = range(first, required)
        self.length = max(held, required)

    def take(self, groups: tuple[tuple[int, int], ...]) -> None:
        """Pop the blocks of state groups whose ids follow one another."""
        pool, n = self.cache.pool, len(self.columns)
        if self.tail is None:
            fresh = pool.take(n * len(groups))
            self.taken += [fresh[i * n : (i + 1) * n] for i in range(len(groups))]
            return
        for group, j in groups:
            copy, *fresh = pool.take(n + 1)
            self._copy_on_write(group, j, copy)
            self.taken.append(fresh)

    def _copy_on_write(self, group: int, j: int, copy: int) -> None:
        assert self.tail is not None
        column, sources = self.tail
        source = sources[j]
        if self.started:
            self._move_keys(source, copy)
        else:
            self.r.states[column][j] = copy
            self.cache.pool.ref[copy] += 1
        self.cache.copies.append((group, source, copy))

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
        r = self.r
        for column, row in zip(self.columns, zip(*self.taken, strict=True), strict=True):
            r.states[column] = list(row)
        self._count_copies()
        r.state_columns = self.length
        r.state_tail = None

    def _count_copies(self) -> None:
        """In ``align`` the running state moves to each new column; the other modes read the old
        column and write the new one."""
        r, traffic = self.r, self.cache.traffic
        if not self.cache.shape.align or not r.state_columns or not (self.columns or self.tail):
            return
        if self.started:
            traffic.state_copies += 1
        else:
            traffic.restores.add(r.index)
