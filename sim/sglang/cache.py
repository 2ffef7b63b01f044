"""The cache manager: what a request takes from the pools, and what it leaves in the tree.

Sources: specs/sglang-0.5.23, sections 3 to 8 and 10; specs/sglang-0.5.18, sections 3 to 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.ledger import Action, Cause, Kind, Ledger
from sim.policies.base import Base
from sim.policy import Memory, Policy, State
from sim.sglang.options import SglangOptions
from sim.sglang.pools import EngineCrashError, Slots, pages
from sim.sglang.request import Live
from sim.sglang.rules import rules_of
from sim.sglang.tree import Node, Tree


class SglangCache:
    """``inserted`` is told of each insert: (request, length, already there, outcome)."""

    def __init__(
        self, options: SglangOptions, policy: Policy, memory: Memory, ledger: Ledger
    ) -> None:
        self.options, self.policy, self.memory, self.ledger = options, policy, memory, ledger
        self.rules = rules_of(options.version, options.tree)
        self.page = options.page_size
        self.tree = Tree(self.page, self.rules, self._dropped)
        self.kv_free = options.kv_tokens // self.page * self.page
        self.slots = Slots(options.mamba_slots)
        self.int8 = Slots(options.int8_slots or 0) if options.int8 else None
        self.reuse = options.radix_cache
        self.extra = options.strategy != "no_buffer" and self.reuse
        self.lazy = options.strategy == "extra_buffer_lazy" and self.reuse
        self.tracking = options.tracking_slots if self.reuse else 0
        self.trims = type(policy).trim is not Base.trim
        self.policy_dropped = 0
        self.step = 0
        self.rows = 0
        self.cause = Cause.PRESSURE
        self.inserts: list[tuple[Live, int, int, str, str, int]] | None = None

    def _dropped(self, node: Node, with_kv: bool) -> None:
        if self.ledger.on:
            if with_kv:
                self._event(Kind.KV, Action.DROPPED, node.last, node.end, -1, Cause.PRESSURE)
            if not with_kv or node.state:
                self._event(Kind.STATE, Action.DROPPED, node.last, node.end, -1, self.cause)

    def _event(
        self, kind: Kind, action: Action, key: int, position: int, request: int, cause: Cause
    ) -> None:
        self.ledger.emit(self.step, kind, action, key, position, request, cause)

    # ---------------------------------------------------------------- lookup
    def match_for_admission(self, r: Live) -> None:
        """Look ``r`` up short of its last token and take a slot for the state it resumes from.

        Changes the tree (splits, recency) and may evict a state.
        """
        r.event = len(self.ledger)
        best = self.match_and_split(r, max(0, r.fill - 1))
        r.branch = self._hint(r.matched, best, r.deepest)
        r.protected = r.prefix
        if best.state:
            if not r.has_slot:
                self._take_for_restore(best)
                r.has_slot = True
            r.restoring = True

    def match_waiting(self, r: Live) -> None:
        """What ordering the waiting queue by matches does to a request."""
        best = self.match_and_split(r, r.fill)
        hint = self._hint(r.matched, best, r.deepest)
        if hint is not None:
            r.branch = hint

    def match_and_split(self, r: Live, limit: int) -> Node:
        """Look ``r`` up within ``limit`` tokens; the node it could resume from."""
        if not self.reuse:
            return self.tree.root
        deepest, best = self.tree.match_and_split(r.content, limit, r.fill)
        r.deepest = deepest
        r.matched, r.prefix, r.node = deepest.end, best.end, best
        return best

    def touch(self, r: Live) -> None:
        """Refresh what a waiting request matches."""
        if self.reuse:
            self.tree.match_and_split(r.content, r.fill, r.fill)

    def _hint(self, matched: int, best: Node, deepest: Node) -> int | None:
        if not self.reuse:
            return None
        if self.rules.hint_beyond_hit:
            hint = matched // self.options.grid * self.options.grid
            return hint if hint > best.end else None
        hint = matched // self.options.chunk * self.options.chunk
        return hint if deepest is not best and hint else None

    def _take_for_restore(self, best: Node) -> None:
        if self.slots.take():
            return
        lock = self.tree.lock(best)
        self.evict_states(1)
        taken = self.slots.take()
        self.tree.unlock(lock)
        if not taken:
            raise EngineCrashError("Can not alloc mamba cache")

    def reject(self, r: Live) -> None:
        """The request is not admitted in this pass: its slot goes back."""
        r.restoring = False
        if r.has_slot:
            self.slots.free += 1
            r.has_slot = False

    # ---------------------------------------------------------------- pools
    def evict_kv(self, tokens: int) -> None:
        """Evict until ``tokens`` more are free, or nothing is left."""
        if tokens > 0 and self.reuse:
            before = len(self.tree.states)
            self.kv_free += self.tree.evict_kv(tokens)
            self._free_states(before - len(self.tree.states))

    def evict_states(self, count: int) -> None:
        """Evict ``count`` states."""
        if count > 0 and self.reuse:
            states, tokens = self.tree.evict_states(count)
            self.kv_free += tokens
            self._free_states(states)

    def _free_states(self, count: int) -> None:
        (self.slots if self.int8 is None else self.int8).free += count

    def make_room(self, tokens: int) -> bool:
        """Evict until ``tokens`` of KV are free; whether they are."""
        self.evict_kv(tokens - self.kv_free)
        return self.kv_free >= tokens

    def take_slots(self, batch: Sequence[Live]) -> None:
        """Slots for the requests of a prefill batch that have none."""
        need = sum(not r.has_slot for r in batch)
        need += self.tracking * sum(not r.row for r in batch)
        ahead = need
        if self.rules.headroom:
            factor = self.rules.headroom - self.lazy if self.reuse else 1
            ahead = factor * len(batch)
        self.evict_states(ahead - self.slots.free)
        if need > self.slots.free:
            raise EngineCrashError("Not enough space for mamba cache")
        self.slots.free -= need
        for r in batch:
            r.has_slot = True
            if not r.row:
                r.row = True
                r.slots = self.tracking
                self.rows += 1

    def take_kv(self, batch: Sequence[Live]) -> None:
        """KV for the chunks of a prefill batch."""
        tokens = sum(r.end - r.prefix for r in batch)
        if self.page == 1:
            self._take_kv(tokens, tokens)
            return
        taken = sum(pages(r.end, self.page) - pages(r.prefix, self.page) for r in batch)
        self._take_kv(tokens + len(batch) * self.page, taken * self.page)

    def take_decode_kv(self, count: int, crossing: int) -> None:
        """KV for one decode step of ``count`` requests, ``crossing`` of which begin a page."""
        if count * self.page > self.kv_free:
            self.make_room(count * self.page)
        self._take_kv(0, crossing * self.page)

    def _take_kv(self, asked: int, taken: int) -> None:
        self.make_room(asked)
        if taken > self.kv_free:
            raise EngineCrashError(f"Out of memory: {taken} tokens of KV, {self.kv_free} are free")
        self.kv_free -= taken

    # ---------------------------------------------------------------- leaving states
    def checkpoint(self, r: Live) -> None:
        """A running request inserts what its last chunk computed, with the tracked state."""
        length = r.track if self.extra else r.end
        if not self.reuse or length is None or not self._published(r, self._floor(length)):
            self._note(r, 0, 0, "none", "prefill", r.end)
        else:
            self._donate(r, self._floor(length))
        r.prefix = r.end
        r.track = None

    def _published(self, r: Live, length: int) -> bool:
        """Whether the policy lets the state be reused; the tree takes no KV without it."""
        state = State(r.index, length, self.options.grid, length, r.branch or 0)
        if self.policy.publish(self.memory, state):
            return True
        if self.ledger.on and length:
            key = r.content.id(length)
            self._event(Kind.STATE, Action.DROPPED, key, length, r.index, Cause.POLICY)
        return False

    def _floor(self, length: int) -> int:
        return length // self.page * self.page

    def _donate(self, r: Live, length: int) -> None:
        if self.extra or self.int8 is None:
            self._take_for_donation(r)
        if self.int8 is not None:
            self._take_int8()
            self.slots.free += self.extra
        node, already, exists = self._insert(r, length)
        if exists:
            self._free_states(1)
        self._note(r, length, already, "dup" if exists else "stored", "prefill", r.end)
        if self.rules.match_again:
            self.tree.match_and_split(r.content, length, length)
        assert r.lock is not None
        self.tree.unlock(r.lock)
        r.lock = self.tree.lock(node, state=not self.options.skip_decode_lock)
        r.node, r.protected = node, length

    def _take_for_donation(self, r: Live) -> None:
        if self.slots.take():
            return
        if self.lazy and self.rules.lock_tombstones and r.lock is not None:
            self.tree.unlock_state(r.lock)
        self.evict_states(1)
        if not self.slots.take():
            raise EngineCrashError("Can not alloc mamba cache")

    def _take_int8(self) -> None:
        assert self.int8 is not None
        if self.int8.take():
            return
        self.evict_states(1)
        if not self.int8.take():
            raise EngineCrashError("Can not alloc int8 mamba checkpoint slot")

    def _insert(self, r: Live, length: int) -> tuple[Node, int, bool]:
        node, already, exists = self.tree.insert(r.content, length)
        self.kv_free += max(0, already - r.protected)
        if self.ledger.on and length:
            self._event(Kind.KV, Action.PUBLISHED, node.last, length, r.index, Cause.NONE)
            if not exists:
                self._event(Kind.STATE, Action.PUBLISHED, node.last, length, r.index, Cause.NONE)
        if not exists:
            self._trim(r, node)
        return node, already, exists

    def _trim(self, r: Live, tail: Node) -> None:
        """Drop what the policy sheds from the path of a new state."""
        if not self.trims:
            return
        nodes = self.tree.holders(tail)
        path = [self._state(r, node, tail) for node in nodes]
        where = {state.position: node for state, node in zip(path, nodes, strict=True)}
        self.cause = Cause.POLICY
        for state in self.policy.trim(self.memory, path):
            if state.pinned:
                raise ValueError(f"trim names the pinned state at {state.position}")
            self.tree.drop_state(where[state.position])
            self._free_states(1)
            self.policy_dropped += 1
        self.cause = Cause.PRESSURE

    def _state(self, r: Live, node: Node, tail: Node) -> State:
        pinned = (
            node is tail
            or node.state_locks > 0
            or len(node.children) != 1
            or self.tree.evictable_leaf(node)
        )
        return State(r.index, node.end, self.options.grid, 0, 0, pinned=pinned)

    # ---------------------------------------------------------------- the end of a request
    def finish(self, r: Live, committed: int) -> None:
        """The request is done: its last tracked state goes to the tree, the rest is freed."""
        if not self.reuse:
            self._release(r, committed, donated=False)
            return
        length = self._floor((r.track or 0) if self.extra else committed)
        if self.int8 is not None:
            self._take_int8()
        if length and not self._published(r, length):
            length = 0
        exists, already = True, 0
        if length or self.rules.insert_empty:
            _, already, exists = self._insert(r, length)
            outcome = "none" if not length else "dup" if exists else "stored"
            self._note(r, length, already, outcome, "finish", committed)
            if length:
                r.protected = max(r.protected, length)
        else:
            self._note(r, 0, 0, "none", "finish", committed)
        if exists and self.int8 is not None:
            self._free_states(1)
        self._release(r, committed, donated=not exists and self.int8 is None)

    def release(self, r: Live, committed: int) -> None:
        """Free everything of ``r``; the tree keeps what earlier checkpoints put there."""
        self._release(r, committed, donated=False)

    def _release(self, r: Live, committed: int, *, donated: bool) -> None:
        held = pages(committed, self.page) - r.protected // self.page
        self.kv_free += held * self.page
        self.slots.free += 1 + r.slots + r.spare - donated
        self.rows -= 1
        r.has_slot = r.row = r.spare = False
        r.slots = 0
        if r.lock is not None:
            self.tree.unlock(r.lock)
            r.lock = None

    @property
    def states_held(self) -> int:
        """Active slots that are taken, by requests and by the tree."""
        return self.options.mamba_slots - self.slots.free

    def check(self, live: Iterable[tuple[Live, int]]) -> None:
        """Every token and slot is free, in the tree, or held by one of the ``live`` requests."""
        self.tree.check()
        private = slots = 0
        for r, committed in live:
            private += pages(committed, self.page) - r.protected // self.page
            slots += r.has_slot + r.slots + r.spare
        total = self.options.kv_tokens // self.page * self.page
        there = self.kv_free + self.tree.kv_tokens + private * self.page
        assert there == total, f"{there} tokens of KV accounted for, the pool has {total}"
        cached = len(self.tree.states)
        slots += self.slots.free + self.slots.group + (cached if self.int8 is None else 0)
        assert slots == self.options.mamba_slots, f"{slots} slots accounted for"
        if self.int8 is not None:
            assert self.int8.free + cached == (self.options.int8_slots or 0)

    def _note(
        self, r: Live, length: int, already: int, outcome: str, kind: str, up_to: int
    ) -> None:
        if self.inserts is not None:
            self.inserts.append((r, length, already, outcome, kind, up_to))
