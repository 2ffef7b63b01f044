"""Past requests once more, one after the other through an empty cache, for policies that tune."""

from __future__ import annotations

from collections.abc import Iterable

from sim.pool.budget import BudgetCache
from sim.vllm.hit import Hit
from sim.vllm.request import Live


def rehearse(cache: BudgetCache, requests: Iterable[tuple[int, int, int]]) -> list[int]:
    """Hit tokens of each (request, prompt, output tokens); 0 for one that does not fit."""
    return [_one(cache, step, *sizes) for step, sizes in enumerate(requests)]


def _one(cache: BudgetCache, step: int, request: int, prompt: int, output: int) -> int:
    r = Live(request, prompt, output, [], 0, step)
    cache.begin_step(step)
    hit = cache.lookup(r)
    r.branch = hit.branch
    if not _compute(cache, r, cache.place(r, hit.tokens, prompt), hit):
        return 0
    while r.computed < prompt:
        _compute(cache, r, cache.place(r, r.computed, prompt), None)
    r.known = prompt + output
    if output > 1:
        _compute(cache, r, r.known - 1, None)
    cache.end_step()
    cache.free(r)
    return hit.tokens


def _compute(cache: BudgetCache, r: Live, end: int, hit: Hit | None) -> bool:
    """Its tokens up to ``end``; at least one, as nobody is there to wait for."""
    start = r.computed if hit is None else hit.tokens
    end = max(end, start + 1)
    if not cache.allocate(r, end - start, hit, crowded=False):
        if hit is None:
            raise ValueError(f"request {r.index} was served and does not fit alone")
        return False
    r.status, r.computed = "running", end
    return True
