"""vLLM's cache manager: what a request may reuse, what it holds, and what becomes a key.

One call of ``allocate`` goes through: whole-sequence check, release of states nobody will read
again, need against free blocks, hits touched, blocks taken group by group, keys registered
before the step runs. Sources: specs/vllm, sections 6 to 8.
"""

from __future__ import annotations

from sim.ledger import Action, Cause, Kind, Ledger
from sim.policy import Limits, Memory, Policy, Prefill, State
from sim.vllm.geometry_types import Geometry
from sim.vllm.hit import Hit
from sim.vllm.options import VllmOptions
from sim.vllm.pool import NULL, BlockPool
from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div
from sim.vllm.state_take import StateTake
from sim.vllm.traffic import Traffic


class VllmCache:
    """Blocks, keys and tables of one engine; ``mode`` and ``dense`` are the policy's layout."""

    def __init__(
        self,
        geometry: Geometry,
        options: VllmOptions,
        policy: Policy,
        memory: Memory,
        ledger: Ledger,
    ) -> None:
        self.options, self.policy, self.memory, self.ledger = options, policy, memory, ledger
        self.geometry = geometry
        layout = policy.layout(f"vllm-{options.version}")
        kinds = [g.kind == "mamba" for g in geometry.groups]
        self.state_groups = [g for g, is_state in enumerate(kinds) if is_state]
        self.kv_groups = [g for g, is_state in enumerate(kinds) if not is_state]
        counters = {True: 0, False: 0}
        self.order: list[tuple[int, bool, int]] = []
        for g, is_state in enumerate(kinds):
            self.order.append((g, is_state, counters[is_state]))
            counters[is_state] += 1
        self.num_groups = len(kinds)
        self.caching = options.enable_prefix_caching and not (
            self.state_groups and layout.mode == "none"
        )
        self.mode = layout.mode if self.state_groups and self.caching else "none"
        self.align = self.mode == "align"
        self.dense = layout.dense
        self.old = options.old
        self.scheduler_block = geometry.scheduler_block_tokens
        self.unit = geometry.unit_tokens
        self.block = geometry.groups[0].block_tokens if self.caching else geometry.block_tokens
        self.state_block = (
            geometry.groups[self.state_groups[0]].block_tokens if self.state_groups else self.block
        )
        self.kv_block = (
            geometry.groups[self.kv_groups[0]].block_tokens if self.kv_groups else self.block
        )
        self.fine = self.align and self.unit < self.scheduler_block and self.num_groups > 1
        self.hit_unit = self.unit if self.fine else self.scheduler_block
        exports = self.align and not self.old
        self.checkpoint_alignment = geometry.checkpoint_alignment if exports else None
        self.watermark_blocks = int(options.watermark * geometry.num_blocks)
        self.pool = BlockPool(geometry.num_blocks, self.caching, self._lost)
        self.keyed_now: set[int] = set()
        self.copies: list[tuple[int, int, int]] = []
        self.traffic = Traffic()
        self.live_states: set[int] = set()
        self.step = 0

    # ---------------------------------------------------------------- ledger
    def _lost(self, key: int, tokens: int) -> None:
        """The last copy of ``key`` went under pressure."""
        prefix, group = divmod(key, self.num_groups)
        if self.kv_groups and group == self.kv_groups[0]:
            self.ledger.emit(
                self.step, Kind.KV, Action.DROPPED, prefix, tokens, cause=Cause.PRESSURE
            )
        elif group in self.state_groups and prefix in self.live_states:
            self.live_states.discard(prefix)
            self.ledger.emit(
                self.step, Kind.STATE, Action.DROPPED, prefix, tokens, cause=Cause.PRESSURE
            )

    def _state_event(
        self, action: Action, r: Live, position: int, cause: Cause = Cause.NONE
    ) -> None:
        prefix = r.keys[position // self.unit - 1]
        if action is Action.PUBLISHED:
            if prefix in self.live_states:
                return
            self.live_states.add(prefix)
        elif action is Action.DROPPED:
            self.live_states.discard(prefix)
        self.ledger.emit(self.step, Kind.STATE, action, prefix, position, r.index, cause)

    # ---------------------------------------------------------------- lookup
    def begin_step(self, step: int) -> None:
        """A new schedule call: nothing was keyed in it yet."""
        self.step = step
        self.keyed_now.clear()
        self.traffic = Traffic()

    def lookup(self, r: Live) -> Hit:
        """The longest usable prefix of ``r``. Pure: changes nothing."""
        if not self.caching:
            return Hit(event=len(self.ledger))
        longest = r.known - 1
        hit = Hit(kv=[[] for _ in self.kv_groups], event=len(self.ledger))
        matched = self._match_kv(r, longest, hit) if self.kv_groups else longest
        if not self.state_groups:
            hit.tokens = hit.matched = matched
            return hit
        hit.tokens = self._match_state(r, matched, hit)
        hit.matched = matched if self.kv_groups else hit.tokens
        keep = ceil_div(hit.tokens, self.block)
        for blocks in hit.kv:
            del blocks[keep:]
        hit.branch = matched if self.kv_groups and matched > hit.tokens else 0
        return hit

    def _blocks(self, prefix: int, groups: list[int]) -> list[int] | None:
        get, base = self.pool.get, prefix * self.num_groups
        out = []
        for g in groups:
            block = get(base + g)
            if block is None:
                return None
            out.append(block)
        return out

    def _match_kv(self, r: Live, longest: int, hit: Hit) -> int:
        per_block = self.block // self.unit
        count = min(longest // self.block, r.known // self.unit // per_block)
        keys, groups = r.keys, self.kv_groups
        n = 0
        if len(groups) == 1:
            where, width, group = self.pool.where, self.num_groups, groups[0]
            blocks = hit.kv[0]
            while n < count:
                found = where.get(keys[(n + 1) * per_block - 1] * width + group)
                if found is None:
                    break
                blocks.append(found if isinstance(found, int) else next(iter(found)))
                n += 1
        else:
            while n < count:
                row = self._blocks(keys[(n + 1) * per_block - 1], groups)
                if row is None:
                    break
                for blocks, block in zip(hit.kv, row, strict=True):
                    blocks.append(block)
                n += 1
        if not self.fine:
            return n * self.block
        top = min((n + 1) * per_block - 1, longest // self.unit, r.known // self.unit)
        for f in range(top - 1, n * per_block - 1, -1):
            row = self._blocks(keys[f], groups)
            if row is not None:
                for blocks, block in zip(hit.kv, row, strict=True):
                    blocks.append(block)
                return (f + 1) * self.unit
        return n * self.block

    def _match_state(self, r: Live, matched: int, hit: Hit) -> int:
        step = self.unit if self.fine else self.block
        per_step = step // self.unit
        top = matched // step
        if self.fine:
            top = min(top, r.known // self.unit)
        where, width, first = self.pool.where, self.num_groups, self.state_groups[0]
        for f in range(top, 0, -1):
            prefix = r.keys[f * per_step - 1]
            if prefix * width + first not in where:
                continue
            row = self._blocks(prefix, self.state_groups)
            if row is not None:
                hit.states, hit.column = row, (f * step - 1) // self.block
                return f * step
        return 0

    # ---------------------------------------------------------------- where a chunk ends
    def place(self, r: Live, start: int, end: int) -> int:
        """The policy's end of a chunk that may reach ``end``; ``start`` means wait."""
        if not self.align or start >= r.prefill_end:
            return end
        block, unit = self.block, self.unit
        last = r.known if self.old else r.known - 1
        tail = (r.prompt if self.old else r.prompt - 1) // unit * unit if self.fine else 0
        position = (r.prefill_end - 1) // self.hit_unit * self.hit_unit
        exported = end >= r.prefill_end and self._exportable(start, end, position)
        request = Prefill(r.index, r.prompt, r.known, r.prefill_end, r.branch)
        limits = Limits(
            block_tokens=block,
            unit_tokens=unit,
            inner=position if exported else 0,
            tail=tail,
            budget_tokens=self.options.largest_chunk,
            last_block=last // block * block,
        )
        placed, _ = self.policy.place(self.memory, request, start, end, limits)
        return placed

    def _exportable(self, start: int, end: int, position: int) -> bool:
        """Whether layers can export the state at ``position`` from inside ``start:end``."""
        alignment = self.checkpoint_alignment
        return (
            alignment is not None
            and start % self.unit == 0
            and ceil_div(end, self.block) - 2 > (start - 1) // self.block
            and start + self.unit <= position
            and start < position < end
            and (position - start) % alignment == 0
        )

    # ---------------------------------------------------------------- need
    def _checkpoint_for(
        self, r: Live, start: int, tokens: int, held: int
    ) -> tuple[int, int] | None:
        """Position and column of the state that this chunk exports, if it does."""
        prefill_end = 0 if self.dense else r.prefill_end
        position = (tokens - 1) // self.hit_unit * self.hit_unit
        column = ceil_div(tokens, self.block) - 2
        if position <= 0 or tokens < prefill_end or column < 0:
            return None
        if not self._exportable(start, tokens, position):
            return None
        if column < held and column in r.states:
            return None
        return position, column

    def _free_among(self, blocks: list[int]) -> int:
        ref = self.pool.ref
        return sum(1 for b in blocks if b != NULL and ref[b] == 0)

    def _need(self, r: Live, tokens: int, hit: Hit | None, start: int, whole: bool) -> int:
        """Blocks that the request must take to reach ``tokens``; more than the pool has if it
        would read a state that is only written in this very step."""
        total = 0
        tail = bool(hit and hit.tokens and start % self.kv_block)
        if self.kv_groups:
            held = len(r.kv[0]) if r.kv else 0
            hits = hit.kv if hit else []
            for blocks in hits:
                total += self._free_among(blocks)
            found = len(hits[0]) if hits else 0
            each = max(ceil_div(tokens, self.kv_block) - held - found, 0)
            total += len(self.kv_groups) * (each + (1 if found and tail else 0))
        if self.state_groups:
            total += self._need_states(r, tokens, hit, start, whole)
        return total

    def _need_states(self, r: Live, tokens: int, hit: Hit | None, start: int, whole: bool) -> int:
        row = hit.states if hit else []
        found = hit.column + 1 if hit and row else 0
        if row and self.pool.key[row[0]] in self.keyed_now:
            return self.pool.num_blocks + 1
        columns = ceil_div(tokens, self.state_block)
        spec = self.options.num_speculative_blocks
        each = columns + spec - found - r.state_columns
        groups = len(self.state_groups)
        free = self._free_among(row)
        if not self.align:
            return groups * max(each, 0) + free
        copy = bool(row and start % self.block) or r.state_tail is not None
        if copy:
            each = max(each, 0) + 1
        checkpoint = self._checkpoint_for(r, start, tokens, r.state_columns)
        if not whole:
            r.checkpoint = checkpoint
        if each > 0:
            first = 0 if r.started else spec
            if self.old:
                each = 1 + copy + first
            else:
                each = min(each, 1 + copy + (checkpoint is not None) + first)
        return groups * each + free

    # ---------------------------------------------------------------- release
    def _release_read(self, r: Live, processed: int) -> None:
        """Release states that no step will read again, given ``processed`` finished tokens."""
        if not self.state_groups or processed <= 1 or not r.states:
            return
        block = self.state_block
        last = min((processed - 1) // block, r.state_columns)
        if self.old or not self.align:
            gone = []
            for column in range(last - 1, -1, -1):
                if column not in r.states:
                    break
                gone.append(column)
            self._release_columns(r, gone)
            if not self.align:
                return
        elif r.retired < last:
            gone = [c for c in sorted(r.states, reverse=True) if r.retired <= c < last]
            self._release_columns(r, gone)
            r.retired = last
        before = r.last_state
        if before is not None and before < ceil_div(processed, block) - 1 and before in r.states:
            self._release_columns(r, [before])

    def _release_columns(self, r: Live, columns: list[int]) -> None:
        if not columns:
            return
        rows = [r.states.pop(c) for c in columns]
        for j in range(len(self.state_groups)):
            self.pool.release([row[j] for row in rows])

    def free(self, r: Live) -> None:
        """Let go of everything, group by group, each from its last block to its first."""
        columns = sorted(r.states, reverse=True)
        for _, is_state, j in self.order:
            if is_state:
                self.pool.release([r.states[c][j] for c in columns])
            elif r.kv:
                self.pool.release(r.kv[j][::-1])
        r.forget_blocks()

    # ---------------------------------------------------------------- allocation
    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool:
        """Give ``r`` what it needs for ``n`` more tokens; False if the blocks are not there."""
        start = r.computed + (hit.tokens if hit else 0)
        limit = self.options.max_model_len
        spare = self.watermark_blocks if crowded and r.status != "running" else 0
        if whole:
            need = self._need(r, min(r.known, limit), hit, start, True)
            if need + spare > self.pool.num_free:
                return False
        end = start + n
        tokens = min(end, limit)
        self._release_read(r, max(0, start - r.in_flight))
        if self._need(r, tokens, hit, start, False) + spare > self.pool.num_free:
            return False
        if hit is not None and hit.tokens:
            self._adopt(r, hit, start)
        elif not r.kv:
            r.kv = [[] for _ in self.kv_groups]
        self._take(r, tokens)
        self._count_saves(r, start, end)
        if self.caching:
            self.publish(r, min(end, r.known))
        return True

    def _count_saves(self, r: Live, start: int, end: int) -> None:
        """States that the chunk writes besides the one at its end."""
        if self.mode == "all":
            inside = (end - 1) // self.state_block - start // self.state_block
        else:
            inside = int(self.align and r.checkpoint is not None)
        if inside:
            self.traffic.saves[r.index] = inside

    def _adopt(self, r: Live, hit: Hit, start: int) -> None:
        """Hold the hit blocks, group by group in id order."""
        r.kv = hit.kv
        for _, is_state, j in self.order:
            self.pool.touch([hit.states[j]] if is_state else hit.kv[j])
        if self.kv_groups:
            r.kv_cached = len(hit.kv[0])
            if start % self.kv_block:
                r.kv_tail = (start // self.kv_block, [blocks[-1] for blocks in hit.kv])
                r.kv_cached = start // self.kv_block
        if self.state_groups:
            column = max(0, start - 1) // self.state_block
            r.states = {column: list(hit.states)}
            r.state_columns = r.state_cached = column + 1
            if start % self.state_block:
                r.state_tail = (start // self.state_block, list(hit.states))
                r.state_cached = start // self.state_block
            self.ledger.emit(
                self.step,
                Kind.STATE,
                Action.RESTORED,
                r.keys[start // self.unit - 1],
                start,
                r.index,
            )

    def _take(self, r: Live, tokens: int) -> None:
        """Pop blocks for every group, in id order."""
        plan = StateTake(self, r, tokens) if self.state_groups else None
        kv_columns = ceil_div(tokens, self.kv_block)
        for g, is_state, j in self.order:
            if is_state:
                if plan is not None and not plan.idle:
                    plan.take(g, j)
                continue
            table = r.kv[j]
            if r.kv_tail is not None:
                column, sources = r.kv_tail
                copy = self.pool.take(1)[0]
                table[column] = copy
                self.pool.ref[copy] += 1
                self.copies.append((g, sources[j], copy))
            missing = kv_columns - len(table)
            if missing > 0:
                table.extend(self.pool.take(missing))
        r.kv_tail = None
        if plan is not None:
            plan.finish()

    def end_step(self) -> Traffic:
        """Let go of the sources and copies of this step's copies; what the step moves."""
        if self.copies:
            self.copies.sort(key=lambda c: c[0])
            self.pool.release([b for _, source, copy in self.copies for b in (source, copy)])
            of_kv = sum(1 for group, _, _ in self.copies if group in self.kv_groups)
            if of_kv:
                self.traffic.kv_copied_tokens = of_kv // len(self.kv_groups) * self.kv_block
            self.copies.clear()
        return self.traffic

    # ---------------------------------------------------------------- keys
    def publish(self, r: Live, n: int) -> None:
        """Register what the first ``n`` tokens fill, before the step that writes it runs."""
        if self.num_groups > 1 and not self.fine:
            n = n // self.scheduler_block * self.scheduler_block
        if self.kv_groups:
            self._publish_kv(r, n)
        if self.state_groups:
            self._publish_states(r, n)

    def _publish_kv(self, r: Live, n: int) -> None:
        block, unit, width, pool = self.kv_block, self.unit, self.num_groups, self.pool
        low, high = r.kv_cached, n // block
        if high > low:
            per_block = block // unit
            for j, g in enumerate(self.kv_groups):
                table = r.kv[j]
                for i in range(low, high):
                    b = table[i]
                    if pool.key[b] is not None:
                        pool.drop(b)
                    pool.put(r.keys[(i + 1) * per_block - 1] * width + g, b, (i + 1) * block)
            r.kv_cached = high
            end = high * block
            self.ledger.emit(
                self.step, Kind.KV, Action.PUBLISHED, r.keys[end // unit - 1], end, r.index
            )
        if unit != block:
            last = r.prompt if self.old else r.prompt - 1
            tail = min(last // unit, r.known // unit) * unit
            column = tail // block
            if 0 < tail <= n and tail % block and column < len(r.kv[0]):
                for j, g in enumerate(self.kv_groups):
                    self._partial_key(r, r.kv[j][column], tail, g)

    def _publish_states(self, r: Live, n: int) -> None:
        block, pool = self.state_block, self.pool
        low, high = r.state_cached, n // block
        kept = self._keep_columns(r, low, high) if high > low else []
        if high > low:
            r.state_cached = high
        if self.align:
            self._publish_tail(r, n)
        for column in kept:
            row = r.states.get(column)
            if row is not None:
                self.keyed_now.update(k for b in row if (k := pool.key[b]) is not None)

    def _keep_columns(self, r: Live, low: int, high: int) -> list[int]:
        """Key the real columns in ``low:high`` that the policy publishes."""
        block, width, pool = self.state_block, self.num_groups, self.pool
        per_block = block // self.unit
        replay, branch = self._reachable(r)
        real = [c for c in sorted(r.states) if low <= c < high]
        for column in real:
            position = (column + 1) * block
            state = State(r.index, position, block, replay, branch)
            if not self.policy.publish(self.memory, state):
                self._state_event(Action.DROPPED, r, position, Cause.POLICY)
                continue
            key = r.keys[(column + 1) * per_block - 1] * width
            for j, g in enumerate(self.state_groups):
                b = r.states[column][j]
                if pool.key[b] is not None:
                    pool.drop(b)
                pool.put(key + g, b, position)
            self._state_event(Action.PUBLISHED, r, position)
        return real

    def _reachable(self, r: Live) -> tuple[int, int]:
        """Replay boundary and branch point, rounded to the block whose end they select."""
        unit = self.scheduler_block if self.old else self.hit_unit
        block = self.state_block

        def rounded(x: int) -> int:
            return x // unit * unit // block * block

        return rounded(r.prompt - 1), rounded(r.branch) if r.branch else 0

    def _partial_key(
        self, r: Live, block: int, tokens: int, group: int, replace: bool = False
    ) -> int:
        key = r.keys[tokens // self.unit - 1] * self.num_groups + group
        pool = self.pool
        stale = not pool.holds(key, block) and pool.key[block] is not None
        if replace or (stale and pool.tokens[block] < tokens):
            pool.drop(block)
        pool.put(key, block, tokens)
        return key

    def _publish_tail(self, r: Live, n: int) -> None:
        """Key the state exported from inside the chunk, or the one at the prompt's tail."""
        if r.checkpoint is not None:
            self._publish_checkpoint(r, *r.checkpoint)
            return
        unit, block, pool = self.unit, self.state_block, self.pool
        last = r.prompt if self.old else r.prompt - 1
        if n <= 0 or n % unit or n != last // unit * unit or (self.old and n % block == 0):
            return
        column = ceil_div(n, block) - 1
        row = r.states.get(column)
        if row is None or (not self.old and pool.tokens[row[0]] == n):
            return
        state = State(r.index, n, block, n, 0)
        if not self.policy.publish(self.memory, state):
            return
        for j, g in enumerate(self.state_groups):
            self.keyed_now.add(self._partial_key(r, row[j], n, g))
        self._state_event(Action.PUBLISHED, r, n)
        if n % block:
            r.state_tail = (column, list(row))
            r.state_cached = column

    def _publish_checkpoint(self, r: Live, position: int, column: int) -> None:
        row, block, pool = r.states[column], self.state_block, self.pool
        mine = position == (r.prompt - 1) // self.hit_unit * self.hit_unit
        branch = position == r.branch
        state = State(r.index, position, block, position if mine else 0, position if branch else 0)
        keep = (mine or branch or position % block == 0) and self.policy.publish(self.memory, state)
        if not keep:
            for b in row:
                pool.unpublish(b)
            self._state_event(Action.DROPPED, r, position, Cause.POLICY)
            return
        if pool.tokens[row[0]] == position:
            return
        for j, g in enumerate(self.state_groups):
            self.keyed_now.add(self._partial_key(r, row[j], position, g, replace=True))
        self._state_event(Action.PUBLISHED, r, position)

    def read_back(self, r: Live) -> None:
        """A sampled token was read (async): register what that completes."""
        if self.caching:
            self.publish(r, r.computed - r.in_flight)

    def quiet_until(self, computed: int, margin: int) -> int:
        """The next count of computed tokens at which a decode may take, key or release a block;
        ``computed`` itself if the last such event is less than ``margin`` tokens ago."""
        nearest = 0
        for block in {self.kv_block, self.state_block}:
            inside = computed % block
            if not margin <= inside <= block - 2:
                return computed
            until = computed + block - 1 - inside
            nearest = min(nearest or until, until)
        return nearest

    # ---------------------------------------------------------------- bytes
    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that requests hold."""
        held = self.pool.num_blocks - 1 - self.pool.num_free
        return held * self.geometry.bytes_per_block

    @property
    def cached_bytes(self) -> int:
        """Bytes of blocks that have a key."""
        return self.pool.keyed * self.geometry.bytes_per_block
