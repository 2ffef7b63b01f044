"""Agent conversations in the run-length form of the WEKA (kv-cache-tester) traces, read only.

A header per conversation, then its requests with block ids as runs ``[first, count]``, local to
the conversation, prefix-chained; the last partial block has no id. No conversation says when it
began, so no request has an arrival: the first of a conversation starts it, all others wait.

Who waits for whom: a turn of the main agent or of a sub-agent waits for the turn before it, and
a sub-agent's first turn for the latest main turn. A main turn also waits for the sub-agents that
began since the main turn before it and were over when it began. Think time is ``think_time``
where only the own turn before is waited for, and else the time from the last end among those
waited for (ends are ``t + api_time``), 0 where that lies later.
Source: callanjfox/kv-cache-tester.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from traces.columns import Columns
from traces.errors import BadLines, BadRecord
from traces.fields import integer, nanoseconds, parse_object, string
from traces.files import lines
from traces.trace import Trace

SECOND = 1_000_000_000
MAX_BLOCK = 2**40


def read_weka(path: str, *, skip_bad: bool = False) -> Trace:
    """Read ``path`` (``.rle.jsonl``, any compression).

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    reader = _Reader()
    for number, text in lines(path, bad):
        try:
            reader.take(parse_object(text))
        except BadRecord as e:
            bad.report(number, str(e))
    return reader.columns.build(
        format="weka",
        block_tokens=reader.block_tokens,
        arrivals="unknown",
        skipped=tuple(bad.found),
    )


@dataclass(frozen=True)
class _Turn:
    row: int
    start: int
    end: int


@dataclass
class _Runs:
    """The chains of one conversation: disjoint stretches of ids and the id before each."""

    heads: list[int] = field(default_factory=list)
    reach: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    def check(self, runs: list[tuple[int, int]]) -> None:
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

    def _check_repeats(self, runs: list[tuple[int, int]]) -> None:
        ordered = sorted(runs)
        for (a, n), (b, _) in pairwise(ordered):
            if b < a + n:
                raise BadRecord(f"id {b} stands twice in one prompt, allowed: prefix-chained ids")

    def _refuse(self, i: int, now: int, then: int) -> None:
        raise BadRecord(
            f"id {i} follows {now} here but {then} earlier, allowed: prefix-chained ids"
        )

    def add(self, runs: list[tuple[int, int]]) -> None:
        previous = 0
        for first, count in runs:
            if first not in self.reach:
                insort(self.heads, first)
                self.before[first] = previous
            previous = first + count - 1
            self.reach[first] = max(self.reach.get(first, 0), previous)


@dataclass
class _Reader:
    columns: Columns = field(default_factory=Columns)
    block_tokens: int = 0
    name: str | None = None
    names: set[str] = field(default_factory=set)
    base: int = 0
    top: int = 0
    runs: _Runs = field(default_factory=_Runs)
    turns: dict[str, list[_Turn]] = field(default_factory=dict)
    latest: int = 0

    def take(self, record: dict[str, Any]) -> None:
        """Begin a conversation, or append a request to it."""
        if "trace" in record:
            self._begin(record)
        elif self.name is None:
            raise BadRecord("no conversation to belong to, allowed: after a header with trace")
        else:
            self._request(record)

    def _begin(self, record: dict[str, Any]) -> None:
        self.name = None  # what follows a bad header belongs to nothing
        name = string(record, "trace")
        size = integer(record, "block_size", 1)
        if name is None or name in self.names:
            raise BadRecord(f"conversation {name!r} stands twice, allowed: names that differ")
        if self.block_tokens not in (0, size):
            raise BadRecord(f"block_size is {size}, allowed: {self.block_tokens} as above")
        self.names.add(name)
        self.name, self.block_tokens = name, size
        self.base += self.top * size
        self.top, self.latest = 1, 0
        self.runs, self.turns = _Runs(), {}

    def _request(self, record: dict[str, Any]) -> None:
        agent = string(record, "s", "") or ""
        prompt, output = integer(record, "in", 1), integer(record, "out")
        start = nanoseconds(record, "t", SECOND)
        took = nanoseconds(record, "api_time", SECOND) or 0
        think = nanoseconds(record, "think_time", SECOND)
        if start is None:
            raise BadRecord("t is missing, allowed: seconds from the conversation's start")
        if start < self.latest:
            raise BadRecord(
                f"t goes back from {self.latest / SECOND} to {start / SECOND} s, allowed: times"
                " that do not fall within a conversation"
            )
        blocks = _blocks(record, prompt // self.block_tokens)
        self.runs.check(blocks)
        self.runs.add(blocks)
        waits = self._waits(agent, start)
        after = tuple(turn.row for turn in waits)
        if len(waits) != 1 or think is None or agent not in self.turns:
            think = max(0, start - max((turn.end for turn in waits), default=start))
        row = self.columns.add(
            f"{self.name}/{len(self.columns.ids)}",
            prompt,
            output,
            [(self.base + i * self.block_tokens, n * self.block_tokens) for i, n in blocks],
            session=f"{self.name}/{agent}" if agent else self.name,
            after=after,
            think=think,
        )
        self.top = max([self.top, *(i + n for i, n in blocks)])
        self.latest = start
        self.turns.setdefault(agent, []).append(_Turn(row, start, start + took))

    def _waits(self, agent: str, start: int) -> list[_Turn]:
        own, main = self.turns.get(agent, []), self.turns.get("", [])
        waits = [*(own or main)[-1:]]
        if agent == "" and own:
            waits += [
                turns[-1]
                for name, turns in self.turns.items()
                if name and turns[0].start >= own[-1].start and turns[-1].end <= start
            ]
        return waits


def _blocks(record: dict[str, Any], want: int) -> list[tuple[int, int]]:
    value = record.get("h")
    if type(value) is not list:
        raise BadRecord(f"h is {str(value)[:40]}, allowed: a list of [first, count]")
    runs: list[tuple[int, int]] = []
    for pair in value:
        ok = type(pair) is list and len(pair) == 2 and set(map(type, pair)) == {int}
        if not ok or not 1 <= pair[0] <= MAX_BLOCK or not 1 <= pair[1] <= MAX_BLOCK:
            raise BadRecord(f"h holds {str(pair)[:40]}, allowed: [first, count], both at least 1")
        if runs and runs[-1][0] + runs[-1][1] == pair[0]:
            pair = [runs[-1][0], runs.pop()[1] + pair[1]]
        runs.append((pair[0], pair[1]))
    total = sum(n for _, n in runs)
    if total != want:
        raise BadRecord(f"h has {total} blocks, allowed: {want}, the whole blocks of in")
    return runs
