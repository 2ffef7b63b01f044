"""vLLM's scheduler: who computes what in the next step.

Most decodes most of the time only add one token in a block they already hold. Such requests are
*quiet*: they are counted, not visited, until the step at which they next matter (a block
boundary, their last tokens). A heap says when. Everything else is *busy* and is visited in the
order of the running list, exactly as the engine does. A stretch without busy requests and without
a waiting request to try is one step with ``repeat``. Sources: specs/vllm, section 9.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from sim.step import Chunk, Step
from sim.vllm.cache_seam import Cache, Traffic
from sim.vllm.hit import Hit
from sim.vllm.options import VllmOptions
from sim.vllm.planned import Flight, Plan, admission
from sim.vllm.request import Live


class Scheduler:
    """Queues, budget and preemption over a ``Cache``."""

    def __init__(self, cache: Cache, options: VllmOptions) -> None:
        self.cache, self.options = cache, options
        # Tokens from an event to its last effect: states go a step later, or two if one is unread.
        self.after_block = 3 if options.async_scheduling else 2
        self.after_prompt = 3 if options.async_scheduling else 1
        self.running: list[Live] = []
        self.stamps: list[int] = []
        self.busy: list[Live] = []
        self.waiting: deque[Live] = deque()
        self.quiet: dict[int, Live] = {}
        self.quiet_context = 0
        self.wakes: list[tuple[int, int, Live]] = []
        self.flights: deque[Flight] = deque()
        self.tick = self.commits = self.index = self.next_stamp = self.pushed = 0

    # ---------------------------------------------------------------- quiet requests
    def _calm(self, r: Live) -> None:
        """Count ``r`` instead of visiting it, if nothing will happen to it for a while."""
        options = self.options
        if options.priority or r.stale or r.computed < r.quiet_from:
            return
        flying = len(self.flights)
        if r.in_flight != flying or (options.async_scheduling and r.promised != flying):
            return
        if not options.async_scheduling and r.known != r.computed:
            return
        last = min(r.target, options.max_model_len) - 1  # all its tokens are planned by then
        wake = min(self.cache.quiet_until(r.computed, self.after_block), last)
        if wake < r.computed + 2:
            return
        for flight in self.flights:
            if flight.busy.get(r) != (1, True):
                return
        for flight in self.flights:
            del flight.busy[r]
        r.quiet, r.tick0, r.commit0 = True, self.tick, self.commits
        self.quiet[r.index] = r
        self.quiet_context += r.computed - self.tick
        self.pushed += 1
        heapq.heappush(self.wakes, (self.tick + wake - r.computed, self.pushed, r))
        del self.busy[bisect_left(self.busy, r.stamp, key=_stamp)]

    def _rouse(self, r: Live) -> None:
        """Bring a quiet request's counts up to date and visit it again."""
        ticks, commits = self.tick - r.tick0, self.commits - r.commit0
        self.quiet_context -= r.computed - r.tick0
        r.computed += ticks
        r.known += commits
        r.in_flight += ticks - commits
        if self.options.async_scheduling:
            r.promised += ticks - commits
        r.quiet = False
        r.last_sample = self.index - 1
        del self.quiet[r.index]
        for flight in self.flights:
            assert flight.left == 1
            flight.busy[r] = (1, True)
        self.busy.insert(bisect_left(self.busy, r.stamp, key=_stamp), r)

    def _rouse_due(self) -> None:
        wakes = self.wakes
        while wakes and wakes[0][0] <= self.tick:
            tick, _, r = heapq.heappop(wakes)
            if r.quiet and tick >= r.tick0:
                self._rouse(r)

    # ---------------------------------------------------------------- one schedule call
    def plan(self) -> Step | None:
        """The next step with its ``repeat``, or None if no token can be computed now."""
        plan = self.schedule()
        if not plan.scheduled and not self.quiet and not plan.preempted:
            self.cache.end_step()
            return None
        step = self.advance(plan)
        self.settle(step)
        return step

    def schedule(self) -> Plan:
        """Decide the next step. The caller turns the plan into a ``Step``."""
        self.cache.begin_step(self.index)
        self._rouse_due()
        plan = Plan()
        count = len(self.running) + len(self.waiting)
        threshold = self.options.long_prefill_token_threshold
        if not self.options.old and count <= 1:
            threshold = 0
        budget = self._schedule_running(plan, self.options.max_num_batched_tokens, threshold)
        if not plan.preempted:
            self._schedule_waiting(plan, budget, threshold)
        return plan

    def _schedule_running(self, plan: Plan, budget: int, threshold: int) -> int:
        counted = i = 0
        ended = False
        while i < len(self.busy) and budget > 0:
            r = self.busy[i]
            before = bisect_left(self.stamps, r.stamp) - i
            if before > counted:
                paid = min(before - counted, budget)
                budget -= paid
                counted += paid
                if budget == 0:
                    break
            n = self._tokens_for(r, budget, threshold)
            if n == 0:
                i += 1
                continue
            budget, i, fits = self._fit(plan, r, n, budget, i)
            if not fits:
                if self.options.priority and not self.options.old:
                    continue
                ended = True
                break
            plan.scheduled[r] = n
            budget -= n
            i += 1
        rest = len(self.quiet) - counted
        if ended:
            return budget
        paid = min(rest, budget)
        if rest > paid:
            self._starve(rest - paid)
        return budget - paid

    def _starve(self, count: int) -> None:
        """The last ``count`` quiet requests of the running list get no token in this step."""
        order = sorted(self.quiet.values(), key=_stamp)
        for r in order[-count:]:
            self._rouse(r)

    def _tokens_for(self, r: Live, budget: int, threshold: int) -> int:
        options = self.options
        if r.promised > 0 and r.computed + 2 - r.promised >= r.target:
            return 0
        n = r.known + r.promised - r.computed
        if 0 < threshold < n:
            n = threshold
        n = min(n, budget, options.max_model_len - r.computed - 1)
        if n <= 0:
            return 0
        return self.cache.place(r, r.computed, r.computed + n) - r.computed

    def _fit(self, plan: Plan, r: Live, n: int, budget: int, i: int) -> tuple[int, int, bool]:
        """Allocate for ``r``, preempting as needed: the budget, index and outcome afterwards."""
        priority = self.options.priority
        while not self.cache.allocate(r, n, None):
            if priority:
                victim = max(self.running, key=lambda q: (q.priority, q.seq))
                at = self.busy.index(victim)
                i -= at < i
                budget += plan.scheduled.pop(victim, 0)
            else:
                victim = self.running[-1]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is r:
                return budget, i, False
        return budget, i, True

    def _leave(self, r: Live) -> None:
        if r.quiet:
            self._rouse(r)
        at = bisect_left(self.stamps, r.stamp)
        del self.stamps[at], self.running[at]
        del self.busy[bisect_left(self.busy, r.stamp, key=_stamp)]

    def _preempt(self, r: Live) -> None:
        self._leave(r)
        self.cache.free(r)
        r.status, r.stale = "preempted", r.in_flight
        r.lost, r.computed, r.promised = r.computed, 0, 0
        self.waiting.appendleft(r)

    def _schedule_waiting(self, plan: Plan, budget: int, threshold: int) -> None:
        options, cache = self.options, self.cache
        skipped: list[Live] = []
        while self.waiting and budget > 0 and len(self.running) < options.max_num_seqs:
            r = self._next_waiting()
            if r.stale:
                self.waiting.remove(r)
                skipped.append(r)
                continue
            hit = cache.lookup(r)
            r.branch = hit.branch
            n = r.known - hit.tokens
            if 0 < threshold < n:
                n = threshold
            if not options.enable_chunked_prefill and n > budget:
                break
            end = cache.place(r, hit.tokens, hit.tokens + min(n, budget))
            n = end - hit.tokens
            if n == 0 or not cache.allocate(
                r, n, hit, whole=options.reserve_full_isl, crowded=bool(self.running)
            ):
                break
            self._admit(plan, r, hit)
            plan.scheduled[r] = n
            budget -= n
        self.waiting.extendleft(reversed(skipped))

    def _next_waiting(self) -> Live:
        if not self.options.priority:
            return self.waiting[0]
        return min(self.waiting, key=lambda q: (q.priority, q.seq))

    def _admit(self, plan: Plan, r: Live, hit: Hit) -> None:
        self.waiting.remove(r)
        self.take_over(r)
        plan.admitted.append((r, hit, r.status == "preempted"))
        r.status = "running"
        r.computed = r.restored = hit.tokens
        r.quiet_from = r.known + self.after_prompt

    def take_over(self, r: Live) -> None:
        """Enter ``r``, admitted elsewhere, into the running list."""
        r.stamp = self.next_stamp
        self.next_stamp += 1
        self.running.append(r)
        self.stamps.append(r.stamp)
        self.busy.append(r)

    # ---------------------------------------------------------------- from plan to step
    def advance(self, plan: Plan) -> Step:
        """Count the plan's tokens as computed and describe it as a ``Step``."""
        cache, traffic = self.cache, self.cache.end_step()
        context = self.quiet_context + len(self.quiet) * (self.tick + 1)
        self.tick += 1
        fresh: list[int] = []
        step = Step(
            index=self.index,
            chunks=[],
            decodes=list(self.quiet),
            decode_context_tokens=context,
            state_copies=traffic.state_copies,
            kv_copied_tokens=traffic.kv_copied_tokens,
            admitted=[admission(r, hit, again) for r, hit, again in plan.admitted]
            if plan.admitted
            else (),
            preempted=[r.index for r in plan.preempted] if plan.preempted else (),
            fresh=fresh,
            paused=self._paused(plan),
            running=len(self.running),
            waiting=len(self.waiting),
            used_bytes=cache.used_bytes,
            cached_bytes=cache.cached_bytes,
        )
        flight = Flight(1, {})
        self.flights.append(flight)
        for r, n in plan.scheduled.items():
            flight.busy[r] = (n, self._compute(step, r, n, traffic, fresh))
        self.index += 1
        return step

    def _paused(self, plan: Plan) -> Sequence[int]:
        """Requests that sampled in the step before, are not over and have no token now."""
        before, scheduled = self.index - 1, plan.scheduled
        if len(scheduled) == len(self.busy):
            return ()
        return [
            r.index
            for r in self.busy
            if r.last_sample == before and r not in scheduled and not self._over(r)
        ]

    def _compute(self, step: Step, r: Live, n: int, traffic: Traffic, fresh: list[int]) -> bool:
        """Count ``n`` tokens of a busy request and add it to the step; whether it samples."""
        start = r.computed
        r.computed += n
        r.in_flight += n
        samples = r.computed >= r.known + r.promised
        if samples:
            if self.options.async_scheduling:
                r.promised += 1
            if r.last_sample != self.index - 1:
                fresh.append(r.index)
            r.last_sample = self.index
        if n == 1 and samples and start >= r.prompt and start != r.restored:
            step.decodes.append(r.index)
            step.decode_context_tokens += start + 1
        else:
            self._add_chunk(step, r, start, n, samples, traffic)
        return samples

    def _add_chunk(
        self, step: Step, r: Live, start: int, n: int, samples: bool, traffic: Traffic
    ) -> None:
        step.chunks.append(
            Chunk(
                r.index,
                start,
                n,
                samples,
                restored=start if start == r.restored else 0,
                slot_copies=int(r.index in traffic.restores),
                saves=traffic.saves.get(r.index, 0),
            )
        )

    def _over(self, r: Live) -> bool:
        """All tokens of ``r`` are on their way."""
        return r.known + r.promised >= min(r.target, self.options.max_model_len)

    def settle(self, step: Step) -> None:
        """After ``advance``: calm what can be, and say how long the step may repeat."""
        for r in list(self.busy):
            self._calm(r)
        if step.chunks or self.busy or len(step.decodes) != len(self.quiet):
            return
        full = len(self.running) >= self.options.max_num_seqs
        if self.quiet and (not self.waiting or full):
            while self.wakes and not (self.wakes[0][2].quiet and self.wakes[0][0] >= self.tick):
                heapq.heappop(self.wakes)
            step.repeat = max(1, self.wakes[0][0] - self.tick + 1)

    def repeat(self, count: int) -> None:
        """The last step is run ``count`` times in all."""
        self.tick += count - 1
        self.index += count - 1
        self.flights[-1].left = count
        self.cache.stamp_events(self.index - 1)

    # ---------------------------------------------------------------- reading back
    def commit(self, count: int) -> Sequence[Live]:
        """Read ``count`` repetitions of the oldest step; the requests that finished."""
        flight = self.flights[0]
        if count == flight.left and len(self.flights) == 1:
            self.commits += count - 1
            flight.left = count = 1
            self._rouse_due()  # whose last token this is: no plan comes before it is read
        flight.left -= count
        self.commits += count
        if flight.left:
            return ()
        self.flights.popleft()
        finished = []
        busy = sorted(flight.busy, key=_stamp) if len(flight.busy) > 1 else list(flight.busy)
        for r in busy:
            n, samples = flight.busy[r]
            if self._read(r, n, samples):
                finished.append(r)
        for r in finished:
            if r.status == "running":
                self._leave(r)
            else:
                self.waiting.remove(r)
        return finished

    def _read(self, r: Live, n: int, samples: bool) -> bool:
        r.in_flight -= n
        stale = r.stale > 0
        if stale:
            r.stale -= n
        if not samples:
            return False
        promised = r.promised > 0
        r.known += 1
        over = r.known >= min(r.target, self.options.max_model_len)
        if not stale and promised:
            r.promised -= 1
            if r.status == "running":
                self.cache.read_back(r)
        if over and r.status == "running":
            self.cache.free(r)
        return over

    @property
    def unfinished(self) -> int:
        """Requests in a queue."""
        return len(self.running) + len(self.waiting)


def _stamp(r: Live) -> int:
    return r.stamp
