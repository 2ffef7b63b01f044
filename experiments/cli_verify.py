"""``prefixlab verify``: reuse computed for real, against full prefills."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.cli_errors import UsageError, executor_extra, tells_errors
from experiments.verify import NOT_EXECUTED, Verified, engines_of, verify
from sim import models, policies

console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _verify(
    policy: Annotated[
        list[str] | None, typer.Argument(help="Policies, shipped or files; all if none.")
    ] = None,
    model: Annotated[str, typer.Option(help="A preset that the executor runs.")] = "nano",
    traces: Annotated[int, typer.Option(min=1, help="Random traces for each engine.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="The first trace's.")] = 0,
    engine: Annotated[
        list[str] | None, typer.Option(help="Only on this engine; any number of times.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Does a restored checkpoint give what a full prefill gives? States and logits, computed."""
    with executor_extra():
        from executor.decoder import random_weights
        from executor.device import one_thread, usable

        one_thread()
        try:
            usable(device)
            random_weights(models.load(model))
        except ValueError as error:
            raise UsageError(str(error)) from None
    table, bad = _columns(), []
    for name in policy or [n for n in policies.names() if n not in NOT_EXECUTED]:
        try:
            hosts = [e for e in engines_of(name) if not engine or e in engine]
        except ValueError as error:
            raise UsageError(f"policy {name}: {error}") from None
        for host in hosts:
            done = verify(name, host, range(seed, seed + traces), model, device)
            _add(table, done)
            bad += [done] if not all(v.holds for v in done.verdicts) else []
    console.print(table)
    if not table.row_count:
        raise UsageError("nothing to verify: no engine given hosts a policy given")
    for done in bad:
        _tell(done, seed)
    if bad:
        raise typer.Exit(1)


def _columns() -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("policy", "engine"):
        table.add_column(name, no_wrap=True)
    counts = ("requests", "hits", "hit tokens", "logits")
    for name in (*counts, "largest error", "states", "to the bit", "largest error"):
        table.add_column(name, justify="right")
    table.add_column("")
    return table


def _add(table: Table, done: Verified) -> None:
    v = done.verdicts
    counts = [sum(getattr(x, name) for x in v) for name in ("requests", "hits", "hit_tokens")]
    exact = f"{sum(x.bitwise for x in v)} of {sum(x.exact for x in v)}"
    table.add_row(
        done.policy,
        done.engine,
        *[f"{n:,}" for n in counts],
        f"{sum(x.logits for x in v):,}",
        f"{max(x.logits_error for x in v):.1e}",
        f"{sum(x.states for x in v):,}",
        exact,
        f"{max(x.states_error for x in v):.1e}",
        "holds" if all(x.holds for x in v) else "DIFFERS",
    )


def _tell(done: Verified, first: int) -> None:
    for i, v in enumerate(done.verdicts):
        if not v.holds:
            what = v.fault or (
                f"logits differ by {v.logits_error:.1e}, states by {v.states_error:.1e}, "
                f"{v.bitwise} of {v.exact} to the bit"
            )
            console.print(f"{done.policy} on {done.engine}, seed {first + i}: {what}")


verify_command = tells_errors(_verify)
