"""Figures of an experiment, from its tables: a line per series, a band over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from experiments.config import Experiment, PlotConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

# Colours that stay apart for colour-blind readers; a policy has the same one in every figure.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
POLICY_COLOURS = {
    "none": "#9a9a9a",
    "align": "#56b4e9",
    "all": "#d55e00",
    "semantic-only": "#004d40",
    "oracle": "#cc79a7",
}
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
        waited = out.first_token_ns - out.arrived_ns
        out["ttft_ms"] = (waited / 1e6).where(out.first_token_ns >= 0)  # none if rejected
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
        lying = plot.bars and plot.x == plot.series
        if plot.from_zero and not plot.log_y and not lying:
            # only now: it ends the scaling of the shared axis
            axes[0][0].set_ylim(bottom=0, top=1.04 * axes[0][0].get_ylim()[1])
        if not lying:
            axes[0][0].set_ylabel(plot.y_label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        columns = _columns(labels, width)
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        where = f"{experiment.model}, {experiment.hardware.device.upper()}, step times modelled"
        below = {"replay": f"\n{where}", "hits": "\nhits only, one request after another"}
        figure.suptitle(plot.title + below.get(experiment.kind, ""))
        path = out / f"{plot.file}.png"
        figure.savefig(path, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)
    return path


def draw_curve(table: pd.DataFrame, experiment: Experiment, rate: float, path: Path) -> Path:
    """Token hit rate against memory, a line a policy; a band of two standard errors."""
    policies = list(dict.fromkeys(table.policy))
    palette = colours(policies)
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
        for i, name in enumerate(policies):
            rows = table[table.policy == name]
            x, y, error = rows.memory_gib, rows.token_hit_rate, 2 * rows.standard_error
            ax.plot(x, y, color=palette[i], lw=max(4.0 - 0.9 * i, 1.3), marker="o", ms=3.5,
                    ls="--" if i % 4 == 3 else "-", label=str(name))  # fmt: skip
            if rate < 1:
                ax.fill_between(x, y - error, y + error, color=palette[i], alpha=0.18, lw=0)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.set_ylim(bottom=0, top=1.04 * ax.get_ylim()[1])
        ax.set_xlabel("memory for states and KV (GiB)")
        ax.set_ylabel("token hit rate")
        labels = [str(name) for name in policies]
        figure.legend(loc="outside lower center", ncols=_columns(labels, 7.6), frameon=False)
        of = "" if rate == 1 else f", {rate:g} of the prefix roots, band: two standard errors"
        figure.suptitle(f"Hits only, one request at a time{of}\n{experiment.model}")
        figure.savefig(path, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)
    return path


def draw_validation(done: Sequence[Any], path: Path) -> Path:
    """Modelled against executed TTFT, TPOT and step durations; the diagonal is equality."""
    palette = colours([f"{v.policy} {v.engine}" for v in done])
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), layout="constrained")
        for ax, figure_name in zip(axes, ("ttft", "tpot", "step"), strict=True):
            low, high = np.inf, 0.0
            for v, colour in zip(done, palette, strict=True):
                if figure_name == "step":
                    x, y = v.steps.executed_s, v.steps.modelled_s
                else:
                    x, y = (v.requests[f"{figure_name}_{r}_s"] for r in ("executed", "modelled"))
                kept = (x > 0) & (y > 0)
                ax.plot(x[kept], y[kept], ".", ms=4, color=colour, alpha=0.6,
                        label=f"{v.policy} ({v.engine})")  # fmt: skip
                if kept.any():
                    low, high = min(low, x[kept].min()), max(high, x[kept].max())
            if high:
                ax.plot([low, high], [low, high], color="#888888", lw=0.8)
            ax.set_xscale("log")
            ax.set_yscale("log")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            ax.set_xlabel("executed (s)")
            ax.set_title({"ttft": "TTFT", "tpot": "TPOT", "step": "steps"}[figure_name])
        axes[0].set_ylabel("modelled (s)")
        handles, labels = axes[0].get_legend_handles_labels()
        columns = _columns(labels, 13)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)
    return path


def _columns(labels: list[str], width: float) -> int:
    """Of the legend: as many as its text leaves room for; a character takes about 0.075 inch."""
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int(width / (0.075 * longest + 0.6))))


def colours(names: list[Any]) -> list[str]:
    """One a series: the policy's own where it is the first with that name, else the next."""
    kept = {POLICY_COLOURS.get(str(name).split(" ")[0]) for name in names}
    spare = [c for c in COLOURS if c not in kept] or list(COLOURS)
    free, out = iter(spare * (2 + len(names))), list[str]()
    for name in names:
        own = POLICY_COLOURS.get(str(name).split(" ")[0])
        out.append(own if own and own not in out else next(c for c in free if c not in out[-2:]))
    return out


