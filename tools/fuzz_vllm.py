"""Random cases for the comparison with vLLM's own scheduler and cache manager.

A case is a configuration and a list of requests, in the format that the recorded cases in
`tests/golden` have.  The same seed, version and kind give the same case, byte for byte.

The configurations are legal ones: units divide blocks, intervals are multiples of the block,
without chunked prefill the budget covers the longest prompt.
"""

import math
import random
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]
Run = list[int]

HYBRIDS = [
    *["M*"] * 6,
    *["M**", "MM*", "MMM*", "MMM**", "MM*MM*", "MMMMM*M*", "M-*-M-", "*M", "**MM*", "MMMM***"],
    *["MMMMMM**M", "M***", "*MM**M", "MMMM*"],
]
BUDGETS = [8, 10, 16, 20, 24, 32, 35, 40, 48, 64, 67, 96, 99, 128, 128, 192, 256, 512, 1024, 8192]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def random_case(seed: int, version: str, asynchronous: bool) -> Case:
    """Return the case of this seed for a vLLM version ("0.33.0" or "0.28.0")."""
    rng = random.Random(f"{version}/{'async' if asynchronous else 'sync'}/{seed}")
    config = _preset(rng) if rng.random() < 0.03 else _small(rng, version)
    config["_pressed"] = rng.random() < 0.3
    _scheduling(rng, config)
    _caching(rng, config, version)
    requests = _requests(rng, config)
    _pool(rng, config, requests)
    config["async_scheduling"] = asynchronous
    return {
        "name": f"fuzz_{version}_{'async' if asynchronous else 'sync'}_{seed}",
        "description": "seeded random configuration and tree of prefixes",
        "tags": ["random", config["mode"], "async" if asynchronous else "sync"],
        "config": {k: v for k, v in config.items() if not k.startswith("_")},
        "options": {"trace_tables": rng.random() < 0.25, "max_steps": 4000},
        "requests": requests,
    }


# ------------------------------------------------------------------ model and block
# Keys with a leading underscore are notes of the generator: block and page sizes it expects.


def _preset(rng: random.Random) -> Case:
    tp = rng.choice([1, 1, 2, 4, 8])
    page = 4_259_840 // tp
    return {
        "preset": "nemotron_h_8b", "mode": rng.choice(["align", "align", "align", "none"]),
        "tp": tp, "max_model_len": 16384, "_block": 1040, "_page_bytes": page,
        "_layers": "MMMM*" * 4 + "M" * 8, "_long": 16,
    }  # fmt: skip


def _small(rng: random.Random, version: str) -> Case:
    config: Case = {"mode": _mode(rng, version), "layers": _layers(rng, version)}
    config["_layers"] = config["layers"]
    config["max_model_len"] = rng.choice([1024, 1024, 1024, 2048, 2048, rng.randint(40, 400)])
    config["attention"] = _attention(rng)
    hybrid = "M" in config["layers"] and "*" in config["layers"]
    if hybrid and rng.random() < 0.25:
        _aligned_block(rng, config)
    else:
        _given_block(rng, config)
    return config


def _mode(rng: random.Random, version: str) -> str:
    if version.startswith("0.28"):
        return rng.choice(["all", "all", "all", "align", "align", "align", "none"])
    return rng.choice(["align"] * 9 + ["none"])


def _layers(rng: random.Random, version: str) -> str:
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(["*", "**", "***"])
    if kind < 0.13:
        return rng.choice(["M", "MM", "MMM"])
    return rng.choice(HYBRIDS)


def _attention(rng: random.Random) -> Case:
    dtype = rng.choice(["bfloat16"] * 6 + ["float16", "float32"])
    return {
        "num_kv_heads": rng.choice([1, 1, 2, 4]), "head_dim": rng.choice([8, 8, 16]), "dtype": dtype
    }  # fmt: skip


