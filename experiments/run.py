"""Run an experiment: points in parallel, each kept as it finishes, then tables and plots."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import costs
from experiments.config import Experiment
from experiments.engines import Point
from experiments.plots import derived, draw
from experiments.points import (
    ROOT,
    collect,
    key_of,
    missing,
    points_of,
    refuse_impossible,
    source_hash,
)
from experiments.sweep import compute_all

PACKAGES = ("prefixlab", "numpy", "pandas", "simpy", "pydantic", "matplotlib")
NOTHING: dict[str, Any] = {"measured": [], "modelled": []}
DEFAULT_TABLE = ["token_hit_rate", "warm_token_hit_rate", "ttft_p50_s", "ttft_p99_s",
                 "tpot_p50_s", "requests_per_s", "preemptions", "rejected"]  # fmt: skip


def run(
    experiment: Experiment, out: Path, jobs: int, console: Console, cluster: str | None = None
) -> list[Path]:
    """Run what is missing and write every table and plot below ``out``; the plots drawn."""
    points = points_of(experiment)
    refuse_impossible(points)
    folder = out / "points"
    folder.mkdir(parents=True, exist_ok=True)
    todo = list(missing(points, folder))
    if len(todo) < len(points):
        console.print(f"{len(points) - len(todo)} of {len(points)} points are finished already")
    stopped = compute_all(todo, folder, jobs, cluster, console)
    plots = write(experiment, points, out, console)
    if stopped:
        raise KeyboardInterrupt
    return plots


def write(experiment: Experiment, points: list[Point], out: Path, console: Console) -> list[Path]:
    """Tables, manifest and plots from finished points."""
    summary, tables = collect(points, out / "points")
    requests = derived(tables["requests"])
    if summary.empty:
        return []
    _replace(out / "summary.csv", summary.to_csv(index=False))
    attribution = attribution_of(experiment, summary)
    if len(attribution):
        _replace(out / "attribution.csv", attribution.to_csv(index=False))
    if experiment.kind == "replay":
        _replace(out / "preemptions.csv", tables["preemptions"].to_csv(index=False))
    if len(requests):
        part = out / "requests.parquet.part"
        requests.to_parquet(part, index=False)
        os.replace(part, out / "requests.parquet")
    _replace(out / "manifest.json", json.dumps(manifest(experiment, points), indent=1))
    show(experiment, summary, requests, console)
    return draw(experiment, summary, requests, out)


def redraw(experiment: Experiment, out: Path) -> list[Path]:
    """Every plot again from the tables in ``out``, whatever has changed in the sources since."""
    whole = out / "requests.parquet"
    requests = pd.read_parquet(whole) if whole.is_file() else pd.DataFrame()
    return draw(experiment, pd.read_csv(out / "summary.csv"), requests, out)


def attribution_of(experiment: Experiment, summary: pd.DataFrame) -> pd.DataFrame:
    """Prompt tokens by reason: a row per point and reason, shares adding up to 1 in each point."""
    tokens = [str(c) for c in summary if str(c).startswith("reason_")]
    if not tokens:
        return pd.DataFrame()
    keys = ["policy", "seed", *[name.split(".")[-1] for name in experiment.sweep]]
    long = summary.melt(keys, tokens, "reason", "tokens")
    long["reason"] = long.reason.str.removeprefix("reason_").str.removesuffix("_tokens")
    whole = long.groupby(keys, sort=False).tokens.transform("sum")
    return long.assign(share=long.tokens / whole)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def show(
    experiment: Experiment, summary: pd.DataFrame, requests: pd.DataFrame, console: Console
) -> None:
    """The table at the end: seeds averaged, one row a policy and axis value."""
    axes = [name.split(".")[-1] for name in experiment.sweep]
    wanted = experiment.table or DEFAULT_TABLE
    by_request = any(c not in summary and c in requests for c in wanted)
    source = requests if by_request else summary
    for column, kept in experiment.table_only.items():
        source = source[source[column].isin(kept)]
    values = [c for c in wanted if c in source and c not in axes]
    keys = ["policy", *[a for a in axes if a in source]]
    for name in ("request", "id"):
        if by_request and name in values:
            keys.append(name)
            values.remove(name)
    means = source.groupby(keys, sort=False)[values].mean().reset_index()
    if len(means) > 40:
        console.print(f"{len(means)} rows; the first 40 (all in summary.csv):")
        means = means.head(40)
    table = Table(title=experiment.name, box=SIMPLE_HEAD, pad_edge=False)
    for column in means.columns:
        table.add_column(
            column, justify="left" if column in ("policy", "id") else "right", no_wrap=True
        )
    for row in means.itertuples(index=False):
        table.add_row(*[_cell(v) for v in row])
    console.print(table)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "–"  # a rejected request has no times
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) > 1 else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def manifest(experiment: Experiment, points: list[Point]) -> dict[str, Any]:
    """Everything needed to run it again, and what its numbers rest on."""
    return {
        "experiment": experiment.model_dump(by_alias=True),
        "points": [key_of(p) for p in points],
        "seeds": experiment.seeds,
        "source_sha256": source_hash(),
        "git_commit": _git(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        **(costs.origin(experiment.cost) if experiment.kind == "replay" else NOTHING),
        "infer_appends": experiment.trace.options.get("infer_appends", "off"),
        "answers": experiment.trace.answers or "as the trace has them",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _git() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
