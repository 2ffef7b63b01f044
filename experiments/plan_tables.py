"""A plan as text: one table a topic, then the groups, then the warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.plan import Plan

Rows = Iterator[tuple[str, str]]
SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def human(size: int) -> str:
    """Bytes, and above one KiB the same in a larger unit."""
    for unit, value in SIZES:
        if size >= value:
            return f"{size:,} B ({size / value:.2f} {unit})"
    return f"{size:,} B"


def show(p: Plan, console: Console | None = None) -> None:
    """Print the whole plan."""
    console = console or Console(soft_wrap=True)
    console.print(f"[bold]{escape(p.model.name)}[/] on {_title(p)}; bytes are those of one rank")
    for title, rows in (
        ("State", _state(p)),
        ("KV", _kv(p)),
        ("Block", _block(p)),
        ("Pool", _pool(p)),
        ("One request", _request(p)),
        ("Crossover", _crossover(p)),
    ):
        print_rows(console, title, list(rows))
    _groups(console, p)
    for warning in p.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    console.print(f"[dim]model: {escape(p.model.source)}[/]")


def _title(p: Plan) -> str:
    mode = p.mode if p.mode == p.serving.mode else f"{p.mode} ({p.serving.mode} asked)"
    return f"{p.serving.engine}, mode {mode}, tensor parallelism {p.serving.tp}"


def print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """A topic's rows under its title."""
    if not rows:
        return
    table = Table(box=None, show_header=False, pad_edge=False, title=title, title_justify="left")
    table.add_column(min_width=30)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", escape(value))
    console.print(table)


def _state(p: Plan) -> Rows:
    s = p.state
    if s is None:
        return
    yield "family, layers", f"{s.family}, {s.layers}"
    for name, shape, dtype, size in zip(
        _tensors(p), s.shapes, s.dtypes, s.tensor_bytes, strict=True
    ):
        share = 100 * size / s.bytes_per_layer
        yield f"{name} a layer", f"{shape} {dtype}, {human(size)}, {share:.1f} %"
    yield "state a layer", human(s.bytes_per_layer)
    yield "state of all layers", human(s.total_bytes)
    yield "allocated, one block a group", human(s.allocated_bytes)
    yield f"states of {p.max_num_seqs} requests", human(p.states_of_all_bytes)


def _tensors(p: Plan) -> tuple[str, ...]:
    assert p.state is not None
    if len(p.state.shapes) == 2:
        return ("conv state", "recurrent state")
    return ("recurrent state" if p.state.family == "linear_attention" else "conv state",)


def _kv(p: Plan) -> Rows:
    if p.kv is None:
        return
    yield "attention layers, dtype", f"{p.kv.layers}, {p.kv.dtype}"
    yield "KV a token, one layer", human(p.kv.bytes_per_token_per_layer)
    yield "KV a token, all layers", human(p.kv.bytes_per_token)
    if p.kv.allocated_bytes_per_token != p.kv.bytes_per_token:
        yield "with layers that fill up groups", f"{p.kv.allocated_bytes_per_token:,.1f} B"


def _block(p: Plan) -> Rows:
    g = p.geometry
    yield "block", f"{g.block_tokens:,} tokens"
    yield "because", p.block_reason
    if g.state_block_tokens not in (None, g.block_tokens):
        yield "state block", f"{g.state_block_tokens:,} tokens: one running state, nothing reusable"
    if p.mode != "none" and g.unit_tokens != g.block_tokens:
        yield (
            "hash unit, scheduler block",
            f"{g.unit_tokens:,}, {g.scheduler_block_tokens:,} tokens",
        )
    yield "page (one layer, one block)", human(g.page_bytes)
    if p.state is not None:
        yield (
            "padding of a state",
            f"{human(p.state.padding_bytes)}, {p.state.padding_percent:.2f} %",
        )
        if p.mode == "align":
            yield "states inside a chunk", _exports(p)


def _exports(p: Plan) -> str:
    step = p.geometry.checkpoint_alignment
    if step is None:
        return "none: a chunk leaves a state only at its end"
    where = "any position" if step == 1 else f"multiples of {step:,} tokens from the chunk's start"
    return f"one, at {where} that is a block boundary"


def _pool(p: Plan) -> Rows:
    g, pool = p.geometry, p.pool
    slots = max(len(group.layers) for group in g.groups)
    yield "memory", human(pool.memory_bytes) + (", assumed" if pool.memory_assumed else "")
    yield "groups", f"{len(g.groups)}, {slots} layer slots in a block"
    yield "bytes a block", human(g.bytes_per_block)
    yield "blocks", f"{pool.num_blocks:,}, one of them the null block"
    yield "left over", human(pool.unused_bytes)
    if pool.states is not None:
        yield "states it could hold", f"{pool.states:,} requests', if nothing else"
    yield "longest requests at once", f"{pool.longest_at_once:.2f}"


def _request(p: Plan) -> Rows:
    pool, r = p.pool, p.request
    yield "shortest", f"{pool.shortest_blocks} blocks, {human(pool.shortest_bytes)}"
    yield "  could hold in tokens", f"{pool.shortest_tokens:,}"
    yield (
        f"longest ({r.tokens:,} tokens)",
        f"{pool.longest_blocks:,} blocks, {human(pool.longest_bytes)}",
    )
    yield "  unpadded, one state", human(r.bytes)
    yield "  KV of llama-3-8b", f"{human(r.reference_bytes)}, {r.ratio:.2f} times as much"
    if p.state is not None and p.mode == "all":
        yield (
            "  its state blocks",
            (
                f"{r.state_blocks:,}: {human(r.state_blocks_bytes)} unpadded, "
                f"{human(r.state_blocks_padded_bytes)} padded"
            ),
        )


def _crossover(p: Plan) -> Rows:
    c = p.crossover
    if c is None:
        return
    yield "against", f"{c.reference}, {c.reference_kv_bytes_per_token:,} B of KV a token"
    yield "state alone", f"{c.state_exact:.2f} tokens; {c.state_tokens:,} whole ones"
    if c.total_exact is None:
        yield "state and KV", "never: the KV a token is not smaller"
    else:
        yield "state and KV", f"{c.total_exact:.1f} tokens; {c.total_tokens:,} whole ones"
    if p.kv is not None:
        whole = "never" if c.allocated_tokens is None else f"{c.allocated_tokens:,} tokens"
        yield "in whole blocks", whole


def _groups(console: Console, p: Plan) -> None:
    table = Table(box=None, pad_edge=False, title="Groups", title_justify="left")
    for name in ("  id", "kind", "layers", "block", "at most"):
        table.add_column(name, justify="left" if name in ("kind", "layers") else "right")
    for number, g in enumerate(p.geometry.groups):
        bound = f"{-(-g.max_memory_usage_bytes // g.page_bytes):,}"
        layers = ", ".join(map(str, g.layers))
        table.add_row(str(number), g.kind, layers, f"{g.block_tokens:,}", bound)
    console.print(table)
