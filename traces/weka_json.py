"""The original WEKA files: one JSON document per conversation, block ids written out.

A sub-agent stands among the requests of its parent, with requests of its own whose times count
from its start. Here they become one list in order of time, each with the name of its agent.
Source: callanjfox/kv-cache-tester.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import integer_array, nanoseconds, string
from traces.files import lines
from traces.weka_rows import MAX_BLOCK, SECOND, Row, row

ENDINGS = (".json", ".json.gz", ".json.zst")
SCOPES = ("local", "global")


def files(path: str) -> list[str]:
    """The conversations of a folder in order of name, or the one that ``path`` is."""
    place = Path(path)
    if not place.is_dir():
        return [path]
    found = sorted(str(p) for p in place.iterdir() if p.name.endswith(ENDINGS))
    if not found:
        raise TraceError(
            path, 0, "cannot be read: a folder without conversations, allowed: one with"
            f" {', '.join(ENDINGS)} files"
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Document:
    """One conversation: its text, the number of each line of it, and its content."""

    text: str
    numbers: list[int]
    content: dict[str, Any]

    def line_of(self, request: int) -> int:
        """The line on which one of the requests begins."""
        decoder = json.JSONDecoder()
        at = self.text.index("[", self.text.index('"requests"')) + 1
        for _ in range(request):
            at = decoder.raw_decode(self.text, _skip(self.text, at))[1]
        return self.numbers[self.text.count("\n", 0, _skip(self.text, at))]


def _skip(text: str, at: int) -> int:
    while text[at] in ", \t\r\n":
        at += 1
    return at


def document(path: str, bad: BadLines) -> Document | None:
    """One conversation; None where ``bad`` took what is wrong with it."""
    numbered = list(lines(path, bad))
    text = "\n".join(t for _, t in numbered)
    numbers = [number for number, _ in numbered]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        cut = isinstance(e, json.JSONDecodeError)
        what, at = (e.msg, numbers[e.lineno - 1]) if isinstance(e, json.JSONDecodeError) else (e, 1)
        bad.report(at, f"not JSON ({what}{'; a cut file?' if cut else ''}), allowed: one object")
        return None
    if not isinstance(value, dict) or type(value.get("requests")) is not list:
        bad.report(numbers[0], "no list of requests, allowed: one conversation with requests")
        return None
    return Document(text, numbers, value)


def header(content: dict[str, Any]) -> dict[str, Any]:
    """What the header of the run-length form says of this conversation."""
    scope = content.get("hash_id_scope", "local")
    if scope not in SCOPES:
        raise BadRecord(f"hash_id_scope is {scope!r}, allowed: {', '.join(SCOPES)}")
    return {"trace": content.get("id"), "block_size": content.get("block_size"), "scope": scope}


def rows(conversation: Document, block_tokens: int, bad: BadLines) -> list[tuple[int, Row]]:
    """Place and content of all requests of a conversation, in order of time."""
    out: list[tuple[int, Row]] = []
    for k, entry in enumerate(conversation.content["requests"]):
        try:
            out += [(k, r) for r in _flat(entry, "", 0, block_tokens, f"requests[{k}]")]
        except BadRecord as e:
            bad.report(conversation.line_of(k), str(e))
    return sorted(out, key=lambda pair: pair[1].start)


def _flat(entry: Any, agent: str, offset: int, block_tokens: int, where: str) -> Iterator[Row]:
    if type(entry) is not dict:
        raise BadRecord(f"{where}: {str(entry)[:40]} is no request, allowed: an object")
    if entry.get("type") != "subagent":
        try:
            yield row(entry, agent, offset, block_tokens, "hash_ids", _blocks)
        except BadRecord as e:
            raise BadRecord(f"{where}: {e}") from None
        return
    name, start = string(entry, "agent_id"), nanoseconds(entry, "t", SECOND)
    inner = entry.get("requests")
    if name is None or start is None or type(inner) is not list:
        raise BadRecord(f"{where}: a sub-agent without agent_id, t or requests, allowed: all three")
    name = f"{agent}/{name}" if agent else name
    for k, part in enumerate(inner):
        yield from _flat(part, name, offset + start, block_tokens, f"{where}.requests[{k}]")


def _blocks(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Stretches ``(first, count)`` of ids that go up by one."""
    ids = integer_array(record, "hash_ids", MAX_BLOCK)
    if not len(ids):
        return []
    if int(ids.min()) < 1:
        raise BadRecord(f"hash_ids holds {int(ids.min())}, allowed: integers from 1 on")
    starts = np.r_[0, np.flatnonzero(np.diff(ids) != 1) + 1]
    counts = np.diff(np.r_[starts, len(ids)])
    return list(zip(ids[starts].tolist(), counts.tolist(), strict=True))
