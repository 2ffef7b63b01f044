"""Qwen-Bailian JSONL: chats as hashes of 16-token blocks, with links to the chat before.

``timestamp`` is in seconds. A row is a whole prompt; it waits for ``parent_chat_id`` (-1: none)
and is sent at its ``timestamp`` or when the parent has finished, whichever is later. Chats that
hang together are one session, named by the first of them. A parent outside the file counts as
none. The publisher does not say that hashes are chained, so it is checked: ``hashes`` content
takes them as names of the blocks alone.
Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from traces.blocks import Blocks
from traces.columns import Columns
from traces.errors import BadLines, BadRecord
from traces.fields import integer, integers, nanoseconds, parse_object
from traces.files import lines
from traces.infer import infer_appends as inferred
from traces.trace import Trace

SECOND = 1_000_000_000
MAX_ID = 2**63 - 1
MAX_HASH = 2**64 - 1


def read_bailian(
    path: str,
    *,
    block_tokens: int = 16,
    tail: Literal["ceil", "floor"] = "ceil",
    hashes: Literal["chained", "content"] = "chained",
    infer_appends: Literal["off", "on"] = "off",
    sort: bool = False,
    skip_bad: bool = False,
) -> Trace:
    """Read ``path``. ``tail`` and ``infer_appends`` are those of Mooncake files.

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    reader = _Reader(Blocks(block_tokens, tail, hashes == "chained"), Columns(sort))
    for number, text in lines(path, bad):
        try:
            reader.take(parse_object(text))
        except BadRecord as e:
            message = str(e)
            if "prefix-chained" in message:
                message += " (or the option hashes content)"
            bad.report(number, message)
    trace = reader.columns.build(
        format="bailian",
        block_tokens=block_tokens,
        tail=tail,
        hashes=hashes,
        infer_appends="off",
        parents_outside=reader.outside,
        skipped=tuple(bad.found),
    )
    return inferred(trace, block_tokens) if infer_appends == "on" else trace


@dataclass
class _Reader:
    """``session`` holds the first chat of every chat's session; ``outside`` counts parents that
    the file does not have."""

    blocks: Blocks
    columns: Columns
    session: dict[int, str] = field(default_factory=dict)
    outside: int = 0

    def take(self, record: dict[str, Any]) -> None:
        """Append one chat; nothing changes if it is bad."""
        chat = integer(record, "chat_id", 0, MAX_ID)
        parent = integer(record, "parent_chat_id", -1, MAX_ID, -1)
        prompt = integer(record, "input_length", 1)
        output = integer(record, "output_length")
        arrival = nanoseconds(record, "timestamp", SECOND)
        if arrival is None:
            raise BadRecord("timestamp is missing, allowed: seconds from the start")
        if parent == chat:
            raise BadRecord(f"parent_chat_id is {chat} itself, allowed: a chat above, or -1")
        self.columns.check(str(chat), arrival)
        ids = integers(record, "hash_ids", MAX_HASH)
        self.blocks.check(ids, prompt)
        known = parent in self.session
        self.outside += parent != -1 and not known
        self.session[chat] = self.session[parent] if known else str(chat)
        self.columns.add(
            str(chat),
            prompt,
            output,
            self.blocks.runs(ids, prompt),
            arrival=arrival,
            session=self.session[chat],
            after=(self.columns.index[str(parent)],) if known else (),
        )
