"""Attention over keys and values in blocks: prefill on a cached prefix, decode, writing KV.

The pools are (blocks, block tokens, J, d); ``block_table`` (S, blocks of the longest) names each
sequence's blocks in order. New keys and values are written first (``write``), so that a prefill and
a decode read everything through the table. Letters: T packed query tokens, S sequences, H query
heads, J key heads (each shared by H / J query heads), d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.attention import reference
from kernels.attention.naive import prefill_naive
from kernels.segments import total
from kernels.state import PAD

__all__ = ["PAD", "decode", "prefill", "prefill_naive", "write"]


def write(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Writes k and v (T J d) to ``places`` (T), each ``block * block tokens + offset``.

    A token at ``PAD`` is not written.
    """
    shapes.bind(
        k_pool=(k_pool, "blocks tokens J d"),
        v_pool=(v_pool, "blocks tokens J d"),
        k=(k, "T J d"),
        v=(v, "T J d"),
        places=(places, "T"),
    )
    chosen = backends.resolve(k, backend)
    if chosen.triton:
        from kernels.state import kernel

        for pool, each in ((k_pool, k), (v_pool, v)):
            rows = pool.view(-1, *pool.shape[2:])
            kernel.move(shapes.packed(each), rows, None, places, chosen)
        return
    live = places >= 0
    for pool, each in ((k_pool, k), (v_pool, v)):
        pool.view(-1, *pool.shape[2:])[places[live].long()] = each[live].to(pool.dtype)


def prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries (T H d) at positions from ``starts`` on: (T H d).

    On CUDA this is torch's own attention unless ``backend`` is triton. Raises ``ValueError``.
    """
    sizes = _bind(q, k_pool, v_pool, block_table)
    total(sizes["T"], lengths)
    begun = tuple(starts) if starts is not None else (0,) * len(lengths)
    if not len(begun) == len(lengths) == sizes["S"] or min((*begun, *lengths), default=0) < 0:
        raise ValueError(
            f"{len(lengths)} lengths, {len(begun)} starts: allowed is one from 0 up for each of "
            f"{sizes['S']} rows of the block table"
        )
    chosen = backends.resolve(q, backend, cuda="torch")
    scale = sizes["d"] ** -0.5 if scale is None else scale
    if chosen.triton:
        from kernels.attention import kernel

        return kernel.prefill(q, k_pool, v_pool, block_table, tuple(lengths), begun, scale, chosen)
    return reference.prefill(q, k_pool, v_pool, block_table, tuple(lengths), begun, scale)


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """One query token (S H d) of each sequence over its first ``contexts`` (S) tokens, itself
    among them: (S H d). A context of 0 is padding; its output is 0."""
    shapes.bind(contexts=(contexts, "T"), q=(q, "T H d"))
    sizes = _bind(q, k_pool, v_pool, block_table)
    chosen = backends.resolve(q, backend)
    scale = sizes["d"] ** -0.5 if scale is None else scale
    if chosen.triton:
        from kernels.attention import kernel

        return kernel.decode(q, k_pool, v_pool, block_table, contexts, scale, chosen)
    return reference.decode(q, k_pool, v_pool, block_table, contexts, scale)


def _bind(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, block_table: torch.Tensor
) -> dict[str, int]:
    sizes = shapes.bind(
        q=(q, "T H d"),
        k_pool=(k_pool, "blocks tokens J d"),
        v_pool=(v_pool, "blocks tokens J d"),
        block_table=(block_table, "S columns"),
    )
    shapes.divides("key heads", sizes["J"], sizes["H"])
    if k_pool.stride() != v_pool.stride():
        raise ValueError(f"strides of v_pool {v_pool.stride()}: allowed is {k_pool.stride()}")
    shapes.pool_rows("k_pool", k_pool)
    return sizes
