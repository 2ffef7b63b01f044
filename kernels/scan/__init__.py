"""Mamba-1's selective scan: every (channel, state column) decays on its own.

``h = exp(dt A) h + dt B u`` and ``y = h C + D u``. Letters: T packed tokens, S sequences,
C channels, N state width, b batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.scan import reference
from kernels.scan.naive import prefill_naive
from kernels.segments import segments, total
from kernels.ssd import PAD, Scan

__all__ = ["PAD", "Scan", "prefill", "prefill_naive", "update"]


def prefill(
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
    chunk: int = 64,
    backend: str | None = None,
) -> Scan:
    """Scans sequences packed one after the other, as ``kernels.ssd.prefill`` does.

    u and dt (T C), A (C N), B and C (T N), D and dt_bias (C), initial (S C N).
    """
    sizes = shapes.bind(
        u=(u, "T C"),
        dt=(dt, "T C"),
        A=(A, "C N"),
        B=(B, "T N"),
        C=(C, "T N"),
        D=(D, "C"),
        dt_bias=(dt_bias, "C"),
        initial=(initial, "S C N"),
    )
    total(sizes["T"], lengths)
    if sizes.get("S", len(lengths)) != len(lengths):
        raise ValueError(f"{sizes['S']} initial states: allowed is {len(lengths)}, one a sequence")
    plan = segments(lengths, starts, states_at, chunk)
    chosen = backends.resolve(u, backend)
    arguments = (u, dt, A, B, C, D, dt_bias, softplus, initial, plan, len(states_at), chunk, chosen)
    if chosen.triton:
        from kernels.scan import kernel

        return Scan(*kernel.prefill(*arguments))
    return Scan(*reference.prefill(*arguments))


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    u: torch.Tensor,
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
    """Advances the states in ``slots`` of ``pool`` (slots C N) in place; returns y (b C).

    u and dt (b C), B and C (b N). Output is 0 and no state is touched for ``PAD``.
    """
    shapes.bind(
        pool=(pool, "S C N"),
        slots=(slots, "b"),
        u=(u, "b C"),
        dt=(dt, "b C"),
        A=(A, "C N"),
        B=(B, "b N"),
        C=(C, "b N"),
        D=(D, "C"),
        dt_bias=(dt_bias, "C"),
    )
    shapes.pool_rows("pool", pool)
    chosen = backends.resolve(u, backend)
    arguments = (pool, slots, u, dt, A, B, C, D, dt_bias, softplus, chosen)
    if chosen.triton:
        from kernels.scan import kernel

        return kernel.update(*arguments)
    return reference.update(*arguments)
