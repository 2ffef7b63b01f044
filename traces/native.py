"""Our own format: radix-segment JSONL, text-free and exact to the token.

Version 1 is a header ``{"format": "prefixlab-trace", "version": 1, "segments": [lengths]}`` and a
request per line whose ``prompt`` and ``output`` are lists of segment ids (indices into
``segments``); ``output_tokens`` stands instead where the content of an output is unknown. Times
are integer nanoseconds. ``radix-segments-v0`` (seconds, prefix-chained segments, no outputs) is
read as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from traces.chain import Chain
from traces.columns import Columns
from traces.content import canonical, segments
from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import (
    MAX_NS,
    MAX_TOKENS,
    integer,
    integers,
    known_keys,
    nanoseconds,
    parse_object,
    string,
)
from traces.files import lines, write_lines
from traces.infer import infer_appends as inferred
from traces.trace import UNKNOWN, Trace

FORMAT, VERSION, V0 = "prefixlab-trace", 1, "radix-segments-v0"
HEADER_KEYS = ("format", "version", "segments", "notes")
KEYS = (
    "id",
    "arrival_ns",
    "session",
    "after",
    "think_ns",
    "prompt",
    "output",
    "output_tokens",
    "generation_prompt_tokens",
    "priority",
)
V0_KEYS = ("t", "s", "in", "out", "seg")
OWN_NOTES = ("format", "version", "skipped")


def read_native(
    path: str,
    *,
    infer_appends: Literal["off", "on"] = "off",
    sort: bool = False,
    skip_bad: bool = False,
) -> Trace:
    """Read a version 1 or ``radix-segments-v0`` file. ``infer_appends`` is that of Mooncake files,
    to the token; it changes nothing where the file tells the content of an output.

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead,
    but a bad header is always refused.
    """
    bad = BadLines(path, skip_bad)
    rows = lines(path, bad)
    number, text = next(rows, (0, ""))
    try:
        reader, take, notes = _begin(parse_object(text), sort)
    except BadRecord as e:
        raise TraceError(path, number, f"header: {e}") from None
    for number, text in rows:
        try:
            take(parse_object(text))
        except BadRecord as e:
            bad.report(number, str(e))
    if not reader.columns.ids and not bad.found:
        raise TraceError(path, number, "no request after the header, allowed: at least one")
    trace = reader.columns.build(**notes, skipped=tuple(bad.found))
    told = bool((trace.output_known & (trace.output_tokens > 0)).any())
    return inferred(trace, 1) if infer_appends == "on" and not told else trace


@dataclass
class _Reader:
    length: list[int]
    columns: Columns
    address: list[int] = field(init=False)
    chain: Chain = field(default_factory=Chain)
    last: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.address = [0, *accumulate(self.length)]

    def take(self, record: dict[str, Any]) -> None:
        """Append a version 1 request; nothing changes if it is bad."""
        known_keys(record, KEYS)
        id = string(record, "id")
        if id is None:
            raise BadRecord("id is missing, allowed: a string")
        prompt, prompt_tokens = self._content(record, "prompt")
        if not prompt_tokens:
            raise BadRecord("prompt is empty, allowed: at least one segment")
        output, output_tokens = self._output(record)
        self.columns.add(
            id,
            prompt_tokens,
            output_tokens,
            prompt,
            output,
            arrival=integer(record, "arrival_ns", UNKNOWN, MAX_NS, UNKNOWN),
            session=string(record, "session"),
            after=self._after(record),
            think=integer(record, "think_ns", 0, MAX_NS, 0),
            generation=_generation(record, prompt_tokens),
            priority=integer(record, "priority", -MAX_TOKENS, MAX_TOKENS, 0),
        )

    def _content(self, record: dict[str, Any], name: str) -> tuple[list[tuple[int, int]], int]:
        ids = integers(record, name, len(self.length) - 1)
        runs = [(self.address[i], self.length[i]) for i in ids]
        total = sum(n for _, n in runs)
        if total > MAX_TOKENS:
            raise BadRecord(f"{name} has {total} tokens, allowed: up to {MAX_TOKENS}")
        return runs, total

    def _output(self, record: dict[str, Any]) -> tuple[list[tuple[int, int]] | None, int]:
        if "output" not in record:
            return None, integer(record, "output_tokens")
        runs, total = self._content(record, "output")
        if integer(record, "output_tokens", default=total) != total:
            raise BadRecord(
                f"output_tokens is {record['output_tokens']} but output has {total} tokens,"
                " allowed: one of the two"
            )
        return runs, total

    def _after(self, record: dict[str, Any]) -> list[int]:
        names = record.get("after", [])
        if type(names) is not list or not all(type(n) is str for n in names):
            raise BadRecord(f"after is {json.dumps(names)[:40]}, allowed: a list of request ids")
        for name in names:
            if name not in self.columns.index:
                raise BadRecord(f"waits for {name!r}, allowed: ids of requests above")
        return [self.columns.index[name] for name in names]

    def take_v0(self, record: dict[str, Any]) -> None:
        """Append a version 0 request: one without a time waits for its session's last turn."""
        known_keys(record, V0_KEYS)
        prompt = integer(record, "in", 1)
        ids = integers(record, "seg", len(self.length) - 1)
        runs = [(self.address[i], self.length[i]) for i in ids]
        covered = sum(n for _, n in runs)
        if covered > prompt:
            raise BadRecord(f"in is {prompt} but seg has {covered} tokens, allowed: up to in")
        output, session = integer(record, "out"), string(record, "s")
        arrival = nanoseconds(record, "t", 1_000_000_000)
        id = str(len(self.columns.ids))
        self.columns.check(id, UNKNOWN if arrival is None else arrival)
        self.chain.check(ids)
        before = self.last.get(session) if session is not None and arrival is None else None
        row = self.columns.add(
            id,
            prompt,
            output,
            runs,
            arrival=UNKNOWN if arrival is None else arrival,
            session=session,
            after=() if before is None else (before,),
        )
        self.chain.add(ids)
        if session is not None:
            self.last[session] = row


