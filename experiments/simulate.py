"""One point of an experiment: from its resolved configuration to records and a summary row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from experiments.config import (
    ArrivalsConfig,
    EngineConfig,
    Experiment,
    InlineRequest,
    PolicyConfig,
    TraceConfig,
    memory_bytes,
)
from sim import models, policies
from sim.attribution import attribute, lost_at_preemption
from sim.cost import device as devices
from sim.cost.modelled import ModelledBackend
from sim.engine import Engine
from sim.ledger import Ledger
from sim.loop import replay
from sim.metrics import summary
from sim.model import Model
from sim.policy import Policy
from sim.pool.engine import PoolEngine
from sim.records import Records
from sim.vllm.engine import VllmEngine
from sim.vllm.geometry_types import Geometry
from sim.vllm.model_geometry import Serving, geometry_of_model, token_bytes
from sim.vllm.options import VllmOptions
from traces import arrivals
from traces.generators import generate
from traces.identity import Prefixes, identify
from traces.registry import read_trace
from traces.trace import Request, Run, Trace, from_requests


@dataclass(frozen=True)
class Point:
    """A resolved experiment (sweep applied) with one policy and one seed."""

    experiment: Experiment
    policy: PolicyConfig
    axes: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def version(self) -> str:
        """The engine that hosts the policy."""
        return self.policy.engine or self.experiment.engine.version

    def columns(self) -> dict[str, Any]:
        """What identifies the point in tables."""
        return {"policy": self.policy.shown, "seed": self.seed, **dict(self.axes)}


@dataclass(frozen=True)
class Result:
    """The summary row of a point, and its tables by name (none for ``kind: geometry``)."""

    row: dict[str, Any]
    tables: dict[str, pd.DataFrame]


def run_point(point: Point) -> Result:
    """Size or replay the point; every table carries the point's columns."""
    if point.experiment.kind == "geometry":
        return Result(point.columns() | geometry_row(point), {})
    return _replay(point)


# -------------------------------------------------------------------------------- pieces
def serving(point: Point) -> Serving:
    """The flags that size the cache."""
    e, engine = point.experiment, point.experiment.engine
    version = point.version if point.version != "pool" else "vllm-0.33"
    mode = load_policy(point).layout(point.version).mode
    return Serving(
        engine=version,
        mode="align" if mode == "exact" else mode,
        tp=e.hardware.tp,
        ssm_dtype=engine.ssm_dtype,
        kv_dtype=engine.kv_dtype,
        max_model_len=engine.max_model_len,
        memory_bytes=memory_bytes(e.memory),
        block_tokens=engine.block_size,
        unit_tokens=engine.prefix_match_unit,
    )


def load_policy(point: Point) -> Policy:
    """The point's policy with its parameters."""
    return policies.load(point.policy.name, **point.policy.parameters)


def options(engine: EngineConfig, version: str) -> VllmOptions:
    """Scheduler settings as the engine takes them."""
    return VllmOptions(
        version=version.removeprefix("vllm-") if version != "pool" else "0.33",
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        watermark=engine.watermark,
        reserve_full_isl=engine.reserve_full_isl,
        priority=engine.priority,
        async_scheduling=engine.async_scheduling,
    )


def load_trace(config: TraceConfig, seed: int) -> tuple[Trace, Prefixes]:
    """The trace of a point, read or generated once per process."""
    return _load_trace(config.model_dump_json(), seed if _is_random(config) else 0)


def _is_random(config: TraceConfig) -> bool:
    return config.generator is not None or config.arrivals is not None


@lru_cache(maxsize=4)
def _load_trace(text: str, seed: int) -> tuple[Trace, Prefixes]:
    config = TraceConfig.model_validate_json(text)
    if config.path:
        trace = read_trace(config.path, **config.options)
    elif config.requests:
        trace = _written(config.requests)
    else:
        assert config.generator is not None, "checked before the run"
        trace = generate(config.generator, config.parameters, seed)
    if config.limit:
        trace = arrivals.limit(trace, config.limit)
    if config.arrivals is not None:
        trace = _with_arrivals(trace, config.arrivals, seed)
    if config.arrival_scale != 1.0:
        trace = arrivals.scale(trace, config.arrival_scale)
    return trace, identify(trace)


def _written(rows: list[InlineRequest]) -> Trace:
    """Requests written in the experiment file; equal content numbers are equal text."""
    return from_requests(
        Request(
            id=row.id,
            prompt=tuple(Run(content << 32, tokens) for content, tokens in row.prompt),
            output_tokens=row.output_tokens,
            after=(rows[i - 1].id,) if i else (),
        )
        for i, row in enumerate(rows)
    )


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


@lru_cache(maxsize=64)
def sized(model: str, serving: Serving) -> tuple[Model, Geometry]:
    """Model and cache geometry, once per process."""
    loaded = models.load(model)
    return loaded, geometry_of_model(loaded, serving)


def make_engine(point: Point, trace: Trace, prefixes: Prefixes, ledger: Ledger) -> Engine:
    """The engine that hosts the point's policy."""
    flags = serving(point)
    model, geometry = sized(point.experiment.model, flags)
    policy, opts = load_policy(point), options(point.experiment.engine, point.version)
    if point.version == "pool":
        layers = model.count("M")
        return PoolEngine(
            trace, prefixes, policy, opts, ledger,
            kv_bytes_per_token=token_bytes(model, flags.tp, flags.kv_dtype) * model.count("*"),
            state_bytes=geometry.state_bytes * layers,
        )  # fmt: skip
    return VllmEngine(trace, prefixes, geometry, policy, opts, ledger)


def _replay(point: Point) -> Result:
    e = point.experiment
    trace, prefixes = load_trace(e.trace, point.seed)
    ledger, records = Ledger(), Records(trace)
    engine = make_engine(point, trace, prefixes, ledger)
    flags = serving(point)
    model, geometry = sized(e.model, flags)
    backend = ModelledBackend(
        model,
        devices.load(e.hardware.device),
        e.hardware.tp,
        kv_dtype=e.engine.kv_dtype,
        ssm_dtype=e.engine.ssm_dtype,
    )
    replay(engine, trace, backend, records, host_ns=backend.host_ns)
    engine.check()
    reuse = load_policy(point).layout(point.version).mode != "none" or not model.count("M")
    grid, block = geometry.unit_tokens, geometry.block_tokens
    if point.version == "pool":
        grid = block = 1
    reasons = attribute(
        trace, prefixes, records, ledger, grid_tokens=grid, block_tokens=block, reuse=reuse
    )
    row = point.columns() | summary(
        records,
        capacity_bytes=engine.capacity_bytes,
        ttft_limit_s=e.ttft_limit_s,
        tpot_limit_s=e.tpot_limit_s,
    )
    row |= {f"reason_{name}_tokens": int(reasons[name].sum()) for name in reasons}
    row |= _rates(trace, e.trace.arrival_scale)
    row |= {"block_tokens": geometry.block_tokens}
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
    kv = token_bytes(model, flags.tp, flags.kv_dtype) * model.count("*")
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
