"""Linear attention: the SSD scan with one constant decay for each head, 1 where there is no gate.

``S = a S + v k^T`` and ``y = S q``; so x is v, B is k, C is q, dt is 1 and A is ``log a``. There is
nothing else to it, and so no kernel of its own. A state is (H V K).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import ssd
from kernels.ssd import PAD, Scan

__all__ = ["PAD", "Scan", "prefill", "update"]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    initial: torch.Tensor | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    chunk: int = ssd.CHUNK,
    backend: str | None = None,
) -> Scan:
    """q and k (T G K), v (T H V), decay (H) above 0, initial (S H V K); as the SSD scan."""
    ones, log = _steps(v, decay)
    return ssd.prefill(
        *(v, ones, log, k, q),
        lengths=lengths,
        starts=starts,
        initial=initial,
        states_at=states_at,
        chunk=chunk,
        backend=backend,
    )


def update(
    pool: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """One token of each sequence, q and k (b G K), v (b H V), in place in pool (slots H V K)."""
    ones, log = _steps(v, decay)
    return ssd.update(pool, slots, v, ones, log, k, q, backend=backend)


def _steps(v: torch.Tensor, decay: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(v.dtype, torch.float32)
    ones = v.new_ones(v.shape[:2], dtype=wide)
    return ones, (ones.new_zeros(v.shape[1]) if decay is None else decay.to(wide).log())
