"""From how many tokens on a hybrid holds a request in fewer bytes than an attention-only model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from sim.vllm.geometry_types import Geometry

STEP_TOKENS = 16


@dataclass(frozen=True)
class Crossover:
    """Token counts against a reference's KV on the same ranks.

    ``state_exact``: tokens of the reference's KV that are as large as the states alone, and
    ``state_tokens`` the first whole count at which the KV is no smaller. ``total_*``: the same for
    states and the hybrid's own KV. ``allocated_tokens``: the first multiple of 16 at which whole
    blocks, one state block a group, cost no more. None: the hybrid's KV is not smaller.
    """

    reference: str
    reference_kv_bytes_per_token: int
    state_exact: float
    state_tokens: int
    total_exact: float | None
    total_tokens: int | None
    allocated_tokens: int | None


def crossover(
    reference: str, reference_bytes: int, state_bytes: int, kv_bytes: int, geometry: Geometry
) -> Crossover:
    """Counts for states of ``state_bytes`` and ``kv_bytes`` a token, all layers of one rank."""
    alone = Fraction(state_bytes, reference_bytes)
    saved = reference_bytes - kv_bytes
    total = Fraction(state_bytes, saved) if saved > 0 else None
    return Crossover(
        reference=reference,
        reference_kv_bytes_per_token=reference_bytes,
        state_exact=float(alone),
        state_tokens=-(-alone.numerator // alone.denominator),
        total_exact=None if total is None else float(total),
        total_tokens=None if total is None else -(-total.numerator // total.denominator),
        allocated_tokens=allocated_tokens(geometry, reference_bytes),
    )


def allocated_tokens(geometry: Geometry, reference_bytes: int) -> int | None:
    """First multiple of 16 tokens whose whole blocks cost no more than the reference's KV."""
    kinds = [g.kind for g in geometry.groups]
    states, attention = kinds.count("mamba"), kinds.count("attention")
    block, size = geometry.block_tokens, geometry.bytes_per_block
    gain = block * reference_bytes - attention * size  # of one more block of tokens
    if not states or not attention or gain <= 0:
        return None
    # With n blocks of tokens at most n * gain is won; start at the fewest that can pay the states.
    blocks = -(-states * size // gain)
    while True:
        cost = (attention * blocks + states) * size
        first = max(-(-cost // reference_bytes), (blocks - 1) * block + 1)
        tokens = STEP_TOKENS * -(-first // STEP_TOKENS)
        if tokens <= blocks * block:
            return tokens
        blocks += 1
