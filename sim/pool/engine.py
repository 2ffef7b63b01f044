"""The pool engine: vLLM's scheduler over a token-exact index with one budget in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.ledger import Ledger
from sim.policy import Policy, View
from sim.pool.budget import RESERVE, BudgetCache, Sizes
from sim.pool.cache import ExactCache
from sim.pool.rehearsal import rehearse
from sim.step import Step
from sim.vllm.options import VllmOptions
from sim.vllm.scheduled import ScheduledEngine, refuse_unless_hosted
from traces.identity import Prefixes
from traces.trace import Trace

MODES = ("exact", "none")

ASKS = ("place", "publish", "trim", "victim", "observe")


class PoolEngine(ScheduledEngine):
    """``capacity_bytes`` None: no budget. A policy whose layout is ``exact`` and dense (the
    oracle) has a state at every token and never a budget. ``flops`` are those of a token and of a
    pair of tokens in attention, ``layers`` the number of state and attention layers.

    Raises ``ValueError`` for a policy that does not name ``pool`` among its engines.
    """

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
        capacity_bytes: int | None = None,
        flops: tuple[float, float] = (0.0, 0.0),
        layers: tuple[int, int] = (0, 0),
    ) -> None:
        refuse_unless_hosted(policy, "pool", ASKS)
        layout = policy.layout("pool")
        if layout.mode not in MODES:
            raise ValueError(
                f"layout is {layout.mode!r}; the pool hosts {' and '.join(MODES)}; the nearest is "
                "'exact'"
            )
        ledger = Ledger() if ledger is None else ledger
        self.everywhere = layout.mode == "exact" and layout.dense
        self.policy = policy
        self.cache: ExactCache | BudgetCache
        if self.everywhere:
            capacity_bytes = None
            self.cache = ExactCache(prefixes, policy, ledger, kv_bytes_per_token, state_bytes)
            self.cache.reuse = options.enable_prefix_caching
        else:
            self.sizes = Sizes(
                state_bytes, kv_bytes_per_token, capacity_bytes, options.largest_chunk,
                options.max_model_len, options.watermark,
            )  # fmt: skip
            self.cache = BudgetCache(
                prefixes, policy, ledger, self.sizes,
                reuse=layout.mode == "exact" and options.enable_prefix_caching,
                generation=trace.generation_prompt_tokens.tolist(),
            )  # fmt: skip
            self.view = View(
                "pool", state_bytes, kv_bytes_per_token, 1, capacity_bytes or 0, *layers, *flops,
            )  # fmt: skip
            self.cache.memory = policy.begin(replace(self.view, rehearse=self._rehearse))
        super().__init__(trace, self.cache, options, ledger, capacity_bytes or 0)

    def _rehearse(self, policy: Policy, requests: Sequence[int]) -> list[int]:
        assert isinstance(self.cache, BudgetCache)
        for request in requests:
            if request not in self.cache.finished:
                raise ValueError(f"request {request} has not finished, so it cannot be rehearsed")
        made = BudgetCache(
            self.cache.prefixes, policy, Ledger(on=False), self.sizes,
            generation=self.cache.generation,
        )  # fmt: skip
        made.memory = policy.begin(self.view)
        return rehearse(made, [(r, self._prompt[r], self._output[r]) for r in requests])

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context, empty, or larger than the pool."""
        reason = super().reject_reason(request)
        if reason is not None or not self.capacity_bytes or self.everywhere:
            return reason
        assert isinstance(self.cache, BudgetCache)
        total = self._prompt[request] + self._output[request]
        reserved = min(-(-total // RESERVE) * RESERVE, self.options.max_model_len)
        states = 2 if self.cache.reuse else 1  # its own and the one it resumes from
        need = self.sizes.token * reserved + self.sizes.state * states
        if need > self.capacity_bytes - self.cache.spare:
            return f"needs {need} bytes, the pool has {self.capacity_bytes - self.cache.spare}"
        return None

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None if no token can be computed now."""
        if isinstance(self.cache, BudgetCache):
            self.cache.now_ns = now_ns
        return super().plan(now_ns)

    def report(self) -> dict[str, float]:
        """What the policy learned, for the summary."""
        if isinstance(self.cache, BudgetCache):
            return self.policy.report(self.cache.memory)
        return {}

    def check(self) -> None:
        """Bytes add up: against the tree, or of every token that the oracle's index covers."""
        self.cache.check()
