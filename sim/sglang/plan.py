"""What SGLang will do with a hybrid model's memory: everything ``prefixlab plan`` shows of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from sim.dtypes import one_of
from sim.model import Model
from sim.sglang.options import SglangOptions
from sim.sglang.plan_warnings import warnings_of
from sim.sglang.sizes import (
    FULL_MEMORY_RATIO,
    Pools,
    Slot,
    Split,
    model_chunk,
    pools_of,
    running_wanted,
    slot_of,
)
from sim.sglang.strategy import Strategy, resolve
from sim.state_shapes import GeometryError
from sim.vllm.model_geometry import token_bytes

ENGINES = {"sglang-0.5.23": "0.5.23", "sglang-0.5.18": "0.5.18"}
DEFAULT_MEMORY_BYTES = 40 << 30


@dataclass(frozen=True)
class SglangServing:
    """How SGLang is started, with the defaults of its flags.

    ``max_running`` None: as many as SGLang reckons. ``int8_outside``: the int8 pool is taken
    beside ``memory_bytes``, as SGLang itself does; else it counts inside.
    """

    engine: str = "sglang-0.5.23"
    tp: int = 1
    ssm_dtype: str = "auto"
    kv_dtype: str = "auto"
    memory_bytes: int | None = None
    max_model_len: int | None = None
    page_size: int = 1
    strategy: str = "auto"
    overlap: bool = True
    radix_cache: bool = True
    track_interval: int = 256
    chunked_prefill_size: int | None = 8192
    mamba_full_memory_ratio: float = FULL_MEMORY_RATIO
    max_mamba_cache_size: int | None = None
    max_running: int | None = None
    int8: bool = False
    int8_slots: int | None = None
    int8_outside: bool = False
    skip_decode_lock: bool = False

    @property
    def version(self) -> str:
        """SGLang's version. Raises ``ValueError`` on another engine."""
        return ENGINES[one_of("engine", self.engine, tuple(ENGINES))]


@dataclass(frozen=True)
class SlotPlan:
    """One state of all layers: active, and as an int8 checkpoint."""

    family: str
    layers: int
    conv: tuple[tuple[int, ...], ...]
    temporal: tuple[int, ...]
    conv_dtype: str
    temporal_dtype: str
    bytes: int
    int8_bytes: int


@dataclass(frozen=True)
class GridPlan:
    """Where states can be left: prefills at multiples of ``grid`` from a chunk's start, decodes at
    sequence lengths that are multiples of ``track_grid``; both None where none are left so."""

    model_chunk: int
    grid: int | None
    track_grid: int | None


@dataclass(frozen=True)
class PoolsPlan:
    """The pools. ``mamba_slots`` and ``int8_slots`` are without the padding slot, ``kv_tokens``
    without the padding page; all bytes are with them.

    ``max_running`` is what SGLang allows, ``running_wanted`` what was asked for or what the KV
    would allow. ``cached_states_full_load``: states that can stay cached while ``max_running``
    requests hold their own slot and their tracking slots; ``cached_states_idle``: while none run.
    """

    mamba_slots: int
    int8_slots: int
    kv_tokens: int
    slots_per_request: int
    tracking_slots: int
    running_wanted: int
    max_running: int
    cached_states_full_load: int
    cached_states_idle: int
    tracking_bytes: int
    state_pool_bytes: int
    kv_pool_bytes: int
    int8_pool_bytes: int
    total_bytes: int
    memory_bytes: int
    memory_assumed: bool

    @property
    def unused_bytes(self) -> int:
        """What is left of the memory; negative if the int8 pool lies outside it."""
        return self.memory_bytes - self.total_bytes


@dataclass(frozen=True)
class SglangPlan:
    """A model on SGLang; all bytes are those of one rank. ``other``: the pools at the same memory
    with int8 checkpoints turned on (off, if they are on), the int8 pool inside the memory; None
    if that does not start."""

    model: Model
    serving: SglangServing
    max_model_len: int
    strategy: Strategy
    slot: SlotPlan
    grid: GridPlan
    kv_layers: int
    kv_bytes_per_token: int
    pools: PoolsPlan
    other: PoolsPlan | None
    warnings: tuple[str, ...]


def sglang_plan(model: Model, serving: SglangServing) -> SglangPlan:
    """The plan. Raises ``GeometryError`` or ``ValueError`` where SGLang would refuse to start."""
    version = serving.version
    if model.state is None:
        raise GeometryError(
            f"{model.name} has no recurrent layers; SGLang's plain radix cache is not modelled"
        )
    strategy = _strategy(model, serving, version)
    slot = slot_of(model, serving.tp, serving.ssm_dtype)
    options, pools = _pools(model, serving, strategy, slot)
    _refuse_interval(model, options)
    context = serving.max_model_len or model.max_model_len
    return SglangPlan(
        model=model,
        serving=serving,
        max_model_len=context,
        strategy=strategy,
        slot=_slot(model, slot),
        grid=_grid(options),
        kv_layers=model.count("*"),
        kv_bytes_per_token=kv_bytes(model, serving),
        pools=pools,
        other=_other(model, serving, strategy, slot),
        warnings=warnings_of(model, serving, slot, options, pools, context),
    )


