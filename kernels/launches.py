"""How a Triton kernel is started, or written down instead for an offline compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One start of ``kernel``: its tensors and numbers in order, and its compile-time constants."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """Launches written down for a device that need not be there."""

    device: str
    launches: list[Launch] = field(default_factory=list)


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


def recorded_device() -> str | None:
    """The device that launches are being written down for, None if they really start."""
    found = _RECORDING.get()
    return found.device if found else None


@contextmanager
def recording(device: str) -> Iterator[list[Launch]]:
    """Inside, operations on CPU tensors choose Triton and only write down what they would start."""
    found = Recording(device)
    token = _RECORDING.set(found)
    try:
        yield found.launches
    finally:
        _RECORDING.reset(token)


def start(
    kernel: Any, grid: tuple[int, ...], *args: Any, config: Mapping[str, int], **constants: Any
) -> None:
    """Starts ``kernel`` on ``grid``; an empty grid starts nothing."""
    if 0 in grid:
        return
    every = {**config, **constants}
    if (found := _RECORDING.get()) is not None:
        found.launches.append(Launch(kernel, grid, args, every))
    else:
        kernel[grid](*args, **every)
