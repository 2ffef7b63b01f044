"""The definition: one token after the other, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPSILON = 1e-6  # added to the squared length before a vector is divided by its length


def unit(x: torch.Tensor) -> torch.Tensor:
    """``x`` with vectors of length 1 along its last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def prefill_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    initial: torch.Tensor | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    scale: float | None = None,
    normalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``prefill``, by the recurrence."""
    if normalise:
        q, k = unit(q), unit(k)
    share, shape = v.shape[1] // k.shape[1], (v.shape[1], v.shape[2], k.shape[2])
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    wanted = {pair: i for i, pair in enumerate(states_at)}
    y, states = torch.empty_like(v), v.new_empty((len(wanted), *shape))
    last, row = v.new_empty((len(lengths), *shape)), 0
    for s, length in enumerate(lengths):
        state = v.new_zeros(shape) if initial is None else initial[s]
        at = starts[s] if starts is not None else 0
        for t in range(row, row + length):
            state = torch.exp(g[t])[:, None, None] * state
            read = torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("h,hv,hk->hvk", beta[t], v[t] - read, k[t])
            y[t] = scale * torch.einsum("hvk,hk->hv", state, q[t])
            at += 1
            if (s, at) in wanted:
                states[wanted[s, at]] = state
        last[s], row = state, row + length
    return y, last, states
