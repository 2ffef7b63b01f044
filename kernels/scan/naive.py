"""The definition: one token after the other, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import softplus as softplus_of


def prefill_naive(
    u: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    initial: torch.Tensor | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    dt_bias: torch.Tensor | None = None,
    softplus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``prefill``, by the recurrence."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = softplus_of(dt) if softplus else dt
    wanted = {pair: i for i, pair in enumerate(states_at)}
    y, states = torch.empty_like(u), u.new_empty((len(wanted), *A.shape))
    last, row = u.new_empty((len(lengths), *A.shape)), 0
    for s, length in enumerate(lengths):
        state = u.new_zeros(A.shape) if initial is None else initial[s]
        at = starts[s] if starts is not None else 0
        for t in range(row, row + length):
            state = torch.exp(dt[t][:, None] * A) * state + torch.outer(dt[t] * u[t], B[t])
            y[t] = state @ C[t] + (0 if D is None else D * u[t])
            at += 1
            if (s, at) in wanted:
                states[wanted[s, at]] = state
        last[s], row = state, row + length
    return y, last, states
