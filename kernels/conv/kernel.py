"""The convolution in Triton: one program a (part of the tokens, part of the channels)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.conv.windows import Windows
from kernels.shapes import Maybe, packed
from kernels.tiles import narrowed


@triton.jit
def seen_at(u, initial, row, first, owner, cs, u_row, C, W: tl.constexpr, live):
    """Inputs at packed rows; before a sequence's first row those of its initial window."""
    inside = row >= first
    at = row[:, None] * u_row + cs[None, :]
    value = tl.load(u + at, mask=live & inside[:, None], other=0.0).to(tl.float32)
    if initial is not None:
        held = owner * (W - 1) + (row - first + W - 1)
        before = live & (row < first)[:, None]
        at = held[:, None] * C + cs[None, :]
        value += tl.load(initial + at, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit
def prefill_kernel(
    u,
    weight,
    bias,
    initial,
    y,
    first,
    owner,
    u_row,
    T,
    C,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    ts = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cs = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_t, in_c = ts < T, cs < C
    live = in_t[:, None] & in_c[None, :]
    begin = tl.load(first + ts, mask=in_t, other=0).to(tl.int64)
    own = tl.load(owner + ts, mask=in_t, other=0).to(tl.int64)
    rows = ts.to(tl.int64)
    out = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if bias is not None:
        out += tl.load(bias + cs, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        tap = tl.load(weight + cs * W + j, mask=in_c, other=0.0).to(tl.float32)
        row = rows - (W - 1 - j)
        out += tap[None, :] * seen_at(u, initial, row, begin, own, cs, u_row, C, W, live)
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    at = rows[:, None] * C + cs[None, :]
    tl.store(y + at, narrowed(out, y.dtype.element_ty), mask=live)


@triton.jit
def window_kernel(
    u,
    initial,
    windows,
    ends,
    begins,
    owners,
    u_row,
    C,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    ws, cs = tl.arange(0, BLOCK_W), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (ws < W - 1)[:, None] & (cs < C)[None, :]
    row = tl.load(ends + window).to(tl.int64) - (W - 1) + ws
    begin = tl.load(begins + window).to(tl.int64) + tl.zeros_like(row)
    owner = tl.load(owners + window).to(tl.int64)
    value = seen_at(u, initial, row, begin, owner, cs, u_row, C, W, live)
    at = (window * (W - 1) + ws[:, None]) * C + cs[None, :]
    tl.store(windows + at, narrowed(value, windows.dtype.element_ty), mask=live)


@triton.jit
def update_kernel(
    pool,
    slots,
    u,
    weight,
    bias,
    y,
    slot_step,
    u_row,
    C,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, cs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live, slot = cs < C, tl.load(slots + row).to(tl.int64)
    at_y = y + row * C + cs
    if slot < 0:
        tl.store(at_y, tl.zeros((BLOCK_C,), dtype=y.dtype.element_ty), mask=live)
        return
    window = pool + slot * slot_step + cs
    out = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if bias is not None:
        out += tl.load(bias + cs, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        held = tl.load(window + j * C, mask=live, other=0.0)
        out += tl.load(weight + cs * W + j, mask=live, other=0.0).to(tl.float32) * held.to(
            tl.float32
        )
        if j > 0:
            tl.store(window + (j - 1) * C, held, mask=live)
    new = tl.load(u + row * u_row + cs, mask=live, other=0.0).to(tl.float32)
    out += tl.load(weight + cs * W + W - 1, mask=live, other=0.0).to(tl.float32) * new
    if W > 1:
        tl.store(window + (W - 2) * C, narrowed(new, pool.dtype.element_ty), mask=live)
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    tl.store(at_y, narrowed(out, y.dtype.element_ty), mask=live)


def prefill(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    initial: Maybe,
    plan: Windows,
    silu: bool,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, last windows, requested windows."""
    (tokens, channels), width, u = u.shape, weight.shape[1], packed(u)
    first, owner, ends, begins, owners = plan.on(u.device)
    initial = None if initial is None else initial.contiguous()
    y = torch.empty((tokens, channels), dtype=u.dtype, device=u.device)
    windows = u.new_empty((len(ends), width - 1, channels))
    chosen = dict(config.row(backend, "conv_prefill", tokens))
    block = config.power(channels, most=chosen.pop("BLOCK_C"))
    parts, weight = -(-channels // block), weight.contiguous()
    launches.start(
        prefill_kernel,
        (-(-tokens // chosen["BLOCK_T"]), parts),
        *(u, weight, bias, initial, y, first, owner, u.stride(0), tokens, channels),
        config=chosen,
        W=width,
        SILU=silu,
        BLOCK_C=block,
    )
    if width > 1:
        launches.start(
            window_kernel,
            (len(ends), parts),
            *(u, initial, windows, ends, begins, owners, u.stride(0), channels),
            config={},
            W=width,
            BLOCK_W=config.power(width - 1, 1),
            BLOCK_C=block,
        )
    return y, windows[: plan.sequences], windows[plan.sequences :]


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    silu: bool,
    backend: Backend,
) -> torch.Tensor:
    """One token of each live row; the pool is written in place."""
    (batch, channels), width, u = u.shape, weight.shape[1], packed(u)
    y = torch.empty((batch, channels), dtype=u.dtype, device=u.device)
    chosen = dict(config.row(backend, "conv_update", batch))
    block = config.power(channels, most=chosen.pop("BLOCK_C"))
    launches.start(
        update_kernel,
        (batch, -(-channels // block)),
        *(pool, slots, u, weight.contiguous(), bias, y, pool.stride(0), u.stride(0), channels),
        config=chosen,
        W=width,
        SILU=silu,
        BLOCK_C=block,
    )
    return y
