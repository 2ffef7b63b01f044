"""Every trace format under one name: what a file holds, and how it is read."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from traces.azure import NAMES, read_azure
from traces.errors import BadLines, TraceError
from traces.fields import nearest
from traces.files import lines
from traces.mooncake import read_mooncake
from traces.native import read_native
from traces.trace import Trace
from traces.weka import read_weka

READERS: dict[str, Callable[..., Trace]] = {
    "native": read_native,
    "mooncake": read_mooncake,
    "weka": read_weka,
    "azure": read_azure,
}
_MARKS = {"format": "native", "trace": "weka"}
_LENGTHS = ("input_length", "input_tokens")
_CHOICES = {"tail": ("ceil", "floor"), "infer_appends": ("off", "on")}


def read_trace(path: str, format: str | None = None, **options: object) -> Trace:
    """Read a trace of any format; without ``format`` the first line tells it.

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
    """The name of the format that the first line of ``path`` is in."""
    _, text = next(lines(path, BadLines(path)))
    if all(name in text for name in NAMES):
        return "azure"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        for key, name in _MARKS.items():
            if key in record:
                return name
        if any(key in record for key in _LENGTHS):
            return "mooncake"
    raise TraceError(path, 1, f"no known format begins with {text[:40]!r}, {_allowed()}")


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
    ok = (
        value in _CHOICES[option]
        if option in _CHOICES
        else type(value) is int and 1 <= value <= 2**20
        if option == "block_tokens"
        else isinstance(value, bool)
    )
    if not ok:
        allowed = {"block_tokens": "an integer from 1 to 1048576"}.get(option, "true or false")
        allowed = ", ".join(_CHOICES[option]) if option in _CHOICES else allowed
        raise TraceError(path, 0, f"option {option} is {value!r}, allowed: {allowed}")
    return value


def _allowed() -> str:
    return f"allowed: {', '.join(READERS)}"
