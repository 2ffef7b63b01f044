"""Attention by torch's scaled dot product, one sequence at a time.

So a sequence's result does not depend on what else is in the batch, and nothing is padded to the
longest context.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

# Fewer query rows go through products that sum in another order (3 or fewer on a CPU); a hit of all
# but the last tokens would then not give the bits of a full prefill.
LEAST = 8


def prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries over everything up to each."""
    y, row = torch.empty_like(q), 0
    for s, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        if length:
            k, v = _read(k_pool, v_pool, block_table[s], start + length, q.dtype)
            y[row : row + length] = _attend(q[row : row + length], k, v, scale, LEAST)
        row += length
    return y


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query token of each sequence over its context."""
    y = torch.zeros_like(q)
    for s, context in enumerate(contexts.tolist()):
        if context:
            k, v = _read(k_pool, v_pool, block_table[s], context, q.dtype)
            y[s : s + 1] = _attend(q[s : s + 1], k, v, scale)
    return y


def _read(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    context: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``context`` keys and values of a sequence: (J context d) each."""
    blocks = table[: -(-context // k_pool.shape[1])].long()
    k, v = (pool[blocks].flatten(0, 1)[:context].to(dtype) for pool in (k_pool, v_pool))
    return k.transpose(0, 1), v.transpose(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, least: int = 1
) -> torch.Tensor:
    length, shared = len(q), q.shape[1] != k.shape[0]
    more = max(0, min(least, k.shape[1]) - length)
    rows, context = length + more, k.shape[1]
    # Rows in front are thrown away again. A bias
    # that torch knows keeps the mask out of memory on CUDA; on a CPU it is materialised.
    y = scaled_dot_product_attention(
        torch.cat([q[:1].expand(more, -1, -1), q]).transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=causal_lower_right(rows, context) if rows > 1 and rows != context else None,
        is_causal=rows > 1 and rows == context,
        scale=scale,
        enable_gqa=shared,
    )
    return y[0, :, more:].transpose(0, 1)
