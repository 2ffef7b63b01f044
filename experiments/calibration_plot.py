"""Predicted against measured time of every case that was held out, as a picture and a table."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from experiments.plots import COLOURS, STYLE
from sim.cost import profile_cases as cases
from sim.cost.layers import shape_of
from sim.cost.profile import Profile, backend
from sim.cost.profile_cases import Case
from sim.cost.profile_fit import point, price
from sim.model import Model

OPERATIONS = "operations"
BAND = 0.1


def held_out(profile: Profile, model: Model) -> pd.DataFrame:
    """A row for each held-out case: kind (operation or whole step), measured and predicted."""
    prices, _ = backend(profile, model)
    rows = []
    for s in profile.samples:
        case = cases.parse(s.case)
        if s.part == "step" and not isinstance(case, Case):
            seconds = int(prices.run(case.step()).durations_ns[0]) / 1e9
            kind = case.kind
        elif s.part == "held" and isinstance(case, Case) and case.op in profile.curves:
            p = point(shape_of(model), profile.machine, profile.dtype, case, s.median_s)
            seconds, kind = price(profile.curves[case.op], p), OPERATIONS
        else:
            continue
        rows.append((s.case, kind, s.median_s, seconds, s.spread))
    columns = ["case", "kind", "measured_s", "predicted_s", "spread"]
    return pd.DataFrame(rows, columns=columns)


def draw(profile: Profile, model: Model, path: Path) -> None:
    """Operations and whole steps, beside the line of equal times and a band of 10 %."""
    table = held_out(profile, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.4), layout="constrained")
        for ax, whole in zip(axes, (False, True), strict=True):
            part = table[(table.kind != OPERATIONS) == whole]
            if not len(part):
                continue
            both = 1e3 * part[["measured_s", "predicted_s"]].to_numpy()
            ends = [both.min() * 0.8, both.max() * 1.25]
            ax.plot(ends, ends, color="#4d4d4d", lw=1)
            ax.fill_between(ends, [e * (1 - BAND) for e in ends], [e * (1 + BAND) for e in ends],
                            color="#4d4d4d", alpha=0.12, lw=0, label="within 10 %")  # fmt: skip
            for colour, (kind, rows) in zip(COLOURS, part.groupby("kind"), strict=False):
                measured, predicted = 1e3 * rows.measured_s, 1e3 * rows.predicted_s
                ax.plot(measured, predicted, "o", ms=5, alpha=0.8, color=colour, label=kind)
            ax.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
            ax.set_title(
                "whole steps, never fitted" if whole else "operations between fitted sizes"
            )
            ax.legend(frameon=False)
        figure.suptitle(f"{profile.name}: {profile.model}, {profile.provenance['device']}")
        figure.savefig(path)
        plt.close(figure)
