"""int8 states in Triton: one program a (pair of slots, matrix P x N, part of N)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.tiles import narrowed

# Adding and taking away 1.5 * 2^23 rounds an fp32 below 2^22 to an integer, half to even.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def save_kernel(
    pool,
    slots,
    values,
    scale,
    saved_slots,
    pool_step,
    values_step,
    scale_step,
    P,
    N,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pair, matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    read = tl.load(slots + pair).to(tl.int64)
    write = tl.load(saved_slots + pair).to(tl.int64)
    if (read >= 0) & (write >= 0):
        ps, ns = tl.arange(0, BLOCK_P), part * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (ps[:, None] < P) & (ns[None, :] < N)
        tile = (matrix * P + ps[:, None]) * N + ns[None, :]
        state = tl.load(pool + read * pool_step + tile, mask=live, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(state), 0), 1e-8)
        step = narrowed(tl.div_rn(largest, 127.0), scale.dtype.element_ty)
        at = write * scale_step + matrix * N + ns
        tl.store(scale + at, step, mask=ns < N)
        step = step.to(tl.float32)
        step = tl.where(step == 0.0, 1.0, step)[None, :] + tl.zeros_like(state)
        whole = (tl.div_rn(state, step) + ROUNDING) - ROUNDING
        whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
        tl.store(values + write * values_step + tile, whole.to(tl.int8), mask=live)


@triton.jit
def restore_kernel(
    values,
    scale,
    saved_slots,
    pool,
    slots,
    values_step,
    scale_step,
    pool_step,
    P,
    N,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pair, matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    read = tl.load(saved_slots + pair).to(tl.int64)
    write = tl.load(slots + pair).to(tl.int64)
    if (read >= 0) & (write >= 0):
        ps, ns = tl.arange(0, BLOCK_P), part * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (ps[:, None] < P) & (ns[None, :] < N)
        tile = (matrix * P + ps[:, None]) * N + ns[None, :]
        whole = tl.load(values + read * values_step + tile, mask=live, other=0).to(tl.float32)
        step = tl.load(scale + read * scale_step + matrix * N + ns, mask=ns < N, other=0.0)
        # Rounded to the scale's dtype first, as the definition has it, then to the pool's.
        state = narrowed(whole * step.to(tl.float32)[None, :], scale.dtype.element_ty)
        state = narrowed(state.to(tl.float32), pool.dtype.element_ty)
        tl.store(pool + write * pool_step + tile, state, mask=live)


def _shape(
    pool: torch.Tensor, pairs: int, backend: Backend
) -> tuple[tuple[int, int, int], dict[str, int]]:
    p, n = pool.shape[-2:]
    chosen = dict(config.row(backend, "int8"))
    chosen["BLOCK_N"] = config.power(n, most=chosen["BLOCK_N"])
    chosen["BLOCK_P"] = config.power(p)
    matrices = pool[0].numel() // max(p * n, 1) if len(pool) else 0
    return (pairs, matrices, -(-n // chosen["BLOCK_N"])), chosen


def save(
    pool: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    saved_slots: torch.Tensor,
    backend: Backend,
) -> None:
    """As ``kernels.int8.save``."""
    grid, chosen = _shape(pool, len(slots), backend)
    steps = (pool.stride(0), values.stride(0), scale.stride(0))
    arguments = (pool, slots, values, scale, saved_slots, *steps, *pool.shape[-2:])
    launches.start(save_kernel, grid, *arguments, config=chosen)


def restore(
    values: torch.Tensor,
    scale: torch.Tensor,
    saved_slots: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    backend: Backend,
) -> None:
    """As ``kernels.int8.restore``."""
    grid, chosen = _shape(pool, len(slots), backend)
    steps = (values.stride(0), scale.stride(0), pool.stride(0))
    arguments = (values, scale, saved_slots, pool, slots, *steps, *pool.shape[-2:])
    launches.start(restore_kernel, grid, *arguments, config=chosen)
