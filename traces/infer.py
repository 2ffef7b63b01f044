"""Follow-ups of hashed traces: what a prompt took over from an earlier prompt and its output.

Hashed formats say nothing of outputs and of what lies inside a last, partial block. The rule:
let ``m >= 1`` be the full blocks that the prompt of Q shares with earlier prompts, and Q's prompt
be longer than what it shares. Of the earlier requests whose prompt has exactly these ``m`` full
blocks, the parent P is the one with the longest prompt and output together, the later one of
equals. If Q's prompt is long enough for both, it begins with P's prompt and P's output; if only
for P's prompt, it begins with that; otherwise nothing is inferred. Whatever shares these blocks
of Q later on shares their content as well.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace

import numpy as np

from traces.columns import merge_runs
from traces.identity import Prefixes, identify
from traces.shared import shared_lengths
from traces.trace import Ints, Trace

Runs = list[tuple[int, int]]


@dataclass
class _Renaming:
    """Disjoint stretches of addresses ``start <= a < end`` and the address each now begins at."""

    stretches: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, old: Runs, new: Runs) -> None:
        """Name the tokens of ``old`` like those of ``new``, which are as many."""
        pairs = _zipped(old, new)
        for a, b, n in pairs:
            insort(self.stretches, (a, a + n, b))

    def apply(self, runs: Runs) -> Runs:
        out: Runs = []
        for address, length in runs:
            end = address + length
            k = max(bisect_right(self.stretches, (address, end, -1)) - 1, 0)
            while address < end:
                while k < len(self.stretches) and self.stretches[k][1] <= address:
                    k += 1
                start, stop, to = self.stretches[k] if k < len(self.stretches) else (end, end, 0)
                inside = start <= address
                n = min(end, stop if inside else start) - address
                out.append((to + address - start if inside else address, n))
                address += n
        return out


def infer_appends(trace: Trace, block_tokens: int) -> Trace:
    """``trace`` with follow-ups that share the prompt and output they were appended to.

    Every output becomes content (``output_known``), used or not.
    """
    prefixes = identify(trace)
    matched = shared_lengths(trace, prefixes)
    names, found = _Renaming(), 0
    runs: list[Runs] = []
    longest: dict[int, int] = {}
    totals = (trace.prompt_tokens + trace.output_tokens).tolist()
    for q, prompt in enumerate(trace.prompt_tokens.tolist()):
        own = _runs(trace, q)
        blocks = int(matched[q]) // block_tokens * block_tokens
        p = longest.get(_id(prefixes, q, blocks)) if blocks and matched[q] < prompt else None
        if p is not None:
            end = totals[p] if totals[p] <= prompt else int(trace.prompt_tokens[p])
            if blocks < end <= prompt:
                names.add(_cut(own, blocks, end), _cut(runs[p], blocks, end))
                found += 1
        runs.append(names.apply(own))
        full = prompt // block_tokens * block_tokens
        if full:
            _keep_longer(longest, _id(prefixes, q, full), q, totals)
    return _with_runs(trace, runs, found)


def _keep_longer(longest: dict[int, int], key: int, q: int, totals: list[int]) -> None:
    if key not in longest or totals[longest[key]] <= totals[q]:
        longest[key] = q


def _id(prefixes: Prefixes, request: int, length: int) -> int:
    return int(prefixes.ids(request, np.array([length], np.int64))[0])


def _runs(trace: Trace, request: int) -> Runs:
    rows = slice(int(trace.run_offsets[request]), int(trace.run_offsets[request + 1]))
    return list(zip(trace.run_address[rows].tolist(), trace.run_length[rows].tolist(), strict=True))


def _cut(runs: Runs, start: int, end: int) -> Runs:
    """Tokens ``start`` to ``end`` of a sequence."""
    out: Runs = []
    at = 0
    for address, length in runs:
        a, b = max(start - at, 0), min(end - at, length)
        if a < b:
            out.append((address + a, b - a))
        at += length
    return out


def _zipped(old: Runs, new: Runs) -> list[tuple[int, int, int]]:
    """Old address, new address and length of each stretch that goes on in both."""
    out: list[tuple[int, int, int]] = []
    left, right = list(reversed(old)), list(reversed(new))
    while left and right:
        (a, n), (b, m) = left.pop(), right.pop()
        k = min(n, m)
        out.append((a, b, k))
        if n > k:
            left.append((a + k, n - k))
        if m > k:
            right.append((b + k, m - k))
    return out


def _with_runs(trace: Trace, runs: list[Runs], found: int) -> Trace:
    flat = np.array([run for rs in runs for run in rs], np.int64).reshape(-1, 2)
    offsets: Ints = np.r_[0, np.cumsum([len(rs) for rs in runs])].astype(np.int64)
    offsets, address, length = merge_runs(offsets, flat[:, 0], flat[:, 1])
    return replace(
        trace,
        run_offsets=offsets,
        run_address=address,
        run_length=length,
        output_known=np.ones(len(trace), bool),
        notes={**trace.notes, "infer_appends": "on", "inferred_appends": found},
    )
