"""The vLLM engine: its scheduler over its cache manager."""

from __future__ import annotations

from sim.ledger import Ledger
from sim.policy import Policy, View
from sim.step import Admission
from sim.vllm.alone import serve_alone
from sim.vllm.cache import VllmCache
from sim.vllm.geometry_types import Geometry
from sim.vllm.grid import Grids
from sim.vllm.options import VllmOptions
from sim.vllm.rounding import ceil_div
from sim.vllm.scheduled import ScheduledEngine, refuse_unless_hosted
from traces.identity import Prefixes
from traces.trace import Trace

ASKS = ("place", "publish")


class VllmEngine(ScheduledEngine):
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
        refuse_unless_hosted(policy, name, ASKS)
        ledger = Ledger() if ledger is None else ledger
        self.geometry, self.prefixes = geometry, prefixes
        memory = policy.begin(view_of(geometry, name))
        self.cache = VllmCache(geometry, options, policy, memory, ledger)
        capacity_bytes = geometry.num_blocks * geometry.bytes_per_block
        self.grids = Grids(prefixes, self.cache.shape.unit)
        super().__init__(trace, self.cache, options, ledger, capacity_bytes)

    def keys_of(self, request: int) -> list[int]:
        """Prefix ids on the grid of hash units."""
        return self.grids.of(request) if self.cache.shape.caching else []

    def serve(self, request: int) -> Admission | None:
        """Serve the only request there is to its end, without steps; how it was admitted.

        None if it was not: then, or while it is unfinished, it is planned step by step.
        """
        return serve_alone(self.scheduler)

    def reject_reason(self, request: int) -> str | None:
        """Longer than the model's context, or than the pool."""
        reason = super().reject_reason(request)
        if reason is not None:
            return reason
        need = self.blocks_for(self._prompt[request] + self._output[request])
        usable = max(0, self.geometry.num_blocks - 1)
        return f"needs {need} blocks, the pool has {usable}" if need > usable else None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a lone request of ``tokens`` tokens needs at its largest."""
        shape = self.cache.shape
        kv = len(shape.kv_groups) * ceil_div(tokens, shape.kv_block)
        per_group = ceil_div(tokens, shape.state_block)
        if shape.mode == "align":
            per_group = min(per_group, 3)
        elif shape.mode == "none":
            per_group = 1
        return kv + len(shape.state_groups) * per_group

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


def view_of(geometry: Geometry, engine: str) -> View:
    """What a policy may know of the engine's sizes, bytes of all layers of one rank."""
    states = sum(len(g.layers) for g in geometry.groups if g.kind == "mamba")
    per_token = (
        len(g.layers) * g.page_bytes // g.block_tokens
        for g in geometry.groups
        if g.kind == "attention"
    )
    return View(
        engine=engine,
        state_bytes=states * geometry.state_bytes,
        kv_bytes_per_token=sum(per_token),
        block_tokens=geometry.block_tokens,
        capacity_bytes=geometry.num_blocks * geometry.bytes_per_block,
    )
