"""What an engine with vLLM's scheduler is, whatever its cache."""

from __future__ import annotations

from collections.abc import Sequence

from sim.ledger import Ledger
from sim.policies.base import Base
from sim.policy import Policy
from sim.step import Step
from sim.vllm.cache_seam import Cache
from sim.vllm.options import VllmOptions
from sim.vllm.planned import Plan
from sim.vllm.request import Live
from sim.vllm.scheduler import Scheduler
from traces.trace import Trace


class ScheduledEngine:
    """The ``Engine`` protocol but for ``check``, on a cache manager."""

    def __init__(
        self, trace: Trace, cache: Cache, options: VllmOptions, ledger: Ledger, capacity_bytes: int
    ) -> None:
        self.options, self.ledger, self.capacity_bytes = options, ledger, capacity_bytes
        self.depth = 2 if options.async_scheduling else 1
        self.scheduler = Scheduler(cache, options)
        self._prompt = trace.prompt_tokens.tolist()
        self._output = trace.output_tokens.tolist()
        self._priority = trace.priority.tolist()
        self._arrived = 0

    def keys_of(self, request: int) -> list[int]:
        """Prefix ids of the request's units; none where the cache needs none."""
        return []

    def arrive(self, request: int) -> None:
        """Append to the waiting queue."""
        self.scheduler.waiting.append(
            Live(
                request,
                self._prompt[request],
                self._output[request],
                self.keys_of(request),
                self._priority[request],
                self._arrived,
            )
        )
        self._arrived += 1

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context, or empty."""
        total = self._prompt[request] + self._output[request]
        if total > self.options.max_model_len:
            return f"{total} tokens, more than max_model_len {self.options.max_model_len}"
        if self._output[request] < 1 or self._prompt[request] < 1:
            return "an empty prompt or output"
        return None

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


def refuse_unless_hosted(policy: Policy, engine: str, asks: Sequence[str]) -> None:
    """Raise ``ValueError`` if the policy does not name ``engine`` among its engines, or answers a
    question that this engine never ``asks``: it would be another policy there."""
    if engine not in policy.engines:
        hosts = ", ".join(policy.engines) or "none"
        raise ValueError(f"this policy cannot run on {engine}; it can on {hosts}")
    for question in ("trim", "victim", "observe"):
        own = getattr(type(policy), question) is not getattr(Base, question)
        if own and question not in asks:
            raise ValueError(
                f"this policy has a {question} of its own, and {engine} never asks it "
                f"(it asks {', '.join(asks)}); pool asks everything"
            )
