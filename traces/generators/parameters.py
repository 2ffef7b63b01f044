"""Checks of generator parameters: an error names the value, the range and the nearest choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

P = TypeVar("P")


def in_range(
    name: str, value: float | None, low: float, high: float | None = None, *, above: bool = False
) -> None:
    """Refuse ``value`` outside [low, high], or (low, high] with ``above``; None passes."""
    if value is None or (
        (value > low if above else value >= low) and (high is None or value <= high)
    ):
        return
    if above and value <= low:
        raise ValueError(f"{name} is {value}; allowed: above {low}")
    nearest = low if not value >= low or high is None else high
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    raise ValueError(f"{name} is {value}; allowed: {allowed}; nearest: {nearest}")


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a ``value`` that is not among ``choices``."""
    known = sorted(choices)
    if value not in known:
        raise ValueError(
            f"{name} is {value!r}; allowed: {', '.join(known)}{_nearest(value, known)}"
        )


def _nearest(value: str, known: list[str]) -> str:
    close = get_close_matches(value, known, 1, 0.4)
    return f"; nearest: {close[0]}" if close else ""


def read(cls: type[P], settings: Mapping[str, object]) -> P:
    """``settings`` as an instance of the dataclass ``cls``; unknown keys and types are refused."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in settings:
        one_of("parameter", key, names)
    return cls(**{key: _typed(key, value, hints[key]) for key, value in settings.items()})


def _typed(name: str, value: object, hint: Any) -> object:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds:
        return value
    words = " or ".join("null" if k is NoneType else k.__name__ for k in kinds)
    raise ValueError(f"{name} is {value!r}; allowed: {words}")
