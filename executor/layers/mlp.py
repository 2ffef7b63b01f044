"""The feed-forward layer: two matrices and a squared ReLU, or three and a gated SiLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import relu, silu

from executor.layers.common import Draw, Numerics, rms_norm
from sim.model import Model


@dataclass(frozen=True)
class Mlp:
    """``up`` (f, hidden), ``down`` (hidden, f), ``gate`` (f, hidden) or None."""

    norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None

    @classmethod
    def draw(cls, model: Model, draw: Draw) -> Mlp:
        """Random weights. Raises ``ValueError`` if the model's width is not known."""
        hidden, inner = model.hidden_size, model.ffn_intermediate
        if not inner:
            raise ValueError(f"{model.name}: the feed-forward width is not known")
        up, down = draw.matrix(inner, hidden), draw.matrix(hidden, inner)
        gate = draw.matrix(inner, hidden) if model.ffn_matrices == 3 else None
        return cls(draw.ones(hidden), up, down, gate)

    def forward(self, x: torch.Tensor, numerics: Numerics) -> torch.Tensor:
        """What is added to ``x`` (T, hidden)."""
        normed = rms_norm(x, self.norm)
        up = numerics.linear(normed, self.up)
        if self.gate is None:
            return numerics.linear(relu(up).square(), self.down)
        return numerics.linear(silu(numerics.linear(normed, self.gate)) * up, self.down)
