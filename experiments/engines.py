"""The engine that hosts a point's policy, sized from the point's memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from experiments.config import (
    EngineConfig,
    Experiment,
    PolicyConfig,
    SglangConfig,
    SizesConfig,
    memory_bytes,
)
from sim import models, policies
from sim.check.case import from_data
from sim.check.hosts import HOSTS
from sim.cost import layers
from sim.engine import Engine
from sim.ledger import Ledger
from sim.marconi_artifact.sizes import Sizes
from sim.model import Model
from sim.policy import Policy
from sim.pool.engine import PoolEngine
from sim.sglang.engine import SglangEngine
from sim.sglang.options import SglangOptions
from sim.sglang.sizes import Pools, Slot, Split, model_chunk, pools_of, slot_of
from sim.sglang.strategy import resolve
from sim.vllm.engine import VllmEngine
from sim.vllm.geometry_types import Geometry
from sim.vllm.model_geometry import Serving, geometry_of_model, token_bytes
from sim.vllm.options import VllmOptions
from traces.identity import Prefixes
from traces.trace import Trace

ARTIFACT = "marconi-artifact"


@dataclass(frozen=True)
class Point:
    """A resolved experiment (sweep applied) with one policy and one seed."""

    experiment: Experiment
    policy: PolicyConfig
    axes: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def version(self) -> str:
        """The engine that hosts the policy."""
        return self.policy.engine or self.experiment.engine.version

    def columns(self) -> dict[str, Any]:
        """What identifies the point in tables."""
        return {"policy": self.policy.shown, "seed": self.seed, **dict(self.axes)}


@dataclass(frozen=True)
class Hosted:
    """An engine and what the rest of a run needs to know of it.

    ``grid_tokens`` and ``block_tokens``: where states and KV can be kept. ``tree``: KV stays
    until it is evicted. ``reuse``: the policy keeps anything. ``columns`` go into the summary.
    """

    engine: Engine
    ssm_dtype: str
    grid_tokens: int
    block_tokens: int
    reuse: bool
    tree: bool = False
    columns: dict[str, Any] = field(default_factory=dict)


def host(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> Hosted:
    """The engine of the point's policy. Raises ``ValueError`` where it would refuse to start."""
    if point.experiment.check is not None:
        return _checked(point, trace, prefixes, ledger)
    if point.version.startswith("sglang"):
        return _sglang(point, trace, prefixes, ledger)
    return _vllm(point, trace, prefixes, ledger)


