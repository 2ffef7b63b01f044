"""Shapes, dtypes and bytes of one layer's recurrent state on one rank, for every state family.

Rules as vLLM computes them (specs section 1, ``mamba_utils.py`` of 0.33.0 and 0.28.0, which agree).
A conv state is (rows, channels): one row a past input, and one more for each draft token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sim.dtypes import SSM_DTYPES, item_bytes, one_of
from sim.model import Model, StateShape

Shape = tuple[int, ...]
Args = dict[str, int]


class GeometryError(ValueError):
    """A model, parallelism and pool that an engine would refuse, with the reason."""


@dataclass(frozen=True)
class LayerState:
    """One layer's state tensors on one rank: ``shapes[i]`` is stored as ``dtypes[i]``."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * item_bytes(dtype) for shape, dtype in pairs)

    @property
    def bytes(self) -> int:
        """Bytes of the whole state, unpadded."""
        return sum(self.tensor_bytes)


def split(what: str, value: int, tp: int) -> int:
    """``value / tp``, which must be exact. Raises ``GeometryError``."""
    if value % tp:
        valid = [n for n in range(1, min(value, 64) + 1) if value % n == 0]
        near = min(valid, key=lambda n: (abs(n - tp), n))
        raise GeometryError(
            f"{what} {value} does not divide over tensor parallelism {tp}; "
            f"allowed are divisors of it, the nearest is {near}"
        )
    return value // tp


def extended_groups(groups: int, tp: int) -> int:
    """Groups after sharding: as they are if they divide, else one a rank (fewer, for 3 over 2)."""
    return groups if groups % tp == 0 else tp


def _mamba1(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    inner = split("intermediate_size", a["intermediate_size"], tp)
    return (a["conv_kernel"] - 1, inner), (inner, a["state_size"])


def _mamba2(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    groups = extended_groups(a["n_groups"], tp)
    channels = a["intermediate_size"] + 2 * groups * a["state_size"]
    heads = split("state heads", a["num_heads"], tp)
    conv = (a["conv_kernel"] - 1 + drafts, split("conv channels", channels, tp))
    return conv, (heads, a["head_dim"], a["state_size"])


def _short_conv(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    inner = split("intermediate_size", a["intermediate_size"], tp)
    return ((a["conv_kernel"] - 1 + drafts, inner),)


def _linear(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    # The only family whose division is floored instead of checked; it may leave no heads.
    return ((a["num_heads"] // tp, a["head_dim"], a["head_dim"]),)


def _delta(a: Args, tp: int, drafts: int, channels: int, matrix: Shape) -> tuple[Shape, ...]:
    conv = (a["conv_kernel"] - 1 + drafts, split("conv channels", channels, tp))
    return conv, (split("state heads", matrix[0], tp), *matrix[1:])


def _gdn(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    heads, keys, values = a["num_v_heads"], a["head_k_dim"], a["head_v_dim"]
    channels = 2 * a["num_k_heads"] * keys + heads * values
    return _delta(a, tp, drafts, channels, (heads, values, keys))


def _kda(a: Args, tp: int, drafts: int) -> tuple[Shape, ...]:
    heads, dim = a["num_heads"], a["head_dim"]
    channels = heads * dim + 2 * a.get("num_k_heads", heads) * a.get("head_k_dim", dim)
    return _delta(a, tp, drafts, channels, (heads, dim, dim))


FAMILIES: dict[str, Callable[[Args, int, int], tuple[Shape, ...]]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
    "linear_attention": _linear,
    "gdn": _gdn,
    "kda": _kda,
}
CONV_ONLY = ("short_conv", "linear_attention")  # one tensor, of the conv dtype


def shapes(state: StateShape, tp: int = 1, drafts: int = 0) -> tuple[Shape, ...]:
    """Tensors of one layer's state on one of ``tp`` ranks, with ``drafts`` speculative tokens.

    Raises ``GeometryError`` if the family is unknown or something does not divide.
    """
    if tp < 1 or drafts < 0:
        raise GeometryError(f"tensor parallelism {tp}, drafts {drafts}: allowed are 1 up, 0 up")
    if state.family not in FAMILIES:
        raise GeometryError(f"state family {state.family!r}: allowed are {', '.join(FAMILIES)}")
    return FAMILIES[state.family](state.args, tp, drafts)


def layer_state(
    model: Model, tp: int = 1, drafts: int = 0, ssm_dtype: str = "auto", version: str = "0.33"
) -> LayerState | None:
    """State of one layer of ``model`` on one rank, None without state layers."""
    if model.state is None:
        return None
    found = shapes(model.state, tp, drafts)
    recurrent = recurrent_dtype(model, ssm_dtype, version)
    dtypes = (model.conv_dtype,) if len(found) == 1 else (model.conv_dtype, recurrent)
    return LayerState(found, dtypes)


def recurrent_dtype(model: Model, ssm_dtype: str = "auto", version: str = "0.33") -> str:
    """Dtype of the recurrent tensor. Raises ``ValueError`` where the engine does."""
    one_of("ssm-dtype", ssm_dtype, SSM_DTYPES)
    kda = model.state is not None and model.state.family == "kda"
    if kda and version == "0.28":
        return "float32"
    if kda and ssm_dtype == "float16":
        raise GeometryError("ssm-dtype 'float16': KDA allows auto, float32, bfloat16")
    return model.ssm_dtype if ssm_dtype == "auto" else ssm_dtype
