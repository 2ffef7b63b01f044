"""The points of an experiment, what each depends on, and how finished ones are kept."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import costs
from experiments.cli_errors import UsageError
from experiments.config import Experiment, PolicyConfig, TraceConfig, checked, put
from experiments.engines import ARTIFACT, Point, host, load_policy, serving, sglang_of, sized
from experiments.hits import Artifact, run_hits
from experiments.simulate import Result, load_trace, run_point
from sim.ledger import Ledger
from sim.policy import Policy
from traces.registry import sources

ROOT = Path(__file__).parent.parent
PARTS = ("traces", "sim")
LIBRARIES = ("numpy", "simpy")
TABLES = ("requests", "preemptions")


def points_of(experiment: Experiment) -> list[Point]:
    """Every combination of sweep axes, policies and seeds, in order."""
    sweep = experiment.axes()
    names = list(sweep)
    out = []
    for values in itertools.product(*sweep.values()):
        resolved = _resolve(experiment, dict(zip(names, values, strict=True)))
        axes = tuple(
            (name.split(".")[-1], _shown(v, sweep[name]))
            for name, v in zip(names, values, strict=True)
        )
        named = zip(experiment.policies, resolved.policies, strict=True)
        plain = [new.model_copy(update={"label": old.shown}) for old, new in named]
        for policy, seed in itertools.product(plain, resolved.seeds):
            out.append(Point(_with_settings(resolved, policy), policy, axes, seed))
    return out


def _with_settings(experiment: Experiment, policy: PolicyConfig) -> Experiment:
    """The experiment with the policy's own engine settings."""
    if not policy.engine_settings:
        return experiment
    data = experiment.model_dump(by_alias=True)
    for dotted, value in policy.engine_settings.items():
        put(data, f"engine.{dotted}", value)
    return checked(data, f"engine_settings of policy {policy.shown}")


def _shown(value: Any, axis: list[Any]) -> Any:
    """The value in tables; as text where the axis has anything but numbers."""
    if all(isinstance(v, (int, float)) for v in axis):
        return value
    return "unset" if value is None else str(value)


def _resolve(experiment: Experiment, values: dict[str, Any]) -> Experiment:
    data = experiment.model_dump(by_alias=True)
    for dotted, value in values.items():
        put(data, dotted, value)
    return checked(data, f"sweep of {', '.join(values)}" if values else experiment.name)


def refuse_impossible(points: list[Point]) -> None:
    """Raise ``UsageError`` for what could never run, before anything does."""
    seen = set()
    for point in points:
        e = point.experiment
        depends = (point.policy, e.model, e.memory, e.engine, e.hardware, e.trace)
        key = tuple(d if isinstance(d, str) else d.model_dump_json() for d in depends)
        if key in seen:
            continue
        seen.add(key)
        try:
            _check(point)
        except (ValueError, TypeError) as error:
            raise UsageError(f"policy {point.policy.shown}: {error}") from None


def _check(point: Point) -> None:
    e, policy = point.experiment, load_policy(point)
    if e.sizes is not None and point.version not in ("pool", ARTIFACT):
        raise ValueError(f"sizes are given, and {point.version} takes a model's; pool takes them")
    if point.version == ARTIFACT:
        if e.kind != "hits":
            raise ValueError(f"{ARTIFACT} runs one request after another: kind must be hits")
        Artifact(**point.policy.parameters)
        return
    if point.version not in policy.engines:
        hosts = ", ".join(policy.engines)
        raise ValueError(f"cannot run on {point.version}; it can on {hosts}")
    if point.version.startswith("sglang"):
        if e.kind == "geometry":
            raise ValueError("kind: geometry sizes vLLM's blocks; see prefixlab plan for SGLang")
        sglang_of(point)
    _, geometry = sized(e.model, serving(point))
    if e.kind == "geometry":
        return
    costs.check(e)
    if not (e.trace.path or e.trace.generator or e.trace.requests):
        raise ValueError("no trace: give trace.path, trace.generator or trace.requests")
    _check_interval(policy, geometry.scheduler_block_tokens)
    _check_pool(point)


