"""What a plan for SGLang warns of: settings that work, but not as one would expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.model import Model
from sim.sglang.options import SglangOptions
from sim.sglang.sizes import Slot

if TYPE_CHECKING:
    from sim.sglang.plan import PoolsPlan, SglangServing


def warnings_of(
    model: Model,
    serving: SglangServing,
    slot: Slot,
    o: SglangOptions,
    pools: PoolsPlan,
    context: int,
) -> tuple[str, ...]:
    """Every warning, the gravest first."""
    keeps = (
        (*_strategy(o), *_grid(o, context), *_int8(serving, slot, pools)) if o.radix_cache else ()
    )
    return (*_pools(o, pools, context), *keeps, *_model(model, context))


def _pools(o: SglangOptions, pools: PoolsPlan, context: int) -> Iterator[str]:
    if o.kv_tokens < context:
        yield (
            f"the KV pool holds {o.kv_tokens:,} tokens, fewer than the {context:,} of one longest "
            "request"
        )
    if pools.max_running < pools.running_wanted:
        yield (
            f"{pools.max_running:,} requests can run at once, not {pools.running_wanted:,}: "
            f"{o.mamba_slots:,} state slots, {o.ratio} reckoned for each"
        )
    if o.radix_cache and pools.cached_states_full_load < pools.max_running:
        yield (
            f"with {pools.max_running:,} requests running {pools.cached_states_full_load:,} states "
            "can stay cached, fewer than one a request"
        )


def _strategy(o: SglangOptions) -> Iterator[str]:
    if o.strategy != "no_buffer":
        return
    yield (
        "no_buffer turns overlap scheduling off: each step is planned only when the one before it "
        "is read, and the planning time adds to every step"
    )
    yield (
        "no_buffer leaves no state at a branch point: prompts that share only a head find states "
        "at chunk ends and nowhere else"
    )


def _grid(o: SglangOptions, context: int) -> Iterator[str]:
    if o.strategy == "no_buffer":
        return
    size, grid = o.chunked_prefill_size, o.grid
    if grid > context:
        yield f"the grid of {grid:,} tokens is longer than any request: no prefix can be reused"
    if size is not None and size < grid:
        yield f"chunks of {size:,} tokens are shorter than the grid {grid:,}: they leave no state"
    elif size is not None and size % grid:
        yield (
            f"chunks of {size:,} tokens are no multiple of the grid {grid:,}: positions leave the "
            "grid, and a branch point that a chunk cannot reach is dropped"
        )
    if o.version == "0.5.18" and o.track_interval % grid:
        yield (
            f"the track interval {o.track_interval:,} is no multiple of the grid {grid:,}: in "
            "0.5.18 a state left by a decode puts all that follow it off the grid"
        )
    if o.track_grid > o.track_interval:
        yield (
            f"decodes leave a state every {o.track_grid:,} tokens, not every "
            f"{o.track_interval:,}: the track interval is rounded to the grid {grid:,}"
        )


def _int8(serving: SglangServing, slot: Slot, pools: PoolsPlan) -> Iterator[str]:
    if not serving.int8:
        return
    if slot.int8_bytes >= slot.bytes:
        yield "int8 checkpoints save nothing: this model's slot has no temporal state"
    if serving.int8_outside:
        yield (
            f"the int8 pool takes {pools.int8_pool_bytes:,} bytes beside the memory given, as "
            "SGLang does: not a comparison on equal bytes"
        )
    yield (
        "cached states hold no active slots with int8 checkpoints: a lack of active slots cannot "
        "be relieved by eviction"
    )


def _model(model: Model, context: int) -> Iterator[str]:
    if context > model.max_model_len:
        yield (
            f"max-model-len {context:,} is beyond the {model.max_model_len:,} that the checkpoint "
            "says"
        )
    if not model.certain:
        yield f"not from the checkpoint's own configuration: {model.uncertain}"
