"""What calls that are timed share: a model's weights, and pools of its decoder's layout.

Every call runs what one of the decoder's layers runs, with its weights. Inputs are normal values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from executor.decoder import Weights, random_weights
from executor.layers.attention import SelfAttention
from executor.layers.common import Numerics
from executor.layers.mamba2 import Mamba2
from executor.layers.mlp import Mlp
from executor.pools import KvPool, StatePool, torch_dtype
from sim.model import Model


@dataclass
class Bench:
    """One model on one device; pools grow with the cases. ``graph``: calls must be capturable.
    ``block_tokens``: of KV; blocks of one token lie in order, as the executor's backend has them,
    longer ones anywhere, as in an engine that has been in use."""

    model: Model
    device: str = "cpu"
    seed: int = 0
    graph: bool = False
    block_tokens: int = 1
    numerics: Numerics = field(default_factory=Numerics)

    def __post_init__(self) -> None:
        self.weights: Weights = random_weights(self.model, self.seed, self.device)
        self.dtype = torch_dtype(self.model.dtype)
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.mamba = [x for x in self.weights.layers if isinstance(x, Mamba2)]
        self.attention = [x for x in self.weights.layers if isinstance(x, SelfAttention)]
        self.mlp = [x for x in self.weights.layers if isinstance(x, Mlp)]
        self._states: StatePool | None = None
        self._kv: KvPool | None = None

    @property
    def backend(self) -> str | None:
        """The kernels' backend."""
        return self.numerics.backend

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal values in the model's dtype."""
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def ints(self, values: Sequence[int] | range) -> torch.Tensor:
        """Indices on the device."""
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def states(self, slots: int) -> StatePool:
        """A pool of at least so many states, filled."""
        if self._states is None or len(self._states.conv) < slots:
            self._states = None
            self._states = StatePool(self.model, slots, self.device)
            for pool in (self._states.conv, self._states.ssm):
                pool.normal_(generator=self.generator)
        return self._states

    def blocks(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def kv(self, blocks: int) -> KvPool:
        """A pool of at least so many blocks, filled."""
        if self._kv is None or self._kv.k.shape[1] < blocks:
            self._kv = None
            self._kv = KvPool(self.model, blocks, self.block_tokens, self.device)
            for pool in (self._kv.k, self._kv.v):
                pool.normal_(generator=self.generator)
        return self._kv