def _check_interval(policy: Policy, block: int) -> None:
    """vLLM refuses an interval off its block grid when it starts, so we do."""
    interval = getattr(policy, "retention_interval", None)
    if interval and interval % block:
        near = max(1, round(interval / block)) * block
        raise ValueError(
            f"retention_interval is {interval}; allowed are null, 0 and multiples of the block "
            f"of {block} tokens, the nearest is {near}"
        )


def _check_pool(point: Point) -> None:
    """Some request of the trace must fit; others are rejected in the run and counted."""
    trace, prefixes = load_trace(point.experiment.trace, point.seed)
    if not len(trace):
        raise ValueError("the trace has no requests")
    shortest = int((trace.prompt_tokens + trace.output_tokens).argmin())
    reason = host(point, trace, prefixes, Ledger()).engine.reject_reason(shortest)
    if reason:
        raise ValueError(f"not even the shortest request, {trace.ids[shortest]!r}, fits: {reason}")


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of everything in the packages that can change a result."""
    digest = hashlib.sha256()
    files = [f for part in PARTS for f in (ROOT / part).rglob("*") if f.suffix in
             (".py", ".yaml", ".json")]  # fmt: skip
    own = [ROOT / "experiments" / name for name in ("simulate.py", "engines.py", "costs.py")]
    for file in [*sorted(files), *own]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _libraries() -> list[str]:
    return [version(name) for name in LIBRARIES]


@lru_cache(maxsize=8)
def file_hash(path: str) -> str:
    """SHA-256 of a file."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def key_of(point: Point) -> str:
    """A hash of everything the point's result depends on."""
    e = point.experiment.model_dump(exclude={"description", "plots", "sweep", "policies", "seeds",
                                             "table", "table_only", "name"})  # fmt: skip
    parts: dict[str, Any] = {
        "config": e,
        "policy": point.policy.model_dump(),
        "columns": point.columns(),
        "source": source_hash(),
        "profile": costs.identity(point.experiment.cost),
        "libraries": _libraries(),
    }
    for path in (*_trace_files(point.experiment.trace), point.policy.name):
        if Path(path).is_file():
            parts[path] = file_hash(path)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _trace_files(trace: TraceConfig) -> list[str]:
    """Every file that the trace is read from; a generator may have a ``path`` too."""
    path = trace.path or trace.parameters.get("path")
    if not isinstance(path, str) or not Path(path).exists():
        return []
    options = {**trace.parameters, **trace.options}
    format = options.pop("format", None)
    return sources(path, format, **{k: v for k, v in options.items() if k != "path"})


def run_any(point: Point) -> Result:
    """Run the point as its experiment's kind says."""
    return run_hits(point) if point.experiment.kind == "hits" else run_point(point)


def compute(point: Point, folder: Path) -> str:
    """Run the point and keep it."""
    return keep(run_any(point), key_of(point), folder)


def keep(result: Result, key: str, folder: Path) -> str:
    """Write the result under its key; the row's file appears last: it marks what is complete."""
    for name, table in result.tables.items():
        part = folder / f"{key}.{name}.{os.getpid()}.part"
        table.to_parquet(part, index=False)
        os.replace(part, folder / f"{key}.{name}.parquet")
    part = folder / f"{key}.{os.getpid()}.part"
    part.write_text(json.dumps(result.row), encoding="utf-8")
    os.replace(part, folder / f"{key}.json")
    return key


def missing(points: list[Point], folder: Path) -> Iterator[Point]:
    """Points without a finished result."""
    return (p for p in points if not (folder / f"{key_of(p)}.json").is_file())


def collect(points: list[Point], folder: Path) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Summary and the tables by name of all finished points, in the experiment's order."""
    keys = [k for p in points if (folder / f"{(k := key_of(p))}.json").is_file()]
    rows = [json.loads((folder / f"{k}.json").read_text(encoding="utf-8")) for k in keys]
    return pd.DataFrame(rows), {name: _joined(folder, keys, name) for name in TABLES}


def _joined(folder: Path, keys: list[str], name: str) -> pd.DataFrame:
    files = [folder / f"{k}.{name}.parquet" for k in keys]
    frames = [pd.read_parquet(f) for f in files if f.is_file()]
    filled = [f for f in frames if len(f)] or frames[:1]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()
