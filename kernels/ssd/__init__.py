"""The scan of the Mamba-2 family (state-space duality): prefill in chunks, update by one token.

For each head, with decay ``a = exp(dt A)``: ``S = a S + dt x B^T`` and ``y = S C + D x``.
Letters: T packed tokens, S sequences, H heads, P head dimension, G groups that share B and C,
N state width, b batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.segments import segments, total
from kernels.ssd import reference
from kernels.ssd.naive import prefill_naive, update_naive

__all__ = ["PAD", "Scan", "prefill", "prefill_naive", "update", "update_naive"]

PAD = -1
CHUNK = 64


class Scan(NamedTuple):
    """``y`` as the input is laid out, ``last`` state of each sequence, ``states`` as requested."""

    y: torch.Tensor
    last: torch.Tensor
    states: torch.Tensor


def prefill(
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
    chunk: int = CHUNK,
    backend: str | None = None,
) -> Scan:
    """Scans sequences packed one after the other.

    x (T H P), dt (T H), A (H), B and C (T G N), D and dt_bias (H), initial (S H P N). ``starts``
    are the positions of the sequences' first tokens; ``states_at`` are pairs (sequence, position)
    whose states, after that many tokens of the sequence, are returned in that order. States are
    fp32 (float64 for float64 inputs in torch). Raises ``ValueError`` for shapes and positions.
    """
    sizes = shapes.bind(
        x=(x, "T H P"),
        dt=(dt, "T H"),
        A=(A, "H"),
        B=(B, "T G N"),
        C=(C, "T G N"),
        D=(D, "H"),
        dt_bias=(dt_bias, "H"),
        initial=(initial, "S H P N"),
    )
    shapes.divides("groups", sizes["G"], sizes["H"])
    total(sizes["T"], lengths)
    if sizes.get("S", len(lengths)) != len(lengths):
        raise ValueError(f"{sizes['S']} initial states: allowed is {len(lengths)}, one a sequence")
    plan = segments(lengths, starts, states_at, chunk)
    chosen = backends.resolve(x, backend)
    arguments = (x, dt, A, B, C, D, dt_bias, softplus, initial, plan, len(states_at), chunk, chosen)
    if chosen.triton:
        from kernels.ssd import kernel

        return Scan(*kernel.prefill(*arguments))
    return Scan(*reference.prefill(*arguments))


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    softplus: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Advances the states in ``slots`` of ``pool`` in place by one token each; returns y (b H P).

    pool (slots H P N), slots (b), x (b H P), dt (b H), B and C (b G N). A slot of ``PAD`` is
    padding: its output is 0 and no state is touched. Other slots must be distinct.
    """
    sizes = shapes.bind(
        pool=(pool, "S H P N"),
        slots=(slots, "b"),
        x=(x, "b H P"),
        dt=(dt, "b H"),
        A=(A, "H"),
        B=(B, "b G N"),
        C=(C, "b G N"),
        D=(D, "H"),
        dt_bias=(dt_bias, "H"),
    )
    shapes.divides("groups", sizes["G"], sizes["H"])
    shapes.pool_rows("pool", pool)
    chosen = backends.resolve(x, backend)
    arguments = (pool, slots, x, dt, A, B, C, D, dt_bias, softplus, chosen)
    if chosen.triton:
        from kernels.ssd import kernel

        return kernel.update(*arguments)
    return reference.update(*arguments)
