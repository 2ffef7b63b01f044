"""Random cases for the comparison with vLLM's own scheduler and cache manager.

A case is a configuration and a list of requests, in the format that the recorded cases in
`tests/golden` have.  The same seed, version and kind give the same case, byte for byte.

The configurations are legal ones: units divide blocks, intervals are multiples of the block,
without chunked prefill the budget covers the longest prompt.
"""

import random
from typing import Any

from fuzz_model import preset, small
from fuzz_requests import total, tree

Case = dict[str, Any]

BUDGETS = [8, 10, 16, 20, 24, 32, 35, 40, 48, 64, 67, 96, 99, 128, 128, 192, 256, 512, 1024, 8192]


def random_case(seed: int, version: str, asynchronous: bool) -> Case:
    """Return the case of this seed for a vLLM version ("0.33.0" or "0.28.0")."""
    rng = random.Random(f"{version}/{'async' if asynchronous else 'sync'}/{seed}")
    config = preset(rng) if rng.random() < 0.03 else small(rng, version)
    config["_pressed"] = rng.random() < 0.3
    _scheduling(rng, config)
    _caching(rng, config, version)
    requests = tree(rng, config)
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
    interval: int = config["_block"] * rng.choice([1, 2, 2, 3, 4])
    choice: int | None = rng.choice([None, 0, 0, 0, interval, interval])
    return choice


def _checkpoint(rng: random.Random, config: Case) -> None:
    block, kind = config["_block"], rng.random()
    if kind < 0.3:
        config["prefill_checkpoint"] = None
    elif kind < 0.5:
        steps = [block, *(d for d in (2, 4, 8, 16, 24) if block % d == 0)]
        config["prefill_checkpoint"] = {"blocks": 1, "alignment": rng.choice(steps)}


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
    # Blocks that one request holds at most, to scale pools by.
    size = _group_size(config["_layers"])
    attention = -(-config["_layers"].count("*") // size)
    mamba = -(-config["_layers"].count("M") // size)
    columns = -(-tokens // block)
    per_mamba = {"none": 1, "align": min(3, columns + 1), "all": columns}[config["mode"]]
    return int(attention * columns + mamba * per_mamba)
