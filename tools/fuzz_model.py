"""Random models for the cases: layers, block and page sizes, state families.

Keys with a leading underscore are notes between the generator's modules, dropped at the end:
the block and page sizes that the planner under test is expected to choose, the layers of a preset.
"""

import math
import random
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]

HYBRIDS = [
    *["M*"] * 6,
    *["M**", "MM*", "MMM*", "MMM**", "MM*MM*", "MMMMM*M*", "M-*-M-", "*M", "**MM*", "MMMM***"],
    *["MMMMMM**M", "M***", "*MM**M", "MMMM*"],
]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def preset(rng: random.Random) -> Case:
    """Return Nemotron-H-8B over a random tensor parallelism."""
    tp = rng.choice([1, 1, 2, 4, 8])
    page = 4_259_840 // tp
    return {
        "preset": "nemotron_h_8b", "mode": rng.choice(["align", "align", "align", "none"]),
        "tp": tp, "max_model_len": 16384, "_block": 1040, "_page_bytes": page,
        "_layers": "MMMM*" * 4 + "M" * 8, "_long": 16,
    }  # fmt: skip


def small(rng: random.Random, version: str) -> Case:
    """Return a small model: given or derived block, one of several state families."""
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
    return SIZES.get(m["type"], _matrix_bytes)(m, tp)


def _raw_bytes(m: Case, tp: int) -> int:
    return sum(math.prod(s) * DTYPE_BYTES[d] for s, d in zip(m["shapes"], m["dtypes"], strict=True))


def _mamba1_bytes(m: Case, tp: int) -> int:
    return int(m["intermediate_size"] // tp * (3 * 2 + m["state_size"] * 4))


def _mamba2_bytes(m: Case, tp: int) -> int:
    conv = 3 * (m["intermediate_size"] + 2 * m["n_groups"] * m["state_size"])
    ssm = m["num_heads"] * m["head_dim"] * m["state_size"] * DTYPE_BYTES[m["ssm_dtype"]]
    return int((conv * 2 + ssm) // tp)


def _conv_bytes(m: Case, tp: int) -> int:
    return int(3 * m["intermediate_size"] // tp * 2)


def _matrix_bytes(m: Case, tp: int) -> int:
    heads = int(m.get("num_v_heads") or m["num_heads"]) // tp
    dim = int(m.get("head_v_dim") or m["head_dim"])
    return heads * (dim * dim * 4 + 3 * 3 * dim * 2)


SIZES: dict[str, Callable[[Case, int], int]] = {
    "raw": _raw_bytes, "mamba1": _mamba1_bytes, "mamba2": _mamba2_bytes, "short_conv": _conv_bytes,
}  # fmt: skip
