"""SGLang's two pools, of state slots and of KV, sized from one memory budget.

Bytes are those of one rank. Sources: specs/sglang-0.5.23, sections 4, 9 and 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.dtypes import item_bytes
from sim.model import Model
from sim.state_shapes import GeometryError, Shape, layer_state

FULL_MEMORY_RATIO = 0.9
# The chunk of the kernels where a model's configuration names none.
DEFAULT_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Slot:
    """One state slot of all layers, as SGLang stores it: conv states of ``conv`` shapes and a
    ``temporal`` state a layer. ``int8_bytes``: the same as an int8 checkpoint."""

    layers: int
    conv: tuple[Shape, ...]
    temporal: Shape
    conv_dtype: str
    temporal_dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one active slot."""
        temporal = math.prod(self.temporal) * item_bytes(self.temporal_dtype)
        return self.layers * (self._conv_bytes + temporal)

    @property
    def int8_bytes(self) -> int:
        """Conv as it is, a byte an element of the temporal state, a scale a head and k channel."""
        scales = math.prod(self.temporal[:-2] + self.temporal[-1:])
        scales *= item_bytes(self.temporal_dtype)
        return self.layers * (self._conv_bytes + math.prod(self.temporal) + scales)

    @property
    def _conv_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.conv) * item_bytes(self.conv_dtype)


def slot_of(model: Model, tp: int = 1, ssm_dtype: str = "auto") -> Slot:
    """The slot of a model; ``auto`` is float32, SGLang's default. Raises ``GeometryError``."""
    dtype = "float32" if ssm_dtype == "auto" else ssm_dtype
    state = layer_state(model, tp, 0, dtype, "0.33")
    if state is None or model.state is None:
        return Slot(0, (), (0, 0), model.dtype, dtype)
    family, shapes = model.state.family, state.shapes
    if family == "short_conv":
        width = model.state.args.get("conv_dim", shapes[0][1] * tp)
        return Slot(model.count("M"), (shapes[0][::-1],), (1, width, 0), state.dtypes[0], dtype)
    *windows, temporal = shapes
    if family == "mamba1":
        temporal = (temporal[0], 1, temporal[1])
    conv = tuple(shape if family == "kda" else shape[::-1] for shape in windows)
    return Slot(model.count("M"), conv, temporal, state.dtypes[0], dtype)


def model_chunk(model: Model) -> int:
    """Tokens of a chunk of the model's scan, as SGLang takes them."""
    args = model.state.args if model.state else {}
    return args.get("chunk_size") or DEFAULT_CHUNK_TOKENS


@dataclass(frozen=True)
class Pools:
    """Slots without the padding slot, tokens without the padding page; ``total_bytes`` with
    both. ``int8_outside_bytes``: what SGLang takes beyond its budget for int8 checkpoints."""

    mamba_slots: int
    kv_tokens: int
    int8_slots: int
    state_pool_bytes: int
    kv_pool_bytes: int
    int8_pool_bytes: int
    int8_outside_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.state_pool_bytes + self.kv_pool_bytes + self.int8_pool_bytes


@dataclass(frozen=True)
class Split:
    """How memory is divided: SGLang's flags. ``inside`` charges the int8 pool and the padding page
    to the memory, as comparisons on equal bytes need; SGLang itself takes both on top."""

    page_size: int = 1
    ratio: float = FULL_MEMORY_RATIO
    max_mamba_cache_size: int | None = None
    int8: bool = False
    int8_slots: int | None = None
    running_without_cache: int | None = None
    inside: bool = True


def pools_of(memory_bytes: int, slot: Slot, token_bytes: int, split: Split) -> Pools:
    """Both pools in ``memory_bytes``. Raises ``GeometryError`` if nothing fits."""
    _refuse(split)
    slots = _slots(memory_bytes, slot, split)
    if slots < 1 and slot.layers:
        raise GeometryError(
            f"{memory_bytes} bytes hold no state slot beside the padding slot; one takes "
            f"{slot.bytes} bytes, the least that works is "
            f"{math.ceil(2 * slot.bytes * (1 + split.ratio) / split.ratio)}"
        )
    int8_slots = _int8_slots(slots, split)
    state = (slots + 1) * slot.bytes if slot.layers else 0
    int8 = (int8_slots + 1) * slot.int8_bytes if split.int8 else 0
    rest = memory_bytes - state - (int8 if split.inside else 0)
    page_bytes = split.page_size * token_bytes
    pages = rest // page_bytes - split.inside if page_bytes else 0
    if pages < 1 and page_bytes:
        raise GeometryError(
            f"{memory_bytes} bytes leave {max(0, rest)} for KV beside {slots} state slots, less "
            f"than two pages of {page_bytes} bytes; lower mamba_full_memory_ratio or "
            "max_mamba_cache_size"
        )
    return Pools(
        slots, pages * split.page_size, int8_slots, state, (pages + 1) * page_bytes, int8,
        0 if split.inside else int8,
    )  # fmt: skip


def running_wanted(kv_tokens: int, context_len: int, asked: int | None = None) -> int:
    """Requests that may run at once before the state slots limit them: ``asked``, else what
    SGLang reckons from the KV pool; never more than half its tokens."""
    if asked is None:
        asked = max(min(int(kv_tokens / context_len * 512), 4096), 2048)
    return max(1, min(asked, kv_tokens // 2))


def _refuse(split: Split) -> None:
    if split.ratio <= 0:
        raise GeometryError(
            f"mamba_full_memory_ratio is {split.ratio}; it must be above 0, the default is "
            f"{FULL_MEMORY_RATIO}"
        )
    for name in ("page_size", "max_mamba_cache_size", "int8_slots", "running_without_cache"):
        value = getattr(split, name)
        if value is not None and value < 1:
            raise GeometryError(f"{name} is {value}; it must be 1 or more; the nearest is 1")


def _slots(memory_bytes: int, slot: Slot, split: Split) -> int:
    if split.max_mamba_cache_size is not None:
        return split.max_mamba_cache_size
    if split.running_without_cache is not None:
        return max(1, split.running_without_cache)
    if not slot.bytes:
        return 0
    budget, fixed, each = memory_bytes * split.ratio / (1 + split.ratio), slot.bytes, slot.bytes
    if split.int8 and split.inside:
        given = split.int8_slots
        fixed += (1 if given is None else given + 1) * slot.int8_bytes
        each += 2 * slot.int8_bytes if given is None else 0
    return int((budget - fixed) // each)


def _int8_slots(slots: int, split: Split) -> int:
    if not split.int8:
        return 0
    return 2 * slots if split.int8_slots is None else split.int8_slots
