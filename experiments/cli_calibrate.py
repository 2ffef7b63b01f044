"""``prefixlab calibrate``: measure a profile, and say how far off its prices are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from executor.calibrate_source import kernel_hashes
from experiments import calibration_plot, config
from experiments.calibration import Outcome, comparison, outcomes, verdict
from experiments.cli_errors import UsageError, tells_errors
from experiments.costs import kernels
from sim import models
from sim.cost import profile_rates
from sim.cost.profile import OTHER_KERNELS, Profile, ProfileError, refuse_foreign
from sim.cost.profile_files import find
from sim.cost.profile_fit import WHOLE, fitted
from sim.model import Model

console = Console(highlight=False, width=110)
PER_CENT = ("mean", "p90", "max", "bias")


def _calibrate(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[str, typer.Option(help="A model whose layers can be run.")] = "tiny",
    pattern: Annotated[
        str | None, typer.Option(help="Layers to run instead of all, e.g. 'M-*-'.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default: profiles/DEVICE-MODEL.json.")] = None,
    grid: Annotated[str, typer.Option(help="full, coarse, or none: only what runs need.")] = "full",
    rounds: Annotated[int, typer.Option(min=1, help="Passes over all cases.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of a case in a pass.")] = 3,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and held-out cases.")] = 0,
    graph: Annotated[bool, typer.Option(help="Replay CUDA graphs instead of launching.")] = False,
    budget_s: Annotated[float, typer.Option(min=0, help="Stop then; run again to go on.")] = 0.0,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Of KV; 1 as the executor has it, 16 as engines do.")
    ] = 1,
    fresh: Annotated[bool, typer.Option(help="Forget the timings in OUT.")] = False,
    report: Annotated[bool, typer.Option(help="Measure nothing, only report on OUT.")] = False,
    accept_other_kernels: Annotated[
        bool, typer.Option(help="Report on a profile of other kernels.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured (.png, .svg).")
    ] = None,
    rates: Annotated[bool, typer.Option(help="Print FLOP/s and bytes/s as well.")] = False,
    policies: Annotated[
        str | None, typer.Option(help="An experiment whose policies are compared.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Whether policies are compared at all.")] = True,
) -> None:
    """Measure operations and whole steps, fit a profile, and print its held-out errors."""
    path = out or Path("profiles") / f"{device}-{model}.json"
    if report:
        accept = [OTHER_KERNELS] if accept_other_kernels else []
        profile, loaded, left = _existing(str(out or path), accept)
    else:
        loaded = _model(model, pattern)
        if fresh and path.is_file():
            path.unlink()
        from_device = {"device": device, "grid": _grid(grid), "rounds": rounds, "repeats": repeats}
        given = {**from_device, "seed": seed, "graph": graph, "budget_s": budget_s}
        given["block_tokens"] = block_tokens
        profile, left = _measured(loaded, path, given)
    show(profile)
    if rates:
        show_rates(profile, loaded)
    if plot is not None:
        _draw(profile, loaded, plot)
    if left:
        console.print(f"{left} timings are left; the same command goes on")
    elif compare and WHOLE in profile.errors:
        show_policies(profile, loaded, policies)
    if not report:
        console.print(f"profile: {path}")


def _existing(name: str, accept: list[str]) -> tuple[Profile, Model, int]:
    profile = find(name)
    if profile.kind == "modelled":
        raise UsageError(f"profile {profile.name} is modelled: nothing was measured, none held out")
    loaded = _model(profile.model, profile.provenance.get("pattern"))
    refuse_foreign(profile, loaded, kernel_hashes(), accept)
    return fitted(profile, loaded), loaded, 0


def _model(name: str, pattern: str | None) -> Model:
    loaded = models.load(name)
    if pattern is None or pattern == loaded.pattern:
        return loaded
    if not re.fullmatch(r"[M*-]+", pattern):
        raise UsageError(f"--pattern {pattern!r}: allowed are the letters M, * and -")
    return replace(loaded, pattern=pattern)


def _grid(name: str) -> str:
    if name not in ("full", "coarse", "none"):
        raise UsageError(f"--grid {name!r}: allowed are full, coarse and none")
    return name


def _measured(model: Model, path: Path, given: Mapping[str, Any]) -> tuple[Profile, int]:
    """Run the kernels, with progress."""
    calibrate = kernels()
    _check_device(str(given["device"]))
    options = calibrate.Options(**given)
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def told(done: int, total: int, case: str) -> None:
            bar.update(task, completed=done, total=total, description=case)

        made: tuple[Profile, int] = calibrate.calibrate(model, path, options, told)
    return made


def _draw(profile: Profile, model: Model, path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {path}: allowed are names that end in .png or .svg")
    calibration_plot.draw(profile, model, path)
    console.print(f"picture: {path}")


def _check_device(device: str) -> None:
    import torch

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: allowed are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU; nearest is --device cpu")


# -------------------------------------------------------------------------------- reports
def show(profile: Profile) -> None:
    """Held-out error by operation and for whole steps."""
    made = profile.provenance
    counts: dict[str, int] = {}
    for s in profile.samples:
        counts[s.part] = counts.get(s.part, 0) + 1
    console.print(f"{profile.name}: {profile.kind}, model {profile.model} on {made['device']}")
    console.print(f"timings: {counts}, {made['timer']}; {_spread(profile)}")
    table = Table(title="predicted against measured, held-out cases only", box=SIMPLE_HEAD)
    table.add_column("operation")
    for name in ("cases", *PER_CENT):
        table.add_column(name, justify="right")
    for name, error in profile.errors.items():
        shown = [f"{100 * error[key]:+.1f} %" if key == "bias" else f"{100 * error[key]:.1f} %"
                 for key in PER_CENT]  # fmt: skip
        table.add_row(name, str(error["n"]), *shown)
    console.print(table)


def _spread(profile: Profile) -> str:
    found = sorted(s.spread for s in profile.samples)
    if not found:
        return "no timings"
    return f"10th to 90th percentile of a case's timings: {100 * found[len(found) // 2]:.0f} %"


def show_rates(profile: Profile, model: Model) -> None:
    """What each operation reaches at best, against the ceilings of the same run."""
    device = profile.machine
    console.print(
        f"ceilings: {device.peak(profile.dtype) / 1e12:.3g} TFLOP/s {profile.dtype}, "
        f"{device.vector_flops / 1e12:.3g} TFLOP/s vector, {device.bandwidth / 1e9:.4g} GB/s"
    )
    table = Table(title="nearest to the roofline", box=SIMPLE_HEAD)
    table.add_column("case")
    for name in ("TFLOP/s", "GB/s", "share"):
        table.add_column(name, justify="right")
    for rate in profile_rates.rates(profile, model):
        flops, moved = rate.flops_per_s / 1e12, rate.bytes_per_s / 1e9
        table.add_row(rate.case, f"{flops:.3g}", f"{moved:.4g}", f"{100 * rate.share:.0f} %")
    console.print(table)


def show_policies(profile: Profile, model: Model, experiment: str | None) -> None:
    """Whether the error could change which policy wins."""
    made = comparison(profile, model)
    if experiment is not None:
        given = config.load(config.find(experiment))
        made = given.model_copy(update={"model": model.name, "sweep": {}})
    found = list(outcomes(profile, model, made))
    _show_outcomes(found)
    console.print(verdict(found).text)


def _show_outcomes(found: list[Outcome]) -> None:
    table = Table(title="mean TTFT (ms) by policy, at prices changed by held-out error",
                  box=SIMPLE_HEAD)  # fmt: skip
    table.add_column("policy")
    for name in ("as calibrated", "least", "greatest"):
        table.add_column(name, justify="right")
    for policy in found[0].order:
        every = [1e3 * outcome.ttft_s[policy] for outcome in found]
        table.add_row(policy, *(f"{v:.1f}" for v in (every[0], min(every), max(every))))
    console.print(table)


calibrate = tells_errors(_calibrate, ProfileError, ValueError)
