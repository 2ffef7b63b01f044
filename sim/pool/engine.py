"""The pool engine: vLLM's scheduler over a token-exact cache; without a budget, for ``oracle``."""

from __future__ import annotations

from sim.ledger import Ledger
from sim.policy import Policy
from sim.pool.cache import ExactCache
from sim.vllm.options import VllmOptions
from sim.vllm.scheduled import ScheduledEngine, refuse_unless_hosted
from traces.identity import Prefixes
from traces.trace import Trace


class PoolEngine(ScheduledEngine):
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
        refuse_unless_hosted(policy, "pool")
        ledger = Ledger() if ledger is None else ledger
        self.cache = ExactCache(prefixes, policy, ledger, kv_bytes_per_token, state_bytes)
        super().__init__(trace, self.cache, options, ledger, capacity_bytes=0)

    def check(self) -> None:
        """Every token that the index covers is counted once."""
        written = self.cache.written
        covered: dict[int, int] = {}
        for request in range(len(written.prefixes.offsets) - 1):
            for start, _, delta in written.prefixes.extents(request):
                head = start + 1 + delta
                if head in written.last:
                    covered[head] = written.last[head] - head + 1
        assert sum(covered.values()) == self.cache.tokens, f"{self.cache.tokens} tokens counted"
