"""Which implementation of an operation runs: decided here and nowhere else.

A CUDA tensor runs the Triton kernel. A CPU tensor runs the torch reference, or the Triton kernel in
Triton's interpreter where ``TRITON_INTERPRET=1`` was set before the process started. ``compiled``
is the reference whose inner functions went through ``torch.compile``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kernels import launches

NAMES = ("torch", "compiled", "triton")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Backend:
    """``name`` is torch or triton; ``device`` names the configuration table of a Triton kernel."""

    name: str
    compiled: bool = False
    interpreted: bool = False
    device: str = "generic"

    @property
    def triton(self) -> bool:
        """Whether the Triton kernel runs."""
        return self.name == "triton"

    def dot(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a Triton kernel's matrix products on inputs of ``dtype``.

        The interpreter multiplies bfloat16 wrongly without saying so, so there it is float32.
        """
        return torch.float32 if self.interpreted else dtype

    def inner(self, function: F) -> F:
        """``function``, through ``torch.compile`` (static shapes) if that was asked for."""
        return _compiled(function) if self.compiled else function


def interpreted() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def resolve(tensor: torch.Tensor, wanted: str | None = None, cuda: str = "triton") -> Backend:
    """The backend for an operation on ``tensor``; ``wanted`` overrides the choice.

    ``cuda`` is the operation's own choice for CUDA tensors. Raises ``ValueError`` for an unknown
    name and for Triton on a CPU tensor without the interpreter.
    """
    if wanted is not None and wanted not in NAMES:
        raise ValueError(f"backend {wanted!r}: allowed are {', '.join(NAMES)}, nearest is 'torch'")
    if tensor.is_cuda:
        return _on_cuda(tensor, wanted or cuda)
    if (device := launches.recorded_device()) is not None:
        return Backend("triton", device=device)
    if wanted == "triton" and not interpreted():
        raise ValueError(
            "backend 'triton' on a CPU tensor: needs a CUDA tensor, or TRITON_INTERPRET=1 set "
            "before the process starts; nearest is 'torch'"
        )
    if wanted == "triton" or (wanted is None and interpreted()):
        return Backend("triton", interpreted=True)
    return Backend("torch", compiled=wanted == "compiled")


def _on_cuda(tensor: torch.Tensor, name: str) -> Backend:
    if name == "triton":
        return Backend("triton", device=torch.cuda.get_device_name(tensor.device))
    return Backend("torch", compiled=name == "compiled")


@functools.cache
def _compiled(function: F) -> F:
    wrapped: F = torch.compile(function, dynamic=False)
    return wrapped
