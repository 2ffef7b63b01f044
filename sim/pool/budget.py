"""The pool's cache: one budget in bytes for checkpoints, KV and running requests.

KV of one prefix is stored once, whoever computed it. KV stays while a request uses it or while a
checkpoint lies at or behind it: without one no lookup could ever use it, so it would only take
bytes from checkpoints that can be. New checkpoints go in first, then whatever is worth least goes
until all fits again, be it the new one. A request takes its KV ``RESERVE`` tokens ahead, so that
a decode asks for bytes only now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.ledger import Action, Cause, Kind, Ledger
from sim.policies.base import Base
from sim.policy import Limits, Memory, Policy, Prefill, State
from sim.pool.states import Checkpoint, States
from sim.pool.tree import Extents, Node, Tree
from sim.vllm.cache_seam import Traffic
from sim.vllm.hit import Hit
from sim.vllm.request import Live
from traces.coverage import Coverage
from traces.identity import Prefixes

RESERVE = 64
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one rank, and what else the cache must know of the engine. ``capacity`` None: no
    limit."""

    state: int
    token: int
    capacity: int | None
    largest_chunk: int = 8192
    max_model_len: int = 131_072
    watermark: float = 0.0


@dataclass(slots=True)
class Held:
    """What a running request holds: the path to ``node``, KV up to ``reserved`` tokens, and the
    checkpoint it ``resumed`` from, until one of its own takes that one's place."""

    extents: Extents
    node: Node
    reserved: int
    seen: int
    resumed: Checkpoint | None


