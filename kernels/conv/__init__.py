"""The short causal convolution before a scan, with the window of past inputs it needs.

Each channel: ``y_t = bias + sum_j weight[j] u[t - W + 1 + j]``, then SiLU if asked for. The window
at a position is the ``W - 1`` raw inputs before it, zeros before the beginning. Letters: T packed
tokens, S sequences, C channels, W width, b batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.conv import reference
from kernels.conv.naive import prefill_naive
from kernels.conv.windows import plan
from kernels.segments import total
from kernels.state import PAD

__all__ = ["PAD", "Conv", "prefill", "prefill_naive", "update"]


class Conv(NamedTuple):
    """``y`` (T C), the ``last`` window of each sequence (S W-1 C), ``windows`` as requested."""

    y: torch.Tensor
    last: torch.Tensor
    windows: torch.Tensor


def prefill(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    initial: torch.Tensor | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    silu: bool = True,
    backend: str | None = None,
) -> Conv:
    """Convolves sequences packed one after the other.

    u (T C), weight (C W), bias (C), initial (S W-1 C). ``starts`` and ``states_at`` are those of
    the scan: windows are returned for the pairs (sequence, position). Equal to the bit however a
    sequence is cut into steps. Raises ``ValueError`` for shapes and positions.
    """
    shapes.bind(u=(u, "T C"), weight=(weight, "C W"), bias=(bias, "C"))
    total(u.shape[0], lengths)
    if initial is not None:
        wanted = (len(lengths), weight.shape[1] - 1, u.shape[1])
        if tuple(initial.shape) != wanted:
            raise ValueError(f"initial has shape {tuple(initial.shape)}: allowed is {wanted}")
    cuts = plan(tuple(lengths), tuple(starts or ()), tuple(states_at), weight.shape[1])
    chosen = backends.resolve(u, backend)
    if chosen.triton:
        from kernels.conv import kernel

        return Conv(*kernel.prefill(u, weight, bias, initial, cuts, silu, chosen))
    return Conv(*reference.prefill(u, weight, bias, initial, cuts, silu, chosen))


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """One token of each sequence: y (b C); the windows in ``slots`` of ``pool`` shift in place.

    pool (slots W-1 C), slots (b), u (b C). Output is 0 and no window is touched for ``PAD``.
    """
    shapes.bind(slots=(slots, "b"), u=(u, "b C"), weight=(weight, "C W"), bias=(bias, "C"))
    if tuple(pool.shape[1:]) != (weight.shape[1] - 1, u.shape[1]):
        allowed = (weight.shape[1] - 1, u.shape[1])
        raise ValueError(f"windows of {tuple(pool.shape[1:])}: allowed is {allowed}")
    shapes.pool_rows("pool", pool)
    chosen = backends.resolve(u, backend)
    if chosen.triton:
        from kernels.conv import kernel

        return kernel.update(pool, slots, u, weight, bias, silu, chosen)
    return reference.update(pool, slots, u, weight, bias, silu, chosen)
