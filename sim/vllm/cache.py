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
from sim.vllm.pool import NULL, BlockPool
from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div
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
        self.copies: list[tuple[int, int, int]] = []
        self.traffic = Traffic()

    def begin_step(self, step: int) -> None:
        """A new schedule call: nothing was keyed in it yet."""
        self.stamp_events(step)
        self.keys.now.clear()
        if self.traffic.any:
            self.traffic = Traffic()

    def stamp_events(self, step: int) -> None:
        """From here on the ledger's events belong to ``step``."""
        self.events.step = step

    # ---------------------------------------------------------------- where a chunk ends
    def place(self, r: Live, start: int, end: int) -> int:
        """The policy's end of a chunk that may reach ``end``; ``start`` means wait."""
        if not self.shape.align or (start >= r.prompt and start >= r.known - 1):
            return end  # past the end of prefill
        block, unit = self.shape.block, self.shape.unit
        last = r.known if self.shape.old else r.known - 1
        tail = self.shape.tail_of(r.prompt) if self.shape.fine else 0
        position = (r.prefill_end - 1) // self.shape.hit_unit * self.shape.hit_unit
        exported = end >= r.prefill_end and self.shape.exportable(start, end, position)
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

    # ---------------------------------------------------------------- need
    def _checkpoint_for(
        self, r: Live, start: int, tokens: int, held: int
    ) -> tuple[int, int] | None:
        """Position and column of the state that this chunk exports, if it does."""
        prefill_end = 0 if self.shape.dense else r.prefill_end
        position = (tokens - 1) // self.shape.hit_unit * self.shape.hit_unit
        column = ceil_div(tokens, self.shape.block) - 2
        if position <= 0 or tokens < prefill_end or column < 0:
            return None
        if not self.shape.exportable(start, tokens, position):
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
        tail = bool(hit and hit.tokens and start % self.shape.kv_block)
        if self.shape.kv_groups:
            held = len(r.kv[0]) if r.kv else 0
            hits = hit.kv if hit else []
            for blocks in hits:
                total += self._free_among(blocks)
            found = len(hits[0]) if hits else 0
            each = max(ceil_div(tokens, self.shape.kv_block) - held - found, 0)
            total += len(self.shape.kv_groups) * (each + (1 if found and tail else 0))
        if self.shape.state_groups:
            total += self._need_states(r, tokens, hit, start, whole)
        return total

    def _need_states(self, r: Live, tokens: int, hit: Hit | None, start: int, whole: bool) -> int:
        row = hit.states if hit else []
        found = hit.column + 1 if hit and row else 0
        if row and self.pool.key[row[0]] in self.keys.now:
            return self.pool.num_blocks + 1
        columns = ceil_div(tokens, self.shape.state_block)
        spec = self.options.num_speculative_blocks
        each = columns + spec - found - r.state_columns
        groups = len(self.shape.state_groups)
        free = self._free_among(row)
        if not self.shape.align:
            return groups * max(each, 0) + free
        copy = bool(row and start % self.shape.block) or r.state_tail is not None
        if copy:
            each = max(each, 0) + 1
        checkpoint = self._checkpoint_for(r, start, tokens, r.state_columns)
        if not whole:
            r.checkpoint = checkpoint
        if each > 0:
            first = 0 if r.started else spec
            if self.shape.old:
                each = 1 + copy + first
            else:
                each = min(each, 1 + copy + (checkpoint is not None) + first)
        return groups * each + free

    # ---------------------------------------------------------------- release
    def _release_read(self, r: Live, processed: int) -> None:
        """Release states that no step will read again, given ``processed`` finished tokens."""
        if processed <= 1 or len(r.states) < 2:  # the last one is the running state
            return
        block = self.shape.state_block
        last = min((processed - 1) // block, r.state_columns)
        if self.shape.old or not self.shape.align:
            gone = []
            for column in range(last - 1, -1, -1):
                if column not in r.states:
                    break
                gone.append(column)
            self._release_columns(r, gone)
            if not self.shape.align:
                return
        elif r.retired < last:
            gone = [c for c in sorted(r.states, reverse=True) if r.retired <= c < last]
            self._release_columns(r, gone)
            r.retired = last
        before = r.last_state
        if before is not None and before < ceil_div(processed, block) - 1 and before in r.states:
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
        columns = sorted(r.states, reverse=True)
        single = r.states[columns[0]] if len(columns) == 1 else None
        for _, is_state, j in self.shape.order:
            if is_state:
                self.pool.release((single[j],) if single else [r.states[c][j] for c in columns])
            elif r.kv:
                self.pool.release(r.kv[j][::-1])
        r.forget_blocks()

    # ---------------------------------------------------------------- allocation
    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool:
        """Give ``r`` what it needs for ``n`` more tokens; False if the blocks are not there."""
        if n == 1 and hit is None and self._stays_inside(r):
            self._continue(r)
            return True
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
            r.kv = [[] for _ in self.shape.kv_groups]
        self._take(r, tokens)
        self._count_saves(r, start, end)
        if self.shape.caching:
            self.keys.publish(r, min(end, r.known))
        return True

    def _stays_inside(self, r: Live) -> bool:
        """Whether one more token needs no block, for KV or for states."""
        shape, tokens = self.shape, r.computed + 1
        columns = r.state_columns - self.options.num_speculative_blocks
        return (
            r.status == "running"
            and r.kv_tail is None
            and r.state_tail is None
            and r.started
            and (not shape.kv_groups or tokens <= len(r.kv[0]) * shape.kv_block)
            and (not shape.state_groups or tokens <= columns * shape.state_block)
            and tokens <= self.options.max_model_len
        )

    def _continue(self, r: Live) -> None:
        """Compute one more token in the blocks that are held."""
        self._release_read(r, max(0, r.computed - r.in_flight))
        r.checkpoint = None  # no state is exported from inside a chunk of one token
        if self.shape.caching:
            self.keys.publish(r, min(r.computed + 1, r.known))

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
        plan = StateTake(self, r, tokens) if self.shape.state_groups else None
        kv_columns = ceil_div(tokens, self.shape.kv_block)
        for is_state, groups in self.shape.runs:
            if not is_state:
                self._take_kv(r, groups, kv_columns)
            elif plan is not None and not plan.idle:
                plan.take(groups)
        r.kv_tail = None
        r.started = True
        if plan is not None:
            plan.finish()

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
                table.extend(self.pool.take(columns - len(table)))

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
