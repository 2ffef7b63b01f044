"""The command line: ``prefixlab``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments import cli_plan, cli_trace, config
from experiments.cli_calibrate import calibrate
from experiments.cli_check import check_command
from experiments.cli_curve import curve_command
from experiments.cli_errors import UsageError, tells_errors
from experiments.cli_options import replaced
from experiments.cli_parity import parity
from experiments.cli_validate import validate_command
from experiments.cli_verify import verify_command
from experiments.config import Experiment
from experiments.run import redraw
from experiments.run import run as run_experiment

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Where should an engine checkpoint the recurrent state, and what will that do?",
)
app.add_typer(cli_trace.app, name="trace", help="Read, measure, convert and generate traces.")
app.command("parity")(parity)
cli_plan.register(app)
# A pipe has no width of its own; figures cut to fit 80 columns would be of no use.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _run(
    file: Annotated[str, typer.Argument(help="An experiment file, or a shipped one's name.")],
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="dotted.key=value, any number of times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default: results/NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="A Dask scheduler to run on: dask://HOST:PORT.")
    ] = None,
) -> None:
    """Run an experiment; only what is missing is computed."""
    experiment = config.load(config.find(file), replaced(trace, setting))
    folder = out or Path("results") / experiment.name
    try:
        plots = run_experiment(experiment, folder, jobs, console, cluster)
    except KeyboardInterrupt:
        console.print(f"stopped; what was finished is in {folder}, the same command goes on")
        raise typer.Exit(130) from None
    console.print(f"tables: {folder / 'summary.csv'}, {folder / 'manifest.json'}")
    for path in plots:
        console.print(f"picture: {path}")


def _plot(folder: Annotated[Path, typer.Argument(help="A folder that `run` wrote.")]) -> None:
    """Draw again from the records in a folder."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise UsageError(
            f"{folder}: no manifest.json; expected a folder that `prefixlab run` wrote"
        )
    experiment = Experiment.model_validate(json.loads(file.read_text())["experiment"])
    for path in redraw(experiment, folder):
        console.print(f"picture: {path}")


def _list() -> None:
    """The experiments that come with prefixlab."""
    for name, path in config.shipped().items():
        first = config.load(path).description.split(". ")[0].strip()
        console.print(f"[bold]{name}[/bold]: {first}")


def _schema() -> None:
    """JSON Schema of experiment files, for editors."""
    typer.echo(json.dumps(Experiment.model_json_schema(), indent=1))


app.command("run")(tells_errors(_run))
app.command("check")(check_command)
app.command("curve")(curve_command)
app.command("verify")(verify_command)
app.command("validate")(validate_command)
app.command("calibrate")(calibrate)
app.command("plot")(tells_errors(_plot))
app.command("list")(tells_errors(_list))
app.command("schema")(tells_errors(_schema))


def main() -> None:
    """Entry point."""
    app()
