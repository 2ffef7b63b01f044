"""Geometry of a recorded case, and the form in which cases record it."""

from __future__ import annotations

from typing import Any

from sim.dtypes import item_bytes
from sim.model import StateShape
from sim.state_shapes import LayerState, shapes
from sim.vllm.geometry import GeometrySpec, geometry
from sim.vllm.geometry_types import Geometry, Group

DEFAULTS: dict[str, Any] = {
    "mode": "align",
    "layers": "M*",
    "attention": {"num_kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"},
    "mamba": {"type": "raw", "shapes": [[4]], "dtypes": ["bfloat16"]},
    "tp": 1,
    "block_size": None,
    "prefill_checkpoint": {"blocks": 1, "alignment": 1},
    "enable_prefix_caching": True,
    "prefix_match_unit": None,
    "num_blocks": None,
    "memory_bytes": None,
    "max_model_len": 131_072,
    "num_speculative_blocks": 0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "nemotron_h_8b": {
        "layers": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "attention": {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
        "mamba": {
            "type": "mamba2",
            "intermediate_size": 8192,
            "n_groups": 8,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
            "chunk_size": 256,
        },
    }
}
UNLIMITED_BYTES = 1 << 40
# Only these get their draft rows in the cases; the others are recorded without.
WITH_DRAFTS = ("mamba2", "gdn")


def geometry_of_case(config: dict[str, Any], version: str) -> Geometry:
    """Geometry of a case's ``config`` on vLLM ``version`` (``0.33.0`` or ``0.33``)."""
    return geometry(spec_of_case(config, version))


def spec_of_case(config: dict[str, Any], version: str) -> GeometrySpec:
    """What the planner reads of a case. A case's block, where given, is taken as it is."""
    c = {**DEFAULTS, **PRESETS.get(config.get("preset", ""), {}), **config}
    attention, export = c["attention"], c["prefill_checkpoint"] or {}
    heads = max(1, attention["num_kv_heads"] // c["tp"])
    states = "M" in c["layers"]
    return GeometrySpec(
        version=".".join(version.split(".")[:2]),
        mode=c["mode"],
        pattern=c["layers"],
        token_bytes=2 * heads * attention["head_dim"] * item_bytes(attention["dtype"]),
        state=_state(c["mamba"], c["tp"], c["num_speculative_blocks"]) if states else None,
        sizing_state=_state(c["mamba"], c["tp"], 0) if states else None,
        caching=c["enable_prefix_caching"],
        fixed_block_tokens=c["block_size"],
        chunk_tokens=c["mamba"].get("chunk_size"),
        block_alignment=c["mamba"].get("block_alignment") or 1,
        checkpoint_blocks=export.get("blocks", 0),
        checkpoint_alignment=export.get("alignment"),
        drafts=c["num_speculative_blocks"],
        unit_tokens=c["prefix_match_unit"],
        max_model_len=c["max_model_len"],
        num_blocks=c["num_blocks"],
        memory_bytes=UNLIMITED_BYTES if c["memory_bytes"] is None else c["memory_bytes"],
    )


def _state(mamba: dict[str, Any], tp: int, drafts: int) -> LayerState:
    kind = mamba["type"]
    if kind == "raw":
        return LayerState(tuple(tuple(s) for s in mamba["shapes"]), tuple(mamba["dtypes"]))
    args = {k: v for k, v in mamba.items() if isinstance(v, int)}
    found = shapes(StateShape(kind, args), tp, drafts if kind in WITH_DRAFTS else 0)
    conv, ssm = mamba.get("conv_dtype", "bfloat16"), mamba.get("ssm_dtype", "float32")
    if len(found) == 2:
        return LayerState(found, (conv, ssm))
    return LayerState(found, (ssm if kind == "linear_attention" else conv,))


def recorded_form(config: dict[str, Any], version: str) -> dict[str, Any]:
    """The geometry as cases record it in ``result.geometry``, without its version."""
    spec = spec_of_case(config, version)
    g = geometry(spec)
    out: dict[str, Any] = {
        "attention_block_size": g.block_tokens,
        "mamba_block_size": g.state_block_tokens,
        "scheduler_block_size": g.scheduler_block_tokens,
        "hash_block_size": g.unit_tokens,
        "num_blocks": g.num_blocks,
        "groups": [_group(group) for group in g.groups],
        "pool_bytes_per_block": g.bytes_per_block,
    }
    if spec.state is not None:
        out["mamba_state_bytes"] = spec.state.bytes
        out["mamba_page_bytes"] = g.page_bytes
        out["mamba_shapes"] = [list(shape) for shape in spec.state.shapes]
    return out


def _group(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "layers": list(group.layers),
        "block_size": group.block_tokens,
        "page_bytes": group.page_bytes,
        "max_memory_usage_bytes": group.max_memory_usage_bytes,
    }
