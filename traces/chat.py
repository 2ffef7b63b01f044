"""OpenAI-chat JSONL: messages, rendered with a chat template and tokenised by a local file.

A record has ``messages`` (or ``conversations`` as ShareGPT writes them, or a ``body`` as batch
files have it) and an answer: ``output`` (text or a message), ``response`` (an OpenAI reply), the
last message where it is the assistant's, or only ``output_length``. The history and the
generation prompt are tokenised apart, so that a prompt ends where the template says. With
``turns`` all, every message of the assistant is the answer of a request of its own.
``timestamp`` and ``delay`` are in milliseconds, as in Mooncake files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from traces import chat_template
from traces.chat_template import ChatTemplate, Rendered
from traces.columns import Columns
from traces.errors import BadLines, BadRecord, TraceError
from traces.fields import integer, nanoseconds, parse_object, string
from traces.files import lines
from traces.token_tree import Tokens
from traces.tokenizer import Tokenizer, tokenizer_file
from traces.trace import Trace
from traces.turns import NONE, Turn, Turns

MS = 1_000_000
BATCH = 256
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant"}
_ANSWER_LENGTHS = ("output_length", "output_tokens", "max_tokens", "max_completion_tokens")
Message = dict[str, Any]


def read_chat(
    path: str,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    turns: Literal["last", "all"] = "last",
    sort: bool = False,
    skip_bad: bool = False,
) -> Trace:
    """Read ``path`` with the ``tokenizer.json`` of ``tokenizer`` (a file or a folder; default:
    the trace's folder) and ``chat_template`` (default: what lies beside the tokenizer).

    Raises ``TraceError``; with ``skip_bad`` bad lines are listed in ``notes["skipped"]`` instead.
    """
    bad = BadLines(path, skip_bad)
    numbered = lines(path, bad)
    first = next(numbered, None)
    reader = _reader(path, tokenizer, chat_template, Columns(sort), bad)
    for number, text in (first, *numbered) if first is not None else ():
        try:
            asked = list(_asked(parse_object(text), number, turns, reader.template))
        except BadRecord as e:
            reader.flush()  # so that the first bad line is the one told
            bad.report(number, str(e))
            continue
        reader.waiting += asked
        if len(reader.waiting) >= BATCH:
            reader.flush()
    reader.flush()
    return reader.turns.columns.build(format="chat", skipped=tuple(bad.found))


@dataclass(frozen=True)
class _Asked:
    """A request whose texts are not tokenised yet; ``output`` is None where only the length of
    the answer is known. ``turn`` holds the rest."""

    number: int
    prompt: Rendered
    output: str | None
    turn: Turn


@dataclass
class _Reader:
    encoder: Tokenizer
    template: ChatTemplate
    turns: Turns
    bad: BadLines
    waiting: list[_Asked] = field(default_factory=list)

    def flush(self) -> None:
        """Tokenise what waits, all at once, and append it."""
        waiting, self.waiting = self.waiting, []
        texts = [
            t for a in waiting for t in (a.prompt.history, a.prompt.generation, a.output or "")
        ]
        ids = self.encoder.encode(texts)
        for k, asked in enumerate(waiting):
            try:
                self.turns.add(self._turn(asked, *ids[3 * k : 3 * k + 3]))
            except BadRecord as e:
                self.bad.report(asked.number, str(e))

    def _turn(self, asked: _Asked, history: Tokens, generation: Tokens, output: Tokens) -> Turn:
        prompt = np.concatenate((history, generation))
        if not len(prompt):
            raise BadRecord("the prompt has no tokens, allowed: messages that the template shows")
        known = None if asked.output is None else self._generated(output)
        return replace(
            asked.turn,
            prompt_tokens=len(prompt),
            output_tokens=asked.turn.output_tokens if known is None else len(known),
            prompt=prompt,
            output=known,
            generation_tokens=len(generation),
        )

    def _generated(self, output: Tokens) -> Tokens:
        """``output`` up to its last special token: the template's text after it was not made."""
        ends = np.flatnonzero(np.isin(output, self.encoder.special))
        return output[: int(ends[-1]) + 1] if len(ends) else output


def _asked(
    record: dict[str, Any], number: int, turns: str, template: ChatTemplate
) -> Iterator[_Asked]:
    """The requests of one record."""
    record = _unwrapped(record)
    messages, tools = _messages(record), record.get("tools")
    every = [k for k, m in enumerate(messages) if m["role"] == "assistant" and k]
    session = string(record, "session_id")
    turn = Turn(
        0, 0, NONE, None,
        id=string(record, "request_id") or string(record, "custom_id"),
        session=session,
        arrival_ns=nanoseconds(record, ("timestamp", "created_time"), MS),
        think_ns=nanoseconds(record, ("delay", "delay_ms"), MS),
    )  # fmt: skip
    if turns == "all" and every:
        turn = replace(turn, session=session or f"line {number}")
        for k in every:
            prompt = template.render(messages[:k], tools)
            output = template.answer(messages[:k], tools, prompt, messages[k])
            yield _Asked(number, prompt, output, turn)
            turn = replace(turn, id=None, arrival_ns=None, think_ns=None)
        return
    answer = _answer(record)
    if answer is None and every and every[-1] == len(messages) - 1:
        *messages, answer = messages
    prompt = template.render(messages, tools)
    if answer is not None:
        yield _Asked(number, prompt, template.answer(messages, tools, prompt, answer), turn)
    else:
        length = integer(record, _ANSWER_LENGTHS)
        yield _Asked(number, prompt, None, replace(turn, output_tokens=length))


def _unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with the keys of its ``body``, as batch files have one."""
    body = record.get("body")
    return {**body, **record} if isinstance(body, dict) else record


def _messages(record: dict[str, Any]) -> list[Message]:
    name = "messages" if "messages" in record else "conversations"
    value = record.get(name)
    if type(value) is not list or not value:
        raise BadRecord(f"{name} is {str(value)[:40]}, allowed: a list of messages")
    return [_message(m, f"{name}[{k}]") for k, m in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if type(value) is not dict:
        raise BadRecord(f"{where} is {str(value)[:40]}, allowed: an object with role and content")
    role = value.get("role", value.get("from"))
    if type(role) is not str:
        raise BadRecord(f"{where} has role {role!r}, allowed: a string such as user")
    content = _text(value.get("content", value.get("value")), where)
    return {**value, "role": ROLES.get(role, role), "content": content}


def _text(content: Any, where: str) -> str:
    """Content as one text; parts of other kinds than text have no tokens here."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") if isinstance(p, dict) else p for p in parts]
    found = [t for t in texts if isinstance(t, str)]
    if len(found) < len(texts):
        raise BadRecord(f"{where} has content {str(content)[:40]}, allowed: text, or parts of text")
    return "".join(found)


def _answer(record: dict[str, Any]) -> Message | None:
    """What was answered, if the record says so apart from its messages."""
    value = record.get("output")
    if value is None and isinstance(record.get("response"), dict):
        reply = record["response"].get("body", record["response"])
        choices = reply.get("choices") if isinstance(reply, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        value = first.get("message") if isinstance(first, dict) else None
        if value is None:
            raise BadRecord("response has no message, allowed: choices with a message")
    if value is None:
        return None
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    return _message({"role": "assistant", **value} if type(value) is dict else value, "output")


def _reader(
    path: str, tokenizer: str | None, template: str | None, columns: Columns, bad: BadLines
) -> _Reader:
    file = tokenizer_file(path, tokenizer)
    if not file.is_file():
        said = f"option tokenizer is {tokenizer!r}" if tokenizer else "no tokenizer.json beside it"
        raise TraceError(
            path, 0, f"{said}, allowed: the option tokenizer with a tokenizer.json file or a folder"
            " that has one"
        )  # fmt: skip
    encoder = Tokenizer(path, file)
    return _Reader(encoder, chat_template.load(template, file, path), Turns(columns), bad)
