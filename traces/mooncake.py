"""Mooncake JSONL: prompts as prefix-chained hashes of whole blocks, times in milliseconds.

What a last, partial block holds is known only as a whole, so its id is shared by equal prompts
alone. Outputs are not hashed; see ``traces.infer`` for what can be said of them.
Source: kvcache-ai/Mooncake, FAST25-release; ``session_id`` and ``delay`` as AIPerf has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from traces.blocks import Blocks
from traces.columns import Columns
from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import integer, integers, nanoseconds, parse_object, string
from traces.files import lines, write_lines
from traces.identity import identify
from traces.infer import infer_appends as inferred
from traces.trace import UNKNOWN, Ints, Trace

MS = 1_000_000
Bools = NDArray[np.bool_]
MAX_HASH = 2**64 - 1
BLOCK_TOKENS, MAX_BLOCK_TOKENS = 512, 2**20


def read_mooncake(
    path: str,
    *,
    block_tokens: int | None = None,
    tail: Literal["ceil", "floor"] = "ceil",
    infer_appends: Literal["off", "on"] = "off",
    sort: bool = False,
    skip_bad: bool = False,
) -> Trace:
    """Read ``path``. ``block_tokens`` None is the ``block_size`` of the first record, or 512.
    With ``tail`` floor the last partial block has no id and is not shared.

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    reader = _Reader(Blocks(block_tokens or 0, tail), Columns(sort))
    for number, text in lines(path, bad):
        try:
            reader.take(parse_object(text))
        except BadRecord as e:
            bad.report(number, str(e))
    size = reader.blocks.block_tokens or BLOCK_TOKENS
    trace = reader.columns.build(
        format="mooncake",
        block_tokens=size,
        tail=tail,
        infer_appends="off",
        skipped=tuple(bad.found),
    )
    return inferred(trace, size) if infer_appends == "on" else trace


@dataclass
class _Reader:
    """``last`` holds the index of a session's latest turn."""

    blocks: Blocks
    columns: Columns
    last: dict[str, int] = field(default_factory=dict)

    def take(self, record: dict[str, Any]) -> None:
        """Append one record; nothing changes if it is bad."""
        _refuse_graph(record)
        prompt = integer(record, ("input_length", "input_tokens"), 1)
        output = integer(record, ("output_length", "output_tokens"))
        arrival = nanoseconds(record, ("timestamp", "created_time"), MS)
        think = nanoseconds(record, ("delay", "delay_ms"), MS)
        session = string(record, "session_id")
        before = self.last.get(session) if session is not None else None
        self._check_times(arrival, think, session, before)
        id = string(record, "request_id") or str(len(self.columns.ids))
        self.columns.check(id, UNKNOWN if arrival is None else arrival)
        ids = integers(record, "hash_ids", MAX_HASH)
        self._check_block_size(record)
        self.blocks.check(ids, prompt)
        row = self.columns.add(
            id,
            prompt,
            output,
            self.blocks.runs(ids, prompt),
            arrival=UNKNOWN if arrival is None else arrival,
            session=session,
            after=() if before is None else (before,),
            think=think or 0,
        )
        if session is not None:
            self.last[session] = row

    def _check_block_size(self, record: dict[str, Any]) -> None:
        """Take the size that the first record names; others must name the same."""
        known = self.blocks.block_tokens
        size = integer(record, "block_size", 1, MAX_BLOCK_TOKENS, default=known or BLOCK_TOKENS)
        if known not in (0, size):
            raise BadRecord(f"block_size is {size}, allowed: {known} as above or as the option")
        self.blocks.block_tokens = size

    def _check_times(
        self, arrival: int | None, think: int | None, session: str | None, before: int | None
    ) -> None:
        if think and before is None:
            what = "has no session_id" if session is None else "is the first of its session"
            raise BadRecord(f"delay on a request that {what}, allowed: on later turns")
        timed = bool(self.columns.ids) and self.columns.arrival[0] != UNKNOWN
        if arrival is None and before is None and timed:
            raise BadRecord("timestamp is missing, allowed: milliseconds from the start")


def _refuse_graph(record: dict[str, Any]) -> None:
    for name in ("wait_for", "branches", "prefix_reset", "tool_wait_ms"):
        if record.get(name):
            raise BadRecord(f"{name} is not read, allowed: session_id with delay")


