"""Moving states between slots: gather, scatter, copy. A state is whatever lies in one slot.

Pools are (slots, ...) with each slot contiguous; slots may be strided, so that one layer of a pool
(slots, layers, ...) is a pool. ``PAD`` in an index is skipped. A copy between dtypes rounds.
"""

from __future__ import annotations

import torch

from kernels import backend as backends
from kernels import shapes

__all__ = ["PAD", "copy", "gather", "scatter"]

PAD = -1


def gather(
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The states in ``slots`` (n), in order: (n, ...); zeros for ``PAD``."""
    found = pool.new_zeros((len(slots), *pool.shape[1:]), dtype=dtype or pool.dtype)
    _move(pool, found, slots, None, backend)
    return found


def scatter(
    pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, *, backend: str | None = None
) -> None:
    """Writes ``values`` (n, ...) to ``slots`` (n), which are distinct apart from ``PAD``."""
    shapes.bind(slots=(slots, "n"), values=(values.flatten(1), "n size"))
    _move(values.contiguous(), pool, None, slots, backend)


def copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """``target[target_slots] = source[source_slots]``; a pair with ``PAD`` in it is skipped.

    The two may be one pool if no slot is both read and written.
    """
    shapes.bind(source_slots=(source_slots, "n"), target_slots=(target_slots, "n"))
    _move(source, target, source_slots, target_slots, backend)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_slots: shapes.Maybe,
    target_slots: shapes.Maybe,
    backend: str | None,
) -> None:
    if source.shape[1:] != target.shape[1:]:
        raise ValueError(f"a state of {source.shape[1:]}: allowed is {target.shape[1:]}")
    for name, pool in (("source", source), ("target", target)):
        shapes.pool_rows(name, pool)
    chosen = backends.resolve(source, backend)
    if chosen.triton:
        from kernels.state import kernel

        kernel.move(source, target, source_slots, target_slots, chosen)
    else:
        _move_torch(source, target, source_slots, target_slots)


def _move_torch(
    source: torch.Tensor, target: torch.Tensor, read: shapes.Maybe, write: shapes.Maybe
) -> None:
    count = len(read) if read is not None else len(source)
    every = torch.arange(count, device=source.device)
    read = every if read is None else read.long()
    write = every if write is None else write.long()
    live = (read >= 0) & (write >= 0)
    target[write[live]] = source[read[live]].to(target.dtype)
