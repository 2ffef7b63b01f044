"""Random requests for the cases: a tree of shared prefixes with arrivals and dependencies.

A run is `[seed, length]` or `[seed, length, start]`, as in the recorded cases.
"""

import random
from typing import Any

Case = dict[str, Any]
Run = list[int]


def tree(rng: random.Random, config: Case) -> list[Case]:
    """Return 3 to 25 requests that branch from, repeat, extend or continue earlier ones."""
    count = rng.randint(3, 25) if rng.random() < 0.8 else rng.randint(3, 6)
    if "preset" in config:
        count = rng.randint(3, 8)
    arrivals, requests = _arrivals(rng, count, config["_pressed"]), list[Case]()
    reuse, chained = rng.choice([0.3, 0.6, 0.85, 0.95]), rng.choice([0.0, 0.3, 0.9])
    levels = rng.choice([1, 2, 3, 5])
    for i in range(count):
        request = _request(rng, config, requests, i, reuse, chained)
        request["arrival_step"] = arrivals[i]
        if request["after"] and rng.random() < 0.5:
            request["arrival_step"] = None
        request["priority"] = rng.randrange(levels) if config.get("policy") == "priority" else 0
        requests.append(request)
    return requests


def _arrivals(rng: random.Random, count: int, pressed: bool) -> list[int]:
    kind = rng.choice(["burst", "waves", "stagger", "dense", "serial"][: 4 if pressed else 5])
    if kind == "burst":
        return [0] * count
    if kind == "waves":
        gap, size = rng.randint(2, 40), rng.randint(2, 6)
        return [gap * (i // size) for i in range(count)]
    width = {"stagger": 6, "dense": 2, "serial": 150}[kind]
    steps, now = [], 0
    for _ in range(count):
        steps.append(now)
        now += rng.randint(0, width)
    return steps if rng.random() < 0.8 else rng.sample(steps, count)


def _request(
    rng: random.Random, config: Case, earlier: list[Case], index: int, reuse: float, chained: float
) -> Case:
    prompt, output, parent = _fresh(rng, config, index), _output(rng, config, index), None
    if earlier and rng.random() < reuse:
        parent = rng.choice(earlier[-rng.choice([3, 8, 25]) :])
        prompt, output = _derived(rng, config, parent, index)
    prompt = cut(prompt, config["max_model_len"] - 1)
    after = [parent["id"]] if parent and rng.random() < chained else None
    if earlier and rng.random() < 0.05:
        after = sorted({*(after or []), rng.choice(earlier)["id"]})
    return {"id": f"r{index}", "arrival_step": 0, "after": after, "prompt": prompt,
            "output": output, "priority": 0}  # fmt: skip


def _length(rng: random.Random, config: Case) -> int:
    scale, block = int(config.get("_long", 1)), int(config["_block"])
    if rng.random() < 0.1:
        return rng.randint(200, 700) * scale
    if rng.random() < 0.2:
        return max(1, block * rng.randint(1, 4) + rng.choice([-1, 0, 0, 1]))
    return rng.randint(1, rng.choice([20, 60, 120, 200])) * scale


def _fresh(rng: random.Random, config: Case, index: int) -> list[Run]:
    return [[1000 + index, _length(rng, config)]]


def _output(rng: random.Random, config: Case, index: int) -> list[Run]:
    low, high = (20, 60) if config["_pressed"] else (1, rng.choice([2, 8, 20, 60]))
    return [[5000 + index, rng.randint(low, high)]]


def _derived(
    rng: random.Random, config: Case, parent: Case, index: int
) -> tuple[list[Run], list[Run]]:
    whole = parent["prompt"] + parent["output"]
    output = _output(rng, config, index)
    kind = rng.choice(["branch", "branch", "branch", "resend", "extend", "turn", "turn", "prefix"])
    if kind == "resend":
        return parent["prompt"], rng.choice([parent["output"], output])
    if kind == "extend":
        return [*parent["prompt"], [2000 + index, rng.randint(1, 5)]], output
    if kind == "turn":
        kept = cut(whole, total(whole) - rng.choice([0, 0, 0, 1, 3]))
        return [*kept, [2000 + index, _length(rng, config) // 2 + 1]], output
    at = _cut_position(rng, config, total(whole))
    if kind == "prefix":
        # The answer repeats what the parent goes on with, so that generated content coincides.
        rest = cut(drop(whole, at), rng.randint(1, 40))
        return cut(whole, at), rest if rest and rng.random() < 0.5 else output
    return [*cut(whole, at), [2000 + index, _length(rng, config)]], output


def _cut_position(rng: random.Random, config: Case, length: int) -> int:
    block = int(config["_block"])
    if length > block and rng.random() < 0.4:
        at = block * rng.randint(1, length // block) + rng.choice([-1, 0, 0, 1])
        return min(length, at)
    return rng.randint(1, length)


def total(runs: list[Run]) -> int:
    """Return the number of tokens that the runs name."""
    return sum(run[1] for run in runs)


def cut(runs: list[Run], length: int) -> list[Run]:
    """Return the first `length` tokens (at least one) of the runs."""
    out, left = list[Run](), max(1, length)
    for run in runs:
        take = min(left, run[1])
        if take:
            out.append([run[0], take, *run[2:]])
        left -= take
    return out


def drop(runs: list[Run], length: int) -> list[Run]:
    """Return the runs without their first `length` tokens."""
    out, left = list[Run](), length
    for run in runs:
        gone = min(left, run[1])
        start = (run[2] if len(run) > 2 else 0) + gone
        if run[1] > gone:
            out.append([run[0], run[1] - gone, start])
        left -= gone
    return out
