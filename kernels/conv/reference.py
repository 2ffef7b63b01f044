"""The convolution in torch: one multiply-add a tap, in the same order for prefill and update."""

from __future__ import annotations

import torch
from torch.nn.functional import silu as silu_of

from kernels.backend import Backend
from kernels.conv.windows import Windows
from kernels.shapes import Maybe


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
    first, owner, ends, begins, owners = (each.long() for each in plan.on(u.device))
    rows, taps = torch.arange(u.shape[0], device=u.device), weight.shape[1]
    seen = [_seen(u, initial, rows - back, first, owner) for back in range(taps - 1, 0, -1)]
    y = backend.inner(combine)([*seen, u], weight, bias, silu)
    kept = [_seen(u, initial, ends - back, begins, owners) for back in range(taps - 1, 0, -1)]
    shape = (len(ends), 0, u.shape[1])
    windows = torch.stack(kept, 1) if kept else u.new_empty(shape)
    return y, windows[: plan.sequences], windows[plan.sequences :]


def _seen(
    u: torch.Tensor, initial: Maybe, row: torch.Tensor, first: torch.Tensor, owner: torch.Tensor
) -> torch.Tensor:
    """Inputs at packed ``row``; before a sequence's ``first`` row those of its initial window."""
    inside = row >= first
    if initial is None:
        earlier: torch.Tensor | float = 0.0
    else:
        held = (row - first + initial.shape[1]).clamp(0, initial.shape[1] - 1)
        earlier = initial[owner, held].to(u.dtype)
    if not u.shape[0]:
        return u.new_zeros((len(row), u.shape[1])) + earlier
    return torch.where(inside[:, None], u[row.clamp(0, u.shape[0] - 1)], earlier)


def combine(
    seen: list[torch.Tensor], weight: torch.Tensor, bias: Maybe, silu: bool
) -> torch.Tensor:
    """The weighted sum of a token's inputs, oldest first, summed in fp32 (float64 for float64)."""
    work = torch.promote_types(seen[-1].dtype, torch.float32)
    taps = weight.to(work)
    y = (
        torch.zeros_like(seen[-1], dtype=work)
        if bias is None
        else bias.to(work).expand_as(seen[-1])
    )
    for j, each in enumerate(seen):
        y = y + taps[:, j] * each.to(work)
    return (silu_of(y) if silu else y).to(seen[-1].dtype)


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
    live = torch.nonzero(slots >= 0).flatten()
    rows, new = slots[live].long(), u[live]
    window = pool[rows]
    seen = [window[:, j].to(u.dtype) for j in range(window.shape[1])]
    y = backend.inner(combine)([*seen, new], weight, bias, silu)
    pool[rows] = torch.cat([window, new[:, None].to(pool.dtype)], 1)[:, 1:]
    return torch.zeros_like(u).index_copy_(0, live, y)
