"""The attention layer: grouped queries, no positions (as in the Nemotron-H family)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor.batch import Plan
from executor.layers.common import Draw, Numerics, rms_norm
from executor.pools import KvPool
from kernels import attention
from sim.model import Attention, Model


@dataclass(frozen=True)
class SelfAttention:
    """``qkv`` ((H + 2 J) d, hidden), ``out`` (hidden, H d)."""

    shape: Attention
    norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor

    @classmethod
    def draw(cls, model: Model, draw: Draw) -> SelfAttention:
        """Random weights. Raises ``ValueError`` for attention other than gqa."""
        a = model.attention
        if a is None or a.kind != "gqa":
            raise ValueError(f"{model.name}: attention other than gqa is not executed")
        columns = (a.num_query_heads + 2 * a.num_kv_heads) * a.head_dim
        qkv = draw.matrix(columns, model.hidden_size)
        out = draw.matrix(model.hidden_size, a.num_query_heads * a.head_dim)
        return cls(a, draw.ones(model.hidden_size), qkv, out)

    def forward(
        self, x: torch.Tensor, plan: Plan, kv: KvPool, layer: int, numerics: Numerics
    ) -> torch.Tensor:
        """What is added to ``x`` (T, hidden); writes the rows' KV first."""
        a, rows = self.shape, plan.prefilled
        found = numerics.linear(rms_norm(x, self.norm), self.qkv)
        found = found.view(len(x), a.num_query_heads + 2 * a.num_kv_heads, a.head_dim)
        q, k, v = found.split([a.num_query_heads, a.num_kv_heads, a.num_kv_heads], 1)
        pools, backend = (kv.k[layer], kv.v[layer]), numerics.backend
        attention.write(*pools, k, v, plan.places, backend=backend)
        parts = []
        if rows:
            parts.append(
                attention.prefill(
                    q[:rows],
                    *pools,
                    plan.tables,
                    lengths=plan.lengths,
                    starts=plan.starts,
                    backend=backend,
                )
            )
        if len(x) > rows:
            tables, contexts = plan.decode_tables, plan.contexts
            parts.append(attention.decode(q[rows:], *pools, tables, contexts, backend=backend))
        return numerics.linear(torch.cat(parts).flatten(1), self.out)
