"""How packed sequences are cut for a scan: at the chunk grid and wherever a state is to be left.

The grid is absolute: what resumes at position 100 with chunk 64 first computes 28 tokens. So a run
that leaves a state at a position and a run that resumes there cut what follows alike, and their
results are equal to the bit; on the grid that holds whether or not a state was left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
CHUNKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Segments:
    """``rows`` and ``lengths`` of each segment in the packed tokens; ``outs`` is the state that it
    leaves, -1 for none; segments ``bounds[s]`` to ``bounds[s + 1]`` are sequence ``s``."""

    rows: Ints
    lengths: Ints
    outs: Ints
    bounds: Ints
    _copies: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Rows, lengths, outs and bounds on ``device``, copied there once."""
        if device not in self._copies:
            arrays = (self.rows, self.lengths, self.outs, self.bounds)
            self._copies[device] = tuple(
                torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays
            )
        return self._copies[device]


def segments(
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    states_at: Sequence[tuple[int, int]] = (),
    chunk: int = 64,
) -> Segments:
    """Cuts sequences of ``lengths`` tokens that begin at ``starts`` (0 if None).

    ``states_at`` are pairs (sequence, position), a position counted from the sequence's own
    beginning, above its start and not above its end. Raises ``ValueError``.
    """
    begun = tuple(starts) if starts is not None else (0,) * len(lengths)
    return _segments(tuple(lengths), begun, tuple(states_at), chunk)


@functools.lru_cache(maxsize=64)
def _segments(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    states_at: tuple[tuple[int, int], ...],
    chunk: int,
) -> Segments:
    _check(lengths, starts, states_at, chunk)
    rows, sizes, outs, bounds, first = [], [], [], [0], 0
    for s, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        wanted = {at: i for i, (where, at) in enumerate(states_at) if where == s}
        cuts = _cuts(start, length, sorted(wanted), chunk)
        rows.append(first + cuts[:-1] - start)
        sizes.append(np.diff(cuts))
        outs.append(np.array([wanted.get(int(at), -1) for at in cuts[1:]], dtype=np.int64))
        bounds.append(bounds[-1] + len(cuts) - 1)
        first += length
    return Segments(_joined(rows), _joined(sizes), _joined(outs), np.array(bounds))


def _cuts(start: int, length: int, wanted: list[int], chunk: int) -> Ints:
    grid = np.arange((start // chunk + 1) * chunk, start + length, chunk)
    return np.unique(np.concatenate([[start, start + length], grid, wanted]).astype(np.int64))


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _check(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    states_at: tuple[tuple[int, int], ...],
    chunk: int,
) -> None:
    if chunk not in CHUNKS:
        near = min(CHUNKS, key=lambda c: abs(c - chunk))
        raise ValueError(f"chunk {chunk}: allowed are {CHUNKS}, nearest is {near}")
    if len(starts) != len(lengths) or min((*lengths, *starts), default=0) < 0:
        raise ValueError(f"starts {starts}: allowed is one from 0 up for each length in {lengths}")
    if len(set(states_at)) != len(states_at):
        raise ValueError(f"states_at {states_at}: a position is named twice")
    for where, at in states_at:
        if not 0 <= where < len(lengths):
            raise ValueError(f"state of sequence {where}: allowed are 0 to {len(lengths) - 1}")
        low, high = starts[where] + 1, starts[where] + lengths[where]
        if not low <= at <= high:
            near = min(max(at, low), high)
            raise ValueError(f"state at {at}: allowed are {low} to {high}, nearest is {near}")


def total(tokens: int, lengths: Sequence[int]) -> None:
    """Raises ``ValueError`` unless ``lengths`` add up to ``tokens``."""
    if sum(lengths) != tokens:
        raise ValueError(f"lengths add up to {sum(lengths)}: allowed is {tokens}, all tokens")
