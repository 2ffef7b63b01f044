"""A Hugging Face ``config.json`` of Nemotron-H as a model."""

from __future__ import annotations

from typing import Any

from sim.model import Attention, Model, Moe, StateShape

LETTERS = {"mamba": "M", "mamba2": "M", "attention": "*", "mlp": "-", "moe": "E"}


def nemotron_h(config: Any, where: str) -> Model:
    """The model that ``config`` describes. Raises ``ValueError``: ``where: field, allowed``."""
    c = _text_config(config, where)
    pattern = _pattern(c, where)
    heads, dim = _int(c, where, "mamba_num_heads"), _int(c, where, "mamba_head_dim")
    attention = Attention(
        "gqa",
        _int(c, where, "num_attention_heads"),
        _int(c, where, "num_key_value_heads"),
        _int(c, where, "head_dim", "attention_head_dim"),
    )
    state = StateShape(
        "mamba2",
        {
            "intermediate_size": heads * dim,
            "n_groups": _int(c, where, "n_groups", "mamba_n_groups"),
            "num_heads": heads,
            "head_dim": dim,
            "state_size": _int(c, where, "ssm_state_size", "state_size"),
            "conv_kernel": _int(c, where, "conv_kernel"),
            **_chunk(c, where),
        },
    )
    dtype = str(c.get("torch_dtype") or c.get("dtype") or "bfloat16").removeprefix("torch.")
    return Model(
        name=str(c.get("_name_or_path") or where),
        pattern=pattern,
        hidden_size=_int(c, where, "hidden_size"),
        vocab_size=_int(c, where, "vocab_size"),
        max_model_len=_int(c, where, "max_position_embeddings"),
        attention=attention if "*" in pattern else None,
        state=state if "M" in pattern else None,
        ffn_intermediate=_int(c, where, "intermediate_size") if "-" in pattern else 0,
        ffn_matrices=2,
        dtype=dtype,
        conv_dtype=dtype,
        ssm_dtype=str(c.get("mamba_ssm_cache_dtype") or "float32"),
        architecture="NemotronHForCausalLM",
        source=where,
        moe=_moe(c, where) if "E" in pattern else None,
    )


def _text_config(config: Any, where: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ValueError(f"{where}: must be a JSON object, found {type(config).__name__}")
    inner = [config[k] for k in ("text_config", "llm_config") if isinstance(config.get(k), dict)]
    c: dict[str, Any] = (inner or [config])[0]
    names = c.get("architectures") or [c.get("model_type", "")]
    if not any("nemotron" in str(n).lower() and "h" in str(n).lower() for n in names):
        raise ValueError(
            f"{where}: architecture {names}: only NemotronHForCausalLM is read from a "
            "config.json; write a .yaml preset for another"
        )
    return c


def _chunk(c: dict[str, Any], where: str) -> dict[str, int]:
    names = [n for n in ("mamba_chunk_size", "chunk_size") if c.get(n) is not None]
    return {"chunk_size": _int(c, where, *names)} if names else {}


def _pattern(c: dict[str, Any], where: str) -> str:
    kinds = c.get("layers_block_type")
    if isinstance(kinds, list):
        if unknown := [k for k in kinds if k not in LETTERS]:
            allowed = ", ".join(LETTERS)
            raise ValueError(f"{where}: layers_block_type {unknown[0]!r}: allowed are {allowed}")
        return "".join(LETTERS[k] for k in kinds)
    pattern = c.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"{where}: hybrid_override_pattern is {pattern!r}, must be text such as M-M*-"
        )
    layers = c.get("num_hidden_layers", len(pattern))
    if layers != len(pattern):
        raise ValueError(
            f"{where}: num_hidden_layers is {layers}, but hybrid_override_pattern has "
            f"{len(pattern)} letters"
        )
    return pattern


def _int(c: dict[str, Any], where: str, *names: str) -> int:
    for name in names:
        if name in c and c[name] is not None:
            value = c[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{where}: {name} is {value!r}, must be a whole number from 1 up")
            return value
    raise ValueError(f"{where}: {' or '.join(names)} is missing")


def _moe(c: dict[str, Any], where: str) -> Moe:
    return Moe(
        experts=_int(c, where, "n_routed_experts"),
        active_experts=_int(c, where, "num_experts_per_tok"),
        expert_intermediate=_int(c, where, "moe_intermediate_size"),
        shared_intermediate=int(c.get("moe_shared_expert_intermediate_size") or 0),
        latent=int(c.get("moe_latent_size") or 0),
    )
