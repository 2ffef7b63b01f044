"""Names of number formats that caches are stored in, and their sizes."""

from __future__ import annotations

from difflib import get_close_matches

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
SSM_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


def item_bytes(dtype: str) -> int:
    """Bytes of one value. Raises ``ValueError`` on an unknown dtype."""
    return ITEM_BYTES[one_of("dtype", dtype, tuple(ITEM_BYTES))]


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> str:
    """``value`` if allowed, else a ``ValueError`` that names the nearest valid choice."""
    if value in allowed:
        return value
    near = get_close_matches(value, allowed, 1, 0.4)
    hint = f"; nearest is {near[0]}" if near else ""
    raise ValueError(f"{what} {value!r}: allowed are {', '.join(allowed)}{hint}")
