"""Why each prompt token was not a hit: one reason a token, judged at first admission.

Everything comes from the ledger, the admissions and prefix identities, as intervals of positions.
The reasons, in order of precedence, are those of ``REASONS``; docs/attribution.md words them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from sim.ledger import Action, Cause, Kind, Ledger
from sim.records import Records
from sim.step import Admission
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


class _Coverage:
    """The furthest id on every chain that something reached."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self.last: dict[int, int] = {}

    def add(self, request: int, length: int) -> None:
        for start, end, delta in self.prefixes.extents(request):
            if start >= length:
                return
            head, last = start + 1 + delta, min(end, length) + delta
            if self.last.get(head, -1) < last:
                self.last[head] = last

    def common(self, request: int, longest: int) -> int:
        reached = 0
        for start, end, delta in self.prefixes.extents(request):
            last = self.last.get(start + 1 + delta)
            if last is None or start >= longest:
                break
            reached = min(end, last - delta, longest)
            if reached < end:
                break
        return reached


class _History:
    """The ledger up to some event: what was published, evicted and dropped so far."""

    def __init__(self, ledger: Ledger, prefixes: Prefixes) -> None:
        self.ledger = ledger
        self.at = 0
        self.published = _Coverage(prefixes)
        self.evicted: set[int] = set()
        self.dropped: set[int] = set()
        self.any = False

    def advance(self, to: int) -> None:
        log = self.ledger
        for i in range(self.at, min(to, len(log))):
            kind, action, key = log.kind[i], log.action[i], log.key[i]
            if kind == Kind.KV:
                if action == Action.PUBLISHED:
                    self.published.add(log.request[i], log.position[i])
                    self.any = True
            elif action == Action.PUBLISHED:
                self.evicted.discard(key)
                self.dropped.discard(key)
                self.any = True
            elif action == Action.DROPPED:
                (self.dropped if log.cause[i] == Cause.POLICY else self.evicted).add(key)
        self.at = max(self.at, to)


def attribute(
    trace: Trace,
    prefixes: Prefixes,
    records: Records,
    ledger: Ledger,
    *,
    grid_tokens: int,
    reuse: bool = True,
) -> pd.DataFrame:
    """Tokens per request (rows) and reason (columns); rows of rejected requests are zero.

    ``grid_tokens``: positions at which a state can be kept. ``reuse`` False: the policy keeps
    nothing, so everything that was seen is ``policy_dropped``. Raises ``AssertionError`` unless
    each row sums to the prompt.
    """
    history, seen = _History(ledger, prefixes), _Coverage(prefixes)
    finishing = sorted((s, r) for r, s in enumerate(records.finished_step) if s >= 0)
    prompts = trace.prompt_tokens.tolist()
    totals = (trace.prompt_tokens + trace.output_tokens).tolist()
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
        counts = _reasons(a, n, seen, history, prefixes, grid_tokens, reuse)
        assert sum(counts.values()) == n, f"request {trace.ids[a.request]!r}: {counts}, not {n}"
        for reason, tokens in counts.items():
            out[reason][a.request] = tokens
        seen.add(a.request, n)
    return pd.DataFrame(out)


def _reasons(
    a: Admission,
    n: int,
    seen: _Coverage,
    history: _History,
    prefixes: Prefixes,
    grid: int,
    reuse: bool,
) -> dict[str, int]:
    """Cut ``0:n`` at the points where the reason changes."""
    end = max(a.hit, seen.common(a.request, n - 1), history.published.common(a.request, n - 1))
    cuts = [("hit", a.hit)]
    if not reuse:
        cuts.append(("policy_dropped", end))
    else:
        floor = end // grid * grid
        published = history.published.common(a.request, n - 1)
        evicted, dropped = _states_lost(a, history, prefixes, grid)
        cuts += [
            ("state_evicted", evicted),
            ("policy_dropped", dropped),
            ("no_checkpoint", min(a.matched, end)),
            ("kv_evicted", min(published, floor)),
            ("in_flight", floor),
            ("below_block", end),
        ]
    cuts += [("never_seen", n - 1), ("last_token", n)]
    return _lengths(cuts)


def _lengths(cuts: Iterable[tuple[str, int]]) -> dict[str, int]:
    at, out = 0, {}
    for reason, upto in cuts:
        out[reason] = max(0, upto - at)
        at = max(at, upto)
    return out


def _states_lost(a: Admission, history: _History, prefixes: Prefixes, grid: int) -> tuple[int, int]:
    """Furthest positions, above the hit and within resident KV, of states evicted and dropped."""
    if a.matched <= a.hit or not (history.evicted or history.dropped):
        return a.hit, a.hit
    keys = prefixes.grid(a.request, grid)
    evicted = dropped = a.hit
    for i in range(a.hit // grid, min(a.matched // grid, len(keys))):
        if keys[i] in history.evicted:
            evicted = (i + 1) * grid
        if keys[i] in history.dropped:
            dropped = (i + 1) * grid
    return evicted, dropped


def lost_at_preemption(trace: Trace, records: Records) -> pd.DataFrame:
    """Lookups after a preemption, apart: what they hit, matched and recomputed again."""
    rows = [
        (trace.ids[a.request], step, a.hit, a.matched, a.matched - a.hit)
        for step, a in records.admissions
        if a.resumed
    ]
    names = ["id", "step", "hit_tokens", "matched_tokens", "recompute_tokens"]
    return pd.DataFrame(rows, columns=names)
