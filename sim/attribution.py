"""Why each prompt token was not a hit: one reason a token, judged at first admission.

Everything comes from the ledger, the admissions and prefix identities, as intervals of positions.
The reasons, in order of precedence, are those of ``REASONS``; docs/attribution.md words them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import pandas as pd

from sim.ledger import Action, Cause, Kind, Ledger
from sim.records import Records
from sim.step import Admission
from traces.coverage import Coverage
from traces.identity import Prefixes
from traces.trace import Trace

REASONS = {
    "hit": "hit",
    "last_token": "last token, always recomputed",
    "never_seen": "never seen before",
    "in_flight": "sharer still in flight",
    "kv_evicted": "KV evicted",
    "state_evicted": "state evicted",
    "policy_dropped": "state dropped by the policy",
    "below_block": "below the block or grid",
    "no_checkpoint": "seen and resident, no checkpoint left in shared tokens",
}


class _InFlight:
    """Requests that were admitted and have not computed their prompt."""

    def __init__(self, records: Records, prompts: list[int], prefixes: Prefixes) -> None:
        self.records, self.prompts, self.prefixes = records, prompts, prefixes
        self.requests: list[int] = []

    def common(self, request: int, longest: int) -> int:
        """The longest prompt prefix shared with one of them when ``request`` is admitted."""
        first, now = self.records.first_token_ns, self.records.admitted_ns[request]
        self.requests = [r for r in self.requests if not 0 <= first[r] <= now]
        shared = (
            min(self.prefixes.common(request, r), self.prompts[r], longest) for r in self.requests
        )
        return max(shared, default=0)


class _Lost:
    """Prefix ids of what was lost, in order, to find the deepest along a request."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def add(self, key: int) -> None:
        i = bisect_left(self.keys, key)
        if i == len(self.keys) or self.keys[i] != key:
            insort(self.keys, key)

    def discard(self, key: int) -> None:
        i = bisect_left(self.keys, key)
        if i < len(self.keys) and self.keys[i] == key:
            del self.keys[i]

    def deepest(self, extents: list[tuple[int, int, int]], low: int, high: int) -> int:
        """The last lost position in ``low < p <= high`` of a request, 0 for none."""
        if not self.keys:
            return 0
        for start, end, delta in reversed(extents):
            first, last = max(start, low), min(end, high)
            if first >= last:
                continue
            i = bisect_right(self.keys, last + delta)
            if i and self.keys[i - 1] > first + delta:
                return self.keys[i - 1] - delta
        return 0


class _History:
    """The ledger up to some event: what was published, evicted and dropped so far.

    ``kv_lost`` keeps every key of KV that was ever evicted: what came back since is resident, so
    a lookup matched it. ``has_kv`` is False for models of states alone.
    """

    def __init__(self, ledger: Ledger, prefixes: Prefixes) -> None:
        self.ledger = ledger
        self.at = 0
        self.published = Coverage(prefixes)
        self.evicted, self.dropped, self.kv_lost = _Lost(), _Lost(), _Lost()
        self.has_kv = Kind.KV in ledger.kind

    def advance(self, to: int) -> None:
        log = self.ledger
        for i in range(self.at, min(to, len(log))):
            kind, action, key = log.kind[i], log.action[i], log.key[i]
            pressed = action == Action.DROPPED and log.cause[i] == Cause.PRESSURE
            if kind == Kind.KV:
                if action == Action.PUBLISHED:
                    self.published.add(log.request[i], log.position[i])
                elif pressed:
                    self.kv_lost.add(key)
            elif action == Action.PUBLISHED:
                self.evicted.discard(key)
                self.dropped.discard(key)
            elif pressed:
                self.evicted.add(key)
            elif action == Action.DROPPED and log.cause[i] == Cause.POLICY:
                self.dropped.add(key)
        self.at = max(self.at, to)


