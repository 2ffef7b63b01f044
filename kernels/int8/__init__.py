"""States as int8: symmetric, one scale for each (head, state column), taken over the rows.

A state is (..., P, N); its scale (..., 1, N) is ``max(largest magnitude, 1e-8) / 127``, rounded to
the state's own dtype; values are divided by the rounded scale and rounded half to even. These are
SGLang's axis and rounding, reproduced to the bit. A scale that rounds to 0 (fp16) restores zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import backend as backends
from kernels import shapes
from kernels.state import PAD

__all__ = ["PAD", "Int8", "dequantise", "quantise", "restore", "save"]

SMALLEST = 1e-8
STEPS = 127


class Int8(NamedTuple):
    """``values`` int8 as the state is laid out, ``scale`` in the state's dtype, (..., 1, N)."""

    values: torch.Tensor
    scale: torch.Tensor


def quantise(state: torch.Tensor, *, backend: str | None = None) -> Int8:
    """A state or a stack of states (..., P, N) as int8."""
    flat = state.reshape(1, *state.shape).contiguous()
    found = Int8(
        torch.empty_like(flat, dtype=torch.int8),
        flat.new_empty((*flat.shape[:-2], 1, flat.shape[-1])),
    )
    only = torch.zeros(1, dtype=torch.int64, device=state.device)
    save(flat, only, found, only, backend=backend)
    return Int8(found.values[0], found.scale[0])


def dequantise(state: Int8, *, backend: str | None = None) -> torch.Tensor:
    """The state, in the dtype of its scale."""
    whole = Int8(state.values[None], state.scale[None])
    found = torch.empty_like(whole.values, dtype=state.scale.dtype)
    only = torch.zeros(1, dtype=torch.int64, device=found.device)
    restore(whole, only, found, only, backend=backend)
    return found[0]


def save(
    pool: torch.Tensor,
    slots: torch.Tensor,
    saved: Int8,
    saved_slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Quantises the states in ``slots`` of ``pool`` (slots, ..., P, N) into slots of ``saved``.

    A pair with ``PAD`` in it is skipped.
    """
    _check(pool, slots, saved, saved_slots)
    chosen = backends.resolve(pool, backend)
    if chosen.triton:
        from kernels.int8 import kernel

        kernel.save(pool, slots, saved.values, saved.scale, saved_slots, chosen)
        return
    live = (slots >= 0) & (saved_slots >= 0)
    values, scale = chosen.inner(quantise_torch)(pool[slots[live].long()])
    saved.values[saved_slots[live].long()] = values
    saved.scale[saved_slots[live].long()] = scale


def restore(
    saved: Int8,
    saved_slots: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Dequantises slots of ``saved`` into ``slots`` of ``pool``; a pair with ``PAD`` is skipped."""
    _check(pool, slots, saved, saved_slots)
    chosen = backends.resolve(pool, backend)
    if chosen.triton:
        from kernels.int8 import kernel

        kernel.restore(saved.values, saved.scale, saved_slots, pool, slots, chosen)
        return
    live = (slots >= 0) & (saved_slots >= 0)
    rows = saved_slots[live].long()
    found = chosen.inner(dequantise_torch)(saved.values[rows], saved.scale[rows])
    pool[slots[live].long()] = found.to(pool.dtype)


def quantise_torch(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in torch."""
    wide = state.float()
    largest = wide.abs().amax(-2, keepdim=True).clamp_min(SMALLEST)
    scale = (largest / STEPS).to(state.dtype)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    return (wide / divisor).round().clamp(-STEPS, STEPS).to(torch.int8), scale


def dequantise_torch(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition, in torch."""
    return (values.float() * scale.float()).to(scale.dtype)


def _check(pool: torch.Tensor, slots: torch.Tensor, saved: Int8, saved_slots: torch.Tensor) -> None:
    shapes.bind(slots=(slots, "n"), saved_slots=(saved_slots, "n"))
    shape, slim = pool.shape[1:], (*pool.shape[1:-2], 1, pool.shape[-1])
    if saved.values.shape[1:] != shape or saved.scale.shape[1:] != slim:
        found = (tuple(saved.values.shape[1:]), tuple(saved.scale.shape[1:]))
        raise ValueError(f"int8 slots of {found}: allowed is {(tuple(shape), slim)}")
    for name, each in (("pool", pool), ("values", saved.values), ("scale", saved.scale)):
        shapes.pool_rows(name, each)
