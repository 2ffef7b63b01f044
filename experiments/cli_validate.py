"""``prefixlab validate``: one trace modelled and executed, side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import config, costs
from experiments.cli_errors import UsageError, executor_extra, tells_errors
from experiments.engines import Point, load_policy
from experiments.plots import draw_validation
from experiments.points import points_of
from experiments.validate import Validated, validate
from sim import policies
from traces import arrivals
from traces.generators import generate
from traces.registry import read_trace
from traces.trace import Trace

console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
ENGINES = {"all": "vllm-0.28", "path-capped": "sglang-0.5.23", "marconi": "pool",
           "replay-value": "pool"}  # fmt: skip
LEFT_OUT = ("oracle",)


def _validate(
    policy: Annotated[
        list[str] | None, typer.Option(help="Any number of times; all if none.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Its first requests; else a generated one.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Requests of the trace.")] = 24,
    model: Annotated[str, typer.Option(help="A preset that the executor runs.")] = "tiny",
    profile: Annotated[
        str | None, typer.Option(help="Step times; else cpu-tiny, or the device's roofline.")
    ] = None,
    memory: Annotated[str, typer.Option(help="For states and KV.")] = "48MiB",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Where tables and the picture go.")] = Path(
        "results/validate"
    ),
) -> None:
    """Predicted against measured: TTFT, TPOT, steps, decisions, and the ranking of policies."""
    with executor_extra():
        from executor.device import one_thread, usable

        one_thread()
    try:
        usable(device)
    except ValueError as error:
        raise UsageError(str(error)) from None
    used = profile or ("cpu-tiny" if device == "cpu" else "h200-roofline")
    chosen = policy or [n for n in policies.names() if n not in LEFT_OUT]
    points = [_point(name, model, memory, used) for name in chosen]
    _refuse(points)
    rows = _trace(trace, limit)
    done = [validate(point, rows, device) for point in points]
    out.mkdir(parents=True, exist_ok=True)
    _write(done, out)
    _show(done, used)
    console.print(f"tables: {out / 'requests.csv'}, {out / 'steps.csv'}")
    console.print(f"picture: {draw_validation(done, out / 'validate.png')}")


def _refuse(points: list[Point]) -> None:
    """Raise ``UsageError`` for a policy that is not there, or a price that cannot be."""
    for point in points:
        try:
            load_policy(point)
            costs.check(point.experiment)
        except (ValueError, TypeError) as error:
            raise UsageError(f"policy {point.policy.name}: {error}") from None


def _point(name: str, model: str, memory: str, profile: str) -> Point:
    engine = ENGINES.get(name, "vllm-0.33")
    data = {
        "name": "validate",
        "description": "modelled and executed",
        "model": model,
        "memory": memory,
        "cost": {"profile": profile},
        "engine": {"version": engine, "max_model_len": 8192, "max_num_batched_tokens": 2048},
        "policies": [{"name": name}],
    }
    return points_of(config.checked(data, "validate"))[0]


def _trace(path: Path | None, limit: int) -> Trace:
    if path is not None:
        return arrivals.limit(read_trace(str(path)), limit)
    given = {"groups": max(1, limit // 4), "repeats": 4, "prefix_tokens": 1300,
             "suffix_tokens": 200, "output_tokens": 24}  # fmt: skip
    made = generate("shared_prefix", given, 0)
    return arrivals.with_arrivals(made, arrivals.poisson(1.5, 0), replace_times=True)


def _write(done: list[Validated], out: Path) -> None:
    for name in ("requests", "steps"):
        tables = [getattr(v, name).assign(policy=v.policy, engine=v.engine) for v in done]
        pd.concat(tables, ignore_index=True).to_csv(out / f"{name}.csv", index=False)


def _show(done: list[Validated], profile: str) -> None:
    table = Table(title=f"modelled by {profile} against executed", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("policy", "engine"):
        table.add_column(name, no_wrap=True)
    heads = ("TTFT mean, modelled", "executed", "TTFT error", "noise", "TPOT error", "noise",
             "steps, total", "speed", "decisions driven", "own")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for v in done:
        total = v.steps.modelled_s.sum() / max(1e-12, v.steps.executed_s.sum()) - 1
        table.add_row(
            v.policy, v.engine,
            f"{v.mean('ttft', 'modelled'):.3f} s", f"{v.mean('ttft', 'executed'):.3f} s",
            f"{v.error('ttft', 'modelled', 'executed'):.1%}",
            f"{v.error('ttft', 'again', 'executed'):.1%}",
            f"{v.error('tpot', 'modelled', 'executed'):.1%}",
            f"{v.error('tpot', 'again', 'executed'):.1%}",
            f"{total:+.1%}", f"{v.speed:.2f}", f"{v.decisions_equal:.0%}", f"{v.agreement:.0%}",
        )  # fmt: skip
    console.print(table)
    if len(done) > 1:
        _rank(done)


def _rank(done: list[Validated]) -> None:
    orders = {
        run: [done[i].policy for i in np.argsort([v.mean("ttft", run) for v in done])]
        for run in ("modelled", "executed", "again")
    }
    for run, order in orders.items():
        console.print(f"by mean TTFT, {run}: {', '.join(order)}")


validate_command = tells_errors(_validate)