def _token_bytes(config: Case) -> int:
    att = config["attention"]
    heads = max(1, att["num_kv_heads"] // config.get("tp", 1))
    size: int = 2 * heads * att["head_dim"] * DTYPE_BYTES[att["dtype"]]
    return size


def _given_block(rng: random.Random, config: Case) -> None:
    config["block_size"] = config["_block"] = rng.choice([8, 16, 16, 16, 16, 24, 32, 32, 48, 64])
    config["_page_bytes"] = config["_block"] * _token_bytes(config)
    if rng.random() < 0.3:
        config["mamba"] = {"type": "raw", "shapes": [[3, 5], [7]], "dtypes": ["bfloat16"] * 2}


def _aligned_block(rng: random.Random, config: Case) -> None:
    config["block_size"] = None
    config["tp"] = rng.choice([1, 1, 1, 2])
    config["mamba"] = rng.choice(STATES)(rng)
    unit = _token_bytes(config)
    state = _state_bytes(config["mamba"], config["tp"])
    step = math.lcm(16, config["mamba"].get("block_alignment", 1))
    if config["mode"] == "all":
        step = math.lcm(step, config["mamba"].get("chunk_size", 1))
    config["_block"] = max(16, step * -(-state // (step * unit)))
    config["_page_bytes"] = config["_block"] * unit


def _raw(rng: random.Random) -> Case:
    size = rng.choice([64, 257, 600, 1000])
    return {"type": "raw", "shapes": [[3, 8], [size]], "dtypes": ["bfloat16", "float32"],
            "chunk_size": rng.choice([16, 32])}  # fmt: skip


def _mamba1(rng: random.Random) -> Case:
    return {"type": "mamba1", "intermediate_size": rng.choice([32, 64]), "state_size": 8,
            "conv_kernel": 4, "chunk_size": 32}  # fmt: skip


def _mamba2(rng: random.Random) -> Case:
    heads = rng.choice([2, 4, 8])
    return {"type": "mamba2", "intermediate_size": heads * 8, "n_groups": rng.choice([1, 2]),
            "num_heads": heads, "head_dim": 8, "state_size": 8, "conv_kernel": 4,
            "chunk_size": rng.choice([16, 32, 48]), "conv_dtype": "bfloat16",
            "ssm_dtype": rng.choice(["float32", "bfloat16"])}  # fmt: skip


def _short_conv(rng: random.Random) -> Case:
    return {"type": "short_conv", "intermediate_size": rng.choice([64, 256]), "conv_kernel": 4,
            "chunk_size": 16}  # fmt: skip


def _linear(rng: random.Random) -> Case:
    return {"type": "linear_attention", "num_heads": rng.choice([2, 3]), "head_dim": 16,
            "chunk_size": 16}  # fmt: skip


def _gdn(rng: random.Random) -> Case:
    return {"type": "gdn", "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 8,
            "conv_kernel": 4, "chunk_size": 64,
            "block_alignment": rng.choice([16, 32, 64])}  # fmt: skip


def _kda(rng: random.Random) -> Case:
    return {"type": "kda", "num_heads": rng.choice([2, 4]), "head_dim": 8, "conv_kernel": 4,
            "chunk_size": 64}  # fmt: skip


STATES: list[Callable[[random.Random], Case]] = [
    _raw, _mamba1, _mamba2, _mamba2, _short_conv, _linear, _gdn, _kda,
]  # fmt: skip


def _state_bytes(m: Case, tp: int) -> int:
    # Only to choose a pool of a sensible size: the planner under test computes its own.
    kind = m["type"]
    if kind == "raw":
        return sum(
            math.prod(s) * DTYPE_BYTES[d] for s, d in zip(m["shapes"], m["dtypes"], strict=True)
        )
    if kind == "mamba1":
        return m["intermediate_size"] // tp * (3 * 2 + m["state_size"] * 4)  # type: ignore[no-any-return]
    if kind == "mamba2":
        conv = 3 * (m["intermediate_size"] + 2 * m["n_groups"] * m["state_size"])
        ssm = m["num_heads"] * m["head_dim"] * m["state_size"] * DTYPE_BYTES[m["ssm_dtype"]]
        return (conv * 2 + ssm) // tp  # type: ignore[no-any-return]
    if kind == "short_conv":
        return 3 * m["intermediate_size"] // tp * 2  # type: ignore[no-any-return]
    heads = m.get("num_v_heads", m.get("num_heads"))
    dim = m.get("head_v_dim", m.get("head_dim"))
    return heads // tp * (dim * dim * 4 + 3 * 3 * dim * 2)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ scheduler and cache
def _scheduling(rng: random.Random, config: Case) -> None:
    seqs = [4, 8, 16] if config["_pressed"] else [1, 2, 2, 3, 4, 8, 8, 16, 16, 32]
    config["max_num_seqs"] = rng.choice(seqs)
    legal = [b for b in BUDGETS if b >= config["max_num_seqs"]]
    config["max_num_batched_tokens"] = rng.choice(legal) * (
        rng.choice([4, 16, 16]) if "preset" in config else 1
    )
    if rng.random() < (0.08 if _whole_prompts_allowed(config) else 0):
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(8192, config["max_model_len"])
    if rng.random() < 0.15:
        config["long_prefill_token_threshold"] = rng.choice([5, 16, 21, 24, 37, 53, 64, 69, 130])
    if rng.random() < 0.2:
        config["watermark"] = rng.choice([0.01, 0.05, 0.1, 0.25])
    if rng.random() < 0.25:
        config["reserve_full_isl"] = False
    if rng.random() < 0.25:
        config["policy"] = "priority"


def _whole_prompts_allowed(config: Case) -> bool:
    # vLLM refuses `align` without chunked prefill.
    return config["mode"] != "align" or "M" not in config["_layers"]


def _caching(rng: random.Random, config: Case, version: str) -> None:
    block, layers = config["_block"], config["_layers"]
    if rng.random() < 0.04:
        config["enable_prefix_caching"] = False
    config["retention_interval"] = _retention(rng, config, version)
    hybrid = "M" in layers and "*" in layers
    if hybrid and config["mode"] == "align" and rng.random() < 0.4:
        units = [u for u in range(2, block) if block % u == 0] or [block]
        config["prefix_match_unit"] = rng.choice([u for u in units if u >= 4] or units)
    if version.startswith("0.33") and "M" in layers:
        _checkpoint(rng, config)


def _retention(rng: random.Random, config: Case, version: str) -> int | None:
    if "M" not in config["_layers"]:
        return None if version.startswith("0.28") else rng.choice([None, 0])
    if config["mode"] == "none" or not config.get("enable_prefix_caching", True):
        return rng.choice([None, 0])  # a block is then as long as the model's maximum
    interval = config["_block"] * rng.choice([1, 2, 2, 3, 4])
    choice: int | None = rng.choice([None, 0, 0, 0, interval, interval])
    return choice


def _checkpoint(rng: random.Random, config: Case) -> None:
    block, kind = config["_block"], rng.random()
    if kind < 0.3:
        config["prefill_checkpoint"] = None
    elif kind < 0.5:
        steps = [block, *(d for d in (2, 4, 8, 16, 24) if block % d == 0)]
        config["prefill_checkpoint"] = {"blocks": 1, "alignment": rng.choice(steps)}


# ------------------------------------------------------------------ requests
def _requests(rng: random.Random, config: Case) -> list[Case]:
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
    scale = config.get("_long", 1)
    if rng.random() < 0.1:
        return rng.randint(200, 700) * scale
    if rng.random() < 0.2:
        return max(1, config["_block"] * rng.randint(1, 4) + rng.choice([-1, 0, 0, 1]))
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
    block = config["_block"]
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


# ------------------------------------------------------------------ pool
def _pool(rng: random.Random, config: Case, requests: list[Case]) -> None:
    block, longest = config["_block"], config["max_model_len"]
    needs = [
        _need(config, min(longest, total(r["prompt"]) + total(r["output"])), block)
        for r in requests
    ]
    factor = rng.choice([rng.uniform(1.0, 1.5), rng.uniform(1.2, 4.0), rng.uniform(2.0, 12.0)])
    if config["_pressed"]:
        factor = rng.uniform(1.0, 2.0)
    if rng.random() < 0.03:
        factor = rng.uniform(0.5, 1.0)
    blocks = max(4, min(int(max(needs) * factor), sum(needs) + 8) + 2)
    if rng.random() < 0.06:
        per_block = config["_page_bytes"] * _group_size(config["_layers"])
        config["memory_bytes"] = per_block * blocks + rng.randrange(per_block)
    else:
        config["num_blocks"] = blocks


def _group_size(layers: str) -> int:
    counts = [n for n in (layers.count("M"), layers.count("*")) if n]
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _need(config: Case, tokens: int, block: int) -> int:
    size = _group_size(config["_layers"])
    attention = -(-config["_layers"].count("*") // size)
    mamba = -(-config["_layers"].count("M") // size)
    columns = -(-tokens // block)
    per_mamba = {"none": 1, "align": min(3, columns + 1), "all": columns}[config["mode"]]
    return attention * columns + mamba * per_mamba
