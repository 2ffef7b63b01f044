"""The SGLang engine: its scheduler over its cache manager, as the replay loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.ledger import Ledger
from sim.policies.base import Base
from sim.policy import Policy, View
from sim.sglang.cache import SglangCache
from sim.sglang.content import content_of
from sim.sglang.options import SglangOptions
from sim.sglang.pools import EngineCrashError, pages
from sim.sglang.request import Live
from sim.sglang.scheduler import Batch, Scheduler
from sim.step import Admission, Chunk, Step
from sim.vllm.scheduled import refuse_unless_hosted
from traces.identity import Prefixes
from traces.trace import Trace

ASKS = ("place", "publish", "trim")


class SglangEngine:
    """Implements ``Engine``. Bytes are of one rank: ``kv_bytes_per_token`` of all attention
    layers, ``state_bytes`` of one active slot, ``int8_bytes`` of one int8 slot.

    Raises ``ValueError`` if the policy cannot be hosted by this version.
    """

    def __init__(
        self,
        trace: Trace,
        prefixes: Prefixes,
        policy: Policy,
        options: SglangOptions,
        ledger: Ledger | None = None,
        *,
        kv_bytes_per_token: int = 0,
        state_bytes: int = 0,
        int8_bytes: int = 0,
    ) -> None:
        name = f"sglang-{options.version}"
        refuse_unless_hosted(policy, name, ASKS)
        if options.tree == "mamba" and type(policy).trim is not Base.trim:
            raise ValueError(
                "this policy sheds states of a path, which MambaRadixCache never could: no release "
                "combined it with the path cap; use tree: unified"
            )
        if policy.layout(name).mode == "none":
            options = replace(options, radix_cache=False)
        self.options, self.prefixes = options, prefixes
        self.ledger = Ledger() if ledger is None else ledger
        self.kv_bytes_per_token, self.state_bytes = kv_bytes_per_token, state_bytes
        self.int8_bytes = int8_bytes
        self.depth = 2 if options.overlap else 1
        self.capacity_bytes = _capacity(options, kv_bytes_per_token, state_bytes, int8_bytes)
        view = View(name, state_bytes, kv_bytes_per_token, options.grid, self.capacity_bytes)
        self.cache = SglangCache(options, policy, policy.begin(view), self.ledger)
        self.scheduler = Scheduler(self.cache)
        self.index = 0
        self._prompt = trace.prompt_tokens.tolist()
        self._output = trace.output_tokens.tolist()
        self._sampled: Sequence[int] = ()

    # ---------------------------------------------------------------- the loop's questions
    def arrive(self, request: int) -> None:
        """Append to the waiting queue."""
        content = content_of(self.prefixes, request)
        root = self.cache.tree.root
        live = Live(request, self._prompt[request], self._output[request], content, root)
        self.scheduler.arrive(live)

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context, larger than the pool, or empty."""
        prompt, output = self._prompt[request], self._output[request]
        total, page = prompt + output, self.options.page_size
        if total > self.options.context_len:
            return f"{total} tokens, more than context_len {self.options.context_len}"
        if prompt < 1 or output < 1:
            return "an empty prompt or output"
        need, there = (pages(total, page) + 1) * page, self.options.kv_tokens // page * page
        return f"needs {need} tokens of KV, the pool has {there}" if need >= there else None

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None if nothing can be computed now."""
        self.cache.step = self.index
        batch = self.scheduler.plan()
        if batch is None and not self.scheduler.flights and self.scheduler.waiting.queue:
            # SGLang's loop goes round at once; the round before may have found the batch full
            # with requests that it only then saw finished.
            batch = self.scheduler.plan()
        if self.scheduler.aborted:
            request = self.scheduler.aborted[0].index
            raise EngineCrashError(f"request {request} was aborted: out of memory alone")
        if batch is None:
            return None
        step = self._decode_step(batch) if batch.requests is None else self._prefill_step(batch)
        self.index += 1
        step.repeat = self.scheduler.most_repeats()
        if step.repeat > 1:
            step.copies_at = self._boundaries(step.repeat)
        return step

    def take(self, step: Step, repeat: int) -> None:
        """Run the last planned step ``repeat`` times."""
        if repeat > 1:
            self.scheduler.repeat(repeat)
            self.index += repeat - 1
            self.cache.step = self.index - 1
        step.repeat = repeat

    def commit(self, step: Step) -> Sequence[int]:
        """Read the oldest step back."""
        return [r.index for r in self.scheduler.read(step.repeat)]

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        return self.scheduler.open

    # ---------------------------------------------------------------- steps
    def _base_step(self, batch: Batch) -> Step:
        scheduler = self.scheduler
        return Step(
            self.index,
            preempted=[r.index for r in batch.retracted],
            running=len(scheduler.running) + len(batch.requests or ()),
            waiting=len(scheduler.waiting.queue),
            used_bytes=self.used_bytes,
            cached_bytes=self.cached_bytes,
        )

    def _prefill_step(self, batch: Batch) -> Step:
        assert batch.requests is not None
        step = self._base_step(batch)
        step.chunks = [self._chunk(r, r is not batch.cut) for r in batch.requests]
        step.admitted = [
            Admission(r.index, r.prefix, r.matched, r.branch or 0, r.resumed, r.event, r.lost)
            for r in batch.admitted
        ]
        if self.cache.reuse and not self.cache.extra:
            step.state_copies = sum(c.samples for c in step.chunks)
        sampled = [c.request for c in step.chunks if c.samples]
        now = set(sampled)
        step.fresh = sampled
        step.paused = [r for r in self._sampled if r not in now]
        self._sampled = sampled
        return step

    def _chunk(self, r: Live, samples: bool) -> Chunk:
        restored = r.prefix if r.restoring else 0
        copies, r.restoring = int(r.restoring), False
        saves = int(r.track is not None)
        return Chunk(r.index, r.prefix, r.end - r.prefix, samples, restored, copies, saves)

    def _decode_step(self, batch: Batch) -> Step:
        running = self.scheduler.running
        step = self._base_step(batch)
        step.decodes = running.indices()
        step.decode_context_tokens = running.context_tokens()
        if self.cache.extra:
            step.state_copies = len(running.tracked(running.planned))
        if step.decodes is not self._sampled:
            before = set(self._sampled)
            step.fresh = [r for r in step.decodes if r not in before]
            self._sampled = step.decodes
        return step

    def _boundaries(self, repeat: int) -> dict[int, int]:
        """Tracked states copied in the repetitions after the first."""
        running = self.scheduler.running
        out: dict[int, int] = {}
        for residue, group in running.tracks.items() if self.cache.extra else ():
            ahead = (residue - running.planned - 1) % running.track + 1
            for i in range(ahead, repeat, running.track):
                out[i] = out.get(i, 0) + len(group)
        return out

    # ---------------------------------------------------------------- bytes and checks
    @property
    def used_bytes(self) -> int:
        """Bytes that are not free."""
        cache, o = self.cache, self.options
        kv = (o.kv_tokens // o.page_size * o.page_size - cache.kv_free) * self.kv_bytes_per_token
        int8 = ((o.int8_slots or 0) - cache.int8.free) * self.int8_bytes if cache.int8 else 0
        return kv + cache.states_held * self.state_bytes + int8

    @property
    def cached_bytes(self) -> int:
        """Bytes that the tree holds."""
        tree = self.cache.tree
        each = self.int8_bytes if self.options.int8 else self.state_bytes
        return tree.kv_tokens * self.kv_bytes_per_token + len(tree.states) * each

    def check(self) -> None:
        """Bytes are conserved: raises ``AssertionError`` unless every count adds up."""
        scheduler, running = self.scheduler, self.scheduler.running
        live = {r: running.committed(r) for r in running if not r.finished}
        for batch in scheduler.flights:
            for r in batch.requests or ():
                if not r.finished and not r.retracted:
                    live.setdefault(r, r.end)
        last = scheduler.last
        for r in (*((last.requests or ()) if last else ()), scheduler.cut):
            if r is not None and not r.finished and not r.retracted:
                live.setdefault(r, r.end)
        for _, epoch, r in running.due:
            if epoch == r.epoch and not r.finished and r not in live:
                live[r] = r.end + running.last(r) - r.joined
        self.cache.check(live.items())


def _capacity(o: SglangOptions, token_bytes: int, state_bytes: int, int8_bytes: int) -> int:
    """Both pools, the padding slots and the padding page included."""
    kv = (o.kv_tokens // o.page_size + 1) * o.page_size * token_bytes
    int8 = ((o.int8_slots or 0) + 1) * int8_bytes if o.int8 else 0
    return kv + (o.mamba_slots + 1) * state_bytes + int8
