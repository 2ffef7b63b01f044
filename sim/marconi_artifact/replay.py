"""Replay sequences or a trace under one of the artifact's policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sim.marconi_artifact.blocks import Blocks
from sim.marconi_artifact.hybrid import Hybrid
from sim.marconi_artifact.outcome import Replay, Sequence
from sim.marconi_artifact.serve import Tuner, serve
from sim.marconi_artifact.sizes import Sizes
from traces.trace import Trace

VERSIONS = ("V1", "V2", "V3", "block")


def replay(
    sequences: Iterable[Sequence],
    *,
    version: str,
    capacity_bytes: float,
    sizes: Sizes | None = None,
    alpha: float = 0.0,
    block_tokens: int = 32,
    bootstrap_multiplier: int = 5,
    exact_booking: bool = False,
) -> Replay:
    """Replay ``sequences`` under one of ``VERSIONS``.

    ``alpha`` is V3's, ``block_tokens`` the block baseline's. V2 searches alpha at
    ``bootstrap_multiplier`` times the requests before the first eviction, serially: of equal
    results the smallest alpha wins. ``exact_booking`` mends one error of V2 and V3, that an
    eviction books bytes of another node than it drops. Raises ``ValueError`` on values out of
    range.
    """
    _check(version, capacity_bytes, alpha, block_tokens, bootstrap_multiplier)
    sizes = sizes or Sizes()
    if version == "block":
        return serve(Blocks(sizes, capacity_bytes, block_tokens), sequences)
    start = {"V1": None, "V2": 0.0, "V3": alpha}[version]
    tuner = Tuner(bootstrap_multiplier) if version == "V2" else None
    return serve(Hybrid(sizes, capacity_bytes, start, exact_booking), sequences, tuner)


def replay_trace(
    trace: Trace,
    *,
    version: str,
    capacity_bytes: float,
    sizes: Sizes | None = None,
    alpha: float = 0.0,
    block_tokens: int = 32,
    bootstrap_multiplier: int = 5,
    exact_booking: bool = False,
) -> Replay:
    """``replay`` of a trace's requests in their order, its addresses for tokens.

    Nothing waits: give the trace its arrivals first, which orders it by nominal time. An output
    of unknown content is one that no later prompt repeats.
    """
    return replay(
        trace_sequences(trace),
        version=version,
        capacity_bytes=capacity_bytes,
        sizes=sizes,
        alpha=alpha,
        block_tokens=block_tokens,
        bootstrap_multiplier=bootstrap_multiplier,
        exact_booking=exact_booking,
    )


def trace_sequences(trace: Trace) -> Iterator[Sequence]:
    """The requests of ``trace`` as token arrays, one at a time."""
    top = int((trace.run_address + trace.run_length).max(initial=0))
    kind = np.int32 if top < 2**31 else np.int64
    address, length = trace.run_address.tolist(), trace.run_length.tolist()
    offsets, prompts = trace.run_offsets.tolist(), trace.prompt_tokens.tolist()
    for i, prompt in enumerate(prompts):
        runs = [
            np.arange(address[k], address[k] + length[k], dtype=kind)
            for k in range(offsets[i], offsets[i + 1])
        ]
        yield Sequence(np.concatenate([np.empty(0, kind), *runs]), prompt)


def _check(version: str, capacity: float, alpha: float, block: int, multiplier: int) -> None:
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; allowed: {', '.join(VERSIONS)}; nearest: V2")
    for name, value, low in (
        ("capacity_bytes", capacity, 1),
        ("alpha", alpha, 0),
        ("block_tokens", block, 1),
        ("bootstrap_multiplier", multiplier, 1),
    ):
        if not value >= low:
            raise ValueError(f"{name} is {value}; allowed: {low} or more; nearest: {low}")