@dataclass(frozen=True)
class Lost:
    """What a Mooncake file does not say of a trace, counted in requests."""

    priorities: int = 0
    generation_prompts: int = 0
    known_outputs: int = 0
    dependencies: int = 0
    sessions: int = 0


def write_mooncake(trace: Trace, path: str, *, block_tokens: int = 512) -> Lost:
    """Write ``trace`` with blocks numbered in order of first sight; says what is lost.

    Sharing is cut to whole blocks. Raises ``TraceError`` where a request has neither a time nor
    a turn before it while others have.
    """
    closed, follows, exact = _turns(trace)
    timeless = (trace.arrival_ns == UNKNOWN) & ~follows
    if timeless.any() and not (timeless | follows).all():
        i = int(np.flatnonzero(timeless)[0])
        raise TraceError(
            path, 0, f"request {trace.ids[i]!r} has no arrival and no turn before it, allowed: one"
        )
    write_lines(path, _records(trace, closed, follows, block_tokens))
    return Lost(
        priorities=int(np.count_nonzero(trace.priority)),
        generation_prompts=int(np.count_nonzero(trace.generation_prompt_tokens != UNKNOWN)),
        known_outputs=int(np.count_nonzero(trace.output_known & (trace.output_tokens > 0))),
        dependencies=int(np.count_nonzero(~exact)),
        sessions=int(np.count_nonzero((trace.session != UNKNOWN) & ~_in(closed, trace))),
    )


def _in(sessions: set[int], trace: Trace) -> Bools:
    return np.isin(trace.session, list(sessions))


def _turns(trace: Trace) -> tuple[set[int], Bools, Bools]:
    """Sessions in which every turn waits for the turn before it; the requests that do so in
    them; and those that wait for exactly what the file can say."""
    last: dict[int, int] = {}
    open_ones = {UNKNOWN}
    before = np.full(len(trace), UNKNOWN, np.int64)
    for i, s in enumerate(trace.session.tolist()):
        before[i] = last.get(s, UNKNOWN)
        if s in last and last[s] not in trace.after_of(i):
            open_ones.add(s)
        last[s] = i
    closed = set(last) - open_ones
    follows = _in(closed, trace) & (before != UNKNOWN)
    said = [[int(b)] if f else [] for b, f in zip(before, follows, strict=True)]
    exact = np.array([trace.after_of(i) == want for i, want in enumerate(said)], bool)
    return closed, follows, exact


def _records(trace: Trace, closed: set[int], follows: Bools, block_tokens: int) -> Iterator[str]:
    offsets, blocks = _blocks(trace, block_tokens)
    plain = trace.ids == tuple(map(str, range(len(trace))))
    for i in range(len(trace)):
        record: dict[str, Any] = {} if plain else {"request_id": trace.ids[i]}
        session, arrival = int(trace.session[i]), int(trace.arrival_ns[i])
        if session in closed:
            record["session_id"] = trace.session_names[session]
        if arrival != UNKNOWN:
            record["timestamp"] = _ms(arrival)
        if follows[i] and trace.think_ns[i]:
            record["delay"] = _ms(int(trace.think_ns[i]))
        record["input_length"] = int(trace.prompt_tokens[i])
        record["output_length"] = int(trace.output_tokens[i])
        record["hash_ids"] = blocks[offsets[i] : offsets[i + 1]].tolist()
        yield json.dumps(record)


def _ms(ns: int) -> int | float:
    return ns / MS if ns % MS else ns // MS


def _blocks(trace: Trace, block_tokens: int) -> tuple[Ints, Ints]:
    """Blocks of every prompt (CSR), numbered in order of first sight."""
    prefixes = identify(trace)
    rows = []
    for i, n in enumerate(trace.prompt_tokens.tolist()):
        ends = np.minimum(np.arange(block_tokens, n + block_tokens, block_tokens), n)
        rows.append(prefixes.ids(i, ends))
    offsets = np.r_[0, np.cumsum([len(r) for r in rows])].astype(np.int64)
    _, first, inverse = np.unique(
        np.concatenate([*rows, np.zeros(0, np.int64)]), return_index=True, return_inverse=True
    )
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    return offsets, np.asarray(rank[inverse], np.int64)
