"""Attention in Triton: one program a (tile of query tokens, key head) walks the keys once.

A tile's rows are (token, query head of the key head), so a decode, one token with all its query
heads, is the same kernel as a prefill and reads each key once.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.shapes import packed
from kernels.tiles import PRECISE, narrowed, tl_dtype


@triton.jit
def attend_kernel(
    q,
    k_pool,
    v_pool,
    table,
    y,
    tile_rows,
    tile_lengths,
    tile_sequences,
    tile_positions,
    q_row,
    table_row,
    block_step,
    scale,
    TOKENS,
    D,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    begin = tl.load(tile_rows + tile).to(tl.int64)
    length = tl.load(tile_lengths + tile)
    sequence = tl.load(tile_sequences + tile).to(tl.int64)
    position = tl.load(tile_positions + tile)
    ms, ns, ds = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    token, head = ms // SHARE, group * SHARE + ms % SHARE
    live = (token < length)[:, None] & (ds < D)[None, :]
    row = begin + token
    at_q = row[:, None] * q_row + head[:, None] * D + ds[None, :]
    ask = tl.load(q + at_q, mask=live, other=0.0).to(DOT)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    most, weight = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    context = position + length
    for first in range(0, context, BLOCK_N):
        n = first + ns
        block = tl.load(table + sequence * table_row + n // TOKENS, mask=n < context, other=0)
        at = block.to(tl.int64) * block_step + ((n % TOKENS) * groups + group) * D
        there = (n < context)[:, None] & (ds < D)[None, :]
        k = tl.load(k_pool + at[:, None] + ds[None, :], mask=there, other=0.0).to(DOT)
        v = tl.load(v_pool + at[:, None] + ds[None, :], mask=there, other=0.0).to(DOT)
        scores = tl.dot(ask, tl.trans(k), input_precision=PRECISION) * scale
        # A row of a tile that is no token sees the first key, so that no row is all masked.
        seen = (n[None, :] <= position + token[:, None]) & (n < context)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        fade, part = tl.exp(most - higher), tl.exp(scores - higher[:, None])
        out = out * fade[:, None] + tl.dot(part.to(DOT), v, input_precision=PRECISION)
        weight, most = weight * fade + tl.sum(part, 1), higher
    out = out / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at_y = (row[:, None] * groups * SHARE + head[:, None]) * D + ds[None, :]
    tl.store(y + at_y, narrowed(out, y.dtype.element_ty), mask=live)


def prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    scale: float,
    backend: Backend,
) -> torch.Tensor:
    """Causal attention of packed queries over everything up to each."""
    share = q.shape[1] // k_pool.shape[2]
    chosen = dict(config.row(backend, "attention_prefill", max(lengths, default=0)))
    height = config.power(share, chosen.pop("BLOCK_M"))
    arrays = _tiles(lengths, starts, height // config.power(share, 1))
    tiles = [torch.from_numpy(a.astype(np.int32)).to(q.device) for a in arrays]
    return _start(q, k_pool, v_pool, block_table, tiles, scale, height, chosen, backend)


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    backend: Backend,
) -> torch.Tensor:
    """One query token of each sequence over its context; a tile each, nothing read back."""
    chosen = dict(config.row(backend, "attention_decode", len(q)))
    height = config.power(q.shape[1] // k_pool.shape[2])
    contexts = contexts.to(torch.int32)
    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
    # Padding is a token at position -1: it has a tile of length 1 and no key.
    tiles = [rows, torch.ones_like(rows), rows, contexts - 1]
    return _start(q, k_pool, v_pool, block_table, tiles, scale, height, chosen, backend)


def _tiles(
    lengths: tuple[int, ...], starts: tuple[int, ...], tokens: int
) -> tuple[np.ndarray, ...]:
    """First row, length, sequence and first position of each tile of up to ``tokens`` tokens."""
    sizes, begun = np.array(lengths, dtype=np.int64), np.array(starts, dtype=np.int64)
    counts = -(-sizes // tokens)
    sequence = np.repeat(np.arange(len(sizes)), counts)
    offset = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    rows = (np.cumsum(sizes) - sizes)[sequence] + offset
    return rows, np.minimum(sizes[sequence] - offset, tokens), sequence, begun[sequence] + offset


def _start(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    tiles: list[torch.Tensor],
    scale: float,
    height: int,
    chosen: dict[str, int],
    backend: Backend,
) -> torch.Tensor:
    (_, heads, d), (_, tokens, groups, _), q = q.shape, k_pool.shape, packed(q)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launches.start(
        attend_kernel,
        (len(tiles[0]), groups),
        *(q, k_pool, v_pool, block_table, y, *tiles),
        *(q.stride(0), block_table.stride(0), k_pool.stride(0), scale, tokens, d),
        config=chosen,
        SHARE=heads // groups,
        BLOCK_M=height,
        BLOCK_D=config.power(d),
        DOT=tl_dtype(backend.dot(q.dtype)),
        PRECISION=PRECISE,
    )
    return y
