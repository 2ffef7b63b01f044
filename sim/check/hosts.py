"""The engines that a policy can be checked on: how each is built, and what it promises.

A new engine is one more entry of ``HOSTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sim import models
from sim.check.case import MODEL, Case
from sim.ledger import Ledger
from sim.policies.base import Base
from sim.policy import Policy
from sim.pool.engine import PoolEngine
from sim.sglang.engine import SglangEngine
from sim.sglang.options import SglangOptions
from sim.sglang.pools import EngineCrashError
from sim.vllm.engine import VllmEngine
from sim.vllm.geometry_types import Geometry
from sim.vllm.model_geometry import Serving, geometry_of_model
from sim.vllm.options import VllmOptions
from traces.identity import Prefixes
from traces.trace import Trace

Build = Callable[[Case, Policy, Trace, Prefixes, Ledger, bool], Any]
CONTEXT = 2048
BLOCK = 16
MAMBA_CHUNK = 16
# What the model of the cases needs: KV of a token, and one state.
KV_BYTES, STATE_BYTES = 32, 304
# FLOP of a token, and of a pair of tokens in attention, for policies that weigh them.
FLOPS = (24_096.0, 64.0)


@dataclass(frozen=True)
class Facts:
    """What the checker knows of an engine that stands.

    ``block``: tokens of KV that come and go together; ``grid``: where states can be kept.
    ``lookup``: calls every lookup that is said to be pure; None if none is. ``held_bytes``: bytes
    that only running requests account for. ``everywhere``: a state at every token, told by KV
    alone. ``locks``: a restored state stays as long as the request runs, not only until the next
    step is planned. ``tells_restored``: restoring a state is an event. ``ahead``: planning a step
    already publishes what the step will write; otherwise only what the steps before it wrote.
    ``budget`` and ``seats``: the most tokens and requests of a step, 0 for unknown.
    """

    block: int
    grid: int
    held_bytes: Callable[[], int]
    lookup: Callable[[], object] | None = None
    everywhere: bool = False
    locks: bool = False
    tells_restored: bool = True
    ahead: bool = True
    budget: int = 0
    seats: int = 0


@dataclass(frozen=True)
class Host:
    """``build(case, policy, trace, prefixes, ledger, caching)``; ``choices`` are settings with the
    values to draw from, ``memory`` capacities in bytes. ``crashes`` are errors with which the
    engine itself would stop: they end a run and are no violation. ``can_be_off``: caching can be
    turned off."""

    name: str
    build: Build
    facts: Callable[[Any, Case], Facts]
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    memory: tuple[int, ...] = (1 << 20,)
    crashes: tuple[type[Exception], ...] = ()
    can_be_off: bool = True


# -------------------------------------------------------------------------------- vLLM
@lru_cache(maxsize=256)
def _geometry(engine: str, mode: str, memory: int, unit: int | None) -> Geometry:
    serving = Serving(
        engine=engine, mode=mode, memory_bytes=memory, max_model_len=CONTEXT, block_tokens=BLOCK,
        unit_tokens=unit if mode == "align" else None,
    )  # fmt: skip
    return geometry_of_model(models.load(MODEL), serving)


def _vllm_options(case: Case, caching: bool) -> VllmOptions:
    settings = {k: v for k, v in case.settings.items() if k not in ("prefix_match_unit",
                "block_size")}  # fmt: skip
    version = "0.33" if case.engine == "pool" else case.engine.removeprefix("vllm-")
    return VllmOptions(version=version, enable_prefix_caching=caching, **settings)


def _vllm(
    case: Case, policy: Policy, trace: Trace, prefixes: Prefixes, ledger: Ledger, caching: bool
) -> VllmEngine:
    mode = policy.layout(case.engine).mode if caching else "none"
    unit = case.settings.get("prefix_match_unit")
    sizes = _geometry(case.engine, mode, case.memory_bytes, unit)
    return VllmEngine(trace, prefixes, sizes, policy, _vllm_options(case, caching), ledger)


def _vllm_facts(engine: VllmEngine, case: Case) -> Facts:
    shape, waiting = engine.cache.shape, engine.scheduler.waiting
    return Facts(
        block=shape.kv_block,
        grid=engine.geometry.unit_tokens,
        held_bytes=lambda: engine.cache.used_bytes,
        lookup=lambda: [engine.cache.lookup(r) for r in waiting],
        budget=case.settings["max_num_batched_tokens"],
        seats=case.settings["max_num_seqs"],
    )


VLLM_CHOICES: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (False, True),
    "max_num_batched_tokens": (64, 24, 40, 256),
    "max_num_seqs": (4, 2, 8),
    "max_model_len": (CONTEXT,),
    "long_prefill_token_threshold": (0, 20, 48),
    "watermark": (0.0, 0.1),
    "reserve_full_isl": (True, False),
    "block_size": (BLOCK,),
    "prefix_match_unit": (None, 4),
}
VLLM_BLOCK_BYTES = 512  # one page of the model's only layer of each kind


# -------------------------------------------------------------------------------- pool
def _pool(
    case: Case, policy: Policy, trace: Trace, prefixes: Prefixes, ledger: Ledger, caching: bool
) -> PoolEngine:
    return PoolEngine(
        trace, prefixes, policy, _vllm_options(case, caching), ledger,
        kv_bytes_per_token=KV_BYTES, state_bytes=STATE_BYTES, capacity_bytes=case.memory_bytes,
        flops=FLOPS, layers=(1, 1),
    )  # fmt: skip


def _pool_facts(engine: PoolEngine, case: Case) -> Facts:
    return Facts(
        block=1,
        grid=1,
        held_bytes=lambda: 0 if engine.everywhere else engine.cache.used_bytes,
        lookup=lambda: [engine.cache.lookup(r) for r in engine.scheduler.waiting],
        everywhere=engine.everywhere and engine.cache.reuse,
        budget=case.settings["max_num_batched_tokens"],
        seats=case.settings["max_num_seqs"],
    )


POOL_CHOICES = {k: v for k, v in VLLM_CHOICES.items() if k not in ("block_size",
                "prefix_match_unit")}  # fmt: skip


# -------------------------------------------------------------------------------- SGLang
def _sglang(
    case: Case, policy: Policy, trace: Trace, prefixes: Prefixes, ledger: Ledger, caching: bool
) -> SglangEngine:
    options = SglangOptions(
        version=case.engine.removeprefix("sglang-"),
        mamba_chunk=MAMBA_CHUNK,
        kv_tokens=case.memory_bytes // KV_BYTES,
        context_len=CONTEXT,
        radix_cache=caching,
        **_allowed(case.settings, policy),
    )
    return SglangEngine(
        trace, prefixes, policy, options, ledger,
        kv_bytes_per_token=KV_BYTES, state_bytes=STATE_BYTES, int8_bytes=80,
    )  # fmt: skip


def _allowed(settings: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """The settings, less what the drawn strategy, tree or policy cannot have."""
    out = dict(settings)
    if type(policy).trim is not Base.trim and out.get("tree") == "mamba":
        out["tree"] = "unified"  # MambaRadixCache has no path cap
    if out.get("tree") == "mamba":
        out["skip_decode_lock"] = False
    if out["strategy"] == "no_buffer":
        out |= {"page_size": 1, "overlap": False}
    elif "lazy" in out["strategy"]:
        out["overlap"] = True
    return out


def _sglang_facts(engine: SglangEngine, case: Case) -> Facts:
    return Facts(
        block=engine.options.page_size,
        grid=engine.options.grid,
        held_bytes=lambda: engine.used_bytes - engine.cached_bytes,
        tells_restored=False,
        ahead=False,
        seats=case.settings["max_running"],
    )


SGLANG_CHOICES: dict[str, tuple[Any, ...]] = {
    "strategy": ("extra_buffer", "no_buffer", "extra_buffer_lazy"),
    "page_size": (1, 16),
    "overlap": (False, True),
    "mamba_slots": (24, 10, 14),
    "track_interval": (16, 32),
    "chunked_prefill_size": (64, 32, 256),
    "max_running": (4, 2, 8),
    "schedule_policy": ("fcfs", "lpm", "dfs-weight"),
    "int8": (False, True),
    "skip_decode_lock": (False, True),
}
SGLANG_18 = {**SGLANG_CHOICES, "tree": ("unified", "mamba")}

# Not drawn on 0.33: units finer than the block. The engine then keys the column of a restored
# state by the end of its block, though the state was left inside it (docs/check.md).
VLLM_033 = {**VLLM_CHOICES, "prefix_match_unit": (None,)}
VLLM_MEMORY = tuple(blocks * VLLM_BLOCK_BYTES for blocks in (30, 14, 20, 45, 200))
POOL_MEMORY = tuple(tokens * KV_BYTES for tokens in (800, 300, 450, 20_000))
SGLANG_MEMORY = tuple(tokens * KV_BYTES for tokens in (400, 176, 240, 320, 2000))

HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        Host("vllm-0.33", _vllm, _vllm_facts, VLLM_033, VLLM_MEMORY),
        Host("vllm-0.28", _vllm, _vllm_facts, VLLM_CHOICES, VLLM_MEMORY),
        Host("pool", _pool, _pool_facts, POOL_CHOICES, POOL_MEMORY),
        *(
            Host(name, _sglang, _sglang_facts, choices, SGLANG_MEMORY, (EngineCrashError,))
            for name, choices in (("sglang-0.5.23", SGLANG_CHOICES), ("sglang-0.5.18", SGLANG_18))
        ),
    )
}
