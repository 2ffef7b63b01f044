"""A model as the simulator sees it: its layers, and the sizes that cache and cost follow from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attention:
    """Attention layers. ``kind`` is ``gqa`` or ``mla`` (one latent of ``kv_lora_rank +
    qk_rope_head_dim`` values a token, not split over ranks)."""

    kind: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0


@dataclass(frozen=True)
class StateShape:
    """Arguments of a family's state shape; ``family`` is mamba1, mamba2, short_conv,
    linear_attention, gdn or kda; the rest as specs name them (intermediate_size, n_groups,
    num_heads, head_dim, state_size, conv_kernel, num_k_heads, num_v_heads, head_k_dim,
    head_v_dim, chunk_size)."""

    family: str
    args: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Moe:
    """A mixture-of-experts feed-forward; widths are inner widths, 0 where there is none or it is
    not known. ``dense_intermediate`` is the width of those layers that are dense instead."""

    experts: int
    active_experts: int
    expert_intermediate: int
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    latent: int = 0


@dataclass(frozen=True)
class Model:
    """``pattern``: one letter per layer in order, M state, * attention, - dense MLP, E MoE.

    ``ffn_intermediate`` is a dense layer's inner width (0 if none or not known), ``moe`` what
    stands in its place; ``vocab_size`` is 0 if not known. Dtypes are names such as ``bfloat16``;
    ``ssm_dtype`` is what "auto" means for this model. ``certain`` False: ``uncertain`` says which
    fields are not from the checkpoint's own configuration.
    """

    name: str
    pattern: str
    hidden_size: int
    vocab_size: int
    max_model_len: int
    attention: Attention | None
    state: StateShape | None
    ffn_intermediate: int = 0
    ffn_matrices: int = 2
    dtype: str = "bfloat16"
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    architecture: str = ""
    source: str = ""
    moe: Moe | None = None
    hf_id: str = ""
    certain: bool = True
    uncertain: str = ""
    notes: str = ""

    def count(self, letter: str) -> int:
        """Layers of one kind."""
        return self.pattern.count(letter)
