"""``prefixlab plan``: what an engine will do with a model's memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from experiments import plan_tables_sglang
from experiments.cli_errors import UsageError, tells_errors
from experiments.plan_tables import show
from sim.dtypes import one_of
from sim.models import load, names
from sim.plan import Plan, plan
from sim.sglang.plan import ENGINES as SGLANG
from sim.sglang.plan import SglangPlan, SglangServing, sglang_plan
from sim.vllm.model_geometry import ENGINES as VLLM
from sim.vllm.model_geometry import Serving

P = TypeVar("P", Plan, SglangPlan)
ENGINES = (*VLLM, *SGLANG)
# Flags that only one of the two engines has.
OF_VLLM = ("mode", "max_num_seqs", "block_size", "kernel_block", "prefix_match_unit", "num_blocks",
           "drafts", "export_states")  # fmt: skip
OF_SGLANG = ("page_size", "strategy", "overlap", "radix_cache", "track_interval",
             "chunked_prefill_size", "mamba_full_memory_ratio", "max_mamba_cache_size",
             "max_running", "int8", "int8_slots", "int8_outside", "skip_decode_lock")  # fmt: skip
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "b": 1}

ModelName = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Preset, .yaml preset or config.json.")
]


def memory_bytes(text: str) -> int:
    """``40GiB``, ``500 MB`` or a number of bytes. Raises ``UsageError``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in UNITS or not float(match[1]):
        raise UsageError(f"--memory is {text!r}, allowed: a size above 0 such as 40GiB or 40GB")
    return int(float(match[1]) * UNITS[unit])


def _plan(
    ctx: typer.Context,
    model: ModelName = None,
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "vllm-0.33",
    mode: Annotated[str, typer.Option(help="none, align, or (vllm-0.28) all.")] = "align",
    tp: Annotated[int, typer.Option(help="Tensor parallelism.")] = 1,
    ssm_dtype: Annotated[
        str, typer.Option(help="State: auto, float32, bfloat16, float16.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV: auto, bfloat16, float16, fp8.")] = "auto",
    memory: Annotated[
        str | None, typer.Option(help="Memory of the pool on one rank; 40GiB is assumed.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request; the model's.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.")] = 256,
    block_size: Annotated[int | None, typer.Option(help="vLLM's --block-size.")] = None,
    kernel_block: Annotated[int, typer.Option(help="The attention backend's smallest block.")] = 16,
    prefix_match_unit: Annotated[int | None, typer.Option(help="Tokens of a prefix hash.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks instead of --memory.")] = None,
    drafts: Annotated[int, typer.Option(help="Speculative tokens a step.")] = 0,
    export_states: Annotated[
        bool,
        typer.Option("--export-states", help="GDN or KDA kernels that export states in a chunk."),
    ] = False,
    page_size: Annotated[int, typer.Option(help="SGLang: tokens of a page.")] = 1,
    strategy: Annotated[
        str, typer.Option(help="SGLang: auto, no_buffer, extra_buffer, extra_buffer_lazy.")
    ] = "auto",
    overlap: Annotated[bool, typer.Option(help="SGLang: overlap scheduling.")] = True,
    radix_cache: Annotated[bool, typer.Option(help="SGLang: keep prefixes.")] = True,
    track_interval: Annotated[int, typer.Option(help="SGLang: --mamba-track-interval.")] = 256,
    chunked_prefill_size: Annotated[
        int, typer.Option(help="SGLang: tokens of a chunk; -1 for no chunks.")
    ] = 8192,
    mamba_full_memory_ratio: Annotated[
        float, typer.Option(help="SGLang: bytes of states to bytes of KV.")
    ] = 0.9,
    max_mamba_cache_size: Annotated[
        int | None, typer.Option(help="SGLang: state slots, instead of the ratio.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="SGLang: max_running_requests.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="SGLang: int8 checkpoints.")] = False,
    int8_slots: Annotated[
        int | None, typer.Option(help="SGLang: int8 slots; twice the state slots.")
    ] = None,
    int8_outside: Annotated[
        bool, typer.Option("--int8-outside", help="SGLang's own count: the int8 pool on top.")
    ] = False,
    skip_decode_lock: Annotated[
        bool, typer.Option("--skip-decode-lock", help="SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.")
    ] = False,
    list_models: Annotated[bool, typer.Option("--list", help="Names of all presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
) -> None:
    """Shapes, bytes, blocks or slots and why, pools, what runs at once, warnings."""
    if list_models:
        return typer.echo("\n".join(names()))
    if model is None:
        raise UsageError("which model? give a MODEL, or --list for the names of all presets")
    one_of("engine", engine, ENGINES)
    _refuse_foreign(ctx, engine)
    size = None if memory is None else memory_bytes(memory)
    if engine in SGLANG:
        flags = SglangServing(
            engine=engine,
            tp=tp,
            ssm_dtype=ssm_dtype,
            kv_dtype=kv_dtype,
            memory_bytes=size,
            max_model_len=max_model_len,
            page_size=page_size,
            strategy=strategy,
            overlap=overlap,
            radix_cache=radix_cache,
            track_interval=track_interval,
            chunked_prefill_size=None if chunked_prefill_size == -1 else chunked_prefill_size,
            mamba_full_memory_ratio=mamba_full_memory_ratio,
            max_mamba_cache_size=max_mamba_cache_size,
            max_running=max_running,
            int8=int8 or int8_slots is not None or int8_outside,
            int8_slots=int8_slots,
            int8_outside=int8_outside,
            skip_decode_lock=skip_decode_lock,
        )
        return _tell(sglang_plan(load(model), flags), as_json, plan_tables_sglang.show)
    for flag, value, low in (("--max-num-seqs", max_num_seqs, 1), ("--num-blocks", num_blocks, 2)):
        if value is not None and value < low:
            raise UsageError(f"{flag} is {value}, allowed: whole numbers from {low} up")
    serving = Serving(
        engine=engine,
        mode=mode,
        tp=tp,
        ssm_dtype=ssm_dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        memory_bytes=size,
        num_blocks=num_blocks,
        block_tokens=block_size,
        kernel_block_tokens=kernel_block,
        unit_tokens=prefix_match_unit,
        drafts=drafts,
        export_states=export_states,
    )
    return _tell(plan(load(model), serving, max_num_seqs), as_json, show)


def _refuse_foreign(ctx: typer.Context, engine: str) -> None:
    """Raise ``UsageError`` if a flag was given that ``engine`` does not have."""
    for name in OF_VLLM if engine in SGLANG else OF_SGLANG:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is not a flag of {engine}; see prefixlab plan --help")


def _tell(found: P, as_json: bool, tables: Callable[[P], None]) -> None:
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=2))
    else:
        tables(found)


def as_data(found: Plan | SglangPlan) -> dict[str, Any]:
    """A plan as JSON holds it."""
    return asdict(found)


plan_command = tells_errors(_plan, ValueError)


def register(app: typer.Typer) -> None:
    """Add ``plan`` to the command line."""
    app.command("plan")(plan_command)


app = typer.Typer(add_completion=False)
register(app)
