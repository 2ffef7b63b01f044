"""Each operation, in all layers of a decoder that have it, as calls that can be timed.

A call does what the layer does around the operation as well: splits, reshapes, the gather and
scatter of a scan's states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import relu, silu

from executor.calibrate_bench import Bench
from executor.calibrate_timing import Call, Pieces
from executor.layers.attention import SelfAttention
from executor.layers.common import rms_norm
from executor.layers.mamba2 import Mamba2
from executor.pools import KvPool
from kernels import attention, conv, ssd, state
from sim.cost.profile_cases import Part


def gemm(bench: Bench, part: Part) -> Pieces:
    """Products that follow one another closely, those of a feed-forward layer, are one call."""
    found: list[list[torch.Tensor]] = []
    for layer in bench.weights.layers:
        if isinstance(layer, Mamba2):
            found += [[layer.inp], [layer.out]]
        elif isinstance(layer, SelfAttention):
            found += [[layer.qkv], [layer.out]]
        else:
            found.append([w for w in (layer.gate, layer.up, layer.down) if w is not None])
    widths = {w.shape[1] for weights in found for w in weights}
    inputs = {k: bench.values(part.total, k) for k in widths}
    return [partial(_products, bench, inputs, weights) for weights in found]


def _products(
    bench: Bench, inputs: dict[int, torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [bench.numerics.linear(inputs[w.shape[1]], w) for w in weights]


def elementwise(bench: Bench, part: Part) -> Pieces:
    """Embedding, norms, residuals, gates and activations."""
    t, x = part.total, bench.values(part.total, bench.model.hidden_size)
    tokens = bench.ints([(7 * i) % bench.model.vocab_size for i in range(t)])
    pieces: list[Call] = [lambda: bench.weights.embedding[tokens]]
    pieces += [partial(_around, x, layer.norm) for layer in bench.weights.layers]
    for m in bench.mamba:
        y, (projected, widths) = bench.values(t, m.heads, m.width), _projected(bench, m, t)
        pieces.append(partial(_gated, m, y, projected, widths))
    for f in bench.mlp:
        pieces.append(partial(_activated, bench.values(t, len(f.up)), f.gate is not None))
    return pieces


def _around(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return x + rms_norm(x, norm)


def _gated(m: Mamba2, y: torch.Tensor, projected: torch.Tensor, widths: list[int]) -> torch.Tensor:
    gate, _, _ = projected.split(widths, 1)
    mixed = (torch.cat([y]).flatten(1) * silu(gate)).unflatten(1, (m.groups, -1))
    return rms_norm(mixed, m.gate_norm.view(m.groups, -1)).flatten(1)


def _activated(up: torch.Tensor, gated: bool) -> torch.Tensor:
    return silu(up) * up if gated else relu(up).square()


def kv_write(bench: Bench, part: Part) -> Pieces:
    t = part.total
    kv, places = bench.kv(bench.blocks(t)), bench.ints(range(t))
    k, v = (bench.values(t, *kv.k.shape[3:]) for _ in range(2))
    return [
        partial(attention.write, kv.k[i], kv.v[i], k, v, places, backend=bench.backend)
        for i in range(len(bench.attention))
    ]


def head(bench: Bench, part: Part) -> Pieces:
    x, w = bench.values(part.total, bench.model.hidden_size), bench.weights
    at = bench.ints(range(part.total))
    return [lambda: bench.numerics.linear(rms_norm(x[at], w.norm), w.head)]


def sample(bench: Bench, part: Part) -> Pieces:
    logits = bench.values(part.total, bench.model.vocab_size)
    return [lambda: logits.argmax(-1)]


# -------------------------------------------------------------------------------- states
def _split(m: Mamba2, y: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x, dt, A, B, C and D of a Mamba-2 layer from what its convolution leaves."""
    inner, shared = m.heads * m.width, m.groups * m.columns
    x, b, c = y.split([inner, shared, shared], 1)
    shape = (len(y), m.groups, m.columns)
    return x.unflatten(1, (m.heads, m.width)), dt, m.A, b.reshape(shape), c.reshape(shape), m.D


