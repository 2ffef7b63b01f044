"""Checks of one record's fields; each says what is wrong and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import BadRecord

Ints = NDArray[np.int64]

MAX_TOKENS = 2**31 - 1
MAX_NS = 2**62
_MISSING = object()


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object on a line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        what = e.msg if isinstance(e, json.JSONDecodeError) else e
        raise BadRecord(f"not JSON ({what}; a cut line?), allowed: one JSON object") from None
    if not isinstance(value, dict):
        raise BadRecord(f"{_short(value)} is no record, allowed: one JSON object")
    return value


def integer(
    record: Mapping[str, Any],
    names: str | tuple[str, ...],
    low: int = 0,
    high: int = MAX_TOKENS,
    default: int | None = None,
) -> int:
    """An integer under one of ``names``; two names with two values contradict each other."""
    name, value = _lookup(record, names)
    if value is _MISSING:
        if default is not None:
            return default
        raise BadRecord(f"{name} is missing, allowed: an integer from {low} to {high}")
    if type(value) is not int or not low <= value <= high:
        raise BadRecord(f"{name} is {_short(value)}, allowed: an integer from {low} to {high}")
    return value


def nanoseconds(
    record: Mapping[str, Any], names: str | tuple[str, ...], unit_ns: int
) -> int | None:
    """A time of ``unit_ns`` each (float allowed) to the nearest nanosecond; None where absent."""
    name, value = _lookup(record, names)
    if value is _MISSING or value is None:
        return None
    ok = type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MAX_NS // unit_ns
    if not ok:
        allowed = f"a number from 0 to {MAX_NS // unit_ns} (units of {unit_ns} ns)"
        raise BadRecord(f"{name} is {_short(value)}, allowed: {allowed}")
    return value * unit_ns if type(value) is int else round(value * unit_ns)


def string(record: Mapping[str, Any], name: str, default: str | None = None) -> str | None:
    """A string, or an integer taken as one."""
    value = record.get(name, default)
    if value is default or type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    raise BadRecord(f"{name} is {_short(value)}, allowed: a string")


def integers(record: Mapping[str, Any], name: str, high: int) -> list[int]:
    """A list of integers from 0 to ``high``."""
    value = record.get(name)
    if type(value) is not list:
        raise BadRecord(f"{name} is {_short(value)}, allowed: a list of integers")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > high):
        wrong = next(v for v in value if type(v) is not int or not 0 <= v <= high)
        raise BadRecord(f"{name} holds {_short(wrong)}, allowed: integers from 0 to {high}")
    return value


def integer_array(record: Mapping[str, Any], name: str, high: int) -> Ints:
    """A list of integers from 0 to ``high``, which int64 holds, as an array."""
    value = record.get(name)
    if type(value) is list and set(map(type, value)) <= {int}:
        try:
            out: Ints = np.array(value, np.int64)
        except OverflowError:
            out = np.array([-1])
        if not len(out) or (out.min() >= 0 and out.max() <= high):
            return out
    return np.array(integers(record, name, high), np.int64)  # says what is wrong


def known_keys(record: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse a key that the format does not have."""
    names = list(allowed)
    for key in record:
        if key not in names:
            near = nearest(key, names)
            raise BadRecord(f"unknown key {key!r}, nearest {near!r}, allowed: {', '.join(names)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of ``names`` that looks most like ``name``."""
    return get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def _lookup(record: Mapping[str, Any], names: str | tuple[str, ...]) -> tuple[str, Any]:
    known = (names,) if isinstance(names, str) else names
    found = [n for n in known if n in record]
    if not found:
        return known[0], _MISSING
    for other in found[1:]:
        if record[other] != record[found[0]]:
            a, b = _short(record[found[0]]), _short(record[other])
            raise BadRecord(f"{found[0]} is {a} but {other} is {b}, allowed: one value")
    return found[0], record[found[0]]


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, dict | list) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