def kv_bytes(model: Model, serving: SglangServing) -> int:
    """KV of one token in all attention layers of one rank."""
    return model.count("*") * token_bytes(model, serving.tp, serving.kv_dtype)


def _strategy(model: Model, serving: SglangServing, version: str) -> Strategy:
    if not serving.radix_cache:
        return Strategy("no_buffer", serving.overlap, "the radix cache is off: nothing is kept")
    return resolve(
        version, model.architecture, serving.strategy, serving.page_size, serving.overlap
    )


def _refuse_interval(model: Model, o: SglangOptions) -> None:
    """Mamba-2's kernels write at most one tracked state a chunk (its backend, at start-up)."""
    tracked = o.radix_cache and o.strategy != "no_buffer"
    mamba2 = model.state is not None and model.state.family == "mamba2"
    if tracked and mamba2 and o.track_interval < o.mamba_chunk:
        raise GeometryError(
            f"track_interval is {o.track_interval}; with Mamba-2 it must be at least the model's "
            f"chunk, the nearest valid choice is {lcm(o.mamba_chunk, o.page_size)}"
        )


def _slot(model: Model, slot: Slot) -> SlotPlan:
    assert model.state is not None
    return SlotPlan(
        model.state.family, slot.layers, slot.conv, slot.temporal, slot.conv_dtype,
        slot.temporal_dtype, slot.bytes, slot.int8_bytes,
    )  # fmt: skip


def _grid(o: SglangOptions) -> GridPlan:
    left = o.radix_cache and o.strategy != "no_buffer"
    return GridPlan(o.mamba_chunk, o.grid if left else None, o.track_grid if left else None)


def _split(serving: SglangServing) -> Split:
    return Split(
        page_size=serving.page_size,
        ratio=serving.mamba_full_memory_ratio,
        max_mamba_cache_size=serving.max_mamba_cache_size,
        int8=serving.int8,
        int8_slots=serving.int8_slots if serving.int8 else None,
        running_without_cache=None if serving.radix_cache else serving.max_running,
        inside=not serving.int8_outside,
    )


def _pools(
    model: Model, serving: SglangServing, strategy: Strategy, slot: Slot
) -> tuple[SglangOptions, PoolsPlan]:
    memory = serving.memory_bytes or DEFAULT_MEMORY_BYTES
    sized = pools_of(memory, slot, kv_bytes(model, serving), _split(serving))
    options = _options(model, serving, strategy, sized)
    return options, _pools_plan(serving, slot, sized, options, memory)


def _options(
    model: Model, serving: SglangServing, strategy: Strategy, sized: Pools
) -> SglangOptions:
    context = serving.max_model_len or model.max_model_len
    return SglangOptions(
        version=serving.version,
        page_size=serving.page_size,
        mamba_chunk=model_chunk(model),
        mamba_slots=sized.mamba_slots,
        kv_tokens=sized.kv_tokens,
        strategy=strategy.name,
        overlap=strategy.overlap,
        track_interval=serving.track_interval,
        int8=serving.int8,
        int8_slots=sized.int8_slots or None,
        chunked_prefill_size=serving.chunked_prefill_size,
        max_running=running_wanted(sized.kv_tokens, context, serving.max_running),
        context_len=context,
        skip_decode_lock=serving.skip_decode_lock,
        radix_cache=serving.radix_cache,
    )


def _pools_plan(
    serving: SglangServing, slot: Slot, sized: Pools, o: SglangOptions, memory: int
) -> PoolsPlan:
    held = o.running_limit * (1 + o.tracking_slots)
    cached = sized.int8_slots if serving.int8 else sized.mamba_slots
    full = cached if serving.int8 else max(0, sized.mamba_slots - held)
    return PoolsPlan(
        mamba_slots=sized.mamba_slots,
        int8_slots=sized.int8_slots,
        kv_tokens=sized.kv_tokens,
        slots_per_request=o.ratio,
        tracking_slots=o.tracking_slots,
        running_wanted=o.max_running,
        max_running=o.running_limit,
        cached_states_full_load=full if o.radix_cache else 0,
        cached_states_idle=cached if o.radix_cache else 0,
        tracking_bytes=o.running_limit * o.tracking_slots * slot.bytes,
        state_pool_bytes=sized.state_pool_bytes,
        kv_pool_bytes=sized.kv_pool_bytes,
        int8_pool_bytes=sized.int8_pool_bytes,
        total_bytes=sized.total_bytes,
        memory_bytes=memory,
        memory_assumed=serving.memory_bytes is None,
    )


def _other(
    model: Model, serving: SglangServing, strategy: Strategy, slot: Slot
) -> PoolsPlan | None:
    if not serving.radix_cache:
        return None
    changed = replace(serving, int8=not serving.int8, int8_outside=False)
    try:
        return _pools(model, changed, strategy, slot)[1]
    except ValueError:
        return None
