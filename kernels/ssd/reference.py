"""The scan in torch: chunk by chunk, every chunk padded to one shape, so that equal inputs give
equal bits wherever a sequence was cut into steps and whatever else was in the batch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, softplus

from kernels.backend import Backend
from kernels.segments import Segments
from kernels.shapes import Maybe


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that is computed in: float64 for float64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


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
    work, shape = wide(x.dtype), (x.shape[1], x.shape[2], B.shape[2])
    y, sequences = torch.empty_like(x), len(plan.bounds) - 1
    last = x.new_empty((sequences, *shape), dtype=work)
    states = x.new_empty((count, *shape), dtype=work)
    step, A, lengths = backend.inner(chunk), A.to(work), plan.on(x.device)[1]
    for s in range(sequences):
        state = x.new_zeros(shape, dtype=work) if initial is None else initial[s].to(work)
        for i in range(plan.bounds[s], plan.bounds[s + 1]):
            row, length, out = int(plan.rows[i]), int(plan.lengths[i]), int(plan.outs[i])
            px, pd, pb, pc = (_padded(each, row, length, size, work) for each in (x, dt, B, C))
            found, state = step(state, px, pd, pb, pc, A, D, dt_bias, soft, lengths[i])
            y[row : row + length] = found[:length]
            if out >= 0:
                states[out] = state
        last[s] = state
    return y, last, states


def _padded(
    tensor: torch.Tensor, row: int, length: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    part = tensor[row : row + length].to(dtype)
    return pad(part, (0, 0) * (part.dim() - 1) + (0, size - length)).contiguous()


def chunk(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
    length: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of which ``length`` tokens are real; padding has dt 0 and so changes nothing."""
    (size, heads, p), (groups, n) = x.shape, B.shape[1:]
    d = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    d = softplus(d) if soft else d
    at = torch.arange(size, device=x.device)
    d = torch.where((at < length)[:, None], d, 0.0).T
    total = torch.cumsum(d * A[:, None], dim=1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    gap = torch.where(at[:, None] >= at[None, :], total[:, :, None] - total[:, None, :], -torch.inf)
    b, c, values = B.transpose(0, 1), C.transpose(0, 1), x.transpose(0, 1)
    scores = (c @ b.transpose(1, 2))[:, None] * gap.exp().view(groups, -1, size, size)
    within = (scores.view(heads, size, size) * d[:, None, :]) @ values
    carried = (c @ state.view(groups, -1, n).transpose(1, 2)).view(groups, size, -1, p)
    carried = carried.transpose(1, 2).reshape(heads, size, p) * total.exp()[:, :, None]
    end = torch.where(at == length - 1, total, 0.0).sum(1, keepdim=True)
    weight = (end - total).exp() * d
    added = (values * weight[:, :, None]).transpose(1, 2).reshape(groups, -1, size) @ b
    following = state * end.exp()[:, :, None] + added.view(heads, p, n)
    y = (within + carried).transpose(0, 1)
    return (y if D is None else y + D[:, None] * x), following


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
    live = torch.nonzero(slots >= 0).flatten()
    rows = slots[live].long()
    lx, ld, lb, lc = (each[live] for each in (x, dt, B, C))
    y, following = backend.inner(token)(pool[rows], lx, ld, lb, lc, A, D, dt_bias, soft)
    pool[rows] = following
    return torch.zeros_like(x).index_copy_(0, live, y)


def token(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: Maybe,
    dt_bias: Maybe,
    soft: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a batch: the outputs and the next states, in the dtypes of x and state."""
    work, (batch, heads, p), (groups, n) = wide(x.dtype), x.shape, B.shape[1:]
    values, d, b, c = (each.to(work) for each in (x, dt, B, C))
    d = d if dt_bias is None else d + dt_bias
    d = softplus(d) if soft else d
    old = state.to(work).view(batch, groups, -1, p, n)
    decay = (d * A).exp().view(batch, groups, -1, 1, 1)
    scaled = (values * d[:, :, None]).view(batch, groups, -1, p, 1)
    new = decay * old + scaled * b[:, :, None, None, :]
    y = (new @ c[:, :, None, :, None]).reshape(batch, heads, p)
    y = y if D is None else y + D[:, None] * values
    return y.to(x.dtype), new.view(state.shape).to(state.dtype)
