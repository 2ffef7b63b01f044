"""One point of an experiment: from its resolved configuration to records and a summary row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from experiments.cli_errors import UsageError
from experiments.config import ArrivalsConfig, InlineRequest, TraceConfig
from experiments.costs import ROUNDS, Prices, Pricing
from experiments.engines import Point, host, kv_bytes_per_token, serving, sized
from sim.attribution import attribute, lost_at_preemption
from sim.cost.profile_curve import ProfileMiss
from sim.ledger import Ledger
from sim.loop import StalledError, replay
from sim.metrics import summary
from sim.records import Records
from sim.sglang.pools import EngineCrashError
from traces import arrivals
from traces.generators import generate
from traces.identity import Prefixes, identify
from traces.registry import READERS, detect, options_of, read_trace
from traces.trace import Request, Run, Trace, forget_outputs, from_requests


@dataclass(frozen=True)
class Result:
    """The summary row of a point, and its tables by name (none for ``kind: geometry``)."""

    row: dict[str, Any]
    tables: dict[str, pd.DataFrame]


def run_point(point: Point) -> Result:
    """Size or replay the point; every table carries the point's columns."""
    if point.experiment.kind == "geometry":
        return Result(point.columns() | geometry_row(point), {})
    try:
        return _replay(point)
    except ProfileMiss as error:
        raise UsageError(f"policy {point.policy.shown}: {error}") from None
    except (StalledError, EngineCrashError) as error:
        at = ", ".join(f"{name} {value}" for name, value in point.axes)
        verb = "would crash" if isinstance(error, EngineCrashError) else "stalls"
        where = f"policy {point.policy.shown}{' at ' + at if at else ''}"
        raise UsageError(f"{where}: {point.version} {verb}: {error}") from None


# -------------------------------------------------------------------------------- traces
def load_trace(config: TraceConfig, seed: int) -> tuple[Trace, Prefixes]:
    """The trace of a point, read or generated once per process."""
    return _load_trace(config.model_dump_json(), seed if _is_random(config) else 0)


def _is_random(config: TraceConfig) -> bool:
    return config.generator is not None or config.arrivals is not None


@lru_cache(maxsize=4)
def _load_trace(text: str, seed: int) -> tuple[Trace, Prefixes]:
    config = TraceConfig.model_validate_json(text)
    if config.path:
        trace = read_trace(config.path, **_reading(config))
    elif config.requests:
        trace = _written(config.requests)
    else:
        assert config.generator is not None, "checked before the run"
        trace = generate(config.generator, config.parameters, seed)
    if config.answers == "unknown":
        trace = forget_outputs(trace)
    if config.limit:
        trace = arrivals.limit(trace, config.limit)
    if config.arrivals is not None:
        trace = _with_arrivals(trace, config.arrivals, seed)
    if config.arrival_scale != 1.0:
        trace = arrivals.scale(trace, config.arrival_scale)
    return trace, identify(trace)


def _reading(config: TraceConfig) -> dict[str, Any]:
    """Options of the file's reader."""
    options, format = dict(config.options), config.options.get("format")
    if config.answers and config.path and _infers(format or detect(config.path)):
        options["infer_appends"] = "on" if config.answers == "known" else "off"
    return options


def _infers(format: object) -> bool:
    """Whether files of this format leave answers to be inferred."""
    return format in READERS and "infer_appends" in options_of(str(format))


def _written(rows: list[InlineRequest]) -> Trace:
    """Requests written in the experiment file; equal content numbers are equal text."""
    return from_requests(
        Request(
            id=row.id,
            prompt=_runs(row.prompt),
            output=_runs(row.output),
            output_tokens=row.output_tokens,
            after=(rows[i - 1].id,) if i and row.arrival_ns is None else (),
            arrival_ns=row.arrival_ns,
        )
        for i, row in enumerate(rows)
    )


def _runs(pairs: list[tuple[int, int]]) -> tuple[Run, ...]:
    return tuple(Run(content << 32, tokens) for content, tokens in pairs)


