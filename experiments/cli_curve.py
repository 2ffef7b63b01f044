"""``prefixlab curve``: token hit rate against memory, many sizes at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import config
from experiments.cli_errors import UsageError, tells_errors
from experiments.cli_options import replaced
from experiments.curve import curve, sizes
from experiments.plots import draw_curve

console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
SHOWN = 7


def _curve(
    file: Annotated[str, typer.Argument(help="An experiment file, or a shipped one's name.")],
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="dotted.key=value, any number of times.")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="FROM:TO in equal ratios, or a list such as 8GiB,64GiB.")
    ] = "8GiB:256GiB",
    points: Annotated[int, typer.Option(min=2, help="Sizes between FROM and TO.")] = 20,
    rate: Annotated[
        float, typer.Option(help="Share of prefix roots to replay; 1 replays all, exactly.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the roots of a sample.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: results/NAME-curve.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
) -> None:
    """Token hit rate against memory: hits only, each request finishing before the next."""
    experiment = config.load(config.find(file), replaced(trace, setting))
    if experiment.kind != "replay":
        raise UsageError(f"{file} is of kind {experiment.kind}; a curve needs one that replays")
    table = curve(experiment, sizes(memory, points), rate, seed, jobs)
    folder = out or Path("results") / f"{experiment.name}-curve"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "curve.csv.part"
    table.to_csv(part, index=False)
    os.replace(part, folder / "curve.csv")
    _show(table, rate)
    for row in table[table.why != ""].itertuples():
        console.print(f"– {row.policy}, {row.memory_gib:g} GiB: {row.why}")
    console.print(f"table: {folder / 'curve.csv'}")
    console.print(f"picture: {draw_curve(table, experiment, rate, folder / 'curve.png')}")


def _show(table: pd.DataFrame, rate: float) -> None:
    """A row a policy; of more than ``SHOWN`` sizes, those spread evenly over them."""
    all_sizes = list(dict.fromkeys(table.memory_gib))
    at = np.linspace(0, len(all_sizes) - 1, min(SHOWN, len(all_sizes))).round().astype(int)
    shown = Table(title="token hit rate by memory (GiB)", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for i in at:
        shown.add_column(f"{all_sizes[i]:,.4g}", justify="right", no_wrap=True)
    for name, rows in table.groupby("policy", sort=False):
        by = rows.set_index("memory_gib")
        shown.add_row(str(name), *[_cell(by.loc[all_sizes[i]], rate) for i in at])
    console.print(shown)
    if len(at) < len(all_sizes):
        console.print(f"{len(at)} of {len(all_sizes)} sizes; all are in curve.csv")


def _cell(row: pd.Series, rate: float) -> str:
    if row.token_hit_rate != row.token_hit_rate:
        return "–"
    text = f"{row.token_hit_rate:.4f}"
    return text if rate == 1 else f"{text}±{row.standard_error:.3f}"


curve_command = tells_errors(_curve)
