"""The selective scan in Triton: one program a (part of the channels, sequence), token by token.

A chunk cannot become a matrix product, since every state value has a decay of its own; so prefill
and update share one body and give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.segments import Segments
from kernels.shapes import Maybe, packed
from kernels.tiles import narrowed, softplus


@triton.jit
def advance(
    state, u, dt, a, B, C, bias, skip, row, u_row, dt_row, b_row, c_row, cs, ns, C_, N, SOFT
):
    in_c, in_n = cs < C_, ns < N
    d = tl.load(dt + row * dt_row + cs, mask=in_c, other=0.0).to(tl.float32) + bias
    if SOFT:
        d = softplus(d)
    value = tl.load(u + row * u_row + cs, mask=in_c, other=0.0).to(tl.float32)
    b = tl.load(B + row * b_row + ns, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(C + row * c_row + ns, mask=in_n, other=0.0).to(tl.float32)
    state = tl.exp(d[:, None] * a) * state + (d * value)[:, None] * b[None, :]
    return state, tl.sum(state * c[None, :], 1) + skip * value


@triton.jit
def prefill_kernel(
    u,
    dt,
    A,
    B,
    C,
    D,
    bias,
    initial,
    y,
    last,
    states,
    seg_rows,
    seg_lengths,
    seg_outs,
    bounds,
    u_row,
    dt_row,
    b_row,
    c_row,
    CHANNELS,
    N,
    SOFTPLUS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cs, ns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    sequence, in_c = tl.program_id(1).to(tl.int64), cs < CHANNELS
    tile = cs[:, None] * N + ns[None, :]
    live = in_c[:, None] & (ns < N)[None, :]
    a = tl.load(A + tile, mask=live, other=0.0).to(tl.float32)
    shift, skip = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + cs, mask=in_c, other=0.0).to(tl.float32)
    if D is not None:
        skip += tl.load(D + cs, mask=in_c, other=0.0).to(tl.float32)
    state = tl.zeros((BLOCK_C, BLOCK_N), dtype=tl.float32)
    own = sequence * CHANNELS * N
    if initial is not None:
        state += tl.load(initial + own + tile, mask=live, other=0.0).to(tl.float32)
    for segment in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
        begin = tl.load(seg_rows + segment).to(tl.int64)
        for t in range(tl.load(seg_lengths + segment)):
            row = begin + t
            state, out = advance(
                state, u, dt, a, B, C, shift, skip, row,
                u_row, dt_row, b_row, c_row, cs, ns, CHANNELS, N, SOFTPLUS,
            )  # fmt: skip
            tl.store(y + row * CHANNELS + cs, narrowed(out, y.dtype.element_ty), mask=in_c)
        left = tl.load(seg_outs + segment).to(tl.int64)
        tl.store(states + left * CHANNELS * N + tile, state, mask=live & (left >= 0))
    tl.store(last + own + tile, state, mask=live)


@triton.jit
def update_kernel(
    pool,
    slots,
    u,
    dt,
    A,
    B,
    C,
    D,
    bias,
    y,
    slot_step,
    u_row,
    dt_row,
    b_row,
    c_row,
    CHANNELS,
    N,
    SOFTPLUS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cs, ns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    row, in_c = tl.program_id(0).to(tl.int64), cs < CHANNELS
    slot = tl.load(slots + row).to(tl.int64)
    at_y = y + row * CHANNELS + cs
    if slot < 0:
        tl.store(at_y, tl.zeros((BLOCK_C,), dtype=y.dtype.element_ty), mask=in_c)
        return
    tile = cs[:, None] * N + ns[None, :]
    live = in_c[:, None] & (ns < N)[None, :]
    a = tl.load(A + tile, mask=live, other=0.0).to(tl.float32)
    shift, skip = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + cs, mask=in_c, other=0.0).to(tl.float32)
    if D is not None:
        skip += tl.load(D + cs, mask=in_c, other=0.0).to(tl.float32)
    state = tl.load(pool + slot * slot_step + tile, mask=live, other=0.0).to(tl.float32)
    state, out = advance(
        state, u, dt, a, B, C, shift, skip, row,
        u_row, dt_row, b_row, c_row, cs, ns, CHANNELS, N, SOFTPLUS,
    )  # fmt: skip
    tl.store(pool + slot * slot_step + tile, narrowed(state, pool.dtype.element_ty), mask=live)
    tl.store(at_y, narrowed(out, y.dtype.element_ty), mask=in_c)


def prefill(
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
    initial: Maybe,
    plan: Segments,
    count: int,
    size: int,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, last states, requested states."""
    (channels, n), sequences = A.shape, len(plan.bounds) - 1
    u, dt, B, C = (packed(each) for each in (u, dt, B, C))
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    last = u.new_empty((sequences, channels, n), dtype=torch.float32)
    states = u.new_empty((count, channels, n), dtype=torch.float32)
    chosen = dict(config.row(backend, "scan_prefill", sequences))
    block = config.power(channels, most=chosen.pop("BLOCK_C"))
    launches.start(
        prefill_kernel,
        (-(-channels // block), sequences),
        *(u, dt, A.contiguous(), B, C, D, dt_bias),
        *(None if initial is None else initial.contiguous(), y, last, states),
        *plan.on(u.device),
        *(u.stride(0), dt.stride(0), B.stride(0), C.stride(0), channels, n),
        config=chosen,
        SOFTPLUS=soft,
        BLOCK_C=block,
        BLOCK_N=config.power(n, 1),
    )
    return y, last, states


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
    backend: Backend,
) -> torch.Tensor:
    """One token of each live row; the pool is written in place."""
    (channels, n), batch = A.shape, len(u)
    u, dt, B, C = (packed(each) for each in (u, dt, B, C))
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    chosen = dict(config.row(backend, "scan_update", batch))
    block = config.power(channels, most=chosen.pop("BLOCK_C"))
    launches.start(
        update_kernel,
        (batch, -(-channels // block)),
        *(pool, slots, u, dt, A.contiguous(), B, C, D, dt_bias, y),
        *(pool.stride(0), u.stride(0), dt.stride(0), B.stride(0), C.stride(0), channels, n),
        config=chosen,
        SOFTPLUS=soft,
        BLOCK_C=block,
        BLOCK_N=config.power(n, 1),
    )
    return y