def _bars(ax: Axes, plot: PlotConfig, rows: pd.DataFrame) -> None:
    """Grouped bars, for an x axis of names."""
    names, series = list(dict.fromkeys(rows[plot.x])), list(dict.fromkeys(rows[plot.series]))
    width, palette = 0.8 / len(series), colours(series)
    for i, name in enumerate(series):
        means = rows[rows[plot.series] == name].groupby(plot.x)[plot.y].mean()
        at = np.arange(len(names)) - 0.4 + width * (i + 0.5)
        bars = ax.bar(at, means.reindex(names), width, color=palette[i], label=str(name))
        ax.bar_label(bars, fmt=_bar_format(rows[plot.y]), fontsize=6.5, padding=2)
    ax.set_xticks(np.arange(len(names)), [str(n) for n in names])
    ax.grid(axis="x", visible=False)


def _bar_format(values: Any) -> str:
    return "{:.0f}" if values.max() >= 10 else "{:.3f}"


def _lying_bars(ax: Axes, plot: PlotConfig, rows: pd.DataFrame) -> None:
    """One bar a series, named at its left, where the series is the x axis too."""
    names = list(dict.fromkeys(rows[plot.x]))
    means = rows.groupby(plot.x)[plot.y].mean().reindex(names)
    bars = ax.barh([str(n) for n in names], means, color=colours(names), height=0.7)
    ax.bar_label(bars, fmt=_bar_format(means), fontsize=8, padding=3)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(plot.y_label)


def _panel(ax: Axes, plot: PlotConfig, rows: pd.DataFrame) -> None:
    if plot.bars and plot.x == plot.series:
        _lying_bars(ax, plot, rows)
        return
    if plot.bars:
        _bars(ax, plot, rows)
        ax.set_xlabel(plot.x_label)
        return
    lines = list(rows.groupby(plot.series, sort=False))
    palette = colours([name for name, _ in lines])
    for i, (name, line) in enumerate(lines):
        grouped = line.groupby(plot.x, sort=pd.api.types.is_numeric_dtype(line[plot.x]))[plot.y]
        mean, low, high = grouped.mean(), grouped.min(), grouped.max()
        x = mean.index.to_numpy()
        colour = palette[i]
        marker = "o" if plot.points or len(x) < 12 else ""
        ax.plot(x, mean, color=colour, lw=max(4.0 - 0.9 * i, 1.3),
                ls="--" if i % 4 == 3 else "-", marker=marker, ms=4, label=str(name))  # fmt: skip
        if not np.array_equal(low, high):
            ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    for i, (name, positions) in enumerate(plot.marks.items()):
        for j, position in enumerate(positions):
            ax.axvline(position, color="#bbbbbb", lw=0.8, ls=("--", ":")[i % 2], zorder=0,
                       label=name if j == 0 else None)  # fmt: skip
    ax.set_xlabel(plot.x_label)
    if plot.log_x:
        ax.set_xscale("log")
        values = sorted(set(rows[plot.x]))
        if len(values) <= 6:
            ax.set_xticks(values)
            ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_major_formatter("{x:,g}")
    if plot.log_y:
        ax.set_yscale("log")
        _plain_numbers(ax)


def _plain_numbers(ax: Axes) -> None:
    """0.2 and not 2x10^-1; ticks between the powers of ten where there is hardly one of these."""
    low, high = ax.get_ylim()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter("{x:,.2g}" if high < 10 * low else NullFormatter())
