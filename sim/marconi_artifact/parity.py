"""Compare our replay of the artifact with a recorded file of its runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sim.marconi_artifact.outcome import Replay, Sequence
from sim.marconi_artifact.replay import replay
from sim.marconi_artifact.sizes import Sizes
from sim.marconi_artifact.tree import Tokens

Row = dict[str, Any]
_VOCABULARY = 32_000
# What a run was asked, not what came out.
_INPUTS = ("policy", "alpha", "capacity_bytes", "block_size")


def is_recorded(data: object) -> bool:
    """Whether ``data`` is a file of the artifact's runs."""
    return isinstance(data, dict) and {"requests", "results", "vllm_block_size"} <= data.keys()


def compare(data: Row) -> Iterator[tuple[str, list[str]]]:
    """``(name, differences)`` of each recorded run of a file.

    Raises ``ValueError`` on a file that lacks a part of a recording.
    """
    try:
        requests = [sequence(request) for request in data["requests"]]
        for result in data["results"]:
            name = f"{data['name']} {result['policy']} alpha {result['alpha']}"
            yield name, list(_differences(result, recorded_form(run(data, result, requests))))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a recording of the artifact's runs: {error!r}") from error


def run(data: Row, result: Row, requests: list[Sequence]) -> Replay:
    """Our replay of one recorded run."""
    model = data["model"]
    return replay(
        requests,
        version="block" if result["policy"] == "vllm+" else result["policy"],
        capacity_bytes=data["capacity_bytes"],
        sizes=Sizes(
            ssm_layers=model["num_ssm_layers"],
            attention_layers=model["num_attn_layers"],
            mlp_layers=model["num_mlp_layers"],
            width=model["d"],
            state_width=model["n"],
        ),
        alpha=result["alpha"],
        block_tokens=data["vllm_block_size"],
        bootstrap_multiplier=data["bootstrap_multiplier"],
    )


def recorded_form(ours: Replay) -> Row:
    """A replay under the recording's names."""
    evictions = [[e.request, e.kind, e.depth, e.edge] for e in ours.evictions]
    text = json.dumps(evictions, separators=(",", ":"))
    return {
        "reused": ours.reused.tolist(),
        "states_after": ours.states_after.tolist(),
        "kv_tokens_after": ours.kv_tokens_after.tolist(),
        "evictions": evictions,
        "n_evictions": len(evictions),
        "evictions_crc32": zlib.crc32(text.encode()),
        "max_tree_bytes": ours.max_bytes,
        "final_states": int(ours.states_after[-1]),
        "final_kv_tokens": int(ours.kv_tokens_after[-1]),
        "tokens_in": int(ours.prompt_tokens.sum()),
        "tokens_reused": int(ours.reused.sum()),
        "token_hit_rate": ours.token_hit_rate,
        "request_hit_rate": ours.request_hit_rate,
        "flops_saved": ours.flops_saved,
        "alpha_tuned": ours.alpha,
        "reqs_before_first_evict": ours.first_evicting,
        "bootstrap_window": ours.window,
    }


def sequence(request: Any) -> Sequence:
    """A recorded request: runs of ``[seed, length]``, token ids, or two strings of digits."""
    if isinstance(request, list):
        prompt, output = ([int(digit) for digit in text] for text in request)
        return Sequence(np.array(prompt + output, np.int64), len(prompt))
    if "input_tokens" in request:
        prompt = request["input_tokens"]
        return Sequence(np.array(prompt + request["output_tokens"], np.int64), len(prompt))
    runs = request["in"] + request["out"]
    tokens = np.concatenate([expand(seed, length) for seed, length in runs])
    return Sequence(tokens, sum(length for _, length in request["in"]))


def expand(seed: int, length: int) -> Tokens:
    """The tokens of a run: a 32-bit mix of its seed and each position, as the recording says."""
    x = np.arange(length, dtype=np.uint32) * np.uint32(0x85EBCA77)
    x += np.uint32((seed * 0x9E3779B1 + 0x1B873593) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    return np.asarray(x % np.uint32(_VOCABULARY), np.int64)


def _differences(recorded: Row, ours: Row) -> Iterator[str]:
    for key, value in recorded.items():
        if key in _INPUTS:
            continue
        if key not in ours:
            yield f"{key}: recorded, not computed here"
        elif value != ours[key]:
            yield f"{key}: {_where(value, ours[key])}"


def _where(recorded: Any, ours: Any) -> str:
    if not isinstance(recorded, list):
        return f"recorded {recorded}, here {ours}"
    if len(recorded) != len(ours):
        return f"recorded {len(recorded)} entries, here {len(ours)}"
    i = next(i for i, (a, b) in enumerate(zip(recorded, ours, strict=True)) if a != b)
    return f"at {i} recorded {recorded[i]}, here {ours[i]}"
