"""Which earlier inputs a packed token sees, and which a window holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.segments import Ints, segments


@dataclass(frozen=True)
class Windows:
    """``first`` (T) is the packed row of the token's own sequence's first token, ``owner`` (T) the
    sequence. Windows to return, the last ones first: ``ends`` (S + K) is the row after the window,
    ``begins`` its sequence's first row, ``owners`` its sequence."""

    first: Ints
    owner: Ints
    ends: Ints
    begins: Ints
    owners: Ints
    sequences: int
    _copies: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The five arrays on ``device``, copied there once."""
        if device not in self._copies:
            arrays = (self.first, self.owner, self.ends, self.begins, self.owners)
            self._copies[device] = tuple(
                torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays
            )
        return self._copies[device]


@functools.lru_cache(maxsize=64)
def plan(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    states_at: tuple[tuple[int, int], ...],
    width: int,
) -> Windows:
    """Raises ``ValueError`` as the scan does for the same arguments."""
    begun = starts or (0,) * len(lengths)
    segments(lengths, begun, states_at)
    sizes, own = np.array(lengths, dtype=np.int64), np.arange(len(lengths))
    begins = np.cumsum(sizes) - sizes
    owners = np.concatenate([own, [s for s, _ in states_at]]).astype(np.int64)
    inside = np.array([at - begun[s] for s, at in states_at], dtype=np.int64)
    ends = np.concatenate([begins + sizes, begins[owners[len(own) :]] + inside])
    owner = np.repeat(own, sizes)
    return Windows(begins[owner], owner, ends, begins[owners], owners, len(lengths))
