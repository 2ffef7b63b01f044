"""vLLM's cache manager: what a request may reuse, what it holds, and what becomes a key.

One call of ``allocate`` goes through: whole-sequence check, release of states nobody will read
again, need against free blocks, hits touched, blocks taken group by group, keys registered
before the step runs. Sources: specs/vllm, sections 6 to 8.
"""

from __future__ import annotations

from sim.ledger import Ledger
from sim.policy import Limits, Memory, Policy, Prefill
from sim.vllm.cache_seam import Traffic
from sim.vllm.events import CacheEvents
from sim.vllm.geometry_types import Geometry
from sim.vllm.hit import Hit
from sim.vllm.keys import Keys
from sim.vllm.lookup import Lookup
from sim.vllm.options import VllmOptions
from sim.vllm.pool import BlockPool
from sim.vllm.request import Live
from sim.vllm.shape import shape_of
from sim.vllm.state_take import StateTake


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
        self.options, self.policy, self.memory = options, policy, memory
        self.geometry = geometry
        self.shape = shape_of(geometry, options, policy.layout(f"vllm-{options.version}"))
        self.events = CacheEvents(self.shape, ledger)
        self.pool = BlockPool(geometry.num_blocks, self.shape.caching, self.events.lost)
        self.lookup = Lookup(self.shape, self.pool, ledger).find
        self.keys = Keys(self.shape, self.pool, policy, memory, self.events)
        self.watermark_blocks = int(options.watermark * geometry.num_blocks)
        self.budget_tokens = options.largest_chunk
        self.copies: list[tuple[int, int, int]] = []
        self.traffic = Traffic()

    def begin_step(self, step: int) -> None:
        """A new schedule call: nothing was keyed in it yet."""
        self.events.step = step
        if self.keys.now:
            self.keys.now.clear()
        moved = self.traffic
        if moved.saves or moved.restores or moved.state_copies or moved.kv_copied_tokens:
            self.traffic = Traffic()

    def stamp_events(self, step: int) -> None:
        """From here on the ledger's events belong to ``step``."""
        self.events.step = step

    # ---------------------------------------------------------------- where a chunk ends
    def place(self, r: Live, start: int, end: int) -> int:
        """The policy's end of a chunk that may reach ``end``; ``start`` means wait."""
        shape, known = self.shape, r.known
        if not shape.align or (start >= r.prompt and start >= known - 1):
            return end  # past the end of prefill
        block, prefill_end = shape.block, max(r.prompt, known - 1)
        last = known if shape.old else known - 1
        position = (prefill_end - 1) // shape.hit_unit * shape.hit_unit
        exported = end >= prefill_end and shape.exportable(start, end, position)
        request = Prefill(r.index, r.prompt, known, prefill_end, r.branch)
        limits = Limits(
            block,
            shape.unit,
            position if exported else 0,
            shape.tail_of(r.prompt) if shape.fine else 0,
            self.budget_tokens,
            last // block * block,
        )
        return self.policy.place(self.memory, request, start, end, limits)[0]

    # ---------------------------------------------------------------- need
    def _checkpoint_for(
        self, r: Live, start: int, tokens: int, held: int
    ) -> tuple[int, int] | None:
        """Position and column of the state that this chunk exports, if it does."""
        shape = self.shape
        if shape.alignment is None or (not shape.dense and tokens < r.prefill_end):
            return None
        column = -(-tokens // shape.block) - 2
        if column <= (start - 1) // shape.block:
            return None
        position = (tokens - 1) // shape.hit_unit * shape.hit_unit
        if position <= 0 or column < 0 or not shape.exportable(start, tokens, position):
            return None
        if column < held and column in r.states:
            return None
        return position, column

    def _free_hits(self, hit: Hit) -> int:
        """Hit blocks that nobody holds; more than there are if the hit's state is only written
        in this very step."""
        if hit.states and self.pool.key[hit.states[0]] in self.keys.now:
            return self.pool.num_blocks + 1
        free_among = self.pool.free_among
        total = free_among(hit.states)
        for blocks in hit.kv:
            total += free_among(blocks)
        return total

    def _need(self, r: Live, tokens: int, hit: Hit | None, start: int, whole: bool) -> int:
        """Blocks that the request must take to reach ``tokens``, beside those of its hit."""
        total, shape = 0, self.shape
        if shape.kv_groups:
            held = len(r.kv[0]) if r.kv else 0
            if hit is not None and hit.tokens:
                held += len(hit.kv[0])
                if start % shape.kv_block:
                    total = len(shape.kv_groups)
            each = -(-tokens // shape.kv_block) - held
            if each > 0:
                total += len(shape.kv_groups) * each
        if shape.state_groups:
            total += len(shape.state_groups) * self._need_columns(r, tokens, hit, start, whole)
        return total

    def _need_columns(self, r: Live, tokens: int, hit: Hit | None, start: int, whole: bool) -> int:
        """Blocks in each group of states."""
        shape, spec = self.shape, self.options.num_speculative_blocks
        row = hit.states if hit is not None else None
        each = -(-tokens // shape.state_block) + spec - r.state_columns
        if row and hit is not None:
            each -= hit.column + 1
        if not shape.align:
            return max(each, 0)
        copy = 1 if (row and start % shape.block) or r.state_tail is not None else 0
        if copy:
            each = max(each, 0) + 1
        most = 1 + copy + (0 if r.started else spec)
        if shape.old:
            r.checkpoint = r.checkpoint if whole else None
            return most if each > 0 else each
        if not whole:
            r.checkpoint = checkpoint = self._checkpoint_for(r, start, tokens, r.state_columns)
        elif each > most:
            checkpoint = self._checkpoint_for(r, start, tokens, r.state_columns)
        else:
            checkpoint = None
        return min(each, most + (checkpoint is not None)) if each > 0 else each

    # ---------------------------------------------------------------- release
    def _release_read(self, r: Live, processed: int) -> None:
        """Release states that no step will read again, given ``processed`` finished tokens."""
        if processed <= 1 or len(r.states) < 2:  # the last one is the running state
            return
        block, shape = self.shape.state_block, self.shape
        last = min((processed - 1) // block, r.state_columns)
        if shape.old or not shape.align:
            gone = []
            for column in range(last - 1, -1, -1):
                if column not in r.states:
                    break
                gone.append(column)
            self._release_columns(r, gone)
            if not shape.align:
                return
        elif r.retired < last:
            gone = [c for c in sorted(r.states, reverse=True) if r.retired <= c < last]
            self._release_columns(r, gone)
            r.retired = last
        before = r.last_state
        if before is not None and before < -(-processed // block) - 1 and before in r.states:
            self._release_columns(r, [before])

    def _release_columns(self, r: Live, columns: list[int]) -> None:
        if len(columns) == 1:
            self.pool.release_each(r.states.pop(columns[0]))
        elif columns:
            rows = [r.states.pop(c) for c in columns]
            for blocks in zip(*rows, strict=True):
                self.pool.release(blocks)

    def free(self, r: Live) -> None:
        """Let go of everything, group by group, each from its last block to its first."""
        pool, rows = self.pool, [r.states[c] for c in sorted(r.states, reverse=True)]
        for is_state, groups in self.shape.runs:
            if not is_state:
                for _, j in groups if r.kv else ():
                    pool.release(r.kv[j][::-1])
            elif len(rows) == 1:
                pool.release_each([rows[0][j] for _, j in groups])
            else:
                for _, j in groups:
                    pool.release([row[j] for row in rows])
        r.forget_blocks()

    # ---------------------------------------------------------------- allocation
    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool:
        """Give ``r`` what it needs for ``n`` more tokens; False if the blocks are not there."""
        computed = r.computed
        if n == 1 and hit is None and computed < r.room:
            self._continue(r)
            return True
        start = computed
        limit, free = self.options.max_model_len, self.pool.num_free
        if hit is not None and hit.tokens:
            start += hit.tokens
            free -= self._free_hits(hit)
        if crowded and r.status != "running":
            free -= self.watermark_blocks
        if whole and self._need(r, min(r.known, limit), hit, start, True) > free:
            return False
        end = start + n
        tokens = min(end, limit)
        if len(r.states) > 1:
            before = self.pool.num_free
            self._release_read(r, max(0, start - r.in_flight))
            free += self.pool.num_free - before
        if self._need(r, tokens, hit, start, False) > free:
            return False
        if hit is not None and hit.tokens:
            self._adopt(r, hit, start)
        elif not r.kv:
            r.kv = [[] for _ in self.shape.kv_groups]
        self._take(r, tokens)
        self._count_saves(r, start, end)
        if self.shape.caching:
            self.keys.publish(r, min(end, r.known))
        r.room = self._room(r)
        return True

    def _room(self, r: Live) -> int:
        """How many tokens fit without a block for KV or for states."""
        shape, room = self.shape, self.options.max_model_len
        if r.state_tail is not None:
            return 0
        if shape.kv_groups:
            room = min(room, len(r.kv[0]) * shape.kv_block)
        if shape.state_groups:
            columns = r.state_columns - self.options.num_speculative_blocks
            room = min(room, columns * shape.state_block)
        return room

    def _continue(self, r: Live) -> None:
        """Compute one more token in the blocks that are held."""
        computed = r.computed
        if len(r.states) > 1:
            self._release_read(r, max(0, computed - r.in_flight))
        r.checkpoint = None  # no state is exported from inside a chunk of one token
        if self.shape.caching:
            self.keys.publish(r, min(computed + 1, r.known))

    def _count_saves(self, r: Live, start: int, end: int) -> None:
        """States that the chunk writes besides the one at its end."""
        if self.shape.mode == "all":
            inside = (end - 1) // self.shape.state_block - start // self.shape.state_block
        else:
            inside = int(self.shape.align and r.checkpoint is not None)
        if inside:
            self.traffic.saves[r.index] = inside

    def _adopt(self, r: Live, hit: Hit, start: int) -> None:
        """Hold the hit blocks, group by group in id order."""
        r.kv = hit.kv
        for _, is_state, j in self.shape.order:
            self.pool.touch([hit.states[j]] if is_state else hit.kv[j])
        if self.shape.kv_groups:
            r.kv_cached = len(hit.kv[0])
            if start % self.shape.kv_block:
                r.kv_tail = (start // self.shape.kv_block, [blocks[-1] for blocks in hit.kv])
                r.kv_cached = start // self.shape.kv_block
        if self.shape.state_groups:
            column = max(0, start - 1) // self.shape.state_block
            r.states = {column: list(hit.states)}
            r.state_columns = r.state_cached = column + 1
            if start % self.shape.state_block:
                r.state_tail = (start // self.shape.state_block, list(hit.states))
                r.state_cached = start // self.shape.state_block
            self.events.state_restored(r, start)

    def _take(self, r: Live, tokens: int) -> None:
        """Pop blocks for every group, in id order; neighbouring state groups at once."""
        shape = self.shape
        plan = StateTake(self, r, tokens) if shape.state_groups else None
        kv_columns = -(-tokens // shape.kv_block)
        if r.kv_tail is None and r.state_tail is None:
            self._take_at_once(r, plan, kv_columns)
        else:
            for is_state, groups in shape.runs:
                if not is_state:
                    self._take_kv(r, groups, kv_columns)
                elif plan is not None and not plan.idle:
                    plan.take(groups)
            r.kv_tail = None
        r.started = True
        if plan is not None and not plan.idle:
            plan.finish()

    def _take_at_once(self, r: Live, plan: StateTake | None, kv_columns: int) -> None:
        """All blocks of an allocation in one go, dealt out in id order."""
        shape = self.shape
        more = max(kv_columns - len(r.kv[0]), 0) if r.kv else 0
        each = len(plan.columns) if plan is not None else 0
        fresh = self.pool.take(more * len(shape.kv_groups) + each * len(shape.state_groups))
        rows, at = [] if plan is None else plan.taken, 0
        for is_state, groups in shape.runs:
            size = each if is_state else more
            for _, j in groups if size else ():
                if is_state:
                    rows.append(fresh[at : at + size])
                else:
                    r.kv[j] += fresh[at : at + size]
                at += size

    def _take_kv(self, r: Live, groups: tuple[tuple[int, int], ...], columns: int) -> None:
        for g, j in groups:
            table = r.kv[j]
            if r.kv_tail is not None:
                column, sources = r.kv_tail
                copy = self.pool.take(1)[0]
                table[column] = copy
                self.pool.ref[copy] += 1
                self.copies.append((g, sources[j], copy))
            if columns > len(table):
                table += self.pool.take(columns - len(table))

    def end_step(self) -> Traffic:
        """Let go of the sources and copies of this step's copies; what the step moves."""
        if self.copies:
            self.copies.sort(key=lambda c: c[0])
            self.pool.release([b for _, source, copy in self.copies for b in (source, copy)])
            groups = self.shape.kv_groups
            copied = sum(1 for group, _, _ in self.copies if group in groups)
            if copied:
                self.traffic.kv_copied_tokens = copied // len(groups) * self.shape.kv_block
            self.copies.clear()
        return self.traffic

    def read_back(self, r: Live) -> None:
        """A sampled token was read (async): register what that completes."""
        if self.shape.caching:
            self.keys.publish(r, r.computed - r.in_flight)

    def quiet_until(self, computed: int, margin: int) -> int:
        """The next count of computed tokens at which a decode may take, key or release a block;
        ``computed`` itself if the last such event is less than ``margin`` tokens ago."""
        nearest = 0
        for block in self.shape.blocks:
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
