"""What is timed: a grid of operations to fit, sizes between to judge, whole steps (no torch)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sim.cost.layers import Shape
from sim.cost.profile_cases import Case, Part, Whole, size, terms
from sim.cost.profile_curve import Curve

Grid = Literal["none", "coarse", "full"]
STRIDE = {"coarse": 4, "full": 2}
HELD = {"none": 0, "coarse": 3, "full": 6}
BY_TOKENS = ("gemm", "elementwise", "kv_write", "scan", "conv")
BY_BATCH = ("update", "conv_update", "head", "sample")
COPIES = ("state_copy", "state_save")
ATTENTION = ("attention_prefill", "attention_decode")
BY_SEQUENCE = ("scan", "conv", "attention_prefill")
SEVERAL = ((2, 128), (4, 64), (4, 256), (8, 128), (16, 16))
MIN_CONTEXT = 16


@dataclass(frozen=True)
class Limits:
    """The largest sizes: tokens of a step, tokens of one sequence, decodes of a step, and tokens of
    KV that all sequences of a step hold."""

    tokens: int
    context: int
    batch: int
    pool_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, must be 1 or more")


def ladder(most: int, stride: int, least: int = 1) -> list[int]:
    """Sizes ``stride`` times apart from ``least`` on, and ``most``."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= stride
    return [*sizes, most]


def grid(shape: Shape, limits: Limits, kind: Grid) -> list[Case]:
    """The cases that curves are fitted to."""
    overhead = [Case("overhead", Part(n, 1)) for n in (1, 4, 16) if n <= limits.batch]
    if kind == "none":
        return overhead
    made = [*overhead, *_every(limits, STRIDE[kind])]
    return [c for c in made if c.op == "overhead" or terms(shape, c)]


def _every(limits: Limits, stride: int) -> Iterator[Case]:
    for n in ladder(limits.tokens, stride):
        yield from (Case(op, Part(1, n)) for op in BY_TOKENS)
        if n <= limits.pool_tokens:
            yield Case("kv_copy", Part(1, n))
    for b in ladder(limits.batch, stride):
        yield from (Case(op, Part(b, 1)) for op in BY_BATCH[:2])
        yield from (Case(op, Part(1, b)) for op in BY_BATCH[2:])
    for b in ladder(min(limits.batch, 16), stride):
        yield from (Case(op, Part(b, 1)) for op in COPIES)
    for n in ladder(min(limits.tokens, limits.context), stride):
        yield Case("attention_prefill", Part(1, n))
    for s, n in SEVERAL:
        if s * n <= min(limits.tokens, limits.pool_tokens) and n <= limits.context:
            yield from (Case(op, Part(s, n)) for op in BY_SEQUENCE)
    for p in ladder(limits.context, stride, MIN_CONTEXT)[:-1]:
        yield Case("attention_prefill", Part(1, max(1, min(256, limits.context - p)), p))
    for b in ladder(limits.batch, 2 * stride):
        yield from (Case("attention_decode", p) for p in _decodes(b, limits, stride))


