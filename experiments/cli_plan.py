"""``prefixlab plan``: what an engine will do with a model's memory."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import typer

from experiments.cli_errors import UsageError, tells_errors
from experiments.plan_tables import show
from sim.models import load, names
from sim.plan import Plan, plan
from sim.vllm.model_geometry import ENGINES, Serving

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
    list_models: Annotated[bool, typer.Option("--list", help="Names of all presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
) -> None:
    """Shapes, bytes, block size and why, padding, groups, pool, crossovers, warnings."""
    if list_models:
        return typer.echo("\n".join(names()))
    if model is None:
        raise UsageError("which model? give a MODEL, or --list for the names of all presets")
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
        memory_bytes=None if memory is None else memory_bytes(memory),
        num_blocks=num_blocks,
        block_tokens=block_size,
        kernel_block_tokens=kernel_block,
        unit_tokens=prefix_match_unit,
        drafts=drafts,
        export_states=export_states,
    )
    found = plan(load(model), serving, max_num_seqs)
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=2))
    else:
        show(found)
    return None


def as_data(found: Plan) -> dict[str, Any]:
    """A plan as JSON holds it."""
    return asdict(found)


plan_command = tells_errors(_plan, ValueError)


def register(app: typer.Typer) -> None:
    """Add ``plan`` to the command line."""
    app.command("plan")(plan_command)


app = typer.Typer(add_completion=False)
register(app)
