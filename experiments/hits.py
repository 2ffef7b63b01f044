"""``kind: hits``: one request after another, no clock; engines, and Marconi's artifact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.config import memory_bytes
from experiments.engines import ARTIFACT, Point, host, kv_bytes_per_token, serving, sized, sizes_of
from experiments.simulate import Result, load_trace
from sim.ledger import Ledger
from sim.loop import serial
from sim.marconi_artifact.replay import VERSIONS, replay_trace
from sim.marconi_artifact.sizes import Sizes
from sim.records import Hits
from traces.trace import Ints, Trace


@dataclass(frozen=True)
class Artifact:
    """Parameters of Marconi's published artifact as an entry of ``policies``.

    ``version``: V1 (LRU), V2 (alpha tuned), V3 (``alpha`` given) or block (``block_tokens``).
    ``exact_booking`` mends its booking of evicted bytes alone. Raises ``ValueError``.
    """

    version: str = "V2"
    alpha: float = 0.0
    block_tokens: int = 32
    bootstrap_multiplier: int = 5
    exact_booking: bool = False

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(
                f"version is {self.version!r}; allowed are {', '.join(VERSIONS)}, the default is V2"
            )


def run_hits(point: Point) -> Result:
    """The summary row of the point, and a row for each request."""
    trace, prefixes = load_trace(point.experiment.trace, point.seed)
    if point.version == ARTIFACT:
        hits, more = _artifact(point, trace)
        served = np.ones(len(trace), bool)
    else:
        recorder = Hits(trace)
        engine = host(point, trace, prefixes, Ledger(on=False)).engine
        serial(engine, trace, recorder)
        engine.check()
        hits, served = np.array(recorder.hit_tokens, np.int64), np.ones(len(trace), bool)
        served[list(recorder.reasons)] = False
        more = dict(getattr(engine, "report", dict)())
    row = point.columns() | _rates(hits, trace.prompt_tokens, served) | more
    row["flop_saved"] = _flop_saved(point, hits)
    requests = pd.DataFrame(
        {"id": trace.ids, "prompt_tokens": trace.prompt_tokens, "hit_tokens": hits}
    )
    return Result(row, {"requests": requests.assign(**point.columns())})


def _artifact(point: Point, trace: Trace) -> tuple[Ints, dict[str, Any]]:
    given = Artifact(**point.policy.parameters)
    capacity = memory_bytes(point.experiment.memory)
    done = replay_trace(
        trace, capacity_bytes=capacity, sizes=_sizes(point), version=given.version,
        alpha=given.alpha, block_tokens=given.block_tokens, exact_booking=given.exact_booking,
        bootstrap_multiplier=given.bootstrap_multiplier,
    )  # fmt: skip
    return done.reused, {"bytes_over_capacity": done.max_bytes / capacity, "alpha": done.alpha}


def _sizes(point: Point) -> Sizes:
    """Those of the experiment, else its model's bytes with the artifact's formulas of FLOP."""
    if point.experiment.sizes is not None:
        return sizes_of(point.experiment.sizes)
    flags = serving(point)
    model, geometry = sized(point.experiment.model, flags)
    return Sizes(
        model.count("M"),
        model.count("*"),
        model.count("-"),
        model.hidden_size,
        model.state.args.get("state_size", 128) if model.state else 128,
        kv_token_bytes=kv_bytes_per_token(model, flags.tp, flags.kv_dtype),
        state_bytes=geometry.state_bytes * model.count("M"),
    )


def _rates(hits: Ints, prompt: Ints, served: Any) -> dict[str, Any]:
    shares = hits[served] / np.maximum(prompt[served], 1)
    return {
        "requests": len(hits),
        "rejected": int(len(served) - served.sum()),
        "prompt_tokens": int(prompt.sum()),
        "hit_tokens": int(hits.sum()),
        "token_hit_rate": float(hits[served].sum() / max(1, prompt[served].sum())),
        "second_half_token_hit_rate": _second_half(hits, prompt, served),
        "request_hit_rate": float((hits[served] > 0).mean()) if served.any() else 0.0,
        "mean_request_hit_rate": float(shares.mean()) if served.any() else 0.0,
    }


def _second_half(hits: Ints, prompt: Ints, served: Any) -> float:
    """Over the later half of the requests in the file's order: the first fills the cache."""
    later = served & (np.arange(len(hits)) >= len(hits) // 2)
    return float(hits[later].sum() / max(1, prompt[later].sum()))


def _flop_saved(point: Point, hits: Ints) -> float:
    """By the artifact's formulas, whoever hit."""
    sizes = _sizes(point)
    return float(sum(sizes.prefill_flops(n) for n in hits.tolist()))
