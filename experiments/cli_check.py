"""``prefixlab check``: property-test a policy on every engine that can host it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.cli_errors import UsageError, tells_errors
from sim import policies
from sim.check.case import to_data
from sim.check.checker import EXAMPLES, Report, hosts_of, search

console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _check(
    policy: Annotated[str, typer.Argument(help="A shipped policy, or path/to/file.py.")],
    examples: Annotated[int, typer.Option(min=1, help="Cases for each engine.")] = EXAMPLES,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only on this engine; any number of times.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="parameter=value of the policy.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where a case that breaks is kept.")] = Path("."),
) -> None:
    """Every invariant, on small random cases; the same cases every time."""
    parameters = dict(map(_parameter, setting or ()))
    name = str(Path(policy).resolve()) if policy.endswith(".py") else policy
    try:
        hosts = hosts_of(policies.load(name, **parameters), engine)
    except (ValueError, TypeError) as error:
        raise UsageError(f"policy {policy}: {error}") from None
    shown, broken = _columns(), []
    for host in hosts:
        start = time.process_time()
        report = search(host, name, parameters, examples)
        _add(shown, report, time.process_time() - start)
        if report.violation is not None:
            broken.append(report)
    console.print(shown)
    for report in broken:
        _tell(report, policy, out)
    if broken:
        raise typer.Exit(1)


def _parameter(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set is {text!r}; expected parameter=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _columns() -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("cases", "requests", "steps", "hits", "preemptions", "evictions", "CPU-s"):
        table.add_column(name, justify="right")
    table.add_column("")
    return table


def _add(table: Table, r: Report, seconds: float) -> None:
    counts = (r.examples, r.requests, r.steps, r.hits, r.preemptions, r.evictions)
    verdict = "holds" if r.violation is None else f"breaks {r.violation.invariant}"
    table.add_row(r.engine, *[f"{n:,}" for n in counts], f"{seconds:.1f}", verdict)


def _tell(report: Report, policy: str, out: Path) -> None:
    assert report.violation is not None and report.case is not None
    data = to_data(report.case, report.violation.invariant, report.violation.message)
    data["name"] = f"check_{Path(policy).stem}_{report.engine}"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{data['name']}.json"
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(part, path)
    case = report.case
    console.print(f"\n{report.engine} breaks {report.violation.told}")
    console.print(f"  found in the run {report.violation.phase!r}; the smallest case that does it:")
    options = ", ".join(f"{k}={v}" for k, v in case.settings.items())
    console.print(f"  memory {case.memory_bytes} B, {options}", soft_wrap=True)
    for r in case.requests:
        console.print(f"  request {r.id}: prompt {_runs(r.prompt)}, output {_runs(r.output)}")
    console.print(f"  kept as {path}: prefixlab parity or prefixlab run replays it", soft_wrap=True)


def _runs(runs: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"{tokens} of text {content}" for content, tokens in runs)


check_command = tells_errors(_check)
