"""What share of a device's peak an operation reaches: the one place a profile replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Share(NamedTuple):
    """Share of peak arithmetic and of memory bandwidth, above 0. Measured ones may exceed 1, where
    data stays in a cache that is faster than the memory."""

    compute: float
    memory: float


class Shares(NamedTuple):
    """``Share`` at many sizes; a float where it does not depend on the size."""

    compute: float | Floats
    memory: float | Floats


class Efficiency(Protocol):
    """``size`` is tokens (GEMM, scan, convolution, KV), query-key pairs (prefill attention),
    batch (updates, sampling), summed context (decode attention) or bytes (copies)."""

    def at(self, op: str, size: float) -> Share:
        """The shares of one operation at one size."""

    def over(self, op: str, sizes: Floats) -> Shares:
        """The same at many sizes, equal to the bit to ``at`` of each."""


OPS = (
    "gemm",
    "head",
    "sample",
    "elementwise",
    "scan",
    "update",
    "conv",
    "conv_update",
    "attention_prefill",
    "attention_decode",
    "kv_write",
    "state_copy",
    "state_save",
    "kv_copy",
    "all_reduce",
)


@dataclass(frozen=True)
class Constant:
    """One share for every size: ``compute`` by operation (``default`` where not named)."""

    compute: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    memory: float = 1.0
    default: float = 1.0

    def __post_init__(self) -> None:
        for op, share in {**self.compute, "memory": self.memory, "default": self.default}.items():
            if op not in (*OPS, "memory", "default"):
                raise ValueError(f"unknown operation {op!r} in efficiency; allowed: {OPS}")
            if not 0 < share <= 1:
                raise ValueError(f"efficiency of {op} is {share}, must be above 0 and at most 1")

    def at(self, op: str, size: float) -> Share:
        return Share(self.compute.get(op, self.default), self.memory)

    def over(self, op: str, sizes: Floats) -> Shares:
        return Shares(self.compute.get(op, self.default), self.memory)


FLOOR = Constant()
