"""``prefixlab trace``: what a trace is like, and its way from one format to another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.cli_errors import UsageError, tells_errors
from experiments.cli_generate import generate, settings
from traces.mooncake import write_mooncake
from traces.native import write_native
from traces.registry import READERS, detect, options_of, read_trace
from traces.stats import Ceiling, Stats, trace_stats
from traces.trace import Trace

app = typer.Typer(help="Read, describe and convert request traces.", no_args_is_help=True)
app.command()(tells_errors(generate))

File = Annotated[str, typer.Argument(help="Trace file, plain, .gz or .zst; a folder for WEKA.")]
Format = Annotated[str | None, typer.Option(help=f"One of {', '.join(READERS)}; else detected.")]
Block = Annotated[int | None, typer.Option(help="Tokens per hash: Mooncake 512, Bailian 16.")]
Tail = Annotated[str | None, typer.Option(help="ceil or floor: has a partial last block an id?")]
Infer = Annotated[str | None, typer.Option(help="off or on: follow-ups of hashed traces.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="Any option of the format, repeatable."),
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort by arrival where times go backwards.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines and list them.")]


@app.command()
@tells_errors
def stats(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
    grid: Annotated[list[int] | None, typer.Option(help="Grid in tokens, repeatable.")] = None,
    format: Format = None,
    block_tokens: Block = None,
    tail: Tail = None,
    infer_appends: Infer = None,
    set_: Set = None,
    sort: Sort = False,
    skip_bad: SkipBad = False,
) -> None:
    """Requests, lengths, burstiness, ceilings of reuse, and where shared prefixes end."""
    grids = grid or [1024, 1040]
    if min(grids) < 1:
        raise UsageError(f"--grid is {min(grids)}, allowed: 1 token or more")
    given = _given(block_tokens, tail, infer_appends, set_)
    found = trace_stats(_read(file, format, given, sort, skip_bad), grids)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(found, file)


@app.command()
@tells_errors
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Trace file to read.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="File to write, .gz or .zst too.")],
    to: Annotated[str, typer.Option(help="native or mooncake.")] = "native",
    out_block_tokens: Annotated[int, typer.Option(help="Block of a Mooncake OUT.")] = 512,
    format: Format = None,
    block_tokens: Block = None,
    tail: Tail = None,
    infer_appends: Infer = None,
    set_: Set = None,
    sort: Sort = False,
    skip_bad: SkipBad = False,
) -> None:
    """Write IN in another format; says what that format cannot hold."""
    if to not in ("native", "mooncake"):
        raise UsageError(f"--to is {to!r}, allowed: native, mooncake")
    if out_block_tokens < 1:
        raise UsageError(f"--out-block-tokens is {out_block_tokens}, allowed: 1 or more")
    given = _given(block_tokens, tail, infer_appends, set_)
    trace = _read(source, format, given, sort, skip_bad)
    if to == "native":
        write_native(trace, target)
        lost = "nothing lost"
    else:
        counts = asdict(write_mooncake(trace, target, block_tokens=out_block_tokens))
        told = [f"{name.replace('_', ' ')} of {n}" for name, n in counts.items() if n]
        lost = f"lost: {', '.join(['sharing inside blocks', *told])}"
    _tell_skipped(trace)
    typer.echo(f"{len(trace)} requests to {target}; {lost}")


def _given(
    block_tokens: int | None, tail: str | None, infer_appends: str | None, pairs: list[str] | None
) -> dict[str, object]:
    """The options that were given; ``pairs`` are ``option=value`` with YAML scalars."""
    named = {"block_tokens": block_tokens, "tail": tail, "infer_appends": infer_appends}
    try:
        return {k: v for k, v in named.items() if v is not None} | settings(pairs or [])
    except ValueError as e:
        raise UsageError(str(e)) from None


def _read(
    file: str, format: str | None, given: dict[str, object], sort: bool, skip_bad: bool
) -> Trace:
    options = dict(given)
    name = format or detect(file)
    if sort and (name not in READERS or "sort" in options_of(name)):
        options["sort"] = True
    if skip_bad:
        options["skip_bad"] = True
    return read_trace(file, name, **options)


def _tell_skipped(trace: Trace) -> None:
    skipped = trace.notes.get("skipped", ())
    if isinstance(skipped, tuple) and skipped:
        typer.echo(f"{len(skipped)} bad lines skipped:", err=True)
        for line in skipped:
            typer.echo(f"  {line}", err=True)


def _show(s: Stats, file: str) -> None:
    console = Console()
    console.print(_overview(s, file))
    console.print(_ceilings(s))
    console.print(_grids(s))
    console.print(_shape(s))
    console.print(_placements(s))
    if s.skipped:
        console.print(f"{len(s.skipped)} bad lines skipped:")
        for line in s.skipped:
            console.print(f"  {line}", markup=False, highlight=False)


def _overview(s: Stats, file: str) -> Table:
    table = Table("", "", title=escape(Path(file).name), show_header=False)
    a = s.arrivals
    rows = [
        ("requests", f"{s.requests:,}"),
        ("sessions", f"{s.sessions:,}"),
        ("prompt tokens", f"{s.prompt_tokens:,}"),
        ("output tokens", f"{s.output_tokens:,}"),
        ("prompt p10/50/90/99 (tokens)", "/".join(map(str, s.prompt_percentiles))),
        ("output p10/50/90/99 (tokens)", "/".join(map(str, s.output_percentiles))),
        ("requests with an arrival", f"{a.known:,}"),
        ("duration (s)", _number(a.duration_s, 1)),
        ("rate (requests/s)", _number(a.rate_per_s)),
        ("IAT CV", _number(a.iat_cv, 3)),
        ("Fano 10 s / 60 s", f"{_number(a.fano_10s, 2)} / {_number(a.fano_60s, 2)}"),
        ("peak/mean 60 s", _number(a.peak_over_mean_60s, 2)),
        ("outputs of known content", f"{s.outputs_known:,}"),
        ("inferred appends", s.infer_appends),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _ceilings(s: Stats) -> Table:
    table = Table("ceiling (unlimited cache)", "prompts", "prompts and outputs")
    both = (s.ceiling_prompts, s.ceiling_prompts_and_outputs)
    for label, text in _CEILING_ROWS:
        table.add_row(label, *(text(c) for c in both))
    return table


_CEILING_ROWS: tuple[tuple[str, Callable[[Ceiling], str]], ...] = (
    ("hit tokens", lambda c: f"{c.hit_tokens:,}"),
    ("token hit rate", lambda c: f"{c.token_hit_rate:.4f}"),
    ("mean request hit rate", lambda c: f"{c.mean_request_hit_rate:.4f}"),
    ("request hit rate", lambda c: f"{c.request_hit_rate:.4f}"),
    ("token hit rate, second half", lambda c: f"{c.second_half_token_hit_rate:.4f}"),
    ("hit tokens, last token computed", lambda c: f"{c.hit_tokens_recomputed_last:,}"),
    ("token hit rate, last token computed", lambda c: f"{c.token_hit_rate_recomputed_last:.4f}"),
)


def _grids(s: Stats) -> Table:
    head = ("grid", "r = 0", "1..e", "..2e", "..3e", "> 3e", "mean r", "L < grid")
    table = Table(*head, title="where shared prefixes end: r = L mod grid, share of requests")
    for g in s.grids:
        shares = (g.on_grid, g.up_to_1_edge, g.up_to_2_edges, g.up_to_3_edges, g.beyond)
        cells = [f"{x:.4f}" for x in shares]
        label = f"{g.grid_tokens} (e = {g.edge_tokens})"
        table.add_row(label, *cells, f"{g.mean_r:.1f}", f"{g.below_grid:.4f}")
    return table


def _shape(s: Stats) -> Table:
    shape, turns = s.structure, s.structure.turns
    table = Table("prefix tree of the prompts", "", show_header=True)
    rows = [
        ("roots / branch points / leaves", f"{shape.roots:,} / {shape.branch_points:,}"
         f" / {shape.leaves:,}"),
        ("most ways to go on", f"{shape.max_fan_out:,}"),
        ("whole prompt seen before", f"{shape.full_prompt_hits:.4f} of the requests"),
        ("hit tokens p50/p90", "/".join(map(str, shape.hit_tokens_percentiles))),
    ]  # fmt: skip
    gaps = "unknown" if s.reuse.gap_s is None else "/".join(f"{x:.0f}" for x in s.reuse.gap_s)
    rows += [
        ("since last use p50/90/99 (s)", gaps),
        ("new tokens since p50/90/99", "/".join(f"{n:,}" for n in s.reuse.new_tokens)),
    ]
    if turns is not None:
        rows += [(f"turns: {word}", f"{n:.3f}") for word, n in asdict(turns).items()]
    for row in rows:
        table.add_row(*row)
    return table


def _placements(s: Stats) -> Table:
    head = ("a state at", "token hit rate", "prefill / least", "uncached p50/p90")
    table = Table(*head, title="ceiling by where states are kept (unlimited cache)")
    for p in s.placements:
        ratio = _number(p.prefill_ratio, 2)
        name = "every token" if p.name == "exact" else p.name
        middle = "/".join(map(str, p.uncached_percentiles))
        table.add_row(name, f"{p.token_hit_rate:.4f}", ratio, middle)
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"
