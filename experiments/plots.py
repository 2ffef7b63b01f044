"""Figures of an experiment, from its tables: a line per series, a band over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from experiments.config import Experiment, PlotConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "prefixlab",
    "figure.dpi": 130,
}


def draw(
    experiment: Experiment, summary: pd.DataFrame, requests: pd.DataFrame, out: Path
) -> list[Path]:
    """PNG and SVG of every plot; the PNG files."""
    made = []
    for plot in experiment.plots:
        table = summary if plot.source == "summary" else requests
        for column, allowed in plot.only.items():
            table = table[table[column].isin(allowed)]
        if table.empty or plot.x not in table or plot.y not in table:
            continue
        made.append(_figure(experiment, plot, table, out))
    return made


def derived(requests: pd.DataFrame) -> pd.DataFrame:
    """Columns in the units that plots use."""
    out = requests.copy()
    if "first_token_ns" in out:
        out["ttft_ms"] = (out.first_token_ns - out.arrived_ns) / 1e6
        out["computed_tokens"] = out.prompt_tokens - out.hit_tokens
    return out


def _figure(experiment: Experiment, plot: PlotConfig, table: pd.DataFrame, out: Path) -> Path:
    panels = list(dict.fromkeys(table[plot.facet])) if plot.facet else [None]
    with plt.rc_context(STYLE):
        width = 5.6 * len(panels) if len(panels) > 1 else 7.6
        figure, axes = plt.subplots(
            1, len(panels), figsize=(width, 4.8), sharey=True, squeeze=False, layout="constrained"
        )
        for ax, panel in zip(axes[0], panels, strict=True):
            rows = table if panel is None else table[table[plot.facet] == panel]
            _panel(ax, plot, rows)
            if panel is not None:
                ax.set_title(plot.facet_labels.get(str(panel), f"{plot.facet} {panel}"))
        axes[0][0].set_ylabel(plot.y_label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        note = "" if experiment.kind == "geometry" else ", step times modelled"
        where = f"{experiment.model}, {experiment.hardware.device.upper()}{note}"
        figure.suptitle(f"{plot.title}\n{where}" if experiment.kind == "replay" else plot.title)
        path = out / f"{plot.file}.png"
        figure.savefig(path, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)
    return path


def _bars(ax: Axes, plot: PlotConfig, rows: pd.DataFrame) -> None:
    """Grouped bars, for an x axis of names."""
    names, series = list(dict.fromkeys(rows[plot.x])), list(dict.fromkeys(rows[plot.series]))
    width = 0.8 / len(series)
    for i, name in enumerate(series):
        means = rows[rows[plot.series] == name].groupby(plot.x)[plot.y].mean()
        at = np.arange(len(names)) - 0.4 + width * (i + 0.5)
        ax.bar(at, means.reindex(names), width, color=COLOURS[i % len(COLOURS)], label=str(name))
    ax.set_xticks(np.arange(len(names)), [str(n) for n in names])
    ax.grid(axis="x", visible=False)


def _panel(ax: Axes, plot: PlotConfig, rows: pd.DataFrame) -> None:
    if plot.bars:
        _bars(ax, plot, rows)
        ax.set_xlabel(plot.x_label)
        return
    for i, (name, line) in enumerate(rows.groupby(plot.series, sort=False)):
        grouped = line.groupby(plot.x)[plot.y]
        mean, low, high = grouped.mean(), grouped.min(), grouped.max()
        x = mean.index.to_numpy()
        colour = COLOURS[i % len(COLOURS)]
        marker = "o" if plot.points or len(x) < 12 else ""
        ax.plot(x, mean, color=colour, lw=max(3.4 - 0.8 * i, 1.2),
                ls="-" if i % 2 == 0 else "--", marker=marker, ms=4, label=str(name))  # fmt: skip
        if not np.array_equal(low, high):
            ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    for i, (name, positions) in enumerate(plot.marks.items()):
        for j, position in enumerate(positions):
            ax.axvline(position, color="#888888", lw=0.8, ls=("--", ":")[i % 2], zorder=0,
                       label=name if j == 0 else None)  # fmt: skip
    ax.set_xlabel(plot.x_label)
    if plot.log_x:
        ax.set_xscale("log")
    if plot.log_y:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
