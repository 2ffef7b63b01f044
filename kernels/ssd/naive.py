"""The definition: one token after the other, in the precision of its inputs. The judge in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import softplus as softplus_of


def update_naive(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: x (H P), dt (H), B and C (G N), state (H P N); the output and the next state."""
    share = x.shape[0] // B.shape[0]
    B, C = B.repeat_interleave(share, 0), C.repeat_interleave(share, 0)
    state = torch.exp(dt * A)[:, None, None] * state + torch.einsum("h,hp,hn->hpn", dt, x, B)
    y = torch.einsum("hpn,hn->hp", state, C)
    return (y if D is None else y + D[:, None] * x), state


def prefill_naive(
    x: torch.Tensor,
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
    shape = (x.shape[1], x.shape[2], B.shape[2])
    wanted = {pair: i for i, pair in enumerate(states_at)}
    y, states = torch.empty_like(x), x.new_empty((len(wanted), *shape))
    last, row = x.new_empty((len(lengths), *shape)), 0
    for s, length in enumerate(lengths):
        state = x.new_zeros(shape) if initial is None else initial[s]
        at = starts[s] if starts is not None else 0
        for t in range(row, row + length):
            y[t], state = update_naive(state, x[t], dt[t], A, B[t], C[t], D)
            at += 1
            if (s, at) in wanted:
                states[wanted[s, at]] = state
        last[s], row = state, row + length
    return y, last, states
