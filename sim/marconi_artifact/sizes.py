"""Bytes and FLOPs as the artifact counts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A hybrid model in fp16: ``width`` is d, ``state_width`` n; the artifact's by default.

    ``kv_token_bytes`` and ``state_bytes`` replace the artifact's formulas, as for a model whose
    sizes are known; FLOPs go on by the formulas. Source: marconi artifact, utils.py.
    """

    ssm_layers: int = 24
    attention_layers: int = 4
    mlp_layers: int = 28
    width: int = 4096
    state_width: int = 128
    kv_token_bytes: int | None = None
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("ssm_layers", "attention_layers", "mlp_layers"):
            _at_least(name, getattr(self, name), 0)
        for name in ("width", "state_width"):
            _at_least(name, getattr(self, name), 1)
        if self.kv_bytes + self.checkpoint_bytes <= 0:
            raise ValueError(
                "neither KV nor checkpoints take bytes; allowed: ssm_layers or attention_layers of"
                " 1 or more; nearest: attention_layers 1"
            )

    @property
    def kv_bytes(self) -> int:
        """KV of one token: one key and one value of ``width`` per attention layer."""
        if self.kv_token_bytes is not None:
            return self.kv_token_bytes
        return self.attention_layers * 4 * self.width

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: a ``width`` by ``state_width`` state and four conv taps per SSM layer."""
        if self.state_bytes is not None:
            return self.state_bytes
        d, n = self.width, self.state_width
        return self.ssm_layers * (2 * d * n + 8 * (2 * d + 2 * n))

    def ssm_flops(self, tokens: int) -> int:
        """One SSM layer over ``tokens``."""
        d = self.width
        return tokens * (12 * d * d + 16 * d * self.state_width + 10 * d)

    def attention_flops(self, tokens: int) -> int:
        """One attention layer over the first ``tokens``."""
        d = self.width
        return 8 * tokens * d * d + 4 * tokens * tokens * d

    def mlp_flops(self, tokens: int) -> int:
        """One MLP layer over ``tokens``."""
        return 16 * tokens * self.width * self.width

    def prefill_flops(self, tokens: int) -> int:
        """All layers over the first ``tokens``: what a hit of that length saves."""
        return (
            self.ssm_layers * self.ssm_flops(tokens)
            + self.attention_layers * self.attention_flops(tokens)
            + self.mlp_layers * self.mlp_flops(tokens)
        )

    def worth(self, depth: int, edge: int) -> float:
        """FLOPs per byte of a node, with two errors of the artifact.

        The MLP term subtracts attention FLOPs of the parent, and savings relative to the parent
        are divided by the KV of the whole depth.
        """
        parent = depth - edge
        above = self.attention_flops(parent)
        flops = (
            self.ssm_layers * self.ssm_flops(edge)
            + self.attention_layers * (self.attention_flops(depth) - above)
            + self.mlp_layers * (self.mlp_flops(depth) - above)
        )
        return flops / (self.checkpoint_bytes + self.kv_bytes * depth)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}; allowed: {low} or more; nearest: {low}")