def _projected(bench: Bench, m: Mamba2, rows: int) -> tuple[torch.Tensor, list[int]]:
    """What a layer's first product leaves: gate, convolved channels, dt; and their widths."""
    inner = m.heads * m.width
    widths = [inner, inner + 2 * m.groups * m.columns, m.heads]
    return bench.values(rows, sum(widths)), widths


def scan(bench: Bench, part: Part) -> Pieces:
    s, pool, made = part.sequences, bench.states(part.sequences).ssm, []
    slots = bench.ints(range(s))
    for i, m in enumerate(bench.mamba):
        channels = m.heads * m.width + 2 * m.groups * m.columns
        y, dt = bench.values(part.total, channels), bench.values(part.total, m.heads)
        start = m.chunk * (part.cached // m.chunk)
        lengths, starts = [part.tokens] * s, [start] * s
        made.append(partial(_scan, bench, m, pool[:, i], slots, y, dt, lengths, starts))
    return made


def _scan(
    bench: Bench,
    m: Mamba2,
    pool: torch.Tensor,
    slots: torch.Tensor,
    y: torch.Tensor,
    dt: torch.Tensor,
    lengths: list[int],
    starts: list[int],
) -> None:
    done = ssd.prefill(
        *_split(m, y, dt),
        initial=state.gather(pool, slots, backend=bench.backend),
        dt_bias=m.dt_bias,
        softplus=True,
        chunk=m.chunk,
        lengths=lengths,
        starts=starts,
        backend=bench.backend,
    )
    state.scatter(pool, slots, done.last, backend=bench.backend)


def convolution(bench: Bench, part: Part) -> Pieces:
    s, pool, made = part.sequences, bench.states(part.sequences).conv, []
    slots, lengths = bench.ints(range(s)), [part.tokens] * s
    for i, m in enumerate(bench.mamba):
        found = _projected(bench, m, part.total)
        made.append(partial(_conv, bench, m, pool[:, i], slots, found, lengths))
    return made


def _conv(
    bench: Bench,
    m: Mamba2,
    pool: torch.Tensor,
    slots: torch.Tensor,
    projected: tuple[torch.Tensor, list[int]],
    lengths: list[int],
) -> None:
    _, u, _ = projected[0].split(projected[1], 1)
    first = state.gather(pool, slots, backend=bench.backend)
    done = conv.prefill(
        u, m.taps, m.tap_bias, lengths=lengths, initial=first, backend=bench.backend
    )
    state.scatter(pool, slots, done.last, backend=bench.backend)


def update(bench: Bench, part: Part) -> Pieces:
    b, pool, made = part.sequences, bench.states(part.sequences).ssm, []
    slots = bench.ints(range(b))
    for i, m in enumerate(bench.mamba):
        channels = m.heads * m.width + 2 * m.groups * m.columns
        y, dt = bench.values(b, channels), bench.values(b, m.heads)
        made.append(partial(_update, bench, m, pool[:, i], slots, y, dt))
    return made


def _update(
    bench: Bench,
    m: Mamba2,
    pool: torch.Tensor,
    slots: torch.Tensor,
    y: torch.Tensor,
    dt: torch.Tensor,
) -> None:
    parts = _split(m, y, dt)
    ssd.update(pool, slots, *parts, dt_bias=m.dt_bias, softplus=True, backend=bench.backend)


def convolution_update(bench: Bench, part: Part) -> Pieces:
    pool, slots = bench.states(part.sequences).conv, bench.ints(range(part.sequences))
    made = []
    for i, m in enumerate(bench.mamba):
        found, widths = _projected(bench, m, part.sequences)
        made.append(partial(_conv_update, bench, m, pool[:, i], slots, found, widths))
    return made


def _conv_update(
    bench: Bench,
    m: Mamba2,
    pool: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    widths: list[int],
) -> None:
    _, u, _ = projected.split(widths, 1)
    conv.update(pool, slots, u, m.taps, m.tap_bias, backend=bench.backend)


def state_copy(bench: Bench, part: Part) -> Pieces:
    n = part.sequences
    pool = bench.states(2 * n)
    return [lambda: pool.copy(range(n), range(n, 2 * n))]


def state_save(bench: Bench, part: Part) -> Pieces:
    states, slots = bench.states(part.sequences), bench.ints(range(part.sequences))
    made = []
    for i in range(len(bench.mamba)):
        for pool in (states.conv, states.ssm):
            left = bench.values(part.sequences, *pool.shape[2:], dtype=pool.dtype)
            made.append(partial(state.scatter, pool[:, i], slots, left, backend=bench.backend))
    return made


# -------------------------------------------------------------------------------- attention
def _blocks(bench: Bench, part: Part) -> tuple[KvPool, torch.Tensor]:
    """The sequences' blocks."""
    columns = bench.blocks(part.cached + part.tokens)
    count = part.sequences * columns
    order = bench.ints(range(count))
    if bench.block_tokens > 1:
        order = torch.randperm(count, generator=bench.generator, device=bench.device)
    return bench.kv(count), order.to(torch.int32).view(part.sequences, columns)


def _queries(bench: Bench, layer: SelfAttention, rows: int) -> tuple[torch.Tensor, list[int]]:
    """What a layer's first product leaves, and the heads of queries, keys and values in it."""
    a = layer.shape
    heads = [a.num_query_heads, a.num_kv_heads, a.num_kv_heads]
    return bench.values(rows, sum(heads), a.head_dim), heads


def attention_prefill(bench: Bench, part: Part) -> Pieces:
    (kv, table), made = _blocks(bench, part), []
    lengths, starts = [part.tokens] * part.sequences, [part.cached] * part.sequences
    for i, layer in enumerate(bench.attention):
        found, heads = _queries(bench, layer, part.total)
        made.append(
            partial(_prefill, bench, found, heads, kv.k[i], kv.v[i], table, lengths, starts)
        )
    return made


def _prefill(
    bench: Bench,
    found: torch.Tensor,
    heads: list[int],
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    starts: list[int],
) -> torch.Tensor:
    q, _, _ = found.split(heads, 1)
    y = attention.prefill(q, k, v, table, lengths=lengths, starts=starts, backend=bench.backend)
    return torch.cat([y]).flatten(1)


def attention_decode(bench: Bench, part: Part) -> Pieces:
    (kv, table), made = _blocks(bench, part), []
    contexts = bench.ints([part.cached + 1] * part.sequences)
    for i, layer in enumerate(bench.attention):
        found, heads = _queries(bench, layer, part.sequences)
        made.append(partial(_decode, bench, found, heads, kv.k[i], kv.v[i], table, contexts))
    return made


def _decode(
    bench: Bench,
    found: torch.Tensor,
    heads: list[int],
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    contexts: torch.Tensor,
) -> torch.Tensor:
    q, _, _ = found.split(heads, 1)
    y = attention.decode(q, k, v, table, contexts, backend=bench.backend)
    return torch.cat([y]).flatten(1)


def kv_copy(bench: Bench, part: Part) -> Pieces:
    n = bench.blocks(part.total)
    pool = bench.kv(2 * n)
    return [lambda: pool.copy(range(n), range(n, 2 * n))]


OPERATIONS: dict[str, Callable[[Bench, Part], Pieces]] = {
    "gemm": gemm,
    "elementwise": elementwise,
    "kv_write": kv_write,
    "head": head,
    "sample": sample,
    "scan": scan,
    "conv": convolution,
    "update": update,
    "conv_update": convolution_update,
    "state_copy": state_copy,
    "state_save": state_save,
    "attention_prefill": attention_prefill,
    "attention_decode": attention_decode,
    "kv_copy": kv_copy,
}
