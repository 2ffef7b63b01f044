"""FLOP and bytes of one operation, from its shapes alone.

Letters: H heads, P head dimension, N state width, G groups, L scan chunk, W convolution width,
C convolution channels. ``act``, ``state`` and ``kv`` are bytes of one value. A FLOP is one
multiply or one add. Bytes count what must cross the memory bus once: fused kernels, weights
read once a step however many tokens share them.
"""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """``vector`` work runs on the fp32 vector units, the rest on the tensor units."""

    flops: float
    bytes: float
    vector: bool = False


def gemm(tokens: int, k: int, n: int, act: int) -> Work:
    """``tokens`` rows times a ``k x n`` weight, which is read once."""
    return Work(2 * tokens * k * n, act * (k * n + tokens * (k + n)))


def experts_gemm(picks: int, reached: float, k: int, n: int, act: int) -> Work:
    """``picks`` rows (tokens times experts each), spread over ``reached`` experts' weights."""
    return Work(2 * picks * k * n, act * (reached * k * n + picks * (k + n)))


def elementwise(tokens: int, values: int, act: int) -> Work:
    """A fused elementwise kernel that reads and writes ``values`` values a token."""
    return Work(0, act * tokens * values)


def ssd_prefill(
    tokens: int, sequences: int, H: int, P: int, N: int, G: int, L: int, act: int, state: int
) -> Work:
    """Chunked scan of the Mamba-2 family; dt in fp32; one state read and written a sequence."""
    flops = tokens * (2 * L * N * G + 2 * L * P * H + 4 * H * N * P)
    moved = tokens * (2 * act * H * P + 2 * act * N * G + 4 * H)
    return Work(flops, moved + 2 * state * sequences * H * P * N)


def state_update(batch: int, H: int, P: int, N: int, G: int, act: int, state: int) -> Work:
    """One token of each of ``batch`` sequences: decay, rank-one update, output."""
    moved = 2 * state * H * P * N + 2 * act * H * P + 2 * act * N * G
    return Work(5 * batch * H * P * N, batch * moved, True)


def delta_prefill(
    tokens: int, sequences: int, H: int, K: int, V: int, HK: int, L: int, act: int, state: int
) -> Work:
    """Chunked gated delta rule, H value heads (K keys, V values wide), HK key heads.

    Derived from the chunked form: key and query products, the triangular solve applied to keys
    and values, the output product (6LK + 4LV), and three products with the state (6KV).
    """
    flops = tokens * H * (6 * L * K + 4 * L * V + 6 * K * V)
    moved = tokens * (act * (2 * HK * K + 2 * H * V) + 8 * H)
    return Work(flops, moved + 2 * state * sequences * H * K * V)


def delta_update(batch: int, H: int, K: int, V: int, HK: int, act: int, state: int) -> Work:
    """One token of each sequence: decay, read by key, rank-one update, read by query."""
    moved = 2 * state * H * K * V + act * (2 * HK * K + 2 * H * V)
    return Work(7 * batch * H * K * V, batch * moved, True)


def selective_scan(tokens: int, sequences: int, C: int, N: int, act: int, state: int) -> Work:
    """Mamba-1's sequential scan on the vector units, about 9 operations a state value."""
    moved = tokens * act * (4 * C + 2 * N)
    return Work(9 * tokens * C * N, moved + 2 * state * sequences * C * N, True)


def conv(tokens: int, sequences: int, C: int, W: int, act: int) -> Work:
    """Causal convolution; the window of ``W - 1`` inputs is read and written a sequence."""
    return Work(2 * tokens * W * C, 2 * act * C * (tokens + sequences * (W - 1)), True)


def attention_prefill(
    pairs: float, context: float, tokens: int, HQ: int, HK: int, d: int, act: int, kv: int
) -> Work:
    """New tokens on a cached prefix. ``pairs`` is the sum over chunks of np + n(n+1)/2,
    ``context`` that of p + n, for n new tokens on p cached ones."""
    return Work(4 * HQ * d * pairs, 2 * kv * HK * d * context + 2 * act * HQ * d * tokens)


def kv_write(tokens: int, HK: int, d: int, act: int, kv: int) -> Work:
    """Keys and values read from the projection and written to the pool."""
    return Work(0, 2 * tokens * HK * d * (act + kv))


def copy(moved: int) -> Work:
    """A copy of ``moved`` bytes on the device: read and written."""
    return Work(0, 2 * moved)


def all_reduce(tokens: int, hidden: int, ranks: int, act: int) -> Work:
    """Ring all-reduce of the hidden states: bytes that cross one rank's link each way."""
    return Work(0, 2 * (ranks - 1) / ranks * tokens * hidden * act)
