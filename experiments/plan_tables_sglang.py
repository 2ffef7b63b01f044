"""A plan for SGLang as text: one table a topic, then the warnings."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from experiments.plan_tables import Rows, human, print_rows
from sim.sglang.plan import PoolsPlan, SglangPlan


def show(p: SglangPlan) -> None:
    """Print the whole plan."""
    console = Console(soft_wrap=True)
    console.print(
        f"[bold]{escape(p.model.name)}[/] on {p.serving.engine}, tensor parallelism "
        f"{p.serving.tp}; bytes are those of one rank"
    )
    for title, rows in (
        ("State slot", _slot(p)),
        ("Strategy", _strategy(p)),
        ("Pools", _pools(p)),
        ("At once", _running(p.pools)),
        ("With int8 checkpoints" if not p.serving.int8 else "Without int8", _other(p)),
    ):
        print_rows(console, title, list(rows))
    for warning in p.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    console.print(f"[dim]model: {escape(p.model.source)}[/]")


def _slot(p: SglangPlan) -> Rows:
    s = p.slot
    yield "family, layers", f"{s.family}, {s.layers}"
    yield "conv state a layer", f"{', '.join(map(str, s.conv))} {s.conv_dtype}"
    yield "temporal state a layer", f"{s.temporal} {s.temporal_dtype}"
    yield "active slot, all layers", human(s.bytes)
    yield (
        "as an int8 checkpoint",
        f"{human(s.int8_bytes)}, {s.bytes / s.int8_bytes:.2f} times smaller",
    )


def _strategy(p: SglangPlan) -> Rows:
    off = not p.serving.radix_cache
    yield "strategy", "none, radix cache off" if off else p.strategy.name
    yield "because", p.strategy.reason
    yield "overlap scheduling", "on" if p.strategy.overlap else "off"
    if off:
        return
    g = p.grid
    if g.grid is None or g.track_grid is None:
        yield "states are left", "at each chunk's end and the prompt's, at their exact length"
        return
    yield "model chunk, page", f"{g.model_chunk:,}, {p.serving.page_size:,} tokens"
    yield "grid of a prefill", f"{g.grid:,} tokens, from a chunk's start"
    yield "grid of a decode", f"{g.track_grid:,} tokens"


def _pools(p: SglangPlan) -> Rows:
    o = p.pools
    yield "memory", human(o.memory_bytes) + (", assumed" if o.memory_assumed else "")
    yield "state slots", f"{o.mamba_slots:,} and a padding slot, {human(o.state_pool_bytes)}"
    if p.serving.int8:
        yield "int8 slots", f"{o.int8_slots:,} and a padding slot, {human(o.int8_pool_bytes)}"
    yield "KV a token", f"{p.kv_layers} layers, {human(p.kv_bytes_per_token)}"
    yield "KV tokens", f"{o.kv_tokens:,} and a padding page, {human(o.kv_pool_bytes)}"
    yield "all cache bytes", human(o.total_bytes)
    if o.unused_bytes >= 0:
        yield "left over", human(o.unused_bytes)
    else:
        yield "beyond the memory", human(-o.unused_bytes)


def _running(o: PoolsPlan) -> Rows:
    yield "slots for one request", f"{o.slots_per_request}, {o.tracking_slots} of them for tracking"
    yield "most requests at once", f"{o.max_running:,} of {o.running_wanted:,}"
    yield "their tracking slots", human(o.tracking_bytes)
    yield "states cached beside them", f"{o.cached_states_full_load:,}"
    yield "states cached when idle", f"{o.cached_states_idle:,}"


def _other(p: SglangPlan) -> Rows:
    o = p.other
    if o is None:
        return
    yield "in the same memory", human(o.memory_bytes)
    slots = f"{o.mamba_slots:,}" + (f" and {o.int8_slots:,} int8" if o.int8_slots else "")
    yield "state slots", slots
    yield "KV tokens", f"{o.kv_tokens:,}"
    yield "most requests at once", f"{o.max_running:,}"
    yield "states cached beside them", f"{o.cached_states_full_load:,}"
