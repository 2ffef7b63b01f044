"""Judges steps and ledger events against the naive model."""

from __future__ import annotations

from collections.abc import Sequence

from sim.check.hosts import Facts
from sim.check.naive import Naive, Names, Work
from sim.check.violation import fail, require
from sim.ledger import Action, Cause, Kind, Ledger
from sim.step import Admission, Chunk, Step
from traces.identity import Prefixes
from traces.trace import Trace


class Judge:
    """Hears of every planned step and of what finished; raises ``Violation``."""

    def __init__(self, trace: Trace, prefixes: Prefixes, facts: Facts, ledger: Ledger) -> None:
        self.facts, self.ledger = facts, ledger
        self.naive = Naive(Names(trace, prefixes), facts.block)
        self.prompt = trace.prompt_tokens.tolist()
        self.total = (trace.prompt_tokens + trace.output_tokens).tolist()
        self.locks: dict[int, tuple[int, int]] = {}
        self.expected: dict[int, int] = {}
        self.fresh: dict[int, tuple[int, int]] = {}
        self.at = self.step = 0

    # ---------------------------------------------------------------- steps
    def planned(self, step: Step, capacity_bytes: int) -> None:
        """A step was planned; the ledger holds what that did to the cache."""
        self.step = step.index
        if not self.facts.locks:
            self.locks.clear()
        for r in step.preempted:
            self._stop(r)
        self._size(step, capacity_bytes)
        chunks = {c.request: c for c in step.chunks}
        admitted = {a.request for a in step.admitted}
        if self.facts.ahead:
            self._compute_all(step, admitted)
        for a in step.admitted:
            self._events(a.event)
            self._admission(a, chunks.get(a.request))
        self._events(len(self.ledger))
        self._check_fresh()
        for r, position in self.expected.items():
            fail("hit", f"request {r} resumes at {position}, and no state was restored")
        if not self.facts.ahead:
            self._compute_all(step, admitted)

    def _compute_all(self, step: Step, admitted: set[int]) -> None:
        """What the step computes, apart from first chunks: those follow their admissions."""
        for chunk in step.chunks:
            if chunk.request not in admitted:
                self._compute(chunk)
        self._decodes(step)

    def read(self, finished: Sequence[int]) -> None:
        """The oldest step was read."""
        self._events(len(self.ledger))
        self._check_fresh()
        for r in finished:
            work = self._work(r)
            short = self.total[r] - 1 - work.furthest
            require(short <= 0, "finish", f"request {r} finished {short} tokens early")
            self._stop(r)

    def _stop(self, r: int) -> None:
        self._work(r).running = False
        self.locks.pop(r, None)

    def _work(self, r: int) -> Work:
        return self.naive.work.setdefault(r, Work())

    def _size(self, step: Step, capacity: int) -> None:
        used, cached, facts = step.used_bytes, step.cached_bytes, self.facts
        for what, size in (("used", used), ("cached", cached)):
            fits = size >= 0 and (size <= capacity or not capacity)
            require(fits, "bytes", f"step {step.index}: {size} bytes {what}, capacity {capacity}")
        if facts.budget:
            told = f"step {step.index} computes {step.tokens} tokens, allowed {facts.budget}"
            require(step.tokens <= facts.budget, "work", told)
        if facts.seats:
            told = f"step {step.index} runs {step.running} requests, allowed {facts.seats}"
            require(step.running <= facts.seats, "work", told)

    def _compute(self, chunk: Chunk) -> None:
        r, work = chunk.request, self._work(chunk.request)
        end = chunk.start + chunk.tokens
        told = f"request {r} computes {chunk.start} to {end}, it is at {work.computed}"
        require(chunk.start == work.computed and chunk.tokens > 0, "work", told)
        require(end <= self.total[r], "work", f"request {r} computes to {end} of {self.total[r]}")
        self.naive.compute(r, chunk.start, end)
        work.compute(chunk.start, end, chunk.saves)

    def _decodes(self, step: Step) -> None:
        context = sum(self._work(r).computed + 1 for r in step.decodes)
        told = f"step {step.index}: decodes attend to {context}, not {step.decode_context_tokens}"
        require(step.decode_context_tokens == context, "work", told)
        for r in step.decodes:
            work = self._work(r)
            require(work.running, "work", f"request {r} decodes, but does not run")
            self.naive.compute(r, work.computed, work.computed + step.repeat)
            work.decode(step.repeat)

    # ---------------------------------------------------------------- lookups
    def _admission(self, a: Admission, chunk: Chunk | None) -> None:
        r, hit, naive = a.request, a.hit, self.naive
        work = self._work(r)
        longest = max(self.prompt[r] - 1, work.furthest)
        oracle = naive.shared(r, longest)
        told = f"request {r}: hit {hit}, matched {a.matched}, oracle hit {oracle}"
        require(hit >= 0, "order", told)
        require(hit <= oracle, "hit", f"{told}: it reaches past what anybody computed")
        require(hit <= a.matched <= oracle, "order", told)
        if hit:
            self._real(r, hit)
        work.begin(hit)
        if hit:
            self.locks[r] = (naive.names.ids[r][hit], hit)
            if self.facts.tells_restored and not self._is_restored(r, hit):
                self.expected[r] = hit
        if chunk is not None:
            told = f"request {r} has a hit of {hit}, and its first chunk resumes at"
            require(chunk.restored == hit, "hit", f"{told} {chunk.restored}")
            self._compute(chunk)

    def _real(self, r: int, hit: int) -> None:
        naive, key = self.naive, self.naive.names.ids[r][hit]
        if not self.facts.everywhere:
            since = naive.states.get(key)
            if since is None:
                fail("hit", f"request {r} resumes at {hit}, where no state is published")
            told = f"request {r} resumes at {hit} from a state that this very step writes"
            require(since < self.step + (not self.facts.ahead), "hit", told)
        gone = naive.missing_kv(r, hit)
        require(not gone, "hit", f"request {r} resumes at {hit}; its KV at {gone} is not resident")

    def _is_restored(self, r: int, hit: int) -> bool:
        """Whether the ledger told of the restored state before the lookup was told."""
        log, i = self.ledger, self.at - 1
        while i >= 0 and log.step[i] == self.step:
            if log.action[i] == Action.RESTORED and log.request[i] == r:
                return log.position[i] == hit
            i -= 1
        return False

    # ---------------------------------------------------------------- events
    def _events(self, to: int) -> None:
        while self.at < to:
            self._event(self.at)
            self.at += 1

    def _event(self, i: int) -> None:
        log = self.ledger
        key, position, r = log.key[i], log.position[i], log.request[i]
        action, state = log.action[i], log.kind[i] == Kind.STATE
        if r >= 0:
            own = self.naive.names.ids[r]
            right = 0 < position < len(own) and own[position] == key
            told = f"an event of request {r} at {position} has another prefix's key"
            require(right, "state" if state else "kv", told)
        if action == Action.PUBLISHED:
            (self._state_published if state else self._kv_published)(r, key, position)
        elif action == Action.RESTORED:
            self._restored(r, position)
        elif action == Action.DROPPED:
            self._dropped(state, key, position, log.cause[i])

    def _state_published(self, r: int, key: int, position: int) -> None:
        if r >= 0:
            self.fresh[key] = (r, position)
        self.naive.states[key] = self.step

    def _check_fresh(self) -> None:
        """States published and not withdrawn in the same breath were left where they say."""
        for key, (r, position) in self.fresh.items():
            if key in self.naive.states:
                work = self._work(r)
                told = f"request {r} publishes a state at {position}; none was left there"
                require(work.has_left(position), "state", f"{told}, it is at {work.computed}")
        self.fresh.clear()

    def _kv_published(self, r: int, key: int, position: int) -> None:
        own = self.naive.names
        there = own.of[r][position] in self.naive.computed
        require(there, "kv", f"request {r} publishes KV up to {position}, which nobody computed")
        block, work = self.facts.block, self._work(r)
        if position % block:
            work.parts.add(position)
        else:
            work.kv = max(work.kv, position)
        self.naive.kv.update(own.ids[r][block : position + 1 : block])

    def _restored(self, r: int, position: int) -> None:
        expected = self.expected.pop(r, None)
        if expected is not None:
            told = f"request {r} has a hit of {expected}, but the state at {position} is restored"
            require(expected == position, "hit", told)

    def _dropped(self, state: bool, key: int, position: int, cause: int) -> None:
        naive, what = self.naive, "the state" if state else "KV"
        if cause == Cause.PRESSURE:
            there = key in naive.states if state else key in naive.kv or position % naive.block
            told = f"{what} at {position} is evicted, but it is not there"
            require(bool(there) or self.facts.everywhere, "bytes", told)
            self._unlocked(state, key, position)
        if state:
            naive.states.pop(key, None)
        else:
            naive.kv.discard(key)

    def _unlocked(self, state: bool, key: int, position: int) -> None:
        if state:
            users = [r for r, lock in self.locks.items() if lock == (key, position)]
        else:
            users = self.naive.users(key, position)
        what = "the state" if state else "KV"
        told = f"{what} at {position} is evicted, request {users[:1]} uses it"
        require(not users, "locked", told)
