"""States kept as int8 checkpoints: a scale a head and key channel, to the bit as SGLang rounds.

numpy has no bfloat16: values of every dtype are held in float32, and ``rounded`` makes them values
of the dtype. Sources: specs/sglang-0.5.23, section 10; recorded vectors of its own code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.dtypes import one_of

Floats = NDArray[np.float32]
LARGEST = 127
SMALLEST_AMAX = np.float32(1e-8)
DTYPES = ("float32", "bfloat16", "float16")


def rounded(values: Floats, dtype: str) -> Floats:
    """``values`` rounded to ``dtype``, half to even. Raises ``ValueError`` on another dtype."""
    values = np.asarray(values, np.float32)
    one_of("dtype", dtype, DTYPES)
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    # Half of the dropped range, one less where the kept part is even: ties go to even.
    up = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, up.view(np.float32)).astype(np.float32)


def quantise(state: Floats, dtype: str) -> tuple[NDArray[np.int8], Floats]:
    """``(q, scale)`` of a state ``[..., heads, value channels, key channels]`` of values of
    ``dtype``; ``scale`` is ``[..., heads, 1, key channels]``.

    The scale is rounded to ``dtype`` before anything is divided by it. In float16 that of a
    channel of zeros becomes 0; its 0/0 is stored as 0, as SGLang does on a CPU.
    """
    state = np.asarray(state, np.float32)
    largest = np.maximum(np.abs(state).max(axis=-2, keepdims=True), SMALLEST_AMAX)
    scale = rounded(largest / np.float32(LARGEST), dtype)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.clip(np.rint(state / scale), -LARGEST, LARGEST)
    return np.nan_to_num(q, nan=0.0).astype(np.int8), scale


def dequantise(q: NDArray[np.int8], scale: Floats, dtype: str) -> Floats:
    """The state that a request resumes from, of values of ``dtype``."""
    return rounded(q.astype(np.float32) * scale, dtype)


def is_vectors(data: object) -> bool:
    """Whether ``data`` are recorded states with their int8 checkpoints."""
    wanted = {"dtype", "state", "q", "scale", "dequant"}
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(row, dict) and wanted <= set(row) for row in data)
    )


def differences(vector: dict[str, Any]) -> list[str]:
    """What a recorded vector has that is not, to the bit, what is computed here."""
    q, scale = quantise(np.array(vector["state"], np.float32), vector["dtype"])
    recorded = np.array(vector["scale"], np.float32)
    ours = {"q": q.tolist(), "scale": scale.tolist(),
            "dequant": dequantise(q, scale, vector["dtype"]).tolist()}  # fmt: skip
    theirs = {"q": vector["q"], "scale": recorded.tolist(), "dequant": vector["dequant"]}
    return [f"{name} differs" for name in ours if ours[name] != theirs[name]]
