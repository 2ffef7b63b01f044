"""Many recorded conversations at once: drawn by seed, each copy with content of its own.

Agent traces say when things happened within a conversation, not when it began, so a fleet is made:
conversations are put in a seeded order, and an arrival process (``traces.arrivals``) starts them.
Within a conversation nothing changes: every turn waits for what it waited for and then thinks as
long as it did, however long the engine takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traces.order import take
from traces.trace import UNKNOWN, Ints, Trace


def interleave(
    trace: Trace, seed: int = 0, conversations: int | None = None, idle_cap_s: float | None = None
) -> Trace:
    """``conversations`` of ``trace`` (None: each once) in an order drawn by ``seed``, without
    arrival times.

    A conversation is what hangs together by waits or by session. More of them than there are
    means further rounds, each in an order of its own, with ids and sessions that end in ``#2``,
    ``#3``, …, and sharing nothing with the rounds before. Thinks are cut at ``idle_cap_s``.
    """
    members = _members(trace)
    rng = np.random.default_rng(seed)
    wanted = len(members) if conversations is None else conversations
    parts: list[Trace] = []
    while wanted > 0 and members:
        chosen = rng.permutation(len(members))[:wanted].tolist()
        parts.append(take(trace, np.concatenate([members[k] for k in chosen])))
        wanted -= len(chosen)
    thinks_at_most = 2**62 if idle_cap_s is None else round(idle_cap_s * 1e9)
    out = joined(parts) if parts else take(trace, np.zeros(0, np.int64))
    return replace(
        out,
        arrival_ns=np.full(len(out), UNKNOWN, np.int64),
        think_ns=np.minimum(out.think_ns, thinks_at_most),
        notes={**trace.notes, "conversations": conversations or len(members), "fleet_seed": seed},
    )


def _members(trace: Trace) -> list[Ints]:
    """The requests of every conversation, in file order."""
    head = list(range(len(trace)))

    def find(i: int) -> int:
        while head[i] != i:
            head[i] = head[head[i]]
            i = head[i]
        return i

    first: dict[int, int] = {}
    for i, session in enumerate(trace.session.tolist()):
        others = list(trace.after_of(i))
        if session != UNKNOWN:
            others.append(first.setdefault(session, i))
        for j in others:
            a, b = find(i), find(j)
            head[max(a, b)] = min(a, b)
    root = np.array([find(i) for i in range(len(trace))], np.int64)
    order = np.argsort(root, kind="stable")
    bounds = np.flatnonzero(np.diff(root[order])) + 1
    return [part for part in np.split(order, bounds) if len(part)]


def joined(parts: Sequence[Trace]) -> Trace:
    """Traces one behind the other; none shares content, ids or sessions with another."""
    rows = np.cumsum([0, *(len(p) for p in parts)]).tolist()
    names = np.cumsum([0, *(len(p.session_names) for p in parts)]).tolist()
    runs = np.cumsum([0, *(len(p.run_address) for p in parts)]).tolist()
    waits = np.cumsum([0, *(len(p.after) for p in parts)]).tolist()
    tops = [1 + int((p.run_address + p.run_length).max(initial=0)) for p in parts]
    shifts = np.cumsum([0, *tops]).tolist()
    sessions = [
        np.where(p.session == UNKNOWN, UNKNOWN, p.session + n)
        for p, n in zip(parts, names, strict=False)
    ]

    def column(name: str) -> Ints:
        return np.concatenate([getattr(p, name) for p in parts])

    def moved(name: str, by: list[int], skip: int = 0) -> Ints:
        found = [getattr(p, name)[skip:] + b for p, b in zip(parts, by, strict=False)]
        return np.concatenate([np.zeros(skip, np.int64), *found])

    return replace(
        parts[0],
        ids=tuple(_named(i, k) for k, p in enumerate(parts) for i in p.ids),
        arrival_ns=column("arrival_ns"),
        prompt_tokens=column("prompt_tokens"),
        output_tokens=column("output_tokens"),
        output_known=np.concatenate([p.output_known for p in parts]),
        session=np.concatenate(sessions),
        think_ns=column("think_ns"),
        generation_prompt_tokens=column("generation_prompt_tokens"),
        priority=column("priority"),
        after_offsets=moved("after_offsets", waits, 1),
        after=moved("after", rows),
        run_offsets=moved("run_offsets", runs, 1),
        run_address=moved("run_address", shifts),
        run_length=column("run_length"),
        session_names=tuple(_named(s, k) for k, p in enumerate(parts) for s in p.session_names),
    )


def _named(name: str, part: int) -> str:
    return f"{name}#{part + 1}" if part else name
