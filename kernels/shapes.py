"""Shapes are checked by letters, once, before any kernel sees a pointer."""

from __future__ import annotations

from typing import TypeAlias

import torch

Maybe: TypeAlias = torch.Tensor | None


def bind(**tensors: tuple[torch.Tensor | None, str]) -> dict[str, int]:
    """The size of each letter, e.g. ``bind(x=(x, "T H P"), dt=(dt, "T H"))``; None is skipped.

    Raises ``ValueError`` naming the tensor whose shape does not fit.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in tensors.items():
        if tensor is not None:
            _fit(name, tuple(tensor.shape), letters, sizes)
    return sizes


def _fit(name: str, shape: tuple[int, ...], letters: str, sizes: dict[str, int]) -> None:
    expected = letters.split()
    if len(shape) != len(expected):
        raise ValueError(f"{name} has shape {shape}: allowed is ({', '.join(expected)})")
    for letter, size in zip(expected, shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            wanted = tuple(sizes.get(each, each) for each in expected)
            raise ValueError(f"{name} has shape {shape}: allowed is {wanted} for {letters}")


def divides(what: str, parts: int, whole: int) -> int:
    """``whole / parts``, which must be exact. Raises ``ValueError``."""
    if parts < 1 or whole % parts:
        valid = [n for n in range(1, whole + 1) if whole % n == 0]
        near = min(valid, key=lambda n: (abs(n - parts), n))
        raise ValueError(f"{parts} {what}: allowed are divisors of {whole}, nearest is {near}")
    return whole // parts


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its dimensions after the first contiguous, copied only if they are not."""
    inner = tensor[:1] if tensor.shape[0] else tensor
    return tensor if inner.is_contiguous() else tensor.contiguous()


def pool_rows(name: str, pool: torch.Tensor) -> int:
    """Values in one slot, which must lie together: pools are written in place, so never copied."""
    if pool.shape[0] and not pool[0].is_contiguous():
        raise ValueError(f"{name}: each slot must be contiguous, strides are {pool.stride()}")
    return pool[0].numel() if pool.shape[0] else 0
