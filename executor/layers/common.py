"""What all layers share: random weights, norms, and products that do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

EPSILON = 1e-5


@dataclass(frozen=True)
class Numerics:
    """``row_block``: matrix products run in blocks of so many rows, so that a row's result does
    not depend on how many others are in the step (0: all rows at once, faster). ``backend`` is the
    kernels' (None: by device)."""

    row_block: int = 0
    backend: str | None = None

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x`` (T, k) times ``weight`` (n, k)."""
        if not self.row_block:
            return x @ weight.T
        rows = len(x)
        parts = pad(x, (0, 0, 0, -rows % self.row_block)).split(self.row_block)
        return torch.cat([part.contiguous() @ weight.T for part in parts])[:rows]


@dataclass(frozen=True)
class Draw:
    """Random weights from one seed, drawn on the CPU in fp32 so that devices and dtypes agree."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device | str

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns), scaled so that outputs are as large as inputs."""
        drawn = torch.randn(rows, columns, generator=self.generator) * columns**-0.5
        return drawn.to(self.device, self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """fp32 between ``low`` and ``high``."""
        drawn = torch.rand(*shape, generator=self.generator)
        return (low + (high - low) * drawn).to(self.device)

    def ones(self, size: int) -> torch.Tensor:
        """Weights of a norm."""
        return torch.ones(size, dtype=self.dtype, device=self.device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + EPSILON)
    return (values * scale).to(x.dtype) * weight
