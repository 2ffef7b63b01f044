"""What Triton kernels share: dtypes, the precision of matrix products, softplus."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PRECISE = "ieee"  # fp32 products keep fp32's mantissa; of no effect on narrower inputs

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def tl_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a torch dtype. Raises ``ValueError`` for one that has none here."""
    if dtype not in _TYPES:
        known = ", ".join(str(each) for each in _TYPES)
        raise ValueError(f"dtype {dtype} in a Triton kernel: allowed are {known}")
    return _TYPES[dtype]


@triton.jit
def softplus(x):
    # Above 20 it is x to the last bit of fp32, and exp would overflow from 89 on. Below, the
    # rounding of 1 + e is taken out again: a small dt is a slow head, whose decay needs its digits.
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    low = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, low)


@triton.jit
def narrowed(x, to: tl.constexpr):
    """fp32 to ``to``, to nearest even. The interpreter's own cast to bfloat16 truncates, so the
    rounding is done on the bits first; infinities stay, NaN stays NaN."""
    if to == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(to)