def attribute(
    trace: Trace,
    prefixes: Prefixes,
    records: Records,
    ledger: Ledger,
    *,
    grid_tokens: int,
    block_tokens: int = 0,
    reuse: bool = True,
    tree: bool = False,
) -> pd.DataFrame:
    """Tokens per request (rows) and reason (columns); rows of rejected requests are zero.

    ``grid_tokens``: positions at which a state can be kept. ``block_tokens``: block of the KV,
    ``grid_tokens`` if 0. ``reuse`` False: the policy keeps nothing, so everything that was seen
    and computed is ``policy_dropped``. ``tree``: KV that was published stays until it is
    evicted, so what a lookup does not match of it was. Raises ``AssertionError`` unless each row
    sums to the prompt.
    """
    history, seen = _History(ledger, prefixes), Coverage(prefixes)
    finishing = sorted((s, r) for r, s in enumerate(records.finished_step) if s >= 0)
    prompts = trace.prompt_tokens.tolist()
    totals = (trace.prompt_tokens + trace.output_tokens).tolist()
    computing = _InFlight(records, prompts, prefixes)
    out = {r: [0] * len(trace) for r in REASONS}
    done = 0
    for step, a in records.admissions:
        history.advance(a.event)
        while done < len(finishing) and finishing[done][0] < step:
            seen.add(finishing[done][1], totals[finishing[done][1]])
            done += 1
        if a.resumed:
            continue
        n = prompts[a.request]
        flying = computing.common(a.request, n - 1)
        end = max(a.hit, seen.common(a.request, n - 1), history.published.common(a.request, n - 1))
        if reuse:
            grid = (grid_tokens, block_tokens or grid_tokens)
            cuts = _cuts(a, end, flying, history, grid, tree)
        else:
            cuts = [("hit", a.hit), ("in_flight", flying), ("policy_dropped", end)]
        counts = _lengths([*cuts, ("never_seen", n - 1), ("last_token", n)])
        assert sum(counts.values()) == n, f"request {trace.ids[a.request]!r}: {counts}, not {n}"
        for reason, tokens in counts.items():
            out[reason][a.request] = tokens
        seen.add(a.request, n)
        computing.requests.append(a.request)
    return pd.DataFrame(out)


def _cuts(
    a: Admission, end: int, flying: int, history: _History, grids: tuple[int, int], tree: bool
) -> list[tuple[str, int]]:
    """Where each reason ends in ``0:end``, the part of the prompt that was seen.

    Up to ``resident`` only a state is missing. Behind it KV is, because a sharer has not computed
    it, it was evicted, or it never became a key since its block was not full.
    """
    grid, block = grids
    resident = min(a.matched, end) if history.has_kv else end // grid * grid
    extents = history.published.prefixes.extents(a.request) if end > a.hit else []
    state = [
        ("state_evicted", history.evicted.deepest(extents, a.hit, resident)),
        ("policy_dropped", history.dropped.deepest(extents, a.hit, resident)),
        ("no_checkpoint", resident),
    ]
    if not history.has_kv:
        return [("hit", a.hit), ("in_flight", flying), *state, ("below_block", end)]
    lost = end if tree else history.kv_lost.deepest(extents, resident, end)
    if lost:
        lost = max(0 if tree else lost, history.published.common(a.request, end) // block * block)
    behind = [("in_flight", flying), ("kv_evicted", lost), ("below_block", end)]
    return [("hit", a.hit), *state, *behind]


def _lengths(cuts: Iterable[tuple[str, int]]) -> dict[str, int]:
    at, out = 0, {}
    for reason, upto in cuts:
        out[reason] = max(0, upto - at)
        at = max(at, upto)
    return out


def lost_at_preemption(trace: Trace, records: Records) -> pd.DataFrame:
    """A row per lookup after a preemption: tokens that had been computed, what of them is hit,
    what is lost and computed again, and how far the KV still matched."""
    rows = [
        (trace.ids[a.request], step, a.lost, a.hit, max(0, a.lost - a.hit), a.matched)
        for step, a in records.admissions
        if a.resumed
    ]
    names = ["id", "step", "computed_tokens", "hit_tokens", "lost_tokens", "matched_tokens"]
    return pd.DataFrame(rows, columns=names)
