"""JSONL of token ids, as Marconi, LLMServingSim and engine logs write them: exact to the token.

A record has a prompt (``input_tokens``, ``input_tok_ids``, ``prompt_token_ids`` or
``input_ids``), an output likewise or its length, a time (``ts`` in seconds, ``timestamp`` in
milliseconds or ``arrival_time_ns``) and perhaps a session. LLMServingSim's ``sub_requests`` are
the turns of one session, each after the tool of the one before. Lengths alone are taken as well;
such content is shared with nothing.
Sources: ruipeterpan/marconi, casys-kaist/LLMServingSim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traces.columns import Columns
from traces.errors import BadLines, BadRecord
from traces.fields import integer, integer_array, nanoseconds, parse_object, string
from traces.files import lines
from traces.token_tree import Tokens
from traces.trace import UNKNOWN, Trace
from traces.turns import NONE, Turn, Turns

MAX_TOKEN_ID = 2**31 - 1
PROMPTS = ("input_tokens", "input_tok_ids", "prompt_token_ids", "input_ids")
OUTPUTS = ("output_tokens", "output_tok_ids", "output_token_ids", "output_ids")
PROMPT_LENGTHS = ("num_input_tokens", "input_toks", "input_length")
OUTPUT_LENGTHS = ("num_output_tokens", "output_toks", "output_length")
_TIMES = (("ts", 1_000_000_000), ("timestamp", 1_000_000), ("arrival_time_ns", 1))
_THINKS = (("delay", 1_000_000), ("delay_ms", 1_000_000))
#: keys of which one tells the format, whatever stands under it
MARKS = (*PROMPTS[1:], *PROMPT_LENGTHS[:2], "sub_requests")


def read_tokens(path: str, *, sort: bool = False, skip_bad: bool = False) -> Trace:
    """Read ``path``.

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    turns = Turns(Columns(sort))
    for number, text in lines(path, bad):
        try:
            record = parse_object(text)
            for turn in _turns(record, number):
                turns.add(turn)
        except BadRecord as e:
            bad.report(number, str(e))
    return turns.columns.build(format="tokens", skipped=tuple(bad.found))


def _turns(record: dict[str, Any], number: int) -> list[Turn]:
    """The turns of a record, all of them good."""
    if "hash_ids" in record:
        raise BadRecord("hash_ids is not read, allowed: token ids (or another format)")
    if "sub_requests" in record:
        return list(_agentic(record, number))
    prompt, output = _ids(record, PROMPTS), _ids(record, OUTPUTS)
    return [
        Turn(
            _length(record, PROMPT_LENGTHS, prompt, 1),
            _length(record, OUTPUT_LENGTHS, output, 0),
            NONE if prompt is None else prompt,
            output,
            id=string(record, "request_id"),
            session=string(record, "session_id"),
            arrival_ns=_first(record, _TIMES),
            think_ns=_first(record, _THINKS),
            generation_tokens=_generation(record, prompt),
        )
    ]


def _agentic(record: dict[str, Any], number: int) -> Iterator[Turn]:
    parts = record["sub_requests"]
    if type(parts) is not list or not parts or not all(type(p) is dict for p in parts):
        raise BadRecord(f"sub_requests is {str(parts)[:40]}, allowed: a list of requests")
    session = string(record, "session_id") or f"line {number}"
    arrival, think = _first(record, _TIMES), None
    for part in parts:
        prompt, output = _ids(part, PROMPTS), _ids(part, OUTPUTS)
        yield Turn(
            _length(part, PROMPT_LENGTHS, prompt, 1),
            _length(part, OUTPUT_LENGTHS, output, 0),
            NONE if prompt is None else prompt,
            output,
            session=session,
            arrival_ns=arrival,
            think_ns=think,
        )
        arrival, think = None, nanoseconds(part, "tool_duration_ns", 1)


def _ids(record: dict[str, Any], names: tuple[str, ...]) -> Tokens | None:
    """The token ids under the first of ``names``; None where there are none."""
    found = [name for name in names if record.get(name) is not None]
    if len(found) > 1:
        raise BadRecord(f"{found[0]} and {found[1]} both stand here, allowed: one of them")
    if not found:
        return None
    return integer_array(record, found[0], MAX_TOKEN_ID)


def _length(record: dict[str, Any], names: tuple[str, ...], ids: Tokens | None, low: int) -> int:
    """Tokens as said or counted; both must agree."""
    if ids is None:
        return integer(record, names, low)
    said = integer(record, names, low, default=len(ids))
    if said != len(ids):
        name = next(n for n in names if n in record)
        raise BadRecord(f"{name} is {said} but there are {len(ids)} ids, allowed: their number")
    if len(ids) < low:
        raise BadRecord(f"a prompt of no tokens, allowed: {low} or more ids")
    return said


def _first(record: dict[str, Any], names: tuple[tuple[str, int], ...]) -> int | None:
    """The time under the only one of ``names`` that is there, in nanoseconds."""
    found = [(name, unit) for name, unit in names if record.get(name) is not None]
    if len(found) > 1:
        raise BadRecord(f"{found[0][0]} and {found[1][0]} both stand here, allowed: one time")
    return nanoseconds(record, *found[0]) if found else None


def _generation(record: dict[str, Any], prompt: Tokens | None) -> int:
    if "generation_prompt_tokens" not in record:
        return UNKNOWN
    high = 0 if prompt is None else len(prompt)
    return integer(record, "generation_prompt_tokens", 0, high)
