"""The definition: one query token after the other, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def prefill_naive(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    *,
    lengths: Sequence[int],
    starts: Sequence[int],
    scale: float | None = None,
) -> torch.Tensor:
    """As ``prefill``; a decode is a prefill of lengths 1."""
    share, size = q.shape[1] // k_pool.shape[2], k_pool.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    y, row = torch.empty_like(q), 0
    for s, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        for position in range(start, start + length):
            places = [(int(block_table[s, p // size]), p % size) for p in range(position + 1)]
            k, v = (
                torch.stack([pool[place] for place in places]).repeat_interleave(share, 1)
                for pool in (k_pool, v_pool)
            )
            weights = torch.softmax(scale * torch.einsum("hd,nhd->hn", q[row], k), 1)
            y[row] = torch.einsum("hn,nhd->hd", weights, v)
            row += 1
    return y
