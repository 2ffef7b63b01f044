"""The scan in Triton: one program a (head, part of P, sequence) walks its segments in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.segments import Segments
from kernels.shapes import Maybe, packed
from kernels.tiles import PRECISE, narrowed, softplus, tl_dtype


@triton.jit
def prefill_kernel(
    x,
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
    x_row,
    dt_row,
    b_row,
    c_row,
    P,
    N,
    share,
    SOFTPLUS: tl.constexpr,
    L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, group = tl.num_programs(0), head // share
    ps, ns, ts = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
    in_p, in_n = ps < P, ns < N
    tile = ps[:, None] * N + ns[None, :]
    in_tile = in_p[:, None] & in_n[None, :]
    a = tl.load(A + head).to(tl.float32)
    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    own = (sequence * heads + head) * P * N
    if initial is not None:
        state += tl.load(initial + own + tile, mask=in_tile, other=0.0).to(tl.float32)
    for segment in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
        row, length = tl.load(seg_rows + segment).to(tl.int64), tl.load(seg_lengths + segment)
        live = ts < length
        rows = row + ts
        d = tl.load(dt + rows * dt_row + head, mask=live, other=0.0).to(tl.float32)
        if bias is not None:
            d += tl.load(bias + head).to(tl.float32)
        if SOFTPLUS:
            d = softplus(d)
        d = tl.where(live, d, 0.0)
        total = tl.cumsum(a * d, 0)
        # The very element, not a sum of its own: a difference of large sums shows any rounding.
        end = tl.sum(tl.where(ts == length - 1, total, 0.0), 0)
        in_x, in_b = live[:, None] & in_p[None, :], live[:, None] & in_n[None, :]
        at_x = rows[:, None] * x_row + head * P + ps[None, :]
        values = tl.load(x + at_x, mask=in_x, other=0.0)
        b = tl.load(B + rows[:, None] * b_row + group * N + ns[None, :], mask=in_b, other=0.0)
        c = tl.load(C + rows[:, None] * c_row + group * N + ns[None, :], mask=in_b, other=0.0)
        values, b, c = values.to(DOT), b.to(DOT), c.to(DOT)
        gap = tl.where(ts[:, None] >= ts[None, :], total[:, None] - total[None, :], float("-inf"))
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * tl.exp(gap) * d[None, :]
        out = tl.dot(scores.to(DOT), values, input_precision=PRECISION)
        carried = tl.dot(c, tl.trans(state.to(DOT)), input_precision=PRECISION)
        out += carried * tl.exp(total)[:, None]
        if D is not None:
            out += tl.load(D + head).to(tl.float32) * values.to(tl.float32)
        at_y = (rows[:, None] * heads + head) * P + ps[None, :]
        tl.store(y + at_y, narrowed(out, y.dtype.element_ty), mask=in_x)
        weighted = values.to(tl.float32) * (tl.exp(end - total) * d)[:, None]
        added = tl.dot(tl.trans(weighted.to(DOT)), b, input_precision=PRECISION)
        state = state * tl.exp(end) + added
        left = tl.load(seg_outs + segment).to(tl.int64)
        tl.store(states + (left * heads + head) * P * N + tile, state, mask=in_tile & (left >= 0))
    tl.store(last + own + tile, state, mask=in_tile)


@triton.jit
def update_kernel(
    pool,
    slots,
    x,
    dt,
    A,
    B,
    C,
    D,
    bias,
    y,
    slot_step,
    x_row,
    dt_row,
    b_row,
    c_row,
    P,
    N,
    share,
    SOFTPLUS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads, group = tl.num_programs(1), head // share
    ps, ns = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = ps < P, ns < N
    slot = tl.load(slots + row).to(tl.int64)
    at_y = y + (row * heads + head) * P + ps
    if slot < 0:
        tl.store(at_y, tl.zeros((BLOCK_P,), dtype=y.dtype.element_ty), mask=in_p)
        return
    tile = slot * slot_step + (head * P + ps[:, None]) * N + ns[None, :]
    in_tile = in_p[:, None] & in_n[None, :]
    d = tl.load(dt + row * dt_row + head).to(tl.float32)
    if bias is not None:
        d += tl.load(bias + head).to(tl.float32)
    if SOFTPLUS:
        d = softplus(d)
    values = tl.load(x + row * x_row + head * P + ps, mask=in_p, other=0.0).to(tl.float32)
    b = tl.load(B + row * b_row + group * N + ns, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(C + row * c_row + group * N + ns, mask=in_n, other=0.0).to(tl.float32)
    state = tl.load(pool + tile, mask=in_tile, other=0.0).to(tl.float32)
    decay = tl.exp(d * tl.load(A + head).to(tl.float32))
    state = decay * state + (values * d)[:, None] * b[None, :]
    out = tl.sum(state * c[None, :], 1)
    if D is not None:
        out += tl.load(D + head).to(tl.float32) * values
    tl.store(pool + tile, narrowed(state, pool.dtype.element_ty), mask=in_tile)
    tl.store(at_y, narrowed(out, y.dtype.element_ty), mask=in_p)


def prefill(
    x: torch.Tensor,
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
    (_, heads, p), (groups, n), sequences = x.shape, B.shape[1:], len(plan.bounds) - 1
    x, dt, B, C = (packed(each) for each in (x, dt, B, C))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = x.new_empty((sequences, heads, p, n), dtype=torch.float32)
    states = x.new_empty((count, heads, p, n), dtype=torch.float32)
    operation = "ssd_prefill_fp32" if x.dtype == torch.float32 else "ssd_prefill"
    chosen = dict(config.row(backend, operation, size))
    block = config.power(p, most=chosen.pop("BLOCK_P"))
    launches.start(
        prefill_kernel,
        (heads, -(-p // block), sequences),
        *(x, dt, A, B, C, D, dt_bias),
        *(None if initial is None else initial.contiguous(), y, last, states),
        *plan.on(x.device),
        *(x.stride(0), dt.stride(0), B.stride(0), C.stride(0), p, n, heads // groups),
        config=chosen,
        SOFTPLUS=soft,
        L=size,
        BLOCK_P=block,
        BLOCK_N=config.power(n),
        DOT=tl_dtype(backend.dot(x.dtype)),
        PRECISION=PRECISE,
    )
    return y, last, states


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    x: torch.Tensor,
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
    (batch, heads, p), (groups, n) = x.shape, B.shape[1:]
    x, dt, B, C = (packed(each) for each in (x, dt, B, C))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chosen = dict(config.row(backend, "ssd_update", batch * heads))
    block = config.power(p, 1, chosen.pop("BLOCK_P"))
    launches.start(
        update_kernel,
        (batch, heads, -(-p // block)),
        *(pool, slots, x, dt, A, B, C, D, dt_bias, y),
        *(pool.stride(0), x.stride(0), dt.stride(0), B.stride(0), C.stride(0)),
        *(p, n, heads // groups),
        config=chosen,
        SOFTPLUS=soft,
        BLOCK_P=block,
        BLOCK_N=config.power(n),
    )
    return y
