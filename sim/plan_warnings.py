"""What a plan warns of: settings that work, but not as one would expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.model import Model
from sim.vllm.geometry import GeometrySpec
from sim.vllm.geometry_types import Geometry
from sim.vllm.model_geometry import Serving, mode_used

if TYPE_CHECKING:
    from sim.plan import PoolPlan


def warnings_of(
    model: Model,
    serving: Serving,
    spec: GeometrySpec,
    sized: Geometry,
    pool: PoolPlan,
    max_num_seqs: int,
) -> tuple[str, ...]:
    """Every warning, the gravest first."""
    return (
        *_start(spec, pool),
        *_blocks(spec, sized),
        *_states(spec, pool, max_num_seqs),
        *_mode(model, serving),
        *_model(model, spec),
    )


def _start(spec: GeometrySpec, pool: PoolPlan) -> Iterator[str]:
    if pool.enough:
        return
    fits = pool.longest_that_fits_tokens
    yield (
        f"vLLM would not start with the assumed memory: one request of {spec.max_model_len:,} "
        f"tokens needs {pool.longest_blocks:,} blocks of {pool.usable_blocks:,}; "
        + (f"--max-model-len {fits} would fit" if fits else "no length would fit")
    )


def _blocks(spec: GeometrySpec, sized: Geometry) -> Iterator[str]:
    block = sized.block_tokens
    if spec.hybrid and block > spec.max_model_len:
        effect = (
            "no prefix can ever be reused" if spec.cached else "every request pays a whole block"
        )
        yield (
            f"a block of {block:,} tokens is longer than max-model-len {spec.max_model_len:,}: "
            f"{effect}"
        )


def _states(spec: GeometrySpec, pool: PoolPlan, max_num_seqs: int) -> Iterator[str]:
    if pool.states is not None and pool.states < max_num_seqs:
        yield (
            f"the pool holds the states of {pool.states:,} requests, fewer than max-num-seqs "
            f"{max_num_seqs:,}: requests will wait or be preempted before that many run"
        )


def _mode(model: Model, serving: Serving) -> Iterator[str]:
    if mode_used(model, serving) != serving.mode:
        yield (
            f"mode all is not declared by {model.architecture or model.name} in vLLM 0.28: "
            "vLLM goes back to align"
        )


def _model(model: Model, spec: GeometrySpec) -> Iterator[str]:
    if spec.max_model_len > model.max_model_len:
        yield (
            f"max-model-len {spec.max_model_len:,} is beyond the {model.max_model_len:,} that "
            "the checkpoint says; vLLM asks for VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        )
    if not model.certain:
        yield f"not from the checkpoint's own configuration: {model.uncertain}"
