"""What one step computes, as slots and blocks that a cache assigned, and its index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.state import PAD

Ints = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class Prefill:
    """A chunk: ``tokens`` at positions from ``start`` on.

    It begins from the state in ``source`` (its own ``slot`` if None; none at position 0), leaves
    its last state in ``slot`` and a copy at each (position, slot) of ``saves``. ``blocks`` hold
    the sequence's KV in order, up to its last token. ``samples``: logits of its last token.
    """

    tokens: Ints
    start: int
    slot: int
    blocks: Ints
    source: int | None = None
    saves: Sequence[tuple[int, int]] = ()
    samples: bool = True

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Decode:
    """One ``token`` at ``position`` of the sequence whose state is in ``slot``."""

    token: int
    position: int
    slot: int
    blocks: Ints


@dataclass(frozen=True)
class Plan:
    """A step on a device: prefill tokens packed one after the other, then one token a decode.

    ``sources`` are slots to begin from (``PAD``: from nothing), ``targets`` those to leave the last
    states in; ``states_at`` and ``save_slots`` belong together. ``places`` are where each token's
    KV goes; ``sampled`` rows get logits.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    states_at: tuple[tuple[int, int], ...]
    sources: torch.Tensor
    targets: torch.Tensor
    save_slots: torch.Tensor
    tables: torch.Tensor
    decode_slots: torch.Tensor
    decode_tables: torch.Tensor
    contexts: torch.Tensor
    places: torch.Tensor
    sampled: torch.Tensor

    @property
    def prefilled(self) -> int:
        """Rows of prefills; decodes come after them."""
        return sum(self.lengths)


def plan(
    prefills: Sequence[Prefill],
    decodes: Sequence[Decode],
    block_tokens: int,
    device: torch.device | str = "cpu",
) -> Plan:
    """Index tensors of a step. Raises ``ValueError`` for too few blocks or a slot used twice."""
    _check(prefills, decodes, block_tokens)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    ends = np.cumsum([len(p.tokens) for p in prefills], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    sampled = [int(end) - 1 for p, end in zip(prefills, ends, strict=True) if p.samples]
    spans = [(p.start, p.end, p.blocks) for p in prefills]
    spans += [(d.position, d.position + 1, d.blocks) for d in decodes]
    places = [_places(*span, block_tokens) for span in spans]
    given = [np.asarray(p.tokens, dtype=np.int64) for p in prefills]
    given.append(np.array([d.token for d in decodes], dtype=np.int64))
    return Plan(
        tokens=torch.from_numpy(np.concatenate(given)).to(device),
        lengths=tuple(len(p.tokens) for p in prefills),
        starts=tuple(p.start for p in prefills),
        states_at=tuple((i, at) for i, p in enumerate(prefills) for at, _ in p.saves),
        sources=ints([_source(p) for p in prefills]),
        targets=ints([p.slot for p in prefills]),
        save_slots=ints([slot for p in prefills for _, slot in p.saves]),
        tables=_table([p.blocks for p in prefills], device),
        decode_slots=ints([d.slot for d in decodes]),
        decode_tables=_table([d.blocks for d in decodes], device),
        contexts=ints([d.position + 1 for d in decodes]),
        places=torch.from_numpy(np.concatenate([*places, np.zeros(0, np.int64)])).to(device),
        sampled=ints([*sampled, *range(total, total + len(decodes))]),
    )


def _source(prefill: Prefill) -> int:
    if prefill.start == 0:
        return PAD
    return prefill.slot if prefill.source is None else prefill.source


def _places(start: int, end: int, blocks: Ints, size: int) -> np.ndarray:
    at = np.arange(start, end, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[at // size] * size + at % size


def _table(rows: Sequence[Ints], device: torch.device | str) -> torch.Tensor:
    table = np.full((len(rows), max((len(r) for r in rows), default=0)), PAD, dtype=np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return torch.from_numpy(table).to(device)


def _check(prefills: Sequence[Prefill], decodes: Sequence[Decode], size: int) -> None:
    ends = [(p.end, p.blocks) for p in prefills] + [(d.position + 1, d.blocks) for d in decodes]
    for end, blocks in ends:
        if len(blocks) * size < end:
            raise ValueError(f"{len(blocks)} blocks for {end} tokens: allowed is {-(-end // size)}")
    if any(not p.tokens for p in prefills if not hasattr(p.tokens, "shape")):
        raise ValueError("a chunk of 0 tokens: allowed is 1 up")
    written = [p.slot for p in prefills] + [d.slot for d in decodes]
    written += [slot for p in prefills for _, slot in p.saves]
    twice = sorted({slot for slot in written if written.count(slot) > 1})
    if twice:
        raise ValueError(f"slots {twice} are written twice in a step: allowed is once")
