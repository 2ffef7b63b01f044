"""``prefixlab trace generate``: a seeded trace as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from traces.arrivals import Arrivals, closed_loop, fixed, gamma, poisson, with_arrivals
from traces.errors import TraceError
from traces.generators import GENERATORS
from traces.generators import generate as make
from traces.generators.parameters import one_of
from traces.mooncake import write_mooncake
from traces.native import write_native
from traces.trace import Trace

ARRIVALS = ("closed_loop", "fixed", "gamma", "none", "poisson")
FORMATS = ("mooncake", "native")


def generate(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(GENERATORS))}.")],
    out: Annotated[Path, typer.Option(help="File to write; .gz and .zst compress.")],
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter as key=value; may be repeated.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="native or mooncake; unset: mooncake for *.mooncake.jsonl*."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Block size of a Mooncake file.")] = 512,
    arrivals: Annotated[str, typer.Option(help=f"One of: {', '.join(ARRIVALS)}.")] = "none",
    rate: Annotated[float, typer.Option(help="Session starts per second.")] = 1.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma gaps.")] = 2.0,
    users: Annotated[int, typer.Option(help="Users of a closed loop.")] = 1,
    think_s: Annotated[float, typer.Option(help="Closed loop: pause before a session.")] = 0.0,
) -> None:
    """Generate a trace; the parameters of each generator are in docs/generators.md."""
    try:
        trace = make(name, settings(set_ or []), seed)
        process = _process(arrivals, rate, cv, users, think_s, seed)
        trace = trace if process is None else with_arrivals(trace, process)
        write(trace, out, format_ or guessed_format(out), block_tokens)
    except (TraceError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: {len(trace)} requests, {int(trace.prompt_tokens.sum())} prompt tokens")


def settings(pairs: list[str]) -> dict[str, object]:
    """``key=value`` texts as a mapping; values are YAML scalars."""
    out: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {pair!r}; allowed: key=value")
        if key in out:
            raise ValueError(f"--set {key} stands twice; allowed: once")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"--set {pair!r}; allowed: a number, word, true or false") from None
    return out


def guessed_format(out: Path) -> str:
    """``mooncake`` for files named ``*.mooncake.jsonl``, compressed or not."""
    return "mooncake" if ".mooncake." in out.name else "native"


def write(trace: Trace, out: Path, format_: str, block_tokens: int) -> None:
    """Write ``trace``; what the Mooncake format cannot say is printed."""
    one_of("format", format_, FORMATS)
    if format_ == "native":
        write_native(trace, str(out))
        return
    lost = write_mooncake(trace, str(out), block_tokens=block_tokens)
    typer.echo(f"not in this format: {lost}", err=True)


def _process(
    arrivals: str, rate: float, cv: float, users: int, think_s: float, seed: int
) -> Arrivals | None:
    one_of("arrivals", arrivals, ARRIVALS)
    if arrivals == "none":
        return None
    if arrivals == "closed_loop":
        return closed_loop(users, think_s)
    if arrivals == "fixed":
        return fixed(rate)
    return poisson(rate, seed) if arrivals == "poisson" else gamma(rate, cv, seed)
