"""From a model and vLLM's flags to what its planner reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sim.dtypes import KV_DTYPES, item_bytes, one_of
from sim.model import Model
from sim.state_shapes import GeometryError, layer_state, split
from sim.vllm.geometry import GeometrySpec, block_tokens, geometry
from sim.vllm.geometry_types import Geometry

ENGINES = {"vllm-0.33": "0.33", "vllm-0.28": "0.28"}
# The model files of 0.28 that declare mode `all`, by the architecture they serve.
ALL_MODE_ARCHITECTURES = (
    "FalconH1",
    "GraniteMoeHybrid",
    "Jamba",
    "MambaForCausalLM",
    "Mamba2",
    "NemotronH",
    "Zamba2",
)
# The scan chunk that 0.28 assumes where a configuration names none (Mamba-1).
DEFAULT_CHUNK_TOKENS = 2048
# What the kernels that export a state from inside a chunk require: FlashInfer's gated delta net
# every 64 tokens, FlashKDA every 16.
EXPORT_TOKENS = {"gdn": 64, "kda": 16}


@dataclass(frozen=True)
class Serving:
    """How vLLM is started. ``block_tokens`` is ``--block-size``; ``kernel_block_tokens`` the
    attention backend's smallest block (16 for FlashAttention); ``export_states`` says whether
    gated delta net and KDA layers run on kernels that export states (Mamba-2 always can, in
    0.33). ``max_model_len`` None takes the model's own."""

    engine: str = "vllm-0.33"
    mode: str = "align"
    tp: int = 1
    ssm_dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    memory_bytes: int | None = None
    num_blocks: int | None = None
    block_tokens: int | None = None
    kernel_block_tokens: int = 16
    unit_tokens: int | None = None
    drafts: int = 0
    export_states: bool = False

    @property
    def version(self) -> str:
        """vLLM's version. Raises ``ValueError`` on another engine."""
        return ENGINES[one_of("engine", self.engine, tuple(ENGINES))]


def mode_used(model: Model, serving: Serving) -> str:
    """The mode after vLLM's own fallback: `all` on a model that does not declare it is `align`."""
    if serving.version == "0.28" and serving.mode == "all" and model.state is not None:
        return "all" if model.architecture.startswith(ALL_MODE_ARCHITECTURES) else "align"
    return serving.mode


def spec_of_model(model: Model, serving: Serving) -> GeometrySpec:
    """What the planner reads. Raises ``GeometryError`` or ``ValueError`` where vLLM refuses."""
    _refuse(model, serving)
    version = serving.version
    state = layer_state(model, serving.tp, serving.drafts, serving.ssm_dtype, version)
    if state is not None and not state.bytes:
        raise GeometryError(f"no state head of {model.name} is left on {serving.tp} ranks")
    draft = GeometrySpec(
        version=version,
        mode=mode_used(model, serving),
        pattern=model.pattern,
        token_bytes=token_bytes(model, serving.tp, serving.kv_dtype),
        state=state,
        caching=serving.mode != "none",
        mla=model.attention is not None and model.attention.kind == "mla",
        kernel_block_tokens=serving.kernel_block_tokens,
        block_tokens=serving.block_tokens,
        chunk_tokens=_chunk(model),
        unit_tokens=serving.unit_tokens,
        drafts=serving.drafts,
        max_model_len=serving.max_model_len or model.max_model_len,
        num_blocks=serving.num_blocks,
        memory_bytes=serving.memory_bytes,
    )
    return _with_exports(draft, model, serving)


def token_bytes(model: Model, tp: int = 1, kv_dtype: str = "auto") -> int:
    """KV of one token in one attention layer on one rank; a latent is whole on every rank."""
    one_of("kv-dtype", kv_dtype, KV_DTYPES)
    size = item_bytes(model.dtype if kv_dtype == "auto" else kv_dtype)
    a = model.attention
    if a is None:
        return 0
    if a.kind == "mla":
        return (a.kv_lora_rank + a.qk_rope_head_dim) * size
    return 2 * max(1, a.num_kv_heads // tp) * a.head_dim * size


def _chunk(model: Model) -> int:
    return (model.state.args.get("chunk_size") if model.state else 0) or DEFAULT_CHUNK_TOKENS


def _refuse(model: Model, serving: Serving) -> None:
    if serving.tp < 1:
        raise GeometryError(f"tensor parallelism is {serving.tp}; allowed are whole numbers from 1")
    if model.attention is not None:
        split(f"{model.name}: query heads", model.attention.num_query_heads, serving.tp)
    kernel, block = serving.kernel_block_tokens, serving.block_tokens
    if kernel < 1:
        raise GeometryError(f"kernel block is {kernel} tokens; allowed are whole numbers from 1")
    if block is not None and (block < 1 or block % kernel):
        near = max(kernel, round(block / kernel) * kernel)
        raise GeometryError(
            f"block size {block}: allowed are multiples of the attention kernel's {kernel} tokens; "
            f"nearest is {near}"
        )
    if serving.max_model_len is not None and serving.max_model_len < 2:
        raise GeometryError(f"max-model-len is {serving.max_model_len}; allowed are 2 and more")


def _with_exports(spec: GeometrySpec, model: Model, serving: Serving) -> GeometrySpec:
    family = model.state.family if model.state else ""
    if spec.version != "0.33" or spec.state_mode != "align":
        return spec
    if family == "mamba2":
        return _export(spec, 1, 1)
    if not serving.export_states:
        return spec
    if family not in EXPORT_TOKENS:
        raise GeometryError(f"{family or 'attention'} layers cannot export states inside a chunk")
    tokens = EXPORT_TOKENS[family]
    # Only gated delta net layers ask the planner for aligned blocks; their exports then land on
    # the grid of the cache, not on the kernel's.
    return _export(spec, tokens if family == "gdn" else 1, tokens)


def _export(spec: GeometrySpec, block_alignment: int, alignment: int) -> GeometrySpec:
    aligned = replace(spec, block_alignment=block_alignment, checkpoint_blocks=1)
    if block_alignment > 1:
        grid = math.lcm(spec.unit_tokens, block_alignment) if spec.unit_tokens else None
        alignment = grid or block_tokens(aligned)
    return replace(aligned, checkpoint_alignment=alignment)


def geometry_of_model(model: Model, serving: Serving) -> Geometry:
    """vLLM's sizes for ``model``. Raises ``GeometryError`` or ``ValueError`` as it would."""
    return geometry(spec_of_model(model, serving))
