"""Random cases for the comparison with SGLang's own scheduler, trees and pools.

A case is a configuration and a list of requests, in the format of the recorded SGLang cases.  The
same seed, version and mode give the same case, byte for byte.

The configurations are ones that SGLang starts with: `no_buffer` has pages of one token and no
overlap, `extra_buffer_lazy` has overlap, the model's chunk and the page divide one another, and
chunked prefill and the track interval are multiples of the page.
"""

import random
from typing import Any

from fuzz_requests import total
from fuzz_sglang_requests import requests_of

Case = dict[str, Any]

VERSIONS = ("0.5.23", "0.5.18")
MODES = ("serial", "concurrent")
PAGES = [1, 1, 1, 16, 16, 32, 64]
CHUNKS = [32, 64, 64, 64, 96, 128, 256]
STRATEGIES = ["no_buffer"] * 4 + ["extra_buffer"] * 7 + ["extra_buffer_lazy"] * 4
PREFILL_CHUNKS = [64, 96, 100, 128, 200, 224, 256, 300, 384, 500, 512, 700, 992, 2048, 8192]
PREFILL_BUDGETS = [16384, 16384, 4096, 2048, 1024, 500, 256, 130]


def random_case(seed: int, version: str, mode: str) -> Case:
    """Return the case of this seed for an SGLang version, `serial` or `concurrent`."""
    rng = random.Random(f"sglang-{version}/{mode}/{seed}")
    config = {"mode": mode, **_tree(rng, version), **_buffers(rng)}
    config["policy"] = rng.choice(["fcfs", "fcfs", "lpm", "dfs-weight"])
    config.update(_prefill(rng, config["page_size"]))
    pressure = rng.choice(["ample", "kv", "states", "both", "both", "retract"])
    if mode == "serial" and pressure == "retract":
        pressure = "kv"  # a request alone is never retracted
    if mode == "concurrent" and rng.random() < 0.01:
        pressure, config["policy"] = "crowd", "lpm"  # `lpm` gives up beyond 128 waiting requests
    if mode == "concurrent" and seed % 25 == 24:
        pressure = "thrash"
    requests = requests_of(rng, config, pressure)
    config.update(_slots(rng, config, pressure), **_kv(rng, config, requests, pressure))
    longest = max(total(r["prompt"]) + total(r["output"]) for r in requests)
    config["context_len"] = longest + rng.choice([1, 50, 1000])
    return {"name": f"fuzz_{version}_{mode}_{seed}", "config": config, "requests": requests}


def _tree(rng: random.Random, version: str) -> Case:
    # `MambaRadixCache` has no path cap and always locks states; 0.5.18 has no refresh of the queue.
    capped = {"max_states_per_path": rng.choice([-1, -1, 1, 2, 3, 4])}
    capped["skip_decode_lock"] = rng.random() < 0.25
    if version == "0.5.23":
        return {**capped, "waiting_refresh": rng.random() < 0.5}
    if rng.random() < 0.6:
        return {"tree": "mamba"}
    return {"tree": "unified", **capped}


def _buffers(rng: random.Random) -> Case:
    strategy, chunk = rng.choice(STRATEGIES), rng.choice(CHUNKS)
    page = 1 if strategy == "no_buffer" else rng.choice(PAGES)
    while max(chunk, page) % min(chunk, page):
        page //= 2
    overlap = strategy == "extra_buffer_lazy" or (strategy != "no_buffer" and rng.random() < 0.65)
    interval = rng.choice([64, 64, 128, 128, 192, 256, 512])
    if page == 1 and rng.random() < 0.15:
        interval = rng.choice([1, 10, 50, 100])
    return {"strategy": strategy, "mamba_chunk": chunk, "page_size": page, "overlap": overlap,
            "track_interval": interval}  # fmt: skip


def _prefill(rng: random.Random, page: int) -> Case:
    size = None if rng.random() < 0.12 else -(-rng.choice(PREFILL_CHUNKS) // page) * page
    return {"chunked_prefill_size": size, "max_prefill_tokens": rng.choice(PREFILL_BUDGETS)}


def slots_per_request(config: Case) -> int:
    """Return the state slots by which SGLang divides to bound the running requests."""
    skips = int(config.get("skip_decode_lock", False))
    tracking = {"no_buffer": skips, "extra_buffer_lazy": 1, "extra_buffer": 1 + config["overlap"]}
    return int(3 - skips + tracking[config["strategy"]])


def _slots(rng: random.Random, config: Case, pressure: str) -> Case:
    retracts = pressure in ("retract", "thrash")
    ratio, fewest = slots_per_request(config), 4 if retracts else 1
    tight = pressure in ("states", "both", "crowd") or rng.random() < 0.1
    tight &= pressure != "thrash"
    many = rng.choice([fewest, fewest + 1, fewest + 3]) * ratio + rng.randint(0, 4)
    slots = many if tight else rng.choice([24, 40, 64, 100])
    out: Case = {"mamba_slots": slots, "max_running": rng.choice([1, 2, 3, 4, 8, 16, 16])}
    if retracts:
        out["max_running"] = rng.choice([4, 8, 16] if pressure == "retract" else [8, 16])
    if rng.random() < 0.25:
        out["int8"] = True
        out["int8_slots"] = rng.choice([None, 2, 3, 4, 6, 10, 24])
    return out


def _kv(rng: random.Random, config: Case, requests: list[Case], pressure: str) -> Case:
    page = config["page_size"]
    needs = [total(r["prompt"]) + total(r["output"]) + 2 * page + 2 for r in requests]
    tokens = float(sum(needs) + 16 * page)
    if pressure in ("kv", "both", "crowd"):
        tokens = min(tokens, max(needs) * rng.choice([1.05, 1.3, 1.7, 2.5, 4.0]))
    if pressure == "retract":
        # Admission counts about 70% of what running requests may still generate.
        tokens = max(max(needs) * 1.1, sum(needs) / len(needs) * rng.uniform(2.2, 5.8))
    if pressure == "thrash":
        tokens = max(max(needs) * 1.05, sum(needs) / len(needs) * rng.uniform(2.0, 3.5))
    if rng.random() < 0.02:
        tokens = max(needs) * 0.8  # the longest request never fits
    return {"kv_tokens": -(-int(tokens) // page) * page}
