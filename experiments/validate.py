"""One trace modelled and executed: times and decisions, request by request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from experiments.config import CostConfig
from experiments.costs import Pricing, profile_of
from experiments.engines import Point, host
from experiments.verify import setup_of
from sim.ledger import Ledger
from sim.loop import replay
from sim.recorder import Recorder
from sim.records import Records
from sim.step import Chunk, Step, StepBackend, StepResult
from traces.identity import identify
from traces.trace import Trace

DECIDED = ["hit_tokens", "matched_tokens", "preemptions"]


@dataclass
class Measured:
    """A backend that keeps every duration that another one gives. ``wall_ns`` is the clock's."""

    backend: StepBackend
    durations: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    wall_ns: int = 0

    def run(self, step: Step) -> StepResult:
        """As the other does."""
        start = time.perf_counter_ns()
        result = self.backend.run(step)
        self.wall_ns += time.perf_counter_ns() - start
        prefill = sum(c.tokens for c in step.chunks)
        self.durations += result.durations_ns.tolist()
        self.shapes.append((prefill, len(step.decodes), step.decode_context_tokens))
        return result


@dataclass
class Replayed:
    """A backend that answers recorded durations, one a step."""

    durations: Iterator[int]

    def run(self, step: Step) -> StepResult:
        """The next one."""
        return StepResult(np.array([next(self.durations)], np.int64))


@dataclass(frozen=True)
class Validated:
    """Requests of one policy: ``modelled``, ``executed`` and executed ``again`` (seconds by
    request), and of steps the modelled and executed seconds for the same work.

    ``decisions_equal``: share of requests decided alike where the modelled engine is driven by
    the executed durations; ``agreement``: where it has its own.
    """

    policy: str
    engine: str
    requests: pd.DataFrame
    steps: pd.DataFrame
    decisions_equal: float
    agreement: float
    wall_s: float
    speed: float

    def error(self, figure: str, left: str, right: str) -> float:
        """Median over requests of the absolute relative difference."""
        a, b = (self.requests[f"{figure}_{x}_s"].to_numpy() for x in (left, right))
        known = (b > 0) & np.isfinite(a) & np.isfinite(b)
        return float(np.median(np.abs(a[known] / b[known] - 1))) if known.any() else float("nan")

    def mean(self, figure: str, run: str) -> float:
        """Mean over requests, in seconds."""
        return float(self.requests[f"{figure}_{run}_s"].mean())


@dataclass
class AtSpeed:
    """A modelled backend on a machine that is now ``speed`` times as fast as its profile says."""

    backend: StepBackend
    speed: float

    def run(self, step: Step) -> StepResult:
        """The profile's durations, longer on a slower machine."""
        durations = np.rint(self.backend.run(step).durations_ns / self.speed)
        return StepResult(np.maximum(durations, 1).astype(np.int64))


def validate(point: Point, trace: Trace, device: str) -> Validated:
    """Run the point's policy executed twice and modelled, at the speed of the machine meanwhile."""
    speeds = [_speed(point)]
    executed, first = _executed(point, trace, device)
    speeds.append(_speed(point))
    again, _ = _executed(point, trace, device)
    speed = float(np.mean(speeds))
    priced = AtSpeed(Pricing(point.experiment).backend(point.experiment.engine.ssm_dtype), speed)
    modelled = _records(point, trace, priced)
    driven = _records(point, trace, Replayed(iter(first.durations)))
    table = pd.DataFrame({"id": trace.ids})
    for name, records in (("modelled", modelled), ("executed", executed), ("again", again)):
        rows = records.requests()
        rows = rows.where(rows.finished_ns >= 0)
        table[f"ttft_{name}_s"] = (rows.first_token_ns - rows.arrived_ns).to_numpy() / 1e9
        later = np.maximum(rows.output_tokens.to_numpy() - 1, 1)
        table[f"tpot_{name}_s"] = (rows.finished_ns - rows.first_token_ns).to_numpy() / 1e9 / later
    steps = pd.DataFrame(first.shapes, columns=["prefill", "decodes", "context"])
    steps["executed_s"] = np.array(first.durations) / 1e9
    steps["modelled_s"] = _priced(priced, steps)
    return Validated(
        point.policy.shown,
        point.version,
        table,
        steps,
        decisions_equal=_equal(driven, executed),
        agreement=_equal(modelled, executed),
        wall_s=first.wall_ns / 1e9,
        speed=speed,
    )


def _equal(a: Records, b: Records) -> float:
    """Share of requests that were decided alike."""
    left, right = a.requests()[DECIDED], b.requests()[DECIDED]
    return float((left == right).all(axis=1).mean())


def _records(point: Point, trace: Trace, backend: StepBackend, host_ns: int = 0) -> Records:
    records, ledger = Records(trace), Ledger()
    engine = host(point, trace, identify(trace), ledger).engine
    replay(engine, trace, backend, records, host_ns=host_ns, leap=False)
    return records


def _speed(point: Point) -> float:
    """Of the machine now, 1 where its profile says nothing of it."""
    from executor.calibrate import speed

    cost = point.experiment.cost
    return speed(profile_of(cost)) if cost.profile else 1.0


def _executed(point: Point, trace: Trace, device: str) -> tuple[Records, Measured]:
    from executor.kernel_backend import KernelBackend

    engine, setup = setup_of(point, trace, 0, device, exact=False)
    backend = Measured(KernelBackend(setup))
    records: Any = Records(trace)
    recorder: Recorder = records
    replay(engine, trace, backend, recorder, host_ns=0, leap=False)
    return records, backend


def _priced(backend: StepBackend, steps: pd.DataFrame) -> list[float]:
    """Modelled seconds of work like that of the executed steps; a chunk from position 0."""
    out = []
    columns = ("prefill", "decodes", "context")
    for i, (prefill, decodes, context) in enumerate(zip(*(steps[c] for c in columns), strict=True)):
        chunks = [Chunk(-1, 0, prefill, True)] if prefill else []
        step = Step(i, chunks, list(range(decodes)), context)
        out.append(float(backend.run(step).durations_ns[0]) / 1e9)
    return out


def with_profile(point: Point, profile: str | None) -> Point:
    """The point with step times of a profile."""
    if profile is None:
        return point
    cost = CostConfig(profile=profile)
    experiment = point.experiment.model_copy(update={"cost": cost})
    return Point(experiment, point.policy, point.axes, point.seed)
