"""Agent conversations of the WEKA (kv-cache-tester) traces, read only.

Either the original JSON, one file per conversation (``traces.weka_json``), or the run-length
form: a header per conversation, then its requests with block ids as runs ``[first, count]``. Ids
are local to the conversation (unless the JSON says global) and prefix-chained; the last partial
block has no id. No conversation says when it began, so no request has an arrival: the first of a
conversation starts it, all others wait.

Who waits for whom: a turn of the main agent or of a sub-agent waits for the turn before it, and
a sub-agent's first turn for the latest main turn. A main turn also waits for the sub-agents that
began since the main turn before it and were over when it began. Think time is ``think_time``
where only the own turn before is waited for, and else the time from the last end among those
waited for (ends are ``t + api_time``), 0 where that lies later.
Source: callanjfox/kv-cache-tester.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from traces import weka_json
from traces.columns import Columns
from traces.errors import BadLines, BadRecord
from traces.fields import integer, parse_object, string
from traces.files import lines
from traces.infer import infer_appends as inferred
from traces.trace import Trace
from traces.weka_rows import MAX_BLOCK, SECOND, Chains, Row, Stretches, row

MAX_BLOCK_TOKENS = 2**20


def read_weka(
    path: str, *, infer_appends: Literal["off", "on"] = "off", skip_bad: bool = False
) -> Trace:
    """Read ``path``: run-length JSONL, one conversation's JSON, or a folder of such.
    ``infer_appends`` is that of Mooncake files.

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    reader, skipped = _Reader(), list[str]()
    for file in weka_json.files(path):
        bad = BadLines(file, skip_bad)
        if file == path and _is_run_length(path):
            _read_lines(reader, bad)
        else:
            _read_document(reader, bad)
        skipped += bad.found
    trace = reader.columns.build(
        format="weka",
        block_tokens=reader.block_tokens,
        tail="floor",
        infer_appends="off",
        arrivals="unknown",
        skipped=tuple(skipped),
    )
    return inferred(trace, reader.block_tokens) if infer_appends == "on" else trace


def _is_run_length(path: str) -> bool:
    """Whether the first line is a whole record of the run-length form, good or bad."""
    _, text = next(lines(path, BadLines(path, skip=True)))
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return not text.startswith("{") or '"trace"' in text
    return not (isinstance(record, dict) and "requests" in record)


def _read_lines(reader: _Reader, bad: BadLines) -> None:
    for number, text in lines(bad.path, bad):
        try:
            reader.take(parse_object(text))
        except BadRecord as e:
            bad.report(number, str(e))


def _read_document(reader: _Reader, bad: BadLines) -> None:
    found = weka_json.document(bad.path, bad)
    if found is None:
        return
    try:
        reader.begin(weka_json.header(found.content))
    except BadRecord as e:
        bad.report(found.numbers[0], str(e))
        return
    for k, one in weka_json.rows(found, reader.block_tokens, bad):
        try:
            reader.add(one)
        except BadRecord as e:
            bad.report(found.line_of(k), f"requests[{k}]: {e}")


@dataclass(frozen=True)
class _Turn:
    row: int
    start: int
    end: int


@dataclass
class _Reader:
    columns: Columns = field(default_factory=Columns)
    block_tokens: int = 0
    name: str | None = None
    names: set[str] = field(default_factory=set)
    scope: object = "local"
    base: int = 0
    top: int = 0
    runs: Chains = field(default_factory=Chains)
    turns: dict[str, list[_Turn]] = field(default_factory=dict)
    latest: int = 0

    def take(self, record: dict[str, Any]) -> None:
        """Begin a conversation, or append a request to it."""
        if "trace" in record:
            self.begin(record)
        elif self.name is None:
            raise BadRecord("no conversation to belong to, allowed: after a header with trace")
        else:
            agent = string(record, "s", "") or ""
            self.add(row(record, agent, 0, self.block_tokens, "h", _stretches))

    def begin(self, record: dict[str, Any]) -> None:
        """Begin the conversation of a header; ids of a global scope go on from the one before."""
        self.name = None  # what follows a bad header belongs to nothing
        name, scope = string(record, "trace"), record.get("scope", "local")
        size = integer(record, "block_size", 1, MAX_BLOCK_TOKENS)
        if name is None or name in self.names:
            raise BadRecord(f"conversation {name!r} stands twice, allowed: names that differ")
        if self.block_tokens not in (0, size):
            raise BadRecord(f"block_size is {size}, allowed: {self.block_tokens} as above")
        if self.names and scope != self.scope:
            raise BadRecord(f"hash_id_scope is {scope}, allowed: {self.scope} as above")
        self.names.add(name)
        self.name, self.block_tokens, self.scope = name, size, scope
        if scope == "local":
            self.base += self.top * size
            self.top, self.runs = 1, Chains()
        self.latest, self.turns = 0, {}

    def add(self, row: Row) -> None:
        """Append a request to the conversation."""
        if row.start < self.latest:
            raise BadRecord(
                f"t goes back from {self.latest / SECOND} to {row.start / SECOND} s, allowed: times"
                " that do not fall within a conversation"
            )
        self.runs.check(row.blocks)
        self.runs.add(row.blocks)
        waits = self._waits(row.agent, row.start)
        think = row.think
        if len(waits) != 1 or think is None or row.agent not in self.turns:
            think = max(0, row.start - max((turn.end for turn in waits), default=row.start))
        size = self.block_tokens
        index = self.columns.add(
            f"{self.name}/{len(self.columns.ids)}",
            row.prompt,
            row.output,
            [(self.base + i * size, n * size) for i, n in row.blocks],
            session=f"{self.name}/{row.agent}" if row.agent else self.name,
            after=tuple(turn.row for turn in waits),
            think=think,
        )
        self.top = max([self.top, *(i + n for i, n in row.blocks)])
        self.latest = row.start
        turn = _Turn(index, row.start, row.start + row.took)
        self.turns.setdefault(row.agent, []).append(turn)

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


def _stretches(record: dict[str, Any]) -> Stretches:
    value = record.get("h")
    if type(value) is not list:
        raise BadRecord(f"h is {str(value)[:40]}, allowed: a list of [first, count]")
    runs: Stretches = []
    for pair in value:
        ok = type(pair) is list and len(pair) == 2 and set(map(type, pair)) == {int}
        if not ok or not 1 <= pair[0] <= MAX_BLOCK or not 1 <= pair[1] <= MAX_BLOCK:
            raise BadRecord(f"h holds {str(pair)[:40]}, allowed: [first, count], both at least 1")
        if runs and runs[-1][0] + runs[-1][1] == pair[0]:
            pair = [runs[-1][0], runs.pop()[1] + pair[1]]
        runs.append((pair[0], pair[1]))
    return runs