def _with_arrivals(trace: Trace, a: ArrivalsConfig, seed: int) -> Trace:
    if a.kind == "closed_loop":
        return arrivals.with_arrivals(trace, arrivals.closed_loop(a.users, a.think_s, seed=seed))
    if a.kind == "gamma":
        process = arrivals.gamma(a.rate, a.cv, seed)
    elif a.kind == "poisson":
        process = arrivals.poisson(a.rate, seed)
    else:
        process = arrivals.fixed(a.rate)
    return arrivals.with_arrivals(trace, process, replace_times=True)


# -------------------------------------------------------------------------------- the run
def _replay(point: Point) -> Result:
    pricing = Pricing(point.experiment)
    for _ in range(ROUNDS):
        result = replay_once(point, pricing)
        if not pricing.measured_misses():
            return result
    raise UsageError(f"{point.experiment.cost.profile}: still lacks sizes after {ROUNDS} rounds")


def replay_once(point: Point, pricing: Prices) -> Result:
    """Replay the point with a backend of ``pricing``."""
    e = point.experiment
    trace, prefixes = load_trace(e.trace, point.seed)
    ledger, records = Ledger(), Records(trace)
    hosted = host(point, trace, prefixes, ledger)
    backend = pricing.backend(hosted.ssm_dtype)
    replay(hosted.engine, trace, backend, records, host_ns=backend.host_ns)
    hosted.engine.check()
    reasons = attribute(
        trace, prefixes, records, ledger,
        grid_tokens=hosted.grid_tokens,
        block_tokens=hosted.block_tokens,
        reuse=hosted.reuse,
        tree=hosted.tree,
    )  # fmt: skip
    row = point.columns() | summary(
        records,
        capacity_bytes=hosted.engine.capacity_bytes,
        ledger=ledger,
        ttft_limit_s=e.ttft_limit_s,
        tpot_limit_s=e.tpot_limit_s,
    )
    row |= {f"reason_{name}_tokens": int(reasons[name].sum()) for name in reasons}
    row |= _rates(trace, e.trace.arrival_scale) | hosted.columns
    row |= getattr(hosted.engine, "report", dict)()
    requests = pd.concat([records.requests(), reasons.add_prefix("reason_")], axis=1)
    tables = {"requests": requests, "preemptions": lost_at_preemption(trace, records)}
    return Result(row, {name: t.assign(**point.columns()) for name, t in tables.items()})


def _rates(trace: Trace, scale: float) -> dict[str, float]:
    """Open-loop arrivals a second, as replayed and before ``arrival_scale`` slowed them."""
    known = trace.arrival_ns[trace.arrival_ns >= 0]
    span_s = float(known.max() - known.min()) / 1e9 if len(known) > 1 else 0.0
    if not span_s:
        return {}
    rate = (len(known) - 1) / span_s
    return {"arrivals_per_s": rate, "unscaled_arrivals_per_s": rate * scale}


def geometry_row(point: Point) -> dict[str, Any]:
    """Block, page, padding and bytes of one request of ``request_tokens``."""
    e, flags = point.experiment, serving(point)
    model, g = sized(e.model, flags)
    layers = model.count("M")
    kv = kv_bytes_per_token(model, flags.tp, flags.kv_dtype)
    state = g.state_bytes * layers
    tokens = e.request_tokens
    blocks = sum(
        -(-tokens // group.block_tokens) if group.kind == "attention" else 1 for group in g.groups
    )
    padding = 100 * (g.page_bytes - g.state_bytes) / g.state_bytes if g.state_bytes else 0.0
    return {
        "block_tokens": g.block_tokens,
        "page_bytes": g.page_bytes,
        "padding_pct": round(padding, 2),
        "groups": len(g.groups),
        "pool_bytes_per_block": g.bytes_per_block,
        "pool_blocks": g.num_blocks,
        "state_bytes": state,
        "kv_bytes_per_token": kv,
        "request_bytes": state + kv * tokens,
        "request_gib": (state + kv * tokens) / 2**30,
        "allocated_bytes": blocks * g.bytes_per_block,
        "allocated_gib": blocks * g.bytes_per_block / 2**30,
    }
