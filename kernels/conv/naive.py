"""The definition: token by token over a padded sequence, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def prefill_naive(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    initial: torch.Tensor | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    silu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``prefill``."""
    width, row, y, seen = weight.shape[1], 0, [u[:0]], []
    for s, length in enumerate(lengths):
        before = u.new_zeros(width - 1, u.shape[1]) if initial is None else initial[s]
        seen.append(torch.cat([before, u[row : row + length]]))
        for t in range(length):
            y.append((seen[s][t : t + width] * weight.T).sum(0, keepdim=True))
        row += length
    out = torch.cat(y) + (0 if bias is None else bias)
    ends = [(s, length) for s, length in enumerate(lengths)]
    wanted = [(s, at - (starts[s] if starts else 0)) for s, at in states_at]
    last, windows = (_stacked(u, seen, pairs, width) for pairs in (ends, wanted))
    return (out * torch.sigmoid(out) if silu else out), last, windows


def _stacked(
    u: torch.Tensor, seen: list[torch.Tensor], pairs: list[tuple[int, int]], width: int
) -> torch.Tensor:
    found = [seen[s][at : at + width - 1] for s, at in pairs]
    return torch.stack(found) if found else u.new_empty((0, width - 1, u.shape[1]))
