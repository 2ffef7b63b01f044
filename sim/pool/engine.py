"""The pool engine behind the ``Engine`` protocol; without a budget, it hosts ``oracle``."""

from __future__ import annotations

from collections.abc import Sequence

from sim.ledger import Ledger
from sim.policy import Policy
from sim.pool.cache import ExactCache
from sim.step import Step
from sim.vllm.options import VllmOptions
from sim.vllm.request import Live
from sim.vllm.scheduler import Scheduler
from traces.identity import Prefixes
from traces.trace import Trace


class PoolEngine:
    """Raises ``ValueError`` for a policy that does not name ``pool`` among its engines."""

    def __init__(
        self,
        trace: Trace,
        prefixes: Prefixes,
        policy: Policy,
        options: VllmOptions,
        ledger: Ledger | None = None,
        *,
        kv_bytes_per_token: int = 0,
        state_bytes: int = 0,
    ) -> None:
        if "pool" not in policy.engines:
            hosts = ", ".join(policy.engines)
            raise ValueError(f"this policy cannot run on pool; it can on {hosts}")
        self.options = options
        self.ledger = Ledger() if ledger is None else ledger
        self.depth = 2 if options.async_scheduling else 1
        self.capacity_bytes = 0
        self.cache = ExactCache(prefixes, policy, self.ledger, kv_bytes_per_token, state_bytes)
        self.scheduler = Scheduler(self.cache, options)
        self._prompt = trace.prompt_tokens.tolist()
        self._output = trace.output_tokens.tolist()
        self._priority = trace.priority.tolist()
        self._arrived = 0

    def arrive(self, request: int) -> None:
        """Append to the waiting queue."""
        prompt, output = self._prompt[request], self._output[request]
        live = Live(request, prompt, output, [], self._priority[request], self._arrived)
        self.scheduler.waiting.append(live)
        self._arrived += 1

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context."""
        total = self._prompt[request] + self._output[request]
        if total > self.options.max_model_len:
            return f"{total} tokens, more than max_model_len {self.options.max_model_len}"
        if self._output[request] < 1 or self._prompt[request] < 1:
            return "an empty prompt or output"
        return None

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None if no token can be computed now."""
        return self.scheduler.plan()

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
        """What is covered is counted."""
        assert self.cache.tokens >= 0
