"""SGLang's scheduler: prefill before decode, one request in mid-prefill, overlap.

``plan`` decides a batch, ``read`` takes its outputs in; with overlap the next batch is planned
before the last one is read. Sources: specs/sglang-0.5.23, sections 4, 5, 11 and 12;
specs/sglang-0.5.18, sections 8, 9, 12 and 13.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.policy import Limits, Prefill
from sim.sglang.admission import CLIP, Admission, Ratio, Verdict
from sim.sglang.cache import SglangCache
from sim.sglang.queue import Waiting
from sim.sglang.request import Live
from sim.sglang.running import Running


@dataclass(slots=True)
class Batch:
    """A prefill batch with its requests, or (``requests`` None) a decode step of all running.

    ``cut`` is the request whose prefill goes on after this batch, ``first`` the batch's first."""

    requests: list[Live] | None = None
    cut: Live | None = None
    admitted: list[Live] = field(default_factory=list)
    retracted: list[Live] = field(default_factory=list)
    first: Live | None = None
    repeat: int = 1


class Scheduler:
    """Queues, batches and retraction over a ``SglangCache``.

    ``spent`` is called after whatever may evict, with the request it was done for."""

    def __init__(
        self, cache: SglangCache, spent: Callable[[Live | None], None] = lambda _: None
    ) -> None:
        self.spent = spent
        self.cache, self.options, self.rules = cache, cache.options, cache.rules
        self.waiting = Waiting(cache)
        self.running = Running(self.options.page_size, self.options.track_grid)
        self.ratio = Ratio()
        self.cut: Live | None = None
        self.last: Batch | None = None
        self.flights: deque[Batch] = deque()
        self.open = 0
        self.aborted: list[Live] = []

    # ---------------------------------------------------------------- planning
    def arrive(self, r: Live) -> None:
        """Append to the waiting queue."""
        self.waiting.queue.append(r)
        self.open += 1

    def plan(self) -> Batch | None:
        """The next batch, or None. Changes queues and cache even if it is None."""
        cut, running = self.cut, self.running
        if cut is not None and cut.end > cut.prefix:
            self.cache.checkpoint(cut)
            self.spent(None)
        self._merge_last()
        if not self.rules.older and running.exclude_finished():
            running.full = False
        batch = self._prefill() or self._decode()
        self.last = batch
        if batch is not None:
            self.flights.append(batch)
        return batch

    def _merge_last(self) -> None:
        last, running = self.last, self.running
        if last is None or last.requests is None:
            return
        out = (self.cut, last.cut)
        going_on = [r for r in last.requests if not (r.finished or r in out)]
        if len(going_on) < len(last.requests) or (going_on and not len(running)):
            running.full = False
        for r in going_on:
            running.join(r, r.base)

    # ---------------------------------------------------------------- prefill
    def _prefill(self) -> Batch | None:
        running, queue = self.running, self.waiting.queue
        if not self.rules.older and not len(running):
            running.full = False
        if (running.full or not queue) and self.cut is None:
            return None
        rows = self.options.running_limit - len(running)
        if (self._room(0) if self.rules.older else rows) <= 0 and self.cut is None:
            running.full = True
            return None
        self.waiting.put_in_order()
        admission = Admission(self.cache, map(self._coming, running), self.ratio.now)
        if self.cut is not None and not admission.add_running(self.cut):
            self.cut = None
        first = len(admission.batch)
        self._admit(admission)
        if not admission.batch:
            return None
        self.waiting.drop(admission.batch[first:])
        self.cut = admission.cut or self.cut
        if self.cut is not None:
            self.cut.middle += 1
        batch = Batch(admission.batch, self.cut, admission.batch[first:], first=admission.batch[0])
        self._prepare(batch)
        self.spent(batch.first)
        return batch

    def _room(self, held: int) -> int:
        """Requests that a batch may hold; ``held`` of them have a row already."""
        free = self.options.running_limit - self.cache.rows
        if not self.rules.older:
            free += held
        return min(self.options.running_limit - len(self.running), free)

    def _coming(self, r: Live) -> int:
        return 0 if r.finished else min(r.target - self.running.out(r), CLIP)

    def _admit(self, admission: Admission) -> None:
        cache, running, count = self.cache, self.running, len(self.running)
        cache.slots.set_aside(len(self.waiting.queue))
        for r in self.waiting.queue:
            if not self.rules.older and admission.verdict() is Verdict.OTHER:
                break
            if len(admission.batch) >= self._room(sum(x.row for x in admission.batch)):
                running.full = True
            if running.full:
                break
            cache.match_for_admission(r)
            verdict = admission.add(r, max(r.target - r.out, 0))
            added = bool(admission.batch) and admission.batch[-1] is r
            self.spent(r)
            if verdict is Verdict.CONTINUE:
                continue
            if verdict is Verdict.NO_TOKEN:
                running.full = self.rules.older or bool(admission.batch) or count > 0
            if not added:
                cache.reject(r)
            break
        cache.slots.give_back()

    def _prepare(self, batch: Batch) -> None:
        """Take memory for the chunks and decide which state each leaves."""
        assert batch.requests is not None
        self.cache.take_slots(batch.requests)
        self.cache.take_kv(batch.requests)
        for r in batch.requests:
            r.retracted = False
            r.base = r.out + 1
            if self.cache.extra:
                self._track(r)

    def _track(self, r: Live) -> None:
        """At most one state is exported from a chunk: on the grid, or at the branching length."""
        options, start = self.options, r.prefix
        length = r.end - start
        if length < options.grid:
            return
        tail = start + length // options.grid * options.grid
        step = options.chunk if self.rules.older else options.mamba_chunk
        beyond = r.end if start + length // step * step == tail else tail + 1
        branch = r.branch or 0
        reachable = start < branch < beyond and (branch - start) % options.chunk == 0
        inner = branch if reachable else 0
        limits = Limits(options.grid, options.page_size, inner, tail, 0, 0, single=True)
        asked = Prefill(r.index, r.prompt, r.fill, r.fill, inner)
        _, states = self.cache.policy.place(self.cache.memory, asked, start, r.end, limits)
        r.track = next((p for p in states if p in (tail, limits.inner)), None)

    # ---------------------------------------------------------------- decode
    def _decode(self) -> Batch | None:
        running, cache, page = self.running, self.cache, self.options.page_size
        if not len(running):
            return None
        before = len(running)
        complete = 0
        if self.options.overlap and not self.rules.overrun and self.flights:
            complete = running.exclude_complete()
        running.exclude_finished()
        if not len(running):
            running.full = False
            return None
        first = next(iter(running))
        step = running.planned + 1
        retracted: list[Live] = []
        if cache.make_room(running.crossing(step) * page):
            self.ratio.decay_steps(1)
        elif complete:
            running.full = False
            self.spent(first)
            return None
        else:
            retracted = self._retract(step)
        if len(running) < before:
            running.full = False
        if len(running):
            cache.take_decode_kv(len(running), running.crossing(step))
            running.planned = step
            if cache.lazy:
                self._take_spares(step)
        self.spent(first)
        if not len(running):
            return None
        return Batch(retracted=retracted, first=next(iter(running)))

    def _take_spares(self, step: int) -> None:
        """A second tracking slot for those that cross a boundary; none: the snapshot replaces
        the old one."""
        for r in self.running.tracked(step):
            if r.spare:
                continue
            if self.cache.slots.take():
                r.spare = r.swapped = True
            elif self.rules.void_in_place:
                r.track = None

    def _retract(self, step: int) -> list[Live]:
        """Send the requests with the fewest outputs back to the queue until a step fits."""
        running, cache, page = self.running, self.cache, self.options.page_size
        keep = sorted(running, key=lambda r: (running.out(r), -r.prompt), reverse=True)
        out: list[Live] = []
        while len(keep) > 1 and (not out or not cache.make_room(running.crossing(step) * page)):
            r = keep.pop()
            self._take_back(r, len(keep))
            out.append(r)
        if len(keep) <= 1 and not cache.make_room(running.crossing(step) * page):
            r = keep.pop()
            self._take_back(r, 0)
            r.aborted = r.finished = True
            self.aborted.append(r)
            self.open -= 1
        running.reorder(keep)
        self.waiting.queue += out
        outs = sum(running.out(r) for r in running)
        self.ratio.after_retraction(outs, sum(r.target for r in running), len(running))
        return out

    def _take_back(self, r: Live, left: int) -> None:
        running = self.running
        r.out, r.lost = running.out(r), running.committed(r)
        self.cache.release(r, r.lost)
        running.leave(r)
        self.cache.make_room(left * 20)
        r.forget(self.cache.tree.root)
        r.epoch, r.retracted, r.resumed = 0, True, True

    # ---------------------------------------------------------------- leaping
    def most_repeats(self) -> int:
        """How many decode steps like the last planned one come before anything else changes.

        It may end with a last token, and comes before an eviction, a lookup, a lazy snapshot and
        the reading of a prefill or of somebody's last token.
        """
        running, cache = self.running, self.cache
        batch = self.flights[-1]
        if batch.requests is not None or batch.retracted or self.cut is not None:
            return 1
        if self.waiting.queue and not running.full:
            return 1
        if running.unread_end() or any(f.requests is not None for f in self.flights):
            return 1
        now, page, count = running.planned, self.options.page_size, len(running)
        most = running.next_last() - now + 1
        if cache.lazy:
            most = min(most, 1 if running.tracked(now) else running.next_tracked())
        if page == 1:
            room = cache.kv_free // count
        else:
            room = (cache.kv_free // (count * page) - 1) * page
        return max(1, min(most, room + 1))

    def repeat(self, count: int) -> None:
        """The last planned decode step is taken ``count`` times."""
        more, running = count - 1, self.running
        self.cache.kv_free -= running.crossings(running.planned, more) * self.options.page_size
        running.planned += more
        self.ratio.decay_steps(more)
        self.flights[-1].repeat = count

    # ---------------------------------------------------------------- reading
    def read(self, count: int = 1) -> list[Live]:
        """Take in ``count`` steps of the oldest batch: the requests that finished, in order."""
        batch = self.flights[0]
        batch.repeat -= count
        if not batch.repeat:
            self.flights.popleft()
        if batch.requests is None:
            done = self._read_decode(count)
        else:
            done = self._read_prefill(batch.requests)
        self.open -= len(done)
        self.spent(batch.first)
        return done

    def _read_prefill(self, requests: list[Live]) -> list[Live]:
        done = []
        for r in requests:
            if (r.finished and r.middle <= 0) or r.retracted:
                continue
            if r.middle > 0:
                r.middle -= 1
                continue
            r.out += 1
            if r.out >= r.target:
                self._finish(r)
                done.append(r)
            else:
                self.cache.checkpoint(r)
        return done

    def _read_decode(self, count: int) -> list[Live]:
        running = self.running
        running.read += count
        done = running.finishing()
        if self.cache.lazy:
            for r in running.tracked(running.read):
                if not r.finished and r.joined < running.read and r not in done:
                    self._settle(r)
        for r in done:
            self._finish_decoding(r)
        return done

    def _settle(self, r: Live) -> None:
        """A lazy snapshot is complete: it is the one to donate, the other slot is free."""
        r.track = r.end + self.running.read - r.joined
        r.swapped = False
        if r.spare:
            r.spare = False
            self.cache.slots.free += 1

    def _finish_decoding(self, r: Live) -> None:
        running, grid = self.running, self.options.track_grid
        length = r.end + running.read - r.joined
        ahead = r in running.requests and running.planned > running.read
        void = self.cache.lazy and ahead and (length + 1) % grid == 0 and not r.swapped
        if self.cache.lazy:
            if length % grid == 0:
                self._settle(r)
        elif self.cache.extra and length // grid * grid > r.end:
            r.track = length // grid * grid
        self._finish(r, insert=not void)

    def _finish(self, r: Live, *, insert: bool = True) -> None:
        running = self.running
        committed = r.end + (running.last(r) - r.joined if r.epoch else 0)
        if r in running.requests:
            committed = running.committed(r)
            running.gone.append(r)
        r.out, r.finished = r.target, True
        if insert:
            self.cache.finish(r, committed)
        else:
            self.cache.release(r, committed)
