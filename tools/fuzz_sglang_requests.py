"""Random requests for SGLang cases: shared system prompts, chats, agents, repeats and prefixes.

A run is `[seed, length]` or `[seed, length, start]`.  In a concurrent case `at` is the iteration
at which a request arrives.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from fuzz_requests import cut, drop, total

Case = dict[str, Any]
Run = list[int]
Derive = Callable[[random.Random, Case, int, int], list[Run]]

LONGEST_PROMPT = 3000
WIDEST = {"retract": 3, "thrash": 12, "crowd": 0}  # iterations between arrivals
COUNTS = {"retract": (5, 14), "thrash": (8, 14)}  # requests with short prompts, long outputs
SCENES = {
    "system": ["system"] * 6 + ["turn", "branch", "short"],
    "chat": ["system", "turn", "turn", "turn", "turn", "trap", "fresh"],
    "agent": ["turn"] * 6 + ["repeat", "branch"],
    "copies": ["repeat", "repeat", "extend", "prefix", "prefix", "branch", "fresh"],
    "mixed": ["fresh", "short", "system", "turn", "trap", "branch", "repeat", "extend", "prefix"],
}


def requests_of(rng: random.Random, config: Case, pressure: str) -> list[Case]:
    """Return 3 to 24 requests of one scene (a crowd: 130), with arrivals if concurrent."""
    grid = math.lcm(max(config["mamba_chunk"], config["page_size"]), config["page_size"])
    kinds = SCENES[rng.choice(sorted(SCENES))]
    count = rng.randint(*COUNTS.get(pressure, (3, 24)))
    if pressure == "crowd":
        count, grid = 130, 16
    systems = [[[100 + i, _length(rng, grid)]] for i in range(rng.choice([1, 1, 2, 3]))]
    arrivals, out = _arrivals(rng, count, WIDEST.get(pressure, 40)), list[Case]()
    usual = rng.randint(60, 350) if pressure != "thrash" else rng.randint(200, 450)
    for i in range(count):
        prompt = _prompt(rng, rng.choice(kinds), systems, out, grid, i)
        if pressure in COUNTS:
            prompt = cut(prompt, rng.choice([30, 80, 80, 200]))
        output = _output(rng, config, grid, prompt, i)
        output = _pressed(rng, pressure, usual, i) or output
        if out and rng.random() < 0.08:
            output = _known(rng, rng.choice(out), prompt) or output
        out.append({"id": f"r{i}", "prompt": prompt, "output": output})
    if config["mode"] == "concurrent":
        _arrive(out, arrivals, pressure)
    return out


def _pressed(rng: random.Random, pressure: str, usual: int, i: int) -> list[Run]:
    if pressure == "crowd":
        return [[5000 + i, rng.choice([1, 1, 2, 4])]]
    if pressure == "thrash" and i == 0:
        return [[5000, rng.randint(500, 650)]]
    return [[5000 + i, round(usual * rng.uniform(0.85, 1.1))]] if pressure in COUNTS else []


def _arrive(requests: list[Case], arrivals: list[int], pressure: str) -> None:
    # Alone for long, the first request brings down what admission counts for those that run:
    # the others are then let in by too many.
    late = total(requests[0]["output"]) * 4 // 5 if pressure == "thrash" else 0
    for i, (request, at) in enumerate(zip(requests, arrivals, strict=True)):
        request["at"] = at + late * (i > 0)


def _arrivals(rng: random.Random, count: int, widest: int) -> list[int]:
    width = min(widest, rng.choice([0, 1, 3, 3, 10, 40]))
    if widest > 3 and rng.random() < 0.25:
        size, gap = rng.randint(2, 6), rng.randint(2, 60)
        return [gap * (i // size) for i in range(count)]
    steps, now = [], 0
    for _ in range(count):
        steps.append(now)
        now += rng.randint(0, width)
    return steps


def _length(rng: random.Random, grid: int) -> int:
    if rng.random() < 0.12:
        return rng.randint(1, 12)
    if rng.random() < 0.45:
        return grid * rng.randint(1, 4) + rng.choice([-2, -1, 0, 0, 1, 2])
    if rng.random() < 0.05:
        return rng.randint(1200, 2500)
    return rng.randint(1, 3 * grid)


def _prompt(
    rng: random.Random, kind: str, systems: list[list[Run]], earlier: list[Case], grid: int, i: int
) -> list[Run]:
    tail = [[1000 + i, _length(rng, grid)]]
    if kind == "system":
        return rng.choice(systems) + tail
    if kind == "short":
        return [[1000 + i, rng.randint(1, 10)]]
    if kind == "fresh" or not earlier:
        return tail
    parent = rng.choice(earlier[-rng.choice([1, 3, 24]) :])
    prompt = DERIVED[kind](rng, parent, grid, i)
    return prompt if total(prompt) <= LONGEST_PROMPT else tail


def _turn(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    whole = parent["prompt"] + parent["output"]
    kept = cut(whole, total(whole) - rng.choice([0, 0, 0, 1, 2]))
    return [*kept, [1000 + i, _length(rng, grid) // rng.choice([1, 2, 8]) + 1]]


def _trap(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    # The generation prompt at the end of the parent's prompt is not kept in the history.
    kept = cut(parent["prompt"], total(parent["prompt"]) - rng.randint(1, 6))
    return [*kept, *parent["output"], [1000 + i, rng.randint(1, grid)]]


def _branch(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    whole = parent["prompt"] + parent["output"]
    return [*cut(whole, _position(rng, total(whole), grid)), [1000 + i, _length(rng, grid)]]


def _prefix(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    whole = parent["prompt"] + parent["output"]
    return cut(whole, _position(rng, total(whole), grid))


def _repeat(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    return [list(run) for run in parent["prompt"]]


def _extend(rng: random.Random, parent: Case, grid: int, i: int) -> list[Run]:
    return [*parent["prompt"], [1000 + i, rng.randint(1, 5)]]


DERIVED: dict[str, Derive] = {
    "turn": _turn, "trap": _trap, "branch": _branch, "prefix": _prefix, "repeat": _repeat,
    "extend": _extend,
}  # fmt: skip


def _position(rng: random.Random, length: int, grid: int) -> int:
    if length > grid and rng.random() < 0.4:
        return min(length, grid * rng.randint(1, length // grid) + rng.choice([-1, 0, 0, 1]))
    return rng.randint(1, length)


def _output(rng: random.Random, config: Case, grid: int, prompt: list[Run], i: int) -> list[Run]:
    if rng.random() < 0.15:
        return [[5000 + i, 1]]
    # Often past the next position at which a decode's state is kept.
    step = math.lcm(grid, config["track_interval"]) if config["track_interval"] > 1 else grid
    gap = step - total(prompt) % step
    if gap <= 160 and rng.random() < 0.6:
        return [[5000 + i, gap + rng.choice([-1, 0, 1, 2, 10])]] if gap > 1 else [[5000 + i, 2]]
    return [[5000 + i, rng.randint(1, rng.choice([4, 20, 60, 150]))]]


def _known(rng: random.Random, other: Case, prompt: list[Run]) -> list[Run]:
    # Generated tokens that repeat what another request holds behind the same prompt.
    whole = other["prompt"] + other["output"]
    if total(whole) <= total(prompt) or cut(whole, total(prompt)) != prompt:
        return []
    return cut(drop(whole, total(prompt)), rng.randint(1, 200))
