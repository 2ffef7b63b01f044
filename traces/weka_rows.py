"""Requests of WEKA conversations and their ids, whichever of the two forms they were written in."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from traces.errors import BadRecord
from traces.fields import MAX_NS, integer, nanoseconds

SECOND = 1_000_000_000
MAX_BLOCK = 2**40
Stretches = list[tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """Times in nanoseconds, ``start`` from the conversation's; ``blocks`` as first id and count.
    ``agent`` is empty for the main agent."""

    agent: str
    prompt: int
    output: int
    start: int
    took: int
    think: int | None
    blocks: Stretches


def row(
    record: dict[str, Any],
    agent: str,
    offset: int,
    block_tokens: int,
    key: str,
    blocks: Callable[[dict[str, Any]], Stretches],
) -> Row:
    """``record``, whose times count from ``offset``; ``blocks`` reads the ids under ``key``."""
    prompt, output = integer(record, "in", 1), integer(record, "out")
    start = nanoseconds(record, "t", SECOND)
    if start is None:
        raise BadRecord("t is missing, allowed: seconds from the conversation's start")
    if offset + start > MAX_NS:
        raise BadRecord(f"t is {record['t']}, allowed: up to {MAX_NS // SECOND} s in all")
    took = nanoseconds(record, "api_time", SECOND) or 0
    think = nanoseconds(record, "think_time", SECOND)
    found, want = blocks(record), prompt // block_tokens
    total = sum(n for _, n in found)
    if total != want:
        raise BadRecord(f"{key} has {total} blocks, allowed: {want}, the whole blocks of in")
    return Row(agent, prompt, output, offset + start, took, think, found)


@dataclass
class Chains:
    """The chains of one conversation: disjoint stretches of ids and the id before each."""

    heads: list[int] = field(default_factory=list)
    reach: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    def check(self, runs: Stretches) -> None:
        """Raise ``BadRecord`` if ``runs`` contradict what was added."""
        previous = 0
        for first, count in runs:
            k = bisect_right(self.heads, first)
            head = self.heads[k - 1] if k else None
            if head is not None and head < first <= self.reach[head]:
                self._refuse(first, previous, first - 1)
            if head == first and self.before[first] != previous:
                self._refuse(first, previous, self.before[first])
            if k < len(self.heads) and self.heads[k] < first + count:
                inner = self.heads[k]
                self._refuse(inner, inner - 1, self.before[inner])
            previous = first + count - 1
        self._check_repeats(runs)

    def _check_repeats(self, runs: Stretches) -> None:
        ordered = sorted(runs)
        for (a, n), (b, _) in pairwise(ordered):
            if b < a + n:
                raise BadRecord(f"id {b} stands twice in one prompt, allowed: prefix-chained ids")

    def _refuse(self, i: int, now: int, then: int) -> None:
        raise BadRecord(
            f"id {i} follows {now} here but {then} earlier, allowed: prefix-chained ids"
        )

    def add(self, runs: Stretches) -> None:
        """Take ``runs``, which ``check`` has passed."""
        previous = 0
        for first, count in runs:
            if first not in self.reach:
                insort(self.heads, first)
                self.before[first] = previous
            previous = first + count - 1
            self.reach[first] = max(self.reach.get(first, 0), previous)
