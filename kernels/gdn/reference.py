"""The gated delta rule in torch: a chunk's replacements solve one triangular system.

With ``c_t`` the sum of the log decays in the chunk, token t writes ``u_t k_t^T`` where
``u_t = beta_t (v_t - exp(c_t) S k_t - sum over s < t of exp(c_t - c_s) (k_s . k_t) u_s)``.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kernels.backend import Backend
from kernels.gdn.naive import unit
from kernels.segments import Segments
from kernels.shapes import Maybe


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
    work, sequences = torch.promote_types(v.dtype, torch.float32), len(plan.bounds) - 1
    shape = (v.shape[1], v.shape[2], k.shape[2])
    last = v.new_empty((sequences, *shape), dtype=work)
    states = v.new_empty((count, *shape), dtype=work)
    y, step = torch.empty_like(v), backend.inner(chunk)
    for s in range(sequences):
        state = v.new_zeros(shape, dtype=work) if initial is None else initial[s].to(work)
        for i in range(plan.bounds[s], plan.bounds[s + 1]):
            row, length, out = int(plan.rows[i]), int(plan.lengths[i]), int(plan.outs[i])
            pq, pk, pv, pg, pb = (
                _padded(each[row : row + length].to(work), size) for each in (q, k, v, g, beta)
            )
            found, state = step(state, pq, pk, pv, pg, pb, scale, normalise)
            y[row : row + length] = found[:length]
            if out >= 0:
                states[out] = state
        last[s] = state
    return y, last, states


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    return pad(part, (0, 0) * (part.dim() - 1) + (0, size - len(part))).contiguous()


def _by_head(x: torch.Tensor, heads: int, normalise: bool) -> torch.Tensor:
    x = unit(x) if normalise else x
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk; a padding token is all zeros: it decays and replaces nothing."""
    size, heads = g.shape
    qs, ks = _by_head(q, heads, normalise), _by_head(k, heads, normalise)
    total, b, values = torch.cumsum(g.T, 1), beta.T[:, :, None], v.transpose(0, 1)
    at = torch.arange(size, device=g.device)
    gap = torch.where(at[:, None] >= at[None, :], total[:, :, None] - total[:, None, :], -torch.inf)
    decay, fade = gap.exp(), total.exp()[:, :, None]
    overlap = b * (ks @ ks.transpose(1, 2)) * decay
    system = torch.tril(overlap, -1) + torch.eye(size, dtype=g.dtype, device=g.device)
    right = b * (values - fade * (ks @ state.transpose(1, 2)))
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    read = fade * (qs @ state.transpose(1, 2)) + (qs @ ks.transpose(1, 2) * decay) @ written
    kept = (total[:, -1:] - total).exp()[:, :, None]
    following = state * total[:, -1].exp()[:, None, None] + (written * kept).transpose(1, 2) @ ks
    return scale * read.transpose(0, 1), following


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
    live = torch.nonzero(slots >= 0).flatten()
    rows, work = slots[live].long(), torch.promote_types(v.dtype, torch.float32)
    lq, lk, lv, lg, lb = (each[live].to(work) for each in (q, k, v, g, beta))
    y, following = backend.inner(token)(pool[rows], lq, lk, lv, lg, lb, scale, normalise)
    pool[rows] = following
    return torch.zeros_like(v).index_copy_(0, live, y.to(v.dtype))


def token(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of a batch: the outputs, and the next states in the dtype they had."""
    share = v.shape[1] // k.shape[1]
    q, k = (unit(q), unit(k)) if normalise else (q, k)
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    decayed = g.exp()[:, :, None, None] * state.to(v.dtype)
    read = (decayed @ k[:, :, :, None]).squeeze(3)
    new = decayed + (beta[:, :, None] * (v - read))[:, :, :, None] * k[:, :, None, :]
    return scale * (new @ q[:, :, :, None]).squeeze(3), new.to(state.dtype)
