"""Every trace format under one name: what a file holds, and how it is read."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from traces import tokens, weka_json
from traces.azure import NAMES, read_azure
from traces.bailian import read_bailian
from traces.chat import read_chat
from traces.chat_template import BESIDE
from traces.errors import BadLines, TraceError
from traces.fields import nearest
from traces.files import lines
from traces.mooncake import read_mooncake
from traces.native import read_native
from traces.rag import length_files, read_rag
from traces.tokenizer import tokenizer_file
from traces.trace import Trace
from traces.weka import read_weka

READERS: dict[str, Callable[..., Trace]] = {
    "native": read_native,
    "mooncake": read_mooncake,
    "weka": read_weka,
    "azure": read_azure,
    "bailian": read_bailian,
    "rag": read_rag,
    "tokens": tokens.read_tokens,
    "chat": read_chat,
}
#: option -> the words it can be, or the type of its value
OPTIONS: dict[str, tuple[str, ...] | type] = {
    "block_tokens": int,
    "tail": ("ceil", "floor"),
    "infer_appends": ("off", "on"),
    "hashes": ("chained", "content"),
    "turns": ("last", "all"),
    "lengths": str,
    "tokenizer": str,
    "chat_template": str,
    "sort": bool,
    "skip_bad": bool,
}
_LENGTHS = ("input_length", "input_tokens")
_TEXTS = ("messages", "conversations", "body")


def read_trace(path: str, format: str | None = None, **options: object) -> Trace:
    """Read a trace of any format; without ``format`` the file's beginning tells it.

    ``options`` are those of the format's reader. Raises ``TraceError`` for what is wrong with the
    file, the format's name or an option.
    """
    name = detect(str(path)) if format is None else format
    if name not in READERS:
        raise TraceError(
            path, 0, f"format {name!r}, nearest {nearest(name, READERS)!r}, {_allowed()}"
        )
    checked = {k: _checked(path, name, k, v) for k, v in options.items()}
    return READERS[name](str(path), **checked)


def detect(path: str) -> str:
    """The name of the format that ``path`` is in: a folder is WEKA, otherwise the first line
    tells."""
    if Path(path).is_dir():
        return "weka"
    first = lines(path, BadLines(path))
    _, text = next(first)
    if all(name in text for name in NAMES):
        return "azure"
    try:
        name = _of_record(json.loads(text))
    except (ValueError, RecursionError):
        name = _of_document(text, (line for _, line in islice(first, 100)))
    if name is not None:
        return name
    raise TraceError(path, 1, f"no known format begins with {text[:40]!r}, {_allowed()}")


def _of_record(record: object) -> str | None:
    """What a whole first line is the beginning of."""
    if not isinstance(record, dict):
        return None
    tests: tuple[tuple[str, bool], ...] = (
        ("native", "format" in record),
        ("weka", "trace" in record or {"requests", "block_size"} <= record.keys()),
        ("chat", any(isinstance(record.get(k), dict | list) for k in _TEXTS)),
        ("rag", isinstance(record.get("hash_ids"), dict)),
        ("bailian", {"chat_id", "hash_ids"} <= record.keys()),
        ("tokens", any(isinstance(record.get(k), list) for k in tokens.PROMPTS)),
        ("tokens", any(k in record for k in tokens.MARKS)),
        ("mooncake", any(k in record for k in _LENGTHS)),
    )
    return next((name for name, found in tests if found), None)


def _of_document(text: str, rest: Iterable[str]) -> str | None:
    """What a file is that goes on after its first line: a WEKA conversation in many lines."""
    if not text.startswith("{"):
        return None
    keys = ('"requests"', '"block_size"')
    head = "\n".join((text, *rest))
    return "weka" if all(key in head for key in keys) else None


def sources(path: str, format: str | None = None, **options: object) -> list[str]:
    """All files that a trace is made from: its own, and those that its format reads besides.

    Raises ``TraceError`` where the format cannot be told.
    """
    name = detect(path) if format is None else format
    given = {k: v for k, v in options.items() if isinstance(v, str)}
    found = [Path(p) for p in weka_json.files(path)]
    if name == "rag":
        found += length_files(path, given.get("lengths"))
    if name == "chat":
        tokenizer = tokenizer_file(path, given.get("tokenizer"))
        found += [tokenizer, *map(tokenizer.with_name, BESIDE)]
        found += [Path(given[k]) for k in ("chat_template",) if k in given]
    return [str(p) for p in found if p.is_file()]


def options_of(format: str) -> tuple[str, ...]:
    """Options of a format's reader."""
    return tuple(inspect.signature(READERS[format]).parameters)[1:]


def _checked(path: str, format: str, option: str, value: Any) -> Any:
    known = options_of(format)
    if option not in known:
        near = nearest(option, known)
        raise TraceError(
            path, 0, f"option {option!r} of {format}, nearest {near!r}, allowed: {', '.join(known)}"
        )
    if option == "infer_appends" and isinstance(value, bool):  # YAML reads on and off as such
        value = "on" if value else "off"
    kind = OPTIONS[option]
    if isinstance(kind, tuple):
        ok, allowed = value in kind, ", ".join(kind)
    elif kind is int:
        ok, allowed = type(value) is int and 1 <= value <= 2**20, "an integer from 1 to 1048576"
    else:
        ok, allowed = type(value) is kind, "a path" if kind is str else "true or false"
    if not ok:
        raise TraceError(path, 0, f"option {option} is {value!r}, allowed: {allowed}")
    return value


def _allowed() -> str:
    return f"allowed: {', '.join(READERS)}"
