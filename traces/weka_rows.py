"""One request of a WEKA conversation, whichever of the two forms it was written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
