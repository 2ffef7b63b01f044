"""A request with the engine to itself: the scheduler's decisions without its queues.

With nobody else there and no step in flight, what a request does follows from its own counts. So
nothing is planned as a ``Step``: the cache is asked as the scheduler would ask it, in the same
order, and steps at which it would not be are only counted. Source: specs/vllm, section 9.
"""

from __future__ import annotations

from sim.step import Admission
from sim.vllm.hit import Hit
from sim.vllm.planned import admission
from sim.vllm.request import Live
from sim.vllm.scheduler import Scheduler


def serve_alone(s: Scheduler) -> Admission | None:
    """Serve the only request to its end, however many steps that takes; how it was admitted.

    None if it is not taken in, or if it is not alone. If it would have to be preempted it is left
    running where it is, and the scheduler goes on as ever.
    """
    if s.options.async_scheduling or s.running or len(s.waiting) != 1:
        return None
    r, hit = s.waiting[0], _enter(s, s.waiting[0])
    if hit is None:
        return None
    told = admission(r, hit, r.status == "preempted")
    s.waiting.clear()
    if _prefill(s, r) and _decode(s, r):
        s.cache.free(r)
    else:
        s.take_over(r)
    return told


def _enter(s: Scheduler, r: Live) -> Hit | None:
    """The first chunk, with the lookup before it."""
    cache, options = s.cache, s.options
    cache.begin_step(s.index)
    hit = cache.lookup(r)
    r.branch = hit.branch
    n = _most(s, r.known - hit.tokens)
    budget = options.max_num_batched_tokens
    if n > budget and not options.enable_chunked_prefill:
        return None
    n = cache.place(r, hit.tokens, hit.tokens + min(n, budget)) - hit.tokens
    if n == 0 or not cache.allocate(r, n, hit, whole=options.reserve_full_isl, crowded=False):
        return None
    r.status = "running"
    r.restored = hit.tokens
    r.quiet_from = r.known + s.after_prompt
    r.computed = hit.tokens + n
    cache.end_step()
    s.index += 1
    return hit


def _most(s: Scheduler, n: int) -> int:
    """``n`` tokens, cut as long prefills are: 0.33 does not while a request is alone."""
    threshold = s.options.long_prefill_token_threshold if s.options.old else 0
    return min(n, threshold) if threshold else n


def _prefill(s: Scheduler, r: Live) -> bool:
    """The other chunks, to the one that samples; False before a step that cannot be."""
    cache, options = s.cache, s.options
    while r.computed < r.known:
        start = r.computed
        n = min(_most(s, r.known - start), options.max_num_batched_tokens)
        n = min(n, options.max_model_len - start - 1)
        cache.begin_step(s.index)
        n = cache.place(r, start, start + n) - start
        if n <= 0 or not cache.allocate(r, n, None):
            return False
        cache.end_step()
        r.computed += n
        s.index += 1
    r.known += 1
    return True


def _decode(s: Scheduler, r: Live) -> bool:
    """One token a step to the last; False before a step that cannot be."""
    cache, limit = s.cache, min(r.target, s.options.max_model_len)
    while r.known < limit:
        wake = r.computed
        if wake >= r.quiet_from:
            wake = min(cache.quiet_until(wake, s.after_block), limit - 1)
        if wake == r.computed:
            cache.begin_step(s.index)
            if not cache.allocate(r, 1, None):
                return False
            cache.end_step()
            wake += 1
        s.index += wake - r.computed
        r.known += wake - r.computed
        r.computed = wake
    return True
