"""A case: requests, an engine with its settings, a policy, and in which order things happen.

As JSON it is an experiment that ``prefixlab run`` takes; ``check`` there holds the engine's
options, what was broken, and what drives the engine. Arrivals never go back in time, so requests
are numbered in the order they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from traces.trace import Request, Run, Trace, from_requests

MODEL = "grain"
OPERATIONS = ("arrive", "plan", "leap", "read")
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Asked:
    """One request: prompt and output as (content, tokens); equal contents are equal text."""

    id: str
    prompt: Runs
    output: Runs
    arrival_ns: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return sum(n for _, n in (*self.prompt, *self.output))


@dataclass(frozen=True)
class Case:
    """``settings`` are options of the engine, by its own names; ``operations`` drive it in the
    first run, and whatever they leave open is then brought to its end. ``other_bytes`` is the
    capacity of a run in between; ``cut`` requests stay when the future is cut off."""

    engine: str
    policy: str
    parameters: dict[str, Any]
    settings: dict[str, Any]
    memory_bytes: int
    requests: tuple[Asked, ...]
    operations: tuple[str, ...] = ()
    other_bytes: int = 0
    cut: int = 1

    def trace(self, count: int | None = None) -> Trace:
        """The first ``count`` requests (all, if None)."""
        return from_requests(
            Request(
                id=r.id,
                prompt=_runs(r.prompt),
                output=_runs(r.output),
                output_tokens=sum(n for _, n in r.output),
                arrival_ns=r.arrival_ns,
            )
            for r in self.requests[:count]
        )


def _runs(pairs: Runs) -> tuple[Run, ...]:
    return tuple(Run(content << 32, tokens) for content, tokens in pairs)


def to_data(case: Case, invariant: str = "", message: str = "") -> dict[str, Any]:
    """The case as the JSON of an experiment."""
    return {
        "name": "check_case",
        "description": f"A small case of `prefixlab check {case.policy}`.",
        "model": MODEL,
        "engine": {"version": case.engine},
        "memory": f"{case.memory_bytes}B",
        "trace": {"requests": [_request(r) for r in case.requests]},
        "policies": [{"name": case.policy, "parameters": case.parameters}],
        "check": {
            "invariant": invariant,
            "message": message,
            "settings": case.settings,
            "operations": list(case.operations),
            "other_memory": f"{case.other_bytes}B",
            "cut": case.cut,
        },
    }


def _request(r: Asked) -> dict[str, Any]:
    return {
        "id": r.id,
        "prompt": [list(pair) for pair in r.prompt],
        "output": [list(pair) for pair in r.output],
        "output_tokens": sum(n for _, n in r.output),
        "arrival_ns": r.arrival_ns,
    }


def from_data(data: dict[str, Any]) -> Case:
    """The case of an experiment's JSON. Raises ``ValueError`` where it is not one."""
    try:
        policy, check = data["policies"][0], data["check"]
        return Case(
            engine=data["engine"]["version"],
            policy=policy["name"],
            parameters=dict(policy.get("parameters", {})),
            settings=dict(check["settings"]),
            memory_bytes=_bytes(data["memory"]),
            requests=tuple(_asked(r) for r in data["trace"]["requests"]),
            operations=tuple(check["operations"]),
            other_bytes=_bytes(check["other_memory"]),
            cut=int(check["cut"]),
        )
    except KeyError as error:
        raise ValueError(f"not a case of `prefixlab check`: {error} is missing") from None
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a case of `prefixlab check`: {error}") from None


def _bytes(text: str) -> int:
    if not text.endswith("B") or not text[:-1].isdigit():
        raise ValueError(f"not a case of `prefixlab check`: memory is {text!r}, allowed: '4096B'")
    return int(text[:-1])


def _asked(row: dict[str, Any]) -> Asked:
    def pairs(name: str) -> Runs:
        return tuple((int(content), int(tokens)) for content, tokens in row[name])

    return Asked(str(row["id"]), pairs("prompt"), pairs("output"), int(row["arrival_ns"]))