def _generation(record: dict[str, Any], prompt_tokens: int) -> int:
    value = integer(record, "generation_prompt_tokens", 0, MAX_TOKENS, MAX_TOKENS)
    if "generation_prompt_tokens" not in record:
        return UNKNOWN
    if value > prompt_tokens:
        raise BadRecord(
            f"generation_prompt_tokens is {value}, allowed: up to the prompt's {prompt_tokens}"
        )
    return value


def _begin(
    header: dict[str, Any], sort: bool
) -> tuple[_Reader, Callable[[dict[str, Any]], None], dict[str, Any]]:
    """Reader, what it does with a record, and the notes of the trace."""
    name = header.get("format")
    if name not in (FORMAT, V0):
        raise BadRecord(f"format is {name!r}, allowed: {FORMAT!r} or {V0!r}")
    lengths = integers(header, "segments", MAX_TOKENS)
    if 0 in lengths:
        raise BadRecord(f"segment {lengths.index(0)} has 0 tokens, allowed: 1 to {MAX_TOKENS}")
    reader = _Reader(lengths, Columns(sort))
    if name == V0:
        notes = {k: v for k, v in header.items() if k not in ("segments", *OWN_NOTES)}
        return reader, reader.take_v0, {**notes, "format": V0}
    known_keys(header, HEADER_KEYS)
    integer(header, "version", VERSION, VERSION)
    notes = header.get("notes", {})
    if type(notes) is not dict:
        raise BadRecord(f"notes is {notes!r}, allowed: an object")
    notes = {k: v for k, v in notes.items() if k not in OWN_NOTES}
    return reader, reader.take, {**notes, "format": "native", "version": VERSION}


def write_native(trace: Trace, path: str) -> None:
    """Write ``trace``, exact to the token. Notes that JSON can hold go along.

    Raises ``TraceError`` where a request waits for one that stands below it.
    """
    for i in range(len(trace)):
        for j in trace.after_of(i):
            if j >= i:
                raise TraceError(
                    path, 0, f"request {trace.ids[i]!r} waits for {trace.ids[j]!r} below it,"
                    " allowed: requests above"
                )  # fmt: skip
    write_lines(path, _texts(trace))


def _texts(trace: Trace) -> Iterator[str]:
    cut = segments(canonical(trace))  # tokens that always go together are one segment
    header = {"format": FORMAT, "version": VERSION, "segments": cut.lengths.tolist()}
    yield json.dumps({**header, "notes": _notes(trace)}, separators=(",", ":"))
    for i, r in enumerate(trace):
        record: dict[str, Any] = {"id": r.id}
        if r.arrival_ns is not None:
            record["arrival_ns"] = r.arrival_ns
        if r.session is not None:
            record["session"] = r.session
        if r.after:
            record["after"] = list(r.after)
        if r.think_ns:
            record["think_ns"] = r.think_ns
        record["prompt"] = cut.prompt(i)
        if trace.output_known[i]:
            record["output"] = cut.output(i)
        else:
            record["output_tokens"] = r.output_tokens
        if r.generation_prompt_tokens is not None:
            record["generation_prompt_tokens"] = r.generation_prompt_tokens
        if r.priority:
            record["priority"] = r.priority
        yield json.dumps(record, separators=(",", ":"))


def _notes(trace: Trace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in trace.notes.items():
        try:
            out[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return {k: v for k, v in out.items() if k not in OWN_NOTES}
