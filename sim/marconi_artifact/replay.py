"""Replay sequences one after the other: look the prompt up, then keep prompt and output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sim.marconi_artifact.blocks import Blocks
from sim.marconi_artifact.hybrid import Hybrid
from sim.marconi_artifact.sizes import Sizes
from sim.marconi_artifact.tree import Eviction, Tokens
from traces.trace import Ints, Trace

VERSIONS = ("V1", "V2", "V3", "block")
ALPHAS = tuple(step / 10 for step in range(21))
_SCORED = 500  # the alpha search counts at most so many requests, the last ones
Cache = Hybrid | Blocks


@dataclass(frozen=True, slots=True)
class Sequence:
    """Prompt and output of a request as token ids, the first ``prompt`` of them the prompt."""

    tokens: Tokens
    prompt: int


@dataclass(frozen=True)
class Replay:
    """What came out, by request in order; of V2 also the alpha it found and the requests it took.

    ``first_evicting`` counts the requests up to the first that evicted, it included; ``window``
    those up to the alpha search. Both are None where it never came to that, and outside V2.
    """

    sizes: Sizes
    capacity_bytes: float
    prompt_tokens: Ints
    reused: Ints
    states_after: Ints
    kv_tokens_after: Ints
    evictions: tuple[Eviction, ...]
    alpha: float
    first_evicting: int | None = None
    window: int | None = None

    @property
    def bytes_after(self) -> Ints:
        """Bytes held after each request."""
        sizes = self.sizes
        return self.states_after * sizes.checkpoint_bytes + self.kv_tokens_after * sizes.kv_bytes

    @property
    def max_bytes(self) -> int:
        """The most bytes held after any request; may exceed the capacity."""
        return int(self.bytes_after.max(initial=0))

    @property
    def token_hit_rate(self) -> float:
        """Credited tokens over prompt tokens."""
        return int(self.reused.sum()) / max(1, int(self.prompt_tokens.sum()))

    @property
    def request_hit_rate(self) -> float:
        """Share of requests with any credited token."""
        return int((self.reused > 0).sum()) / max(1, len(self.reused))

    @property
    def flops_saved(self) -> int:
        """FLOPs that prefilling the credited tokens would have taken."""
        return flops_saved(self.sizes, self.reused.tolist())


def replay(
    sequences: Iterable[Sequence],
    *,
    version: str,
    capacity_bytes: float,
    sizes: Sizes | None = None,
    alpha: float = 0.0,
    block_tokens: int = 32,
    bootstrap_multiplier: int = 5,
) -> Replay:
    """Replay ``sequences`` under one of ``VERSIONS``.

    ``alpha`` is V3's, ``block_tokens`` the block baseline's. V2 searches alpha at
    ``bootstrap_multiplier`` times the requests before the first eviction, serially: of equal
    results the smallest alpha wins. Raises ``ValueError`` on values out of range.
    """
    _check(version, capacity_bytes, alpha, block_tokens, bootstrap_multiplier)
    sizes = sizes or Sizes()
    if version == "block":
        return _run(Blocks(sizes, capacity_bytes, block_tokens), sequences, None)
    start = {"V1": None, "V2": 0.0, "V3": alpha}[version]
    tuner = Tuner(bootstrap_multiplier) if version == "V2" else None
    return _run(Hybrid(sizes, capacity_bytes, start), sequences, tuner)


def replay_trace(
    trace: Trace,
    *,
    version: str,
    capacity_bytes: float,
    sizes: Sizes | None = None,
    alpha: float = 0.0,
    block_tokens: int = 32,
    bootstrap_multiplier: int = 5,
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


def flops_saved(sizes: Sizes, reused: list[int]) -> int:
    """FLOPs that prefilling prefixes of these lengths takes."""
    return sum(sizes.prefill_flops(n) for n in reused)


class Tuner:
    """V2's search: once, over all requests so far, from an empty tree."""

    def __init__(self, multiplier: int) -> None:
        self.multiplier = multiplier
        self.history: list[Sequence] = []
        self.first_evicting: int | None = None
        self.window: int | None = None
        self.done = False

    def seen(self, cache: Hybrid, sequence: Sequence) -> None:
        """Before ``sequence`` is kept: search if the window is full with it."""
        if self.done:
            return
        self.history.append(sequence)
        # equality: a window already full when it is set (multiplier 1) never leads to a search
        if len(self.history) == self.window:
            cache.alpha = best_alpha(cache, self.history)
            self.done, self.history = True, []

    def kept(self, cache: Hybrid) -> None:
        """After a request is kept: its eviction, if the first, sets the window."""
        if self.window is None and cache.evicts:
            self.first_evicting = len(self.history)
            self.window = self.multiplier * self.first_evicting


def best_alpha(cache: Hybrid, history: list[Sequence]) -> float:
    """The smallest alpha that saves the most FLOPs over the last requests of ``history``."""

    def saved(alpha: float) -> int:
        tried = _run(Hybrid(cache.tree.sizes, cache.capacity, alpha), history, None)
        return flops_saved(cache.tree.sizes, tried.reused[-_SCORED:].tolist())

    return max(ALPHAS, key=saved)


def _run(cache: Cache, sequences: Iterable[Sequence], tuner: Tuner | None) -> Replay:
    rows: list[tuple[int, int, int, int]] = []
    tree = cache.tree
    for tree.request, sequence in enumerate(sequences):
        reused = cache.lookup(sequence.tokens[: sequence.prompt])
        if tuner is not None and isinstance(cache, Hybrid):
            tuner.seen(cache, sequence)
        cache.insert(sequence.tokens)
        if tuner is not None and isinstance(cache, Hybrid):
            tuner.kept(cache)
        rows.append((sequence.prompt, reused, tree.states, tree.kv_tokens))
    prompts, reused_tokens, states, kv_tokens = np.array(rows, np.int64).reshape(-1, 4).T
    alpha = cache.alpha if isinstance(cache, Hybrid) else None
    return Replay(
        sizes=tree.sizes,
        capacity_bytes=cache.capacity,
        prompt_tokens=prompts,
        reused=reused_tokens,
        states_after=states,
        kv_tokens_after=kv_tokens,
        evictions=tuple(tree.evictions),
        alpha=alpha or 0.0,
        first_evicting=tuner.first_evicting if tuner else None,
        window=tuner.window if tuner else None,
    )


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
