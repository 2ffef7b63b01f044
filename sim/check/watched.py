"""A policy whose answers are looked at on their way to the engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from sim.check.violation import Violation, fail, require
from sim.policies.base import Base
from sim.policy import Limits, Memory, Policy, Prefill, State

ANSWERS = ("place", "publish", "trim", "victim")


def watched(policy: Policy) -> Policy:
    """``policy`` with its answers checked.

    A subclass made for the purpose: what the policy leaves to ``Base`` stays as it is, so that an
    engine that looks for that takes the same way.
    """
    kind: Any = type(policy)
    changed = {
        name: _CHECKS[name](getattr(kind, name))
        for name in ANSWERS
        if getattr(kind, name) is not getattr(Base, name)
    }
    body = {"__module__": kind.__module__, **changed}
    made: Any = object.__new__(type(kind.__name__, (kind,), body))
    made.__dict__.update(policy.__dict__)
    checked: Policy = made
    return checked


def _place(place: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(place)
    def checked(
        self: Policy, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        placed, states = place(self, memory, request, start, end, limits)
        offer = f"place of request {request.request}, chunk {start} to {end}"
        require(start <= placed <= end, "answers", f"{offer}: it ends the chunk at {placed}")
        for state in states if placed > start else ():
            inside = start < state <= end
            require(inside, "answers", f"{offer}: it leaves a state at {state}")
        return placed, states

    return checked


def _publish(publish: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(publish)
    def checked(self: Policy, memory: Memory, state: State) -> bool:
        answer = publish(self, memory, state)
        told = f"publish of the state at {state.position} answers {answer!r}, not True or False"
        require(isinstance(answer, bool), "answers", told)
        return bool(answer)

    return checked


def _trim(trim: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trim)
    def checked(self: Policy, memory: Memory, path: Sequence[State]) -> Sequence[State]:
        offered = list(path)
        answer: Sequence[State] = trim(self, memory, path)
        require(list(path) == offered, "answers", "trim changed the path that it was given")
        for state in answer:
            known = state in offered
            require(known, "answers", f"trim drops a state at {state.position}, not on the path")
        return answer

    return checked


def _victim(victim: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(victim)
    def checked(
        self: Policy, memory: Memory, candidates: Sequence[State], now_ns: int
    ) -> State | None:
        answer: State | None = victim(self, memory, candidates, now_ns)
        if answer is not None and answer not in candidates:
            fail(
                "answers",
                f"victim names a state at {answer.position} of request {answer.request}, which is "
                "not among the candidates: it is used, or not there",
            )
        return answer

    return checked


_CHECKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "place": _place,
    "publish": _publish,
    "trim": _trim,
    "victim": _victim,
}


def as_violation(error: Exception) -> Violation:
    """Whatever a run raised, as the invariant that it breaks."""
    if isinstance(error, Violation):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    if isinstance(error, AssertionError):
        return Violation("bytes", f"{str(error) or last.line} ({where})")
    return Violation("raises", f"{type(error).__name__}: {error} ({where})")
