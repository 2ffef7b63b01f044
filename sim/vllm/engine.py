"""The vLLM engine: scheduler and cache manager behind the ``Engine`` protocol."""

from __future__ import annotations

from collections.abc import Sequence

from sim.ledger import Ledger
from sim.policy import Policy, View
from sim.step import Step
from sim.vllm.cache import VllmCache
from sim.vllm.geometry_types import Geometry
from sim.vllm.options import VllmOptions
from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div
from sim.vllm.scheduler import Plan, Scheduler
from traces.identity import Prefixes
from traces.trace import Trace


class VllmEngine:
    """Raises ``ValueError`` if the policy cannot be hosted by this version."""

    def __init__(
        self,
        trace: Trace,
        prefixes: Prefixes,
        geometry: Geometry,
        policy: Policy,
        options: VllmOptions,
        ledger: Ledger | None = None,
    ) -> None:
        name = f"vllm-{options.version}"
        if name not in policy.engines:
            hosts = ", ".join(policy.engines)
            raise ValueError(f"this policy cannot run on {name}; it can on {hosts}")
        self.geometry, self.options = geometry, options
        self.ledger = Ledger() if ledger is None else ledger
        self.capacity_bytes = geometry.num_blocks * geometry.bytes_per_block
        self.depth = 2 if options.async_scheduling else 1
        view = View(
            engine=name,
            state_bytes=geometry.state_bytes,
            kv_bytes_per_token=0,
            block_tokens=geometry.block_tokens,
            capacity_bytes=self.capacity_bytes,
        )
        self.cache = VllmCache(geometry, options, policy, policy.begin(view), self.ledger)
        self.scheduler = Scheduler(self.cache, options)
        self.prefixes = prefixes
        self._prompt = trace.prompt_tokens.tolist()
        self._output = trace.output_tokens.tolist()
        self._priority = trace.priority.tolist()
        self._arrived = 0

    def live(self, request: int) -> Live:
        """The request as the engine keeps it."""
        keys = self.prefixes.grid(request, self.cache.unit) if self.cache.caching else []
        return Live(
            request,
            self._prompt[request],
            self._output[request],
            keys,
            self._priority[request],
            self._arrived,
        )

    def arrive(self, request: int) -> None:
        """Append to the waiting queue."""
        self.scheduler.waiting.append(self.live(request))
        self._arrived += 1

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context, or than the pool."""
        total = self._prompt[request] + self._output[request]
        if total > self.options.max_model_len:
            return f"{total} tokens, more than max_model_len {self.options.max_model_len}"
        if self._output[request] < 1 or self._prompt[request] < 1:
            return "an empty prompt or output"
        need = self.blocks_for(total)
        if need > self.geometry.num_blocks - 1:
            usable = self.geometry.num_blocks - 1
            return f"needs {need} blocks, the pool has {usable}"
        return None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a lone request of ``tokens`` tokens needs at its largest."""
        cache = self.cache
        kv = len(cache.kv_groups) * ceil_div(tokens, cache.kv_block)
        per_group = ceil_div(tokens, cache.state_block)
        if cache.mode == "align":
            per_group = min(per_group, 3)
        elif cache.mode == "none":
            per_group = 1
        return kv + len(cache.state_groups) * per_group

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None if no token can be computed now."""
        return self.scheduler.plan()

    def plan_even_if_empty(self) -> tuple[Plan, Step]:
        """One schedule call whatever comes of it, as recorded cases count steps."""
        plan = self.scheduler.schedule()
        return plan, self.scheduler.advance(plan)

    def take(self, step: Step, repeat: int) -> None:
        """Run the last planned step ``repeat`` times."""
        self.scheduler.repeat(repeat)
        step.repeat = repeat

    def commit(self, step: Step) -> Sequence[int]:
        """Read the oldest step back."""
        return [r.index for r in self.scheduler.commit(step.repeat)]

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        return self.scheduler.unfinished

    def check(self) -> None:
        """Blocks are free or held, and held as often as tables say."""
        pool = self.cache.pool
        pool.check()
        held = [0] * pool.num_blocks
        for r in self.scheduler.running:
            for blocks in (*r.kv, *r.states.values()):
                for b in blocks:
                    held[b] += 1
        for b in range(1, pool.num_blocks):
            assert held[b] == pool.ref[b], f"block {b}: {held[b]} tables, {pool.ref[b]} references"
