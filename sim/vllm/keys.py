"""What becomes a key: full blocks of KV, and the states that the policy publishes.

Source: specs/vllm, section 7.
"""

from __future__ import annotations

from sim.policy import Memory, Policy, State
from sim.vllm.events import CacheEvents
from sim.vllm.pool import BlockPool
from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div
from sim.vllm.shape import Shape

FAR = 1 << 62


class Keys:
    """``now`` holds the keys, by the first group, of states registered in this schedule call: they
    cannot be read yet."""

    def __init__(
        self, shape: Shape, pool: BlockPool, policy: Policy, memory: Memory, events: CacheEvents
    ) -> None:
        self.shape, self.pool, self.events = shape, pool, events
        self.policy, self.memory = policy, memory
        self.now: set[int] = set()

    def publish(self, r: Live, n: int) -> None:
        """Register what the first ``n`` tokens fill, before the step that writes it runs."""
        if n < r.next_key and r.checkpoint is None and r.tail_column not in r.states:
            return
        shape = self.shape
        if shape.num_groups > 1 and not shape.fine:
            n = n // shape.scheduler_block * shape.scheduler_block
        if shape.kv_groups and (n // shape.kv_block > r.kv_cached or shape.unit != shape.kv_block):
            self._publish_kv(r, n)
        if shape.state_groups and (
            n // shape.state_block > r.state_cached
            or (shape.align and (r.checkpoint is not None or n == shape.tail_of(r.prompt)))
        ):
            self._publish_states(r, n)
        self._expect(r)

    def _expect(self, r: Live) -> None:
        """Until when ``publish`` has nothing to do, unless a state is left at the tail."""
        shape = self.shape
        if shape.fine or (shape.kv_groups and shape.unit != shape.kv_block):
            return
        kv = (r.kv_cached + 1) * shape.kv_block if shape.kv_groups else FAR
        state = (r.state_cached + 1) * shape.state_block if shape.state_groups else FAR
        r.next_key = min(kv, state)
        r.tail_column = (
            ceil_div(shape.tail_of(r.prompt), shape.state_block) - 1 if shape.align else -1
        )

    def _publish_kv(self, r: Live, n: int) -> None:
        shape = self.shape
        block, unit, width, pool = shape.kv_block, shape.unit, shape.num_groups, self.pool
        low, high = r.kv_cached, n // block
        if unit == block:  # no partial keys, so these blocks have none yet
            positions = range((low + 1) * block, (high + 1) * block, block)
            prefixes = r.keys[low:high]
            for table, g in zip(r.kv, shape.kv_groups, strict=True):
                keys = [k * width + g for k in prefixes] if width > 1 else prefixes
                pool.put_fresh(keys, table[low:high], positions)
            r.kv_cached = high
            self.events.kv_published(r, high * block)
            return
        if high > low:
            per_block = block // unit
            for j, g in enumerate(shape.kv_groups):
                table = r.kv[j]
                for i in range(low, high):
                    b = table[i]
                    if pool.key[b] is not None:
                        pool.drop(b)
                    pool.put(r.keys[(i + 1) * per_block - 1] * width + g, b, (i + 1) * block)
            r.kv_cached = high
            self.events.kv_published(r, high * block)
        tail = min(shape.tail_of(r.prompt), r.known // unit * unit)
        column = tail // block
        if 0 < tail <= n and tail % block and column < len(r.kv[0]):
            for j, g in enumerate(shape.kv_groups):
                self._partial_key(r, r.kv[j][column], tail, g)

    def _publish_states(self, r: Live, n: int) -> None:
        block, pool = self.shape.state_block, self.pool
        low, high = r.state_cached, n // block
        kept = self._keep_columns(r, low, high) if high > low else []
        if high > low:
            r.state_cached = high
        if self.shape.align:
            self._publish_tail(r, n)
        for column in kept:
            row = r.states.get(column)
            if row is not None and (key := pool.key[row[0]]) is not None:
                self.now.add(key)

    def _keep_columns(self, r: Live, low: int, high: int) -> list[int]:
        """Key the real columns in ``low:high`` that the policy publishes."""
        real = [c for c in sorted(r.states) if low <= c < high]
        if not real:
            return real
        block, width, pool = self.shape.state_block, self.shape.num_groups, self.pool
        per_block = block // self.shape.unit
        replay, branch = self._reachable(r)
        for column in real:
            position = (column + 1) * block
            state = State(r.index, position, block, replay, branch)
            if not self.policy.publish(self.memory, state):
                self.events.state_declined(r, position)
                continue
            key = r.keys[(column + 1) * per_block - 1] * width
            row, groups = r.states[column], self.shape.state_groups
            if [pool.key[b] for b in row] == self.shape.no_keys:
                pool.put_fresh([key + g for g in groups], row, [position] * len(row))
            else:
                self._put_again(key, row, position)
            self.events.state_published(r, position)
        return real

    def _put_again(self, key: int, row: list[int], position: int) -> None:
        for g, b in zip(self.shape.state_groups, row, strict=True):
            if self.pool.key[b] is not None:
                self._forget(b)
            self.pool.put(key + g, b, position)

    def _reachable(self, r: Live) -> tuple[int, int]:
        """Replay boundary and branch point, rounded to the block whose end they select."""
        unit = self.shape.scheduler_block if self.shape.old else self.shape.hit_unit
        block = self.shape.state_block

        def rounded(x: int) -> int:
            return x // unit * unit // block * block

        return rounded(r.prompt - 1), rounded(r.branch) if r.branch else 0

    def _partial_key(
        self, r: Live, block: int, tokens: int, group: int, replace: bool = False
    ) -> int:
        key = r.keys[tokens // self.shape.unit - 1] * self.shape.num_groups + group
        pool = self.pool
        stale = not pool.holds(key, block) and pool.key[block] is not None
        if replace or (stale and pool.tokens[block] < tokens):
            self._forget(block)
        pool.put(key, block, tokens)
        return key

    def _forget(self, block: int) -> None:
        """Take every key from ``block``, which gets another one or none."""
        positions = self.pool.positions(block)
        for key in self.pool.drop(block):
            self.events.replaced(key, positions[key])

    def _publish_tail(self, r: Live, n: int) -> None:
        """Key the state exported from inside the chunk, or the one at the prompt's tail."""
        if r.checkpoint is not None:
            self._publish_checkpoint(r, *r.checkpoint)
            return
        block, pool = self.shape.state_block, self.pool
        if n <= 0 or n != self.shape.tail_of(r.prompt) or (self.shape.old and n % block == 0):
            return
        column = ceil_div(n, block) - 1
        row = r.states.get(column)
        if row is None or (not self.shape.old and pool.tokens[row[0]] == n):
            return
        state = State(r.index, n, block, n, 0)
        if not self.policy.publish(self.memory, state):
            return
        for j, g in enumerate(self.shape.state_groups):
            self.now.add(self._partial_key(r, row[j], n, g))
        self.events.state_published(r, n)
        if n % block:
            r.state_tail = (column, list(row))
            r.state_cached, r.room = column, 0

    def _publish_checkpoint(self, r: Live, position: int, column: int) -> None:
        row, block, pool = r.states[column], self.shape.state_block, self.pool
        mine = position == (r.prompt - 1) // self.shape.hit_unit * self.shape.hit_unit
        branch = position == r.branch
        state = State(r.index, position, block, position if mine else 0, position if branch else 0)
        keep = (mine or branch or position % block == 0) and self.policy.publish(self.memory, state)
        if not keep:
            for b in row:
                positions = pool.positions(b)
                for key in pool.unpublish(b):
                    self.events.replaced(key, positions[key])
            self.events.state_declined(r, position)
            return
        if pool.tokens[row[0]] == position:
            return
        for j, g in enumerate(self.shape.state_groups):
            self.now.add(self._partial_key(r, row[j], position, g, replace=True))
        self.events.state_published(r, position)
