"""The gated delta rule in Triton, token by token: one program a (part of V, head, sequence).

Prefill and update share one body and so give the same bits. A chunked kernel would use the tensor
units; this one is the exact and simple form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.segments import Segments
from kernels.shapes import Maybe, packed
from kernels.tiles import narrowed


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def advance(state, q, k, v, g, beta, at_q, at_k, at_v, at_g, at_beta, ks, vs, K, V, NORMALISE):
    one = tl.load(k + at_k + ks, mask=ks < K, other=0.0).to(tl.float32)
    ask = tl.load(q + at_q + ks, mask=ks < K, other=0.0).to(tl.float32)
    if NORMALISE:
        one, ask = unit(one), unit(ask)
    value = tl.load(v + at_v + vs, mask=vs < V, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(g + at_g).to(tl.float32))
    gain = tl.load(beta + at_beta).to(tl.float32)
    written = gain * (value - tl.sum(state * one[None, :], 1))
    state = state + written[:, None] * one[None, :]
    return state, tl.sum(state * ask[None, :], 1)


@triton.jit
def prefill_kernel(
    q,
    k,
    v,
    g,
    beta,
    initial,
    y,
    last,
    states,
    seg_rows,
    seg_lengths,
    seg_outs,
    bounds,
    q_row,
    k_row,
    v_row,
    g_row,
    beta_row,
    scale,
    K,
    V,
    share,
    NORMALISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, sequence, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    vs, ks = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    live, tile = (vs < V)[:, None] & (ks < K)[None, :], vs[:, None] * K + ks[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    own = (sequence * heads + head) * V * K
    if initial is not None:
        state += tl.load(initial + own + tile, mask=live, other=0.0).to(tl.float32)
    for segment in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
        begin = tl.load(seg_rows + segment).to(tl.int64)
        for t in range(tl.load(seg_lengths + segment)):
            row, group = begin + t, head // share
            state, out = advance(
                state, q, k, v, g, beta,
                row * q_row + group * K, row * k_row + group * K, row * v_row + head * V,
                row * g_row + head, row * beta_row + head, ks, vs, K, V, NORMALISE,
            )  # fmt: skip
            at = y + (row * heads + head) * V + vs
            tl.store(at, narrowed(scale * out, y.dtype.element_ty), mask=vs < V)
        left = tl.load(seg_outs + segment).to(tl.int64)
        at = states + (left * heads + head) * V * K + tile
        tl.store(at, state, mask=live & (left >= 0))
    tl.store(last + own + tile, state, mask=live)


@triton.jit
def update_kernel(
    pool,
    slots,
    q,
    k,
    v,
    g,
    beta,
    y,
    slot_step,
    q_row,
    k_row,
    v_row,
    g_row,
    beta_row,
    scale,
    K,
    V,
    share,
    NORMALISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, row, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    vs, ks = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    live, group = (vs < V)[:, None] & (ks < K)[None, :], head // share
    slot, at_y = tl.load(slots + row).to(tl.int64), y + (row * heads + head) * V + vs
    if slot < 0:
        tl.store(at_y, tl.zeros((BLOCK_V,), dtype=y.dtype.element_ty), mask=vs < V)
        return
    at = pool + slot * slot_step + (head * V + vs[:, None]) * K + ks[None, :]
    state = tl.load(at, mask=live, other=0.0).to(tl.float32)
    state, out = advance(
        state, q, k, v, g, beta,
        row * q_row + group * K, row * k_row + group * K, row * v_row + head * V,
        row * g_row + head, row * beta_row + head, ks, vs, K, V, NORMALISE,
    )  # fmt: skip
    tl.store(at, narrowed(state, pool.dtype.element_ty), mask=live)
    tl.store(at_y, narrowed(scale * out, y.dtype.element_ty), mask=vs < V)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    normalise: bool,
    initial: Maybe,
    plan: Segments,
    count: int,
    size: int,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, last states, requested states."""
    (_, heads, width), (groups, keys) = v.shape, k.shape[1:]
    sequences = len(plan.bounds) - 1
    q, k, v, g, beta = (packed(each) for each in (q, k, v, g, beta))
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    last = v.new_empty((sequences, heads, width, keys), dtype=torch.float32)
    states = v.new_empty((count, heads, width, keys), dtype=torch.float32)
    chosen = dict(config.row(backend, "gdn_prefill", sequences))
    block = config.power(width, 1, chosen.pop("BLOCK_V"))
    launches.start(
        prefill_kernel,
        (-(-width // block), heads, sequences),
        *(q, k, v, g, beta, None if initial is None else initial.contiguous()),
        *(y, last, states, *plan.on(v.device)),
        *(q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0)),
        *(scale, keys, width, heads // groups),
        config=chosen,
        NORMALISE=normalise,
        BLOCK_K=config.power(keys),
        BLOCK_V=block,
    )
    return y, last, states


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    normalise: bool,
    backend: Backend,
) -> torch.Tensor:
    """One token of each live row; the pool is written in place."""
    (batch, heads, width), (groups, keys) = v.shape, k.shape[1:]
    q, k, v, g, beta = (packed(each) for each in (q, k, v, g, beta))
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    chosen = dict(config.row(backend, "gdn_update", batch * heads))
    block = config.power(width, 1, chosen.pop("BLOCK_V"))
    launches.start(
        update_kernel,
        (-(-width // block), heads, batch),
        *(pool, slots, q, k, v, g, beta, y, pool.stride(0)),
        *(q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0)),
        *(scale, keys, width, heads // groups),
        config=chosen,
        NORMALISE=normalise,
        BLOCK_K=config.power(keys),
        BLOCK_V=block,
    )
    return y
