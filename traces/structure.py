"""The shape of sharing in a trace: its prefix tree, and how sessions go on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.identity import Prefixes
from traces.trace import UNKNOWN, Ints, Trace

ROOT = -1


@dataclass(frozen=True)
class Structure:
    """The radix tree of all prompts. ``roots`` are different first tokens, ``branch_points``
    prefixes that go on in two ways or more (``max_fan_out`` at most, 0 without any), ``leaves``
    different prompts that no other prompt goes on from. ``full_prompt_hits`` is the share of
    requests whose whole prompt stood in an earlier one. Hit tokens at the 50th and 90th
    percentile are what prompts share with any earlier one."""

    roots: int
    branch_points: int
    max_fan_out: int
    leaves: int
    full_prompt_hits: float
    hit_tokens_percentiles: tuple[int, int]
    turns: Turns | None


@dataclass(frozen=True)
class Turns:
    """Shares of the requests that have a session: the first of it; the prompt before and more;
    the same prompt; nothing in common; everything else (the end was changed or cut)."""

    first: float
    append: float
    repeat: float
    disjoint: float
    edit: float


def whole_blocks(trace: Trace) -> Ints:
    """Tokens of each prompt in whole blocks, for formats that hash blocks; otherwise all."""
    block = trace.notes.get("block_tokens")
    if not isinstance(block, int):
        return trace.prompt_tokens
    return np.asarray(trace.prompt_tokens // block * block, np.int64)


def known_lengths(trace: Trace) -> Ints:
    """Tokens of each prompt that another can be seen to share: all, but where a last, partial
    block has no id."""
    return whole_blocks(trace) if trace.notes.get("tail") == "floor" else trace.prompt_tokens


def structure(trace: Trace, prefixes: Prefixes, shared: Ints, known: Ints) -> Structure:
    """The shape of ``trace``, of which the first ``known`` tokens of each prompt can be shared.

    ``shared`` is what each prompt shares with any earlier one.
    """
    children, leaves = _tree(prefixes, known)
    roots = children.pop(ROOT, 0)
    fans = np.array([n for n in children.values() if n > 1], np.int64)
    middle = np.percentile(shared, (50, 90)) if len(shared) else (0, 0)
    return Structure(
        roots=roots,
        branch_points=len(fans),
        max_fan_out=int(fans.max(initial=0)),
        leaves=leaves,
        full_prompt_hits=float((shared == trace.prompt_tokens).mean()) if len(trace) else 0.0,
        hit_tokens_percentiles=(round(middle[0]), round(middle[1])),
        turns=_turns(trace, prefixes, known),
    )


def _tree(prefixes: Prefixes, lengths: Ints) -> tuple[dict[int, int], int]:
    """Children of every prefix that has any that are not the next id; and the leaves.

    Ids go on by one along a chain, so that only the first id of a chain has a parent that
    must be noted, and how far a chain reaches says whether an id on it goes on.
    """
    parent: dict[int, int] = {}
    reach: dict[int, int] = {}
    ends: dict[int, int] = {}
    for r, length in enumerate(lengths.tolist()):
        last, head = ROOT, ROOT
        for start, end, delta in prefixes.extents(r):
            if start >= length:
                break
            head, before = start + 1 + delta, last
            last = min(end, length) + delta
            parent.setdefault(head, before)
            reach[head] = max(reach.get(head, 0), last)
        if last != ROOT:
            ends[last] = head
    fans: dict[int, int] = {}
    for before in parent.values():
        fans[before] = fans.get(before, 0) + 1
    owner = _owners(sorted(parent), [k for k in fans if k != ROOT])
    for x, head in owner.items():
        fans[x] += reach[head] > x
    leaves = sum(reach[head] == x and x not in fans for x, head in ends.items())
    return fans, leaves


def _owners(heads: list[int], ids: list[int]) -> dict[int, int]:
    """The chain that each id lies on."""
    if not ids:
        return {}
    table, wanted = np.array(heads, np.int64), np.array(ids, np.int64)
    found = table[np.searchsorted(table, wanted, side="right") - 1]
    return dict(zip(ids, found.tolist(), strict=True))


def _turns(trace: Trace, prefixes: Prefixes, known: Ints) -> Turns | None:
    """How each request of a session relates to the one before it."""
    last: dict[int, int] = {}
    counts = dict.fromkeys(("first", "append", "repeat", "disjoint", "edit"), 0)
    lengths = known.tolist()
    for i, session in enumerate(trace.session.tolist()):
        if session != UNKNOWN:
            counts[_kind(prefixes, lengths, last.get(session), i)] += 1
            last[session] = i
    total = sum(counts.values())
    return Turns(**{k: n / total for k, n in counts.items()}) if total else None


def _kind(prefixes: Prefixes, lengths: list[int], before: int | None, i: int) -> str:
    if before is None:
        return "first"
    shared = min(prefixes.common(i, before), lengths[i], lengths[before])
    if shared == lengths[before]:
        return "repeat" if lengths[i] == shared else "append"
    return "edit" if shared else "disjoint"
