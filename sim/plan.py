"""What vLLM will do with a model's memory: everything that ``prefixlab plan`` shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.crossover import Crossover, crossover
from sim.model import Model
from sim.models import load
from sim.plan_warnings import warnings_of
from sim.state_shapes import GeometryError
from sim.vllm.block_reason import block_reason
from sim.vllm.geometry import GeometrySpec, geometry
from sim.vllm.geometry_types import Geometry
from sim.vllm.model_geometry import Serving, mode_used, spec_of_model, token_bytes

GIB = 1 << 30
DEFAULT_MEMORY_BYTES = 40 * GIB
REFERENCE = "llama-3-8b"


@dataclass(frozen=True)
class StatePlan:
    """Recurrent state; ``bytes_per_layer`` and ``total_bytes`` (all layers) are unpadded,
    ``allocated_bytes`` counts one padded block a group."""

    family: str
    layers: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tensor_bytes: tuple[int, ...]
    bytes_per_layer: int
    total_bytes: int
    allocated_bytes: int
    padding_bytes: int
    padding_percent: float


@dataclass(frozen=True)
class KvPlan:
    """Attention KV of one token; ``allocated`` adds layers that only fill up a group."""

    layers: int
    dtype: str
    bytes_per_token_per_layer: int
    bytes_per_token: int
    allocated_bytes_per_token: float


@dataclass(frozen=True)
class PoolPlan:
    """The pool; ``usable_blocks`` leaves out the null block. ``shortest`` is the first chunk of a
    one-token prompt; ``longest`` is the admission bound of a request of max-model-len tokens.
    ``states`` is how many requests' states fit if there were nothing else, None without states.
    ``enough``: whether vLLM starts; ``longest_that_fits_tokens`` the max-model-len it would."""

    memory_bytes: int
    memory_assumed: bool
    num_blocks: int
    usable_blocks: int
    unused_bytes: int
    shortest_blocks: int
    shortest_bytes: int
    shortest_tokens: int
    longest_blocks: int
    longest_bytes: int
    longest_at_once: float
    states: int | None
    enough: bool
    longest_that_fits_tokens: int


@dataclass(frozen=True)
class LongRequest:
    """One request of ``tokens`` tokens, unpadded: a state and its KV, against the reference."""

    tokens: int
    bytes: int
    reference_bytes: int
    ratio: float
    state_blocks: int
    state_blocks_bytes: int
    state_blocks_padded_bytes: int


@dataclass(frozen=True)
class Plan:
    """A model on an engine; all bytes are those of one rank."""

    model: Model
    serving: Serving
    mode: str
    max_model_len: int
    max_num_seqs: int
    block_reason: str
    geometry: Geometry
    state: StatePlan | None
    kv: KvPlan | None
    pool: PoolPlan
    request: LongRequest
    crossover: Crossover | None
    states_of_all_bytes: int
    warnings: tuple[str, ...]


def plan(model: Model, serving: Serving, max_num_seqs: int = 256) -> Plan:
    """The plan. Raises ``GeometryError`` or ``ValueError`` where vLLM would refuse, with the
    reason; a pool that is too small is refused only if its size was given."""
    assumed = serving.memory_bytes is None and serving.num_blocks is None
    spec = spec_of_model(model, serving)
    sized = geometry(_with_memory(spec, assumed))
    pool = _pool(spec, sized, assumed)
    if not assumed and not pool.enough:
        raise GeometryError(_too_small(spec, sized, pool))
    state, kv = _state(model, spec, sized), _kv(model, serving, spec, sized)
    return Plan(
        model=model,
        serving=serving,
        mode=mode_used(model, serving),
        max_model_len=spec.max_model_len,
        max_num_seqs=max_num_seqs,
        block_reason=block_reason(spec),
        geometry=sized,
        state=state,
        kv=kv,
        pool=pool,
        request=_request(spec, sized, state, kv, _reference_bytes(serving)),
        crossover=_crossover(serving, sized, state, kv),
        states_of_all_bytes=max_num_seqs * (state.total_bytes if state else 0),
        warnings=warnings_of(model, serving, spec, sized, pool, max_num_seqs),
    )


def _with_memory(spec: GeometrySpec, assumed: bool) -> GeometrySpec:
    return replace(spec, memory_bytes=DEFAULT_MEMORY_BYTES) if assumed else spec


def _kinds(sized: Geometry, kind: str) -> int:
    return sum(group.kind == kind for group in sized.groups)


def _state(model: Model, spec: GeometrySpec, sized: Geometry) -> StatePlan | None:
    if spec.state is None or model.state is None:
        return None
    layers, one, padding = model.count("M"), spec.state.bytes, sized.page_bytes - spec.state.bytes
    return StatePlan(
        family=model.state.family,
        layers=layers,
        shapes=spec.state.shapes,
        dtypes=spec.state.dtypes,
        tensor_bytes=spec.state.tensor_bytes,
        bytes_per_layer=one,
        total_bytes=layers * one,
        allocated_bytes=_kinds(sized, "mamba") * sized.bytes_per_block,
        padding_bytes=padding,
        padding_percent=round(100 * padding / one, 2),
    )


def _kv(model: Model, serving: Serving, spec: GeometrySpec, sized: Geometry) -> KvPlan | None:
    layers = model.count("*")
    if not layers:
        return None
    allocated = _kinds(sized, "attention") * sized.bytes_per_block / sized.block_tokens
    return KvPlan(
        layers=layers,
        dtype=model.dtype if serving.kv_dtype == "auto" else serving.kv_dtype,
        bytes_per_token_per_layer=spec.token_bytes,
        bytes_per_token=layers * spec.token_bytes,
        allocated_bytes_per_token=allocated,
    )


def _longest_blocks(sized: Geometry) -> int:
    return sum(-(-g.max_memory_usage_bytes // g.page_bytes) for g in sized.groups)


def _pool(spec: GeometrySpec, sized: Geometry, assumed: bool) -> PoolPlan:
    memory = DEFAULT_MEMORY_BYTES if assumed else spec.memory_bytes
    total = sized.num_blocks * sized.bytes_per_block
    usable, longest = max(0, sized.num_blocks - 1), _longest_blocks(sized)
    states, groups = _kinds(sized, "mamba"), len(sized.groups)
    return PoolPlan(
        memory_bytes=memory or total,
        memory_assumed=assumed,
        num_blocks=sized.num_blocks,
        usable_blocks=usable,
        unused_bytes=(memory or total) - total,
        shortest_blocks=groups,
        shortest_bytes=groups * sized.bytes_per_block,
        shortest_tokens=groups * sized.block_tokens,
        longest_blocks=longest,
        longest_bytes=longest * sized.bytes_per_block,
        longest_at_once=usable / longest,
        states=usable // states if states else None,
        enough=longest <= usable,
        longest_that_fits_tokens=_that_fits(spec, sized, usable),
    )


def _that_fits(spec: GeometrySpec, sized: Geometry, usable: int) -> int:
    """The most tokens for which the admission bound fits, up to max-model-len."""
    per_block = _kinds(sized, "attention") + (
        _kinds(sized, "mamba") if spec.state_mode == "all" and spec.cached else 0
    )
    fixed = _longest_blocks(sized) - per_block * -(-spec.max_model_len // sized.block_tokens)
    if fixed > usable:
        return 0
    if not per_block:
        return spec.max_model_len
    return min(spec.max_model_len, (usable - fixed) // per_block * sized.block_tokens)


def _too_small(spec: GeometrySpec, sized: Geometry, pool: PoolPlan) -> str:
    need = (pool.longest_blocks + 1) * sized.bytes_per_block
    fits = pool.longest_that_fits_tokens
    hint = f"the longest max-model-len that fits is {fits}" if fits else "no length fits"
    return (
        f"pool too small: one request of max-model-len {spec.max_model_len} needs "
        f"{pool.longest_blocks} blocks and the null block, {need / GIB:.2f} GiB; the pool has "
        f"{pool.num_blocks} blocks, {pool.memory_bytes / GIB:.2f} GiB; {hint}"
    )


def _reference_bytes(serving: Serving) -> int:
    """KV of one token of the reference, all layers of one rank, in its own dtype."""
    reference = load(REFERENCE)
    return reference.count("*") * token_bytes(reference, serving.tp)


def _request(
    spec: GeometrySpec, sized: Geometry, state: StatePlan | None, kv: KvPlan | None, reference: int
) -> LongRequest:
    tokens = spec.max_model_len
    own = (state.total_bytes if state else 0) + tokens * (kv.bytes_per_token if kv else 0)
    groups = [g for g in sized.groups if g.kind == "mamba"]
    blocks = -(-groups[0].max_memory_usage_bytes // sized.page_bytes) if groups else 0
    layers = state.layers if state else 0
    return LongRequest(
        tokens=tokens,
        bytes=own,
        reference_bytes=tokens * reference,
        ratio=tokens * reference / own,
        state_blocks=blocks,
        state_blocks_bytes=blocks * (state.total_bytes if state else 0),
        state_blocks_padded_bytes=blocks * layers * sized.page_bytes,
    )


def _crossover(
    serving: Serving, sized: Geometry, state: StatePlan | None, kv: KvPlan | None
) -> Crossover | None:
    if state is None:
        return None
    own = kv.bytes_per_token if kv else 0
    return crossover(REFERENCE, _reference_bytes(serving), state.total_bytes, own, sized)
