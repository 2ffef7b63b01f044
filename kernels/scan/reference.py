"""The selective scan in torch: in each chunk the steps are composed in log2 of its length."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, softplus

from kernels import affine
from kernels.backend import Backend
from kernels.segments import Segments
from kernels.shapes import Maybe


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
    work, sequences = torch.promote_types(u.dtype, torch.float32), len(plan.bounds) - 1
    last = u.new_empty((sequences, *A.shape), dtype=work)
    states = u.new_empty((count, *A.shape), dtype=work)
    y, step, lengths, A = (
        torch.empty_like(u),
        backend.inner(chunk),
        plan.on(u.device)[1],
        A.to(work),
    )
    for s in range(sequences):
        state = u.new_zeros(A.shape, dtype=work) if initial is None else initial[s].to(work)
        for i in range(plan.bounds[s], plan.bounds[s + 1]):
            row, length, out = int(plan.rows[i]), int(plan.lengths[i]), int(plan.outs[i])
            pu, pd, pb, pc = (
                pad(each[row : row + length].to(work), (0, 0, 0, size - length))
                for each in (u, dt, B, C)
            )
            found, state = step(state, pu, pd, A, pb, pc, D, dt_bias, soft, lengths[i])
            y[row : row + length] = found[:length]
            if out >= 0:
                states[out] = state
        last[s] = state
    return y, last, states


def chunk(
    state: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
    length: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of which ``length`` tokens are real; padding has dt 0 and so changes nothing."""
    d = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    d = softplus(d) if soft else d
    d = torch.where((torch.arange(len(d), device=d.device) < length)[:, None], d, 0.0)
    steps = (d[:, :, None] * A).exp(), (d * u)[:, :, None] * B[:, None, :]
    decay, added = affine.scan(*steps)
    every = decay * state + added
    y = (every @ C[:, :, None]).squeeze(2)
    return (y if D is None else y + D * u), every[-1]


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
    live = torch.nonzero(slots >= 0).flatten()
    rows, work = slots[live].long(), torch.promote_types(u.dtype, torch.float32)
    lu, ld, lb, lc = (each[live].to(work) for each in (u, dt, B, C))
    y, following = backend.inner(token)(pool[rows], lu, ld, A.to(work), lb, lc, D, dt_bias, soft)
    pool[rows] = following
    return torch.zeros_like(u).index_copy_(0, live, y.to(u.dtype))


def token(
    state: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a batch: the outputs, and the next states in the dtype they had."""
    d = dt if dt_bias is None else dt + dt_bias
    d = softplus(d) if soft else d
    new = (d[:, :, None] * A).exp() * state.to(u.dtype) + (d * u)[:, :, None] * B[:, None, :]
    y = (new @ C[:, :, None]).squeeze(2)
    return (y if D is None else y + D * u), new.to(state.dtype)