class BudgetCache:
    """Implements ``Cache``. ``reuse`` False: running requests alone take bytes."""

    def __init__(
        self,
        prefixes: Prefixes,
        policy: Policy,
        ledger: Ledger,
        sizes: Sizes,
        *,
        reuse: bool = True,
        generation: Sequence[int] = (),
    ) -> None:
        self.prefixes, self.policy, self.ledger, self.sizes = prefixes, policy, ledger, sizes
        self.reuse, self.generation = reuse, generation
        self.memory: Memory = None
        self.capacity = UNLIMITED if sizes.capacity is None else sizes.capacity
        self.spare = int(sizes.watermark * (sizes.capacity or 0))
        kind = type(policy)
        self.chooses = kind.victim is not Base.victim
        self.trims = kind.trim is not Base.trim
        self.watched = kind.observe is not Base.observe
        self.tree = Tree(self._kv_gone)
        self.states = States(self.tree, self._tell)
        self.seen = Coverage(prefixes)
        self.extents: dict[int, Extents] = {}
        self.held: dict[int, Held] = {}
        self.asked: dict[int, Sequence[int]] = {}
        self.finished: set[int] = set()
        self.fresh: list[Checkpoint] = []
        self.inside: list[tuple[int, Checkpoint]] = []
        self.looked: tuple[Hit | None, Checkpoint | None, int] = (None, None, 0)
        self.ahead = self.step = self.now_ns = self.tick = 0
        self.cause = Cause.PRESSURE
        self.traffic = Traffic()

    # ---------------------------------------------------------------- steps
    def begin_step(self, step: int) -> None:
        """What the step before wrote can be read now."""
        self.stamp_events(step)
        self.traffic = Traffic()
        for state in self.fresh:
            state.fresh = False
        self.fresh.clear()

    def stamp_events(self, step: int) -> None:
        """From here on the ledger's events belong to ``step``."""
        self.step = step

    def end_step(self) -> Traffic:
        """What the step copies: restored states, and states saved inside chunks."""
        saves = self.traffic.saves
        for request, state in self.inside:
            if state.node.state is state:
                saves[request] = saves.get(request, 0) + 1
        self.inside.clear()
        return self.traffic

    # ---------------------------------------------------------------- lookup and placement
    def lookup(self, r: Live) -> Hit:
        """The deepest checkpoint on the request's path, short of its last token. Pure."""
        if not self.reuse:
            return Hit(event=len(self.ledger))
        matched, state = self.tree.find(self._extents(r.index), r.known - 1)
        hit = state.position if state is not None else 0
        branch = matched if matched > hit else 0
        found = Hit(tokens=hit, matched=matched, branch=branch, event=len(self.ledger))
        self.looked = (found, state, self.seen.common(r.index, r.known - 1))
        return found

    def _extents(self, request: int) -> Extents:
        if request not in self.extents:
            self.extents[request] = self.prefixes.extents(request)
        return self.extents[request]

    def place(self, r: Live, start: int, end: int) -> int:
        """The policy's end of the chunk; ``start`` if it asks to wait, or if the checkpoint to
        resume from is written in this very step."""
        if not self.reuse or (start >= r.prompt and start >= r.known - 1):
            self.asked.pop(r.index, None)
            return end
        held = self.held.get(r.index)
        if held is None and self.looked[1] is not None and self.looked[1].fresh:
            return start
        seen = held.seen if held is not None else self.looked[2]
        generation = self.generation[r.index] if self.generation else -1
        request = Prefill(r.index, r.prompt, r.known, r.prefill_end, r.branch, generation, seen)
        limits = Limits(1, 1, 0, 0, self.sizes.largest_chunk, r.known - 1, anywhere=True)
        placed, states = self.policy.place(self.memory, request, start, end, limits)
        self.asked[r.index] = states if states else ()
        return placed

    # ---------------------------------------------------------------- allocation
    def allocate(
        self, r: Live, n: int, hit: Hit | None, *, whole: bool = False, crowded: bool = True
    ) -> bool:
        """Give ``r`` what it needs for ``n`` more tokens; False if it does not fit beside what
        running requests use."""
        if r.index in self.held:
            return self._go_on(r, self.held[r.index], r.computed + n)
        assert hit is not None
        start, resumed = hit.tokens, self.looked[1] if hit.tokens else None
        reserved = self._rounded(start + n)
        longest = max(reserved, self._rounded(r.known)) if whole else reserved
        need = self.sizes.token * (longest - start) + self.sizes.state
        if resumed is not None:
            need += self.sizes.token * self.tree.unlocked(resumed.node)
            need += 0 if resumed.pinned else self.sizes.state
        if self.used_bytes + need + (self.spare if crowded else 0) > self.capacity:
            return False
        self._admit(r, hit, resumed, reserved)
        self._compute(r, self.held[r.index], start, start + n)
        return True

    def _rounded(self, tokens: int) -> int:
        return min(-(-tokens // RESERVE) * RESERVE, max(tokens, self.sizes.max_model_len))

    def _go_on(self, r: Live, held: Held, end: int) -> bool:
        reserved = self._rounded(end)
        more = max(0, reserved - held.reserved)
        if more and self.used_bytes + more * self.sizes.token > self.capacity:
            return False
        held.reserved += more
        self.ahead += more
        self._compute(r, held, r.computed, end)
        return True

    def _admit(self, r: Live, hit: Hit, resumed: Checkpoint | None, reserved: int) -> None:
        if r.status == "waiting":
            self.tick += 1
            if self.watched:
                self._observe("request admitted", self._as_state(r, hit.tokens))
            if self.reuse:
                self.seen.add(r.index, r.prompt)
        node = self.tree.root if resumed is None else resumed.node
        self.held[r.index] = Held(self._extents(r.index), node, reserved, self.looked[2], resumed)
        self.tree.lock(node)
        self.ahead += reserved - node.end
        if resumed is not None:
            self.states.use(resumed, self.tick, self.now_ns)
            self.states.refresh(node)
            self._event(Kind.STATE, Action.RESTORED, resumed.key, resumed.position, r.index)
            self.traffic.restores.add(r.index)

    def _compute(self, r: Live, held: Held, start: int, end: int) -> None:
        """Its KV is resident to ``end``, with checkpoints where the policy asked for them."""
        if self.reuse:
            known = min(end, r.known)
            own = None
            for position in sorted({*self.asked.pop(r.index, ())}):
                if held.node.end < position <= known:
                    self._cover(r, held, position)
                    made = self._offer(r, held, position)
                    if made is not None:
                        made.fresh = True
                        self.fresh.append(made)
                        if position < end:
                            self.inside.append((r.index, made))
                        own = made
            self._cover(r, held, known)
            self._make_room()
            if own is not None and own.node.state is own:
                self._let_go(held)
        else:
            self._make_room()

    def _cover(self, r: Live, held: Held, to: int) -> None:
        """The request's KV up to ``to`` tokens is in the tree."""
        if to <= held.node.end:
            return
        self.ahead -= to - held.node.end
        held.node = self.tree.extend(held.node, held.extents, to)
        for node in self.tree.touched:
            self.states.refresh(node)
        self.tree.touched.clear()
        self.states.refresh(held.node)
        self._event(Kind.KV, Action.PUBLISHED, held.node.last, to, r.index)

    def _offer(self, r: Live, held: Held, position: int) -> Checkpoint | None:
        """A checkpoint at the end of what ``held`` covers, if the policy wants it there and there
        is none yet."""
        node = held.node
        if node.state is not None:
            return None
        state = Checkpoint(
            r.index, position, 1, r.prompt - 1, r.branch, key=node.last, prompt_tokens=r.prompt,
            created=self.tick, used=self.tick, used_ns=self.now_ns, node=node,
        )  # fmt: skip
        if not self.policy.publish(self.memory, state):
            self._event(Kind.STATE, Action.DROPPED, node.last, position, r.index, Cause.POLICY)
            return None
        self._event(Kind.STATE, Action.PUBLISHED, node.last, position, r.index)
        self.states.add(state)
        if self.trims:
            self._trim(state)
        return state if node.state is state else None

    def _trim(self, state: Checkpoint) -> None:
        path: list[Checkpoint] = []
        at: Checkpoint | None = state
        while at is not None:
            path.append(at)
            at = at.above
        path.reverse()
        for one in list(self.policy.trim(self.memory, path)):
            chosen = self._chosen(one)
            self._drop(chosen, Cause.POLICY)

    # ---------------------------------------------------------------- pressure
    def _make_room(self) -> None:
        while self.total_bytes > self.capacity:
            victim: State | None = None
            if self.chooses:
                candidates = self.states.candidates
                victim = self.policy.victim(self.memory, candidates, self.now_ns)
            self._drop(
                self.states.oldest() if victim is None else self._chosen(victim), Cause.PRESSURE
            )

    def _chosen(self, state: State) -> Checkpoint:
        if not isinstance(state, Checkpoint) or state.place < 0:
            raise ValueError(
                f"the policy drops the state at {state.position} of request {state.request}, which "
                "is in use or not there; allowed are candidates"
            )
        return state

    def _drop(self, state: Checkpoint, cause: Cause) -> None:
        self._event(Kind.STATE, Action.DROPPED, state.key, state.position, -1, cause)
        self.cause = cause
        self.states.drop(state)

    def _let_go(self, held: Held) -> None:
        if held.resumed is not None:
            self.states.release(held.resumed)
            held.resumed = None

    # ---------------------------------------------------------------- the end of a request
    def read_back(self, r: Live) -> None:
        """Sampled tokens are covered when the request is visited next."""

    def free(self, r: Live) -> None:
        """Let go of everything; a request that has finished may leave its last state, whose bytes
        it held already."""
        held, asked = self.held[r.index], self.asked
        over = r.known >= min(r.target, self.sizes.max_model_len)
        asked.pop(r.index, None)
        last = min(r.known, r.target) - 1
        if over and self.reuse:
            self._cover(r, held, min(last, held.reserved))
            self.seen.add(r.index, last + 1)
            self._offer(r, held, held.node.end)
        del self.held[r.index]
        self.ahead -= held.reserved - held.node.end
        self._let_go(held)
        self.cause = Cause.ENGINE if over else Cause.PRESSURE
        self.states.refresh(self.tree.unlock(held.node))
        if over:
            self.extents.pop(r.index, None)
            self.finished.add(r.index)
            if self.watched:
                self._observe("request finished", self._as_state(r, last))

    def quiet_until(self, computed: int, margin: int) -> int:
        """A decode needs bytes when it has used up what it took ahead."""
        return computed if computed % RESERVE == 0 else -(-computed // RESERVE) * RESERVE

    # ---------------------------------------------------------------- telling
    def _as_state(self, r: Live, position: int) -> State:
        return State(r.index, position, 1, r.prompt - 1, r.branch, prompt_tokens=r.prompt)

    def _tell(self, event: str, state: State) -> None:
        if self.watched:
            self.policy.observe(self.memory, event, state)

    _observe = _tell

    def _event(
        self,
        kind: Kind,
        action: Action,
        key: int,
        position: int,
        request: int,
        cause: Cause = Cause.NONE,
    ) -> None:
        self.ledger.emit(self.step, kind, action, key, position, request, cause)

    def _kv_gone(self, node: Node) -> None:
        self._event(Kind.KV, Action.DROPPED, node.last, node.end, -1, self.cause)

    # ---------------------------------------------------------------- bytes
    @property
    def total_bytes(self) -> int:
        """Everything that lies in the pool: states, KV, and KV taken ahead."""
        states = len(self.held) + self.states.count
        return states * self.sizes.state + (self.tree.tokens + self.ahead) * self.sizes.token

    @property
    def used_bytes(self) -> int:
        """What requests use; everything else can go."""
        states = len(self.held) + self.states.pinned
        return states * self.sizes.state + (self.tree.locked_tokens + self.ahead) * self.sizes.token

    @property
    def cached_bytes(self) -> int:
        """How full the pool is."""
        return self.total_bytes

    def check(self) -> None:
        """Raise ``AssertionError`` unless bytes, locks and checkpoints agree with the tree."""
        self.tree.check()
        self.states.check()
        locks: dict[Node, int] = {}
        readers: dict[Checkpoint, int] = {}
        ahead = 0
        for held in self.held.values():
            node: Node | None = held.node
            while node is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
            ahead += held.reserved - held.node.end
            if held.resumed is not None:
                readers[held.resumed] = readers.get(held.resumed, 0) + 1
        assert ahead == self.ahead, f"{self.ahead} tokens taken ahead counted, {ahead} held"
        self._check_users(locks, readers)
        assert self.total_bytes <= self.capacity, f"{self.total_bytes} bytes of {self.capacity}"

    def _check_users(self, locks: dict[Node, int], readers: dict[Checkpoint, int]) -> None:
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            assert node.locks == locks.get(node, 0), f"{node.locks} locks at {node.end}"
            if node.state is not None:
                assert node.state.readers == readers.get(node.state, 0)
            stack.extend(node.children.values())
