"""The gated delta rule: what a key reads from the state is replaced, not added to.

For each value head, with decay ``a = exp(g)``: ``S = a S (I - beta k k^T) + beta v k^T`` and
``y = scale S q``. Letters: T packed tokens, S sequences, H value heads, J key heads (each shared by
H / J value heads), K and V widths, b batch. A state is (H V K).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.gdn import reference
from kernels.gdn.naive import prefill_naive
from kernels.segments import segments, total
from kernels.ssd import PAD, Scan

__all__ = ["PAD", "Scan", "prefill", "prefill_naive", "update"]


def prefill(
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
    chunk: int = 64,
    backend: str | None = None,
) -> Scan:
    """Scans sequences packed one after the other, as ``kernels.ssd.prefill`` does.

    q and k (T J K), v (T H V), g (T H) log of the decay, beta (T H), initial (S H V K).
    ``normalise`` makes q and k of length 1 first: without it, and with ``beta |k|^2`` above 2, an
    error in the state grows. ``scale`` is ``K ** -0.5`` if None.
    """
    sizes = shapes.bind(
        q=(q, "T J K"),
        k=(k, "T J K"),
        v=(v, "T H V"),
        g=(g, "T H"),
        beta=(beta, "T H"),
        initial=(initial, "S H V K"),
    )
    shapes.divides("key heads", sizes["J"], sizes["H"])
    total(sizes["T"], lengths)
    if sizes.get("S", len(lengths)) != len(lengths):
        raise ValueError(f"{sizes['S']} initial states: allowed is {len(lengths)}, one a sequence")
    plan = segments(lengths, starts, states_at, chunk)
    chosen = backends.resolve(v, backend)
    scale = sizes["K"] ** -0.5 if scale is None else scale
    arguments = (q, k, v, g, beta, scale, normalise, initial, plan, len(states_at), chunk, chosen)
    if chosen.triton:
        from kernels.gdn import kernel

        return Scan(*kernel.prefill(*arguments))
    return Scan(*reference.prefill(*arguments))


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    normalise: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Advances the states in ``slots`` of ``pool`` (slots H V K) in place; returns y (b H V).

    q and k (b J K), v (b H V), g and beta (b H). Output is 0 and no state touched for ``PAD``.
    """
    sizes = shapes.bind(
        pool=(pool, "S H V K"),
        slots=(slots, "b"),
        q=(q, "b J K"),
        k=(k, "b J K"),
        v=(v, "b H V"),
        g=(g, "b H"),
        beta=(beta, "b H"),
    )
    shapes.divides("key heads", sizes["J"], sizes["H"])
    shapes.pool_rows("pool", pool)
    chosen = backends.resolve(v, backend)
    scale = sizes["K"] ** -0.5 if scale is None else scale
    arguments = (pool, slots, q, k, v, g, beta, scale, normalise, chosen)
    if chosen.triton:
        from kernels.gdn import kernel

        return kernel.update(*arguments)
    return reference.update(*arguments)
