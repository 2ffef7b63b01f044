"""A hybrid decoder with random weights, which computes steps over pools of states and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.batch import Decode, Plan, Prefill, plan
from executor.layers.attention import SelfAttention
from executor.layers.common import Draw, Numerics, rms_norm
from executor.layers.mamba2 import Mamba2
from executor.layers.mlp import Mlp
from executor.pools import KvPool, StatePool, torch_dtype
from sim.model import Model

Layer = Mamba2 | SelfAttention | Mlp
KINDS: dict[str, type[Layer]] = {"M": Mamba2, "*": SelfAttention, "-": Mlp}
DEFAULT = Numerics()


@dataclass(frozen=True)
class Weights:
    """``embedding`` and ``head`` (vocabulary, hidden), layers in the order of the pattern."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


def random_weights(model: Model, seed: int = 0, device: torch.device | str = "cpu") -> Weights:
    """Weights from a seed. Raises ``ValueError`` for layers that are not executed."""
    unknown = sorted(set(model.pattern) - set(KINDS))
    family = model.state.family if model.state else "mamba2"
    if unknown or family != "mamba2" or not model.vocab_size:
        raise ValueError(
            f"{model.name}: layers {unknown}, states {family}, vocabulary {model.vocab_size}; "
            f"executed are {sorted(KINDS)}, mamba2 and a known vocabulary, e.g. those of 'tiny'"
        )
    draw = Draw(torch.Generator().manual_seed(seed), torch_dtype(model.dtype), device)
    embedding = draw.matrix(model.vocab_size, model.hidden_size) * model.hidden_size**0.5
    layers = tuple(KINDS[letter].draw(model, draw) for letter in model.pattern)
    head = draw.matrix(model.vocab_size, model.hidden_size)
    return Weights(embedding, layers, draw.ones(model.hidden_size), head)


@dataclass(frozen=True)
class Decoder:
    """Weights over pools; ``step`` is one forward pass."""

    weights: Weights
    states: StatePool
    kv: KvPool
    numerics: Numerics = DEFAULT

    def step(
        self, prefills: Sequence[Prefill] = (), decodes: Sequence[Decode] = ()
    ) -> torch.Tensor:
        """Computes chunks and decodes together; logits (sampling chunks, then decodes; vocabulary).

        States and KV of all rows are left in the pools.
        """
        device = self.weights.embedding.device
        with torch.inference_mode():
            return self.run(plan(prefills, decodes, self.kv.tokens, device))

    def run(self, plan: Plan) -> torch.Tensor:
        """As ``step``, with the index tensors at hand."""
        x, at = self.weights.embedding[plan.tokens], {Mamba2: 0, SelfAttention: 0}
        for layer in self.weights.layers:
            if isinstance(layer, Mlp):
                x = x + layer.forward(x, self.numerics)
            elif isinstance(layer, Mamba2):
                x = x + layer.forward(x, plan, self.states, at[Mamba2], self.numerics)
                at[Mamba2] += 1
            else:
                x = x + layer.forward(x, plan, self.kv, at[SelfAttention], self.numerics)
                at[SelfAttention] += 1
        normed = rms_norm(x[plan.sampled], self.weights.norm)
        return self.numerics.linear(normed, self.weights.head)
