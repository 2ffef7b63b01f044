"""What one recurrent-state layer computes on one rank, for each state family.

Projections of Mamba-2, the update and the scan follow the published layer; those of the other
families are estimates from the layer's shapes (gates of low rank are counted whole on each rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.cost import ops
from sim.cost.ops import Work
from sim.model import StateShape

Prefill = Callable[[int, int], Work]
Update = Callable[[int], Work]


@dataclass(frozen=True)
class Family:
    """``projections`` are GEMM shapes (k, n); ``prefill(tokens, sequences)`` and ``update(batch)``
    are None for a family without a recurrent state; ``norm_values`` are values a token that the
    elementwise kernels around the scan move."""

    projections: tuple[tuple[int, int], ...]
    channels: int
    width: int
    norm_values: int
    prefill: Prefill | None
    update: Update | None


def _split(value: int, ranks: int) -> int:
    return -(-value // ranks)


def _mamba2(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    heads, p, n = _split(a["num_heads"], tp), a["head_dim"], a["state_size"]
    total = a["n_groups"] if a["n_groups"] % tp == 0 else tp
    g, inner, chunk = total // tp, _split(a["intermediate_size"], tp), a.get("chunk_size") or 256
    channels = inner + 2 * g * n
    return Family(
        projections=((hidden, inner + channels + heads), (inner, hidden)),
        channels=channels,
        width=a["conv_kernel"],
        norm_values=3 * inner,
        prefill=lambda t, s: ops.ssd_prefill(t, s, heads, p, n, g, chunk, act, state),
        update=lambda b: ops.state_update(b, heads, p, n, g, act, state),
    )


def _mamba1(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    inner, n, rank = _split(a["intermediate_size"], tp), a["state_size"], -(-hidden // 16)
    return Family(
        projections=((hidden, 2 * inner), (inner, rank + 2 * n), (rank, inner), (inner, hidden)),
        channels=inner,
        width=a["conv_kernel"],
        norm_values=3 * inner,
        prefill=lambda t, s: ops.selective_scan(t, s, inner, n, act, state),
        update=lambda b: ops.selective_scan(b, b, inner, n, act, state),
    )


def _short_conv(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    inner = _split(a["intermediate_size"], tp)
    return Family(
        projections=((hidden, 3 * inner), (inner, hidden)),
        channels=inner,
        width=a["conv_kernel"],
        norm_values=4 * inner,
        prefill=None,
        update=None,
    )


def _linear(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    heads, d, chunk = _split(a["num_heads"], tp), a["head_dim"], a.get("chunk_size") or 256
    inner = heads * d
    return Family(
        projections=((hidden, 4 * inner), (inner, hidden)),
        channels=0,
        width=1,
        norm_values=3 * inner,
        prefill=lambda t, s: ops.ssd_prefill(t, s, heads, d, d, heads, chunk, act, state),
        update=lambda b: ops.state_update(b, heads, d, d, heads, act, state),
    )


def _delta(
    hidden: int, shape: tuple[int, int, int, int], chunk: int, extra: int, act: int, state: int
) -> tuple[tuple[tuple[int, int], ...], Prefill, Update]:
    heads, keys, k, v = shape
    columns = 2 * keys * k + heads * v + extra
    return (
        ((hidden, columns), (heads * v, hidden)),
        lambda t, s: ops.delta_prefill(t, s, heads, k, v, keys, chunk, act, state),
        lambda b: ops.delta_update(b, heads, k, v, keys, act, state),
    )


def _gdn(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    heads, keys = _split(a["num_v_heads"], tp), _split(a["num_k_heads"], tp)
    k, v, chunk = a["head_k_dim"], a["head_v_dim"], a.get("chunk_size") or 64
    gate = heads * v + 2 * heads
    projections, prefill, update = _delta(hidden, (heads, keys, k, v), chunk, gate, act, state)
    channels = 2 * keys * k + heads * v
    return Family(projections, channels, a["conv_kernel"], 3 * heads * v, prefill, update)


def _kda(a: dict[str, int], hidden: int, tp: int, act: int, state: int) -> Family:
    heads, d, chunk = _split(a["num_heads"], tp), a["head_dim"], a.get("chunk_size") or 64
    keys, k = _split(a.get("num_k_heads", a["num_heads"]), tp), a.get("head_k_dim", d)
    projections, prefill, update = _delta(
        hidden, (heads, keys, k, d), chunk, 2 * d + heads, act, state
    )
    gates = ((d, heads * d), (d, heads * d))
    channels = 2 * keys * k + heads * d
    projections = (*projections, *gates)
    return Family(projections, channels, a["conv_kernel"], 3 * heads * d, prefill, update)


FAMILIES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
    "linear_attention": _linear,
    "gdn": _gdn,
    "kda": _kda,
}


def family(shape: StateShape, hidden: int, tp: int, act: int, state: int) -> Family:
    """The layer's operations on one of ``tp`` ranks. Raises ``ValueError`` if not priced."""
    if shape.family not in FAMILIES:
        raise ValueError(f"no cost of state family {shape.family!r}; known: {sorted(FAMILIES)}")
    return FAMILIES[shape.family](shape.args, hidden, tp, act, state)
