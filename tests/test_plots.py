"""Figures: one file of each format, the same bytes each time, colours by policy."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments import plots
from experiments.config import Experiment, PlotConfig

PLOT = PlotConfig(file="f", title="t", x="memory", y="v", x_label="memory", y_label="v (s)")
TABLE = pd.DataFrame(
    {
        "policy": ["none", "align"] * 6,
        "memory": ["8GiB"] * 4 + ["16GiB"] * 4 + ["32GiB"] * 4,
        "seed": [0, 0, 1, 1] * 3,
        "v": range(12),
    }
)


def experiment(**changes: object) -> Experiment:
    plot = PLOT.model_copy(update=changes)
    return Experiment(name="x", description="y", plots=[plot])


def test_png_and_svg_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (png,) = plots.draw(experiment(), TABLE, pd.DataFrame(), folder)
        made.append((png.read_bytes(), png.with_suffix(".svg").read_bytes()))
    assert made[0] == made[1]


def test_a_figure_names_model_device_and_that_times_are_modelled(tmp_path: Path) -> None:
    with plt.rc_context({"svg.fonttype": "none"}):
        (png,) = plots.draw(experiment(), TABLE, pd.DataFrame(), tmp_path)
    text = png.with_suffix(".svg").read_text()
    for word in ("nemotron-h-8b, H200, step times modelled", "v (s)", "memory", "align"):
        assert word in text


def test_names_on_an_axis_keep_their_order_and_seeds_make_a_band() -> None:
    _, ax = plt.subplots()
    plots._panel(ax, PLOT, TABLE)
    line = ax.get_lines()[0]
    assert list(line.get_xdata(orig=True)) == ["8GiB", "16GiB", "32GiB"]
    assert list(line.get_ydata()) == [1.0, 5.0, 9.0]
    assert len(ax.collections) == 2  # a band for each policy
    plt.close()


def test_only_and_facet_choose_rows(tmp_path: Path) -> None:
    chosen = experiment(only={"memory": ["none of it"]})
    assert plots.draw(chosen, TABLE, pd.DataFrame(), tmp_path) == []
    assert len(plots.draw(experiment(facet="seed"), TABLE, pd.DataFrame(), tmp_path)) == 1


def test_a_policy_has_its_colour_whatever_stands_beside_it() -> None:
    names = ["align", "all (vllm-0.28)", "align retention_interval=0"]
    first, second, third = plots.colours(names)
    assert first == plots.colours(["none", "align"])[1]
    assert second == plots.POLICY_COLOURS["all"]
    assert third != first


def test_a_rejected_request_has_no_ttft() -> None:
    table = pd.DataFrame(
        {
            "first_token_ns": [-1, 3_000_000],
            "arrived_ns": [0, 1_000_000],
            "prompt_tokens": [5, 5],
            "hit_tokens": [0, 2],
        }
    )
    ttft = plots.derived(table).ttft_ms
    assert ttft.isna().tolist() == [True, False] and ttft[1] == 2.0


def test_a_shared_axis_holds_every_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, float]] = []
    close = plt.close

    def look(figure: Figure) -> None:
        shown.extend(ax.get_ylim() for ax in figure.axes)
        close(figure)

    monkeypatch.setattr(plt, "close", look)
    plots.draw(experiment(facet="memory"), TABLE, pd.DataFrame(), tmp_path)
    assert len(shown) == 3
    assert all(low == 0 and high >= 11 for low, high in shown)