def _checked(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> Hosted:
    """The engine of a case of `prefixlab check`, as the checker builds it."""
    case = replace(
        from_data(point.experiment.model_dump()),
        engine=point.version,
        policy=point.policy.name,
        parameters=dict(point.policy.parameters),
    )
    policy, made = load_policy(point), HOSTS[point.version]
    engine = made.build(case, policy, trace, prefixes, ledger, True)
    facts = made.facts(engine, case)
    reuse = policy.layout(point.version).mode != "none"
    tree = point.version.startswith("sglang")
    return Hosted(engine, "auto", facts.grid, facts.block, reuse, tree)


def load_policy(point: Point) -> Policy:
    """The point's policy with its parameters; Marconi's artifact stands for itself."""
    if point.version == ARTIFACT:
        return policies.load("marconi")
    return policies.load(point.policy.name, **point.policy.parameters)


# -------------------------------------------------------------------------------- vLLM and pool
def serving(point: Point) -> Serving:
    """The flags that size vLLM's cache."""
    e, engine = point.experiment, point.experiment.engine
    version, mode = "vllm-0.33", "align"
    if point.version.startswith("vllm"):
        version, mode = point.version, load_policy(point).layout(point.version).mode
    elif load_policy(point).layout(point.version).mode == "none":
        mode = "none"
    return Serving(
        engine=version,
        mode=mode,
        tp=e.hardware.tp,
        ssm_dtype=engine.ssm_dtype,
        kv_dtype=engine.kv_dtype,
        max_model_len=engine.max_model_len,
        memory_bytes=memory_bytes(e.memory),
        block_tokens=engine.block_size,
        unit_tokens=engine.prefix_match_unit,
    )


def options(engine: EngineConfig, version: str) -> VllmOptions:
    """Scheduler settings as vLLM takes them."""
    return VllmOptions(
        version=version.removeprefix("vllm-") if version != "pool" else "0.33",
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        watermark=engine.watermark,
        reserve_full_isl=engine.reserve_full_isl,
        priority=engine.priority,
        async_scheduling=engine.async_scheduling,
    )


@lru_cache(maxsize=64)
def sized(model: str, serving: Serving) -> tuple[Model, Geometry]:
    """Model and vLLM's cache geometry, once per process."""
    loaded = models.load(model)
    return loaded, geometry_of_model(loaded, serving)


def kv_bytes_per_token(model: Model, tp: int, kv_dtype: str) -> int:
    """KV of one token in all attention layers of one rank."""
    return token_bytes(model, tp, kv_dtype) * model.count("*")


def _vllm(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> Hosted:
    flags = serving(point)
    model, geometry = sized(point.experiment.model, flags)
    policy, opts = load_policy(point), options(point.experiment.engine, point.version)
    grid, block = geometry.unit_tokens, geometry.block_tokens
    engine: Engine
    if point.version == "pool":
        grid = block = 1
        engine = _pool(point, trace, prefixes, ledger)
    else:
        engine = VllmEngine(trace, prefixes, geometry, policy, opts, ledger)
    reuse = policy.layout(point.version).mode != "none" or not model.count("M")
    columns = {"block_tokens": geometry.block_tokens}
    return Hosted(engine, point.experiment.engine.ssm_dtype, grid, block, reuse, columns=columns)


def _pool(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> PoolEngine:
    """Our own engine, with the experiment's memory as its budget."""
    flags, engine = serving(point), point.experiment.engine
    model, geometry = sized(point.experiment.model, flags)
    shape = layers.shape_of(model, flags.tp, flags.kv_dtype, flags.ssm_dtype)
    layers_of = (model.count("M"), model.count("*"))
    kv, state = kv_bytes_per_token(model, flags.tp, flags.kv_dtype), geometry.state_bytes
    state, flops = state * model.count("M"), layers.prefill_flops(shape)
    if (own := point.experiment.sizes) is not None:
        sizes = sizes_of(own)
        layers_of, kv, state = own.layers[:2], sizes.kv_bytes, sizes.checkpoint_bytes
        flops = flops_of(sizes)
    return PoolEngine(
        trace,
        prefixes,
        load_policy(point),
        options(engine, "pool"),
        ledger,
        kv_bytes_per_token=kv,
        state_bytes=state,
        capacity_bytes=flags.memory_bytes,
        flops=flops,
        layers=layers_of,
    )


def sizes_of(own: SizesConfig) -> Sizes:
    """Sizes as Marconi's artifact counts them."""
    return Sizes(*own.layers, own.width, own.state_width)


def flops_of(sizes: Sizes) -> tuple[float, float]:
    """FLOP of a token and of a pair of tokens, so that a prefill's sum is the artifact's."""
    pair = 8.0 * sizes.attention_layers * sizes.width
    return sizes.prefill_flops(1) - pair, pair


# -------------------------------------------------------------------------------- SGLang
@dataclass(frozen=True)
class Sglang:
    """What an SGLang server of this point starts with."""

    slot: Slot
    pools: Pools
    options: SglangOptions


def sglang_of(point: Point) -> Sglang:
    """Pools and options. Raises ``ValueError`` where SGLang would refuse to start."""
    e, engine, flags = point.experiment, point.experiment.engine, point.experiment.engine.sglang
    model = models.load(e.model)
    if not model.count("M"):
        raise ValueError(
            f"{model.name} has no recurrent layers; SGLang's plain radix cache is not modelled"
        )
    slot = slot_of(model, e.hardware.tp, engine.ssm_dtype)
    caching = load_policy(point).layout(point.version).mode != "none"
    split = Split(
        page_size=flags.page_size,
        ratio=flags.mamba_full_memory_ratio,
        max_mamba_cache_size=flags.max_mamba_cache_size,
        int8=flags.enable_int8_mamba_checkpoint and caching,
        int8_slots=flags.int8_mamba_ckpt_size,
        running_without_cache=None if caching else flags.max_running_requests,
    )
    token = kv_bytes_per_token(model, e.hardware.tp, engine.kv_dtype)
    pools = pools_of(memory_bytes(e.memory), slot, token, split)
    version = point.version.removeprefix("sglang-")
    return Sglang(slot, pools, _options(flags, engine, version, model, pools, caching))


def _options(
    flags: SglangConfig,
    engine: EngineConfig,
    version: str,
    model: Model,
    pools: Pools,
    caching: bool,
) -> SglangOptions:
    wanted = not flags.disable_overlap_schedule
    strategy = resolve(
        version, model.architecture, flags.mamba_radix_cache_strategy, flags.page_size, wanted
    )
    return SglangOptions(
        version=version,
        tree=flags.tree if version == "0.5.18" else "unified",
        page_size=flags.page_size,
        mamba_chunk=model_chunk(model),
        mamba_slots=pools.mamba_slots,
        kv_tokens=pools.kv_tokens,
        strategy=strategy.name,
        overlap=strategy.overlap if caching else wanted,
        track_interval=flags.mamba_track_interval,
        int8=bool(pools.int8_slots),
        int8_slots=pools.int8_slots or None,
        chunked_prefill_size=flags.chunked_prefill_size,
        max_prefill_tokens=flags.max_prefill_tokens,
        max_running=flags.max_running_requests or engine.max_num_seqs,
        context_len=engine.max_model_len,
        schedule_policy=flags.schedule_policy,
        skip_decode_lock=flags.skip_decode_lock,
        waiting_refresh=flags.waiting_refresh,
        radix_cache=caching,
    )


def _sglang(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> Hosted:
    e, made = point.experiment, sglang_of(point)
    model = models.load(e.model)
    engine = SglangEngine(
        trace, prefixes, load_policy(point), made.options, ledger,
        kv_bytes_per_token=kv_bytes_per_token(model, e.hardware.tp, e.engine.kv_dtype),
        state_bytes=made.slot.bytes,
        int8_bytes=made.slot.int8_bytes,
    )  # fmt: skip
    dtype = made.slot.temporal_dtype
    o = made.options
    columns = {
        "block_tokens": o.grid,
        "state_slots": o.mamba_slots,
        "int8_slots": o.int8_slots or 0,
        "kv_pool_tokens": o.kv_tokens,
        "running_limit": o.running_limit,
        "strategy": o.strategy,
    }
    return Hosted(engine, dtype, o.grid, o.page_size, o.radix_cache, tree=True, columns=columns)
