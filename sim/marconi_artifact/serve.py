"""One request after the other against a cache, and V2's search for alpha in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sim.marconi_artifact.blocks import Blocks
from sim.marconi_artifact.hybrid import Hybrid
from sim.marconi_artifact.outcome import Replay, Sequence, flops_saved

ALPHAS = tuple(step / 10 for step in range(21))
_SCORED = 500  # the search counts at most so many requests, the last ones


@dataclass
class Tuner:
    """Searches once, at ``multiplier`` times the requests before the first eviction."""

    multiplier: int
    history: list[Sequence] = field(default_factory=list)
    first_evicting: int | None = None
    window: int | None = None
    done: bool = False

    def before(self, cache: Hybrid, sequence: Sequence) -> None:
        """Before ``sequence`` is kept: search if it fills the window."""
        if self.done:
            return
        self.history.append(sequence)
        # equality: a window that is full when it is set (multiplier 1) never leads to a search
        if len(self.history) == self.window:
            cache.alpha = best_alpha(cache, self.history)
            self.done, self.history = True, []

    def after(self, cache: Hybrid) -> None:
        """After a request is kept: the first eviction sets the window."""
        if self.window is None and cache.evicts:
            self.first_evicting = len(self.history)
            self.window = self.multiplier * self.first_evicting


def best_alpha(cache: Hybrid, history: list[Sequence]) -> float:
    """The smallest alpha that saves the most FLOPs over the end of ``history``, cache empty."""

    def saved(alpha: float) -> int:
        tried = serve(cache.emptied(alpha), history)
        return flops_saved(tried.sizes, tried.reused[-_SCORED:].tolist())

    return max(ALPHAS, key=saved)


def serve(
    cache: Hybrid | Blocks, sequences: Iterable[Sequence], tuner: Tuner | None = None
) -> Replay:
    """Look each prompt up, then keep prompt and output. Only a ``Hybrid`` is tuned."""
    rows: list[tuple[int, int, int, int]] = []
    tree = cache.tree
    tuned = cache if isinstance(cache, Hybrid) else None
    for tree.request, sequence in enumerate(sequences):
        reused = cache.lookup(sequence.tokens[: sequence.prompt])
        if tuner and tuned:
            tuner.before(tuned, sequence)
        cache.insert(sequence.tokens)
        if tuner and tuned:
            tuner.after(tuned)
        rows.append((sequence.prompt, reused, tree.states, tree.kv_tokens))
    prompts, hits, states, kv_tokens = np.array(rows, np.int64).reshape(-1, 4).T
    return Replay(
        sizes=tree.sizes,
        capacity_bytes=cache.capacity,
        prompt_tokens=prompts,
        reused=hits,
        states_after=states,
        kv_tokens_after=kv_tokens,
        evictions=tuple(tree.evictions),
        alpha=(tuned.alpha if tuned else None) or 0.0,
        first_evicting=tuner.first_evicting if tuner else None,
        window=tuner.window if tuner else None,
    )
