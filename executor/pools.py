"""Memory that outlives a step: states by slot, KV by block, and states kept as int8."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import int8, state
from sim.model import Model
from sim.state_shapes import layer_state


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a model file's name for it. Raises ``ValueError``."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r}: allowed are float32, bfloat16, float16")
    return found


class StatePool:
    """States of all layers in one slot: ``conv`` (slots, layers, W-1, C), ``ssm`` (slots, layers,
    ...). A layer's pool is ``conv[:, layer]``. New slots hold NaN: nobody may read them."""

    def __init__(self, model: Model, slots: int, device: torch.device | str = "cpu") -> None:
        found = layer_state(model)
        if found is None or len(found.shapes) != 2:
            raise ValueError(f"{model.name}: allowed is a model with a conv and a recurrent state")
        layers, (conv, ssm) = model.count("M"), found.shapes
        first, second = (torch_dtype(name) for name in found.dtypes)
        self.conv = torch.full((slots, layers, *conv), torch.nan, dtype=first, device=device)
        self.ssm = torch.full((slots, layers, *ssm), torch.nan, dtype=second, device=device)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies whole states between slots, e.g. to restore one or to fork a sequence."""
        read, write = self._slots(source), self._slots(target)
        state.copy(self.conv, self.conv, read, write)
        state.copy(self.ssm, self.ssm, read, write)

    def _slots(self, slots: Sequence[int]) -> torch.Tensor:
        bad = [slot for slot in slots if not 0 <= slot < len(self.conv)]
        if bad:
            raise ValueError(f"slots {bad}: allowed are 0 to {len(self.conv) - 1}")
        return torch.tensor(list(slots), dtype=torch.int64, device=self.conv.device)


class Int8Pool:
    """Checkpoints of states of a ``StatePool`` as int8; the conv windows as they are."""

    def __init__(self, states: StatePool, slots: int) -> None:
        shape = states.ssm.shape[1:]
        self.states = states
        self.conv = torch.full_like(states.conv[:1], torch.nan).repeat(slots, 1, 1, 1)
        self.ssm = int8.Int8(
            states.ssm.new_zeros((slots, *shape), dtype=torch.int8),
            states.ssm.new_full((slots, *shape[:-2], 1, shape[-1]), torch.nan),
        )

    def save(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Keeps the states in ``source`` slots of the state pool in ``target`` slots of this."""
        read, write = self.states._slots(source), self._slots(target)
        state.copy(self.states.conv, self.conv, read, write)
        int8.save(self.states.ssm, read, self.ssm, write)

    def restore(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Puts ``source`` slots of this back into ``target`` slots of the state pool."""
        read, write = self._slots(source), self.states._slots(target)
        state.copy(self.conv, self.states.conv, read, write)
        int8.restore(self.ssm, read, self.states.ssm, write)

    def _slots(self, slots: Sequence[int]) -> torch.Tensor:
        bad = [slot for slot in slots if not 0 <= slot < len(self.conv)]
        if bad:
            raise ValueError(f"int8 slots {bad}: allowed are 0 to {len(self.conv) - 1}")
        return torch.tensor(list(slots), dtype=torch.int64, device=self.conv.device)


class KvPool:
    """KV of all attention layers by block: ``k`` and ``v`` (layers, blocks, tokens, heads, d)."""

    def __init__(
        self, model: Model, blocks: int, tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        attention = model.attention
        if model.count("*") and (attention is None or attention.kind != "gqa"):
            raise ValueError(f"{model.name}: attention other than gqa is not executed")
        heads, d = (attention.num_kv_heads, attention.head_dim) if attention else (1, 1)
        shape = (model.count("*"), blocks, tokens, heads, d)
        dtype, self.tokens = torch_dtype(model.dtype), tokens
        self.k = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.v = torch.full(shape, torch.nan, dtype=dtype, device=device)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies whole blocks in every layer, e.g. before a shared block is written to."""
        read, write = (torch.tensor(list(b), device=self.k.device) for b in (source, target))
        for pool in (self.k, self.v):
            for layer in pool:
                state.copy(layer, layer, read, write)