def _decodes(batch: int, limits: Limits, stride: int) -> Iterator[Part]:
    most = min(limits.context, limits.pool_tokens // batch) - 1
    for cached in ladder(max(most, 1), 2 * stride, MIN_CONTEXT):
        yield Part(batch, 1, cached)


def held(shape: Shape, limits: Limits, kind: Grid, seed: int) -> list[Case]:
    """Cases between those of the grid, drawn evenly in the logarithm, for each operation."""
    draw = random.Random(seed)

    def between(most: int, least: int = 1) -> int:
        return round(least * (most / least) ** draw.random()) if most > least else most

    out = []
    for _ in range(HELD[kind]):
        n, b, c = between(limits.tokens, 2), between(limits.batch), between(min(limits.batch, 16))
        out += [Case(op, Part(1, n)) for op in BY_TOKENS]
        out += [Case(op, Part(b, 1)) for op in BY_BATCH[:2]]
        out += [Case(op, Part(1, b)) for op in BY_BATCH[2:]]
        out += [Case(op, Part(c, 1)) for op in COPIES]
        p = between(limits.context // 2, MIN_CONTEXT)
        new = between(min(limits.context - p, limits.tokens), 2)
        out.append(Case("attention_prefill", Part(1, new, p * draw.randrange(2))))
        most = min(limits.context, limits.pool_tokens // b) - 1
        out.append(Case("attention_decode", Part(b, 1, between(max(most, 1), MIN_CONTEXT))))
    fresh = dict.fromkeys(c for c in out if terms(shape, c))
    return [c for c in fresh if c not in set(grid(shape, limits, kind))]


def steps(limits: Limits, kind: Grid) -> list[Whole]:
    """Whole steps, which no curve ever sees."""
    if kind == "none":
        return []
    found = [
        *(Whole(Part(1, n)) for n in (32, 100, 300, 1000, 2000, 4000)),
        *(Whole(Part(1, n, p)) for n, p in ((64, 900), (256, 1024), (200, 3800), (1000, 3000))),
        *(Whole(Part(s, n)) for s, n in ((2, 500), (4, 128))),
        *(Whole(Part(1, n, p), saves=1) for n, p in ((300, 0), (500, 1040))),
        Whole(Part(1, 200, 2048), copies=1),
        *(Whole(None, Part(b, 1, p)) for b in (1, 2, 8, 32) for p in (200, 1500)),
        *(Whole(None, Part(b, 1, p)) for b, p in ((1, 6000), (4, 4000), (16, 700))),
        Whole(Part(1, 128, 512), Part(4, 1, 700)),
        Whole(Part(1, 512), Part(16, 1, 300)),
        Whole(Part(2, 200, 1000), Part(8, 1, 1000)),
        Whole(Part(1, 1000), Part(2, 1, 2000)),
    ]
    return [w for w in found if fits(w, limits)]


def fits(step: Whole, limits: Limits) -> bool:
    """Whether a step stays within the limits."""
    parts = [p for p in (step.prefill, step.decode) if p]
    return (
        sum(p.total for p in parts) <= limits.tokens
        and max(p.cached + p.tokens for p in parts) <= limits.context
        and sum(p.sequences for p in parts) + step.saves + step.copies <= limits.batch
        and sum(p.context for p in parts) <= limits.pool_tokens
    )


# -------------------------------------------------------------------------------- on demand
def covering(
    shape: Shape, limits: Limits, op: str, low: float, high: float, curve: Curve | None
) -> list[Case]:
    """Cases with which sizes from ``low`` to ``high`` lie within what was measured.

    They continue the ladder from what the curve has, or begin a new one. Raises ``ValueError`` for
    an operation that is not measured.
    """
    have = curve.sizes if curve else ()
    ends = (have[0], have[-1]) if have else (high, high)
    below = [low, *_between(low, ends[0])] if low < ends[0] or not have else []
    above = [*_between(ends[1], high), high] if high > ends[1] or not have else []
    found = [_case(shape, limits, op, s, up=False) for s in below]
    found += [_case(shape, limits, op, s, up=True) for s in above]
    return [c for c in dict.fromkeys(found) if size(shape, c) not in have]


def _between(low: float, high: float) -> Iterator[float]:
    while (low := low * 4) < high:
        yield low


def _case(shape: Shape, limits: Limits, op: str, wanted: float, up: bool) -> Case:
    """A case of that size, or the next one up (down)."""
    n = int(wanted)
    if op in (*BY_TOKENS, "head", "sample"):
        return Case(op, Part(1, n))
    if op in BY_BATCH:
        return Case(op, Part(n, 1))
    if op in COPIES:
        return Case(op, Part(_over(n, shape.state_bytes, up), 1))
    if op == "kv_copy":
        return Case(op, Part(1, _over(n, shape.kv_bytes_per_token, up)))
    if op == "attention_decode":
        batch = -(-n // max(MIN_CONTEXT, limits.context // 8))
        return Case(op, Part(batch, 1, _over(n, batch, up) - 1))
    if op == "attention_prefill":
        return Case(op, _pairs(n, limits, up))
    raise ValueError(f"operation {op!r} is not measured; measured are {_measured()}")


def _over(value: int, by: int, up: bool) -> int:
    return max(1, -(-value // by) if up else value // by)


def _pairs(pairs: int, limits: Limits, up: bool) -> Part:
    """Sequences from position 0 with so many pairs, none longer than the limit."""
    most = min(limits.context, limits.tokens)
    sequences = -(-pairs // (most * (most + 1) // 2))
    each = _over(pairs, sequences, up)
    tokens = (math.isqrt(8 * each + 1) - 1) // 2
    return Part(sequences, max(1, tokens + (up and tokens * (tokens + 1) // 2 < each)))


def _measured() -> tuple[str, ...]:
    return (*BY_TOKENS, *BY_BATCH, *COPIES, *ATTENTION, "kv_copy")


def shuffled(cases: Iterable[Case | Whole], seed: int) -> list[Case | Whole]:
    """In an order drawn by seed, so that a slow moment does not fall on one operation's sizes."""
    out = list(cases)
    random.Random(seed).shuffle(out)
    return out
