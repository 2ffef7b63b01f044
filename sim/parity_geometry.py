"""Compare our sizes with those that the engines' own code computed for released models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.models import load
from sim.plan import Plan, plan
from sim.sglang.sizes import model_chunk, slot_of
from sim.sglang.strategy import supports_hybrid_cache
from sim.state_shapes import GeometryError
from sim.vllm.case_geometry import recorded_form
from sim.vllm.model_geometry import Serving

Row = dict[str, Any]
# What a row is, not what was computed.
INPUTS = ("model", "vllm", "variant", "tp", "ssm", "kv", "mode", "max_model_len_note")


@dataclass(frozen=True)
class RowResult:
    """One row; ``difference`` is the first one in words, None if everything agrees."""

    name: str
    difference: str | None


def compare_file(path: str | Path) -> list[RowResult]:
    """Every vLLM row, every SGLang row, then every operators' report, of a file of recorded sizes
    (``.json``, ``.json.gz``).

    Raises ``ValueError`` (``path:line: what``) on a file that holds no such rows.
    """
    path = Path(path)
    data = read_json(path)
    if not is_geometry(data):
        raise ValueError(f"{path}: holds no recorded sizes: must be an object with a list `vllm`")
    reports = data.get("reports", {}).get("rows", [])
    sglang = map(compare_sglang, data.get("sglang", []))
    return [*map(compare_row, data["vllm"]), *sglang, *map(compare_report, reports)]


def read_json(path: Path) -> Any:
    """A plain or gzipped JSON file."""
    raw = path.read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: not readable: {error}") from error


def is_geometry(data: Any) -> bool:
    """Whether ``data`` is a file of recorded sizes."""
    return isinstance(data, dict) and isinstance(data.get("vllm"), list)


def compare_row(row: Row) -> RowResult:
    """Our figures for a row's model and settings against the row's."""
    name = " ".join(str(row.get(k)) for k in ("model", "vllm", "variant", "tp", "ssm", "kv"))
    try:
        ours = computed(row)
    except (ValueError, KeyError) as error:
        return RowResult(name, f"refused here: {error}")
    return RowResult(name, next(_differences(row, ours), None))


def compare_sglang(row: Row) -> RowResult:
    """Our slot and grid for a row's model against the row's; the grid is null for what SGLang gives
    no cache of KV and states."""
    name = " ".join(str(row.get(k)) for k in ("model", "sglang", "tp", "ssm"))
    try:
        model = load(row["model"])
        slot = slot_of(model, row["tp"], row["ssm"])
    except (ValueError, KeyError) as error:
        return RowResult(name, f"refused here: {error}")
    ours: Row = {
        "conv": [list(shape) for shape in slot.conv],
        "temporal": list(slot.temporal),
        "slot_bytes": slot.bytes,
        "default": row["ssm"] == "float32",
    }
    hosted = supports_hybrid_cache(row["sglang"], model.architecture)
    chunk = model_chunk(model)
    ours |= {f"grid_page{n}": max(chunk, n) if hosted else None for n in (1, 64)}
    told = {k: v for k, v in row.items() if k != "sglang"}
    return RowResult(name, next(_differences(told, ours), None))


def compare_report(row: Row) -> RowResult:
    """A block size that an operator reported, with the figures derived from the report."""
    name, args = f"report {row['source']}", row["args"]
    serving = Serving(
        tp=args.get("tp", 1),
        kv_dtype=args.get("kv", "auto"),
        ssm_dtype=args.get("ssm", "auto"),
        drafts=args.get("spec", 0),
    )
    try:
        p = plan(load(row["model"]), serving)
    except ValueError as error:
        return RowResult(name, f"refused here: {error}")
    ours = {
        "reported": p.geometry.block_tokens,
        "computed": p.geometry.block_tokens,
        "computed_padding": p.state.padding_percent if p.state else None,
        "state_bytes": p.geometry.state_bytes,
        "groups": len(p.geometry.groups),
        "pool_bytes_per_block": p.geometry.bytes_per_block,
    }
    return RowResult(name, next(_differences({k: row[k] for k in ours}, ours), None))


def _differences(row: Row, ours: Row) -> Iterator[str]:
    for key in row.keys() - set(INPUTS) - ours.keys():
        yield f"{key}: recorded {row[key]}, not computed here"
    for key in row:
        if key in ours and row[key] != ours[key]:
            yield f"{key}: recorded {row[key]}, here {ours[key]}"


def computed(row: Row) -> Row:
    """Every figure of a row, computed for its model and settings."""
    version = ".".join(str(row["vllm"]).split(".")[:2])
    serving = Serving(
        engine=f"vllm-{version}",
        mode=row["mode"],
        tp=row["tp"],
        ssm_dtype=row["ssm"],
        kv_dtype=row["kv"],
        max_model_len=row.get("max_model_len"),
        export_states="gdn_align" in row.get("variant", ""),
    )
    found = plan(load(row["model"]), serving)
    return {**_pool(found), **_state(found), **_kv(found), **_crossover(found)}


def _pool(p: Plan) -> Row:
    groups = p.geometry.groups
    layers = [len(g.layers) for g in groups]
    return {
        "page_bytes": p.geometry.page_bytes,
        "groups": len(groups),
        "mamba_groups": sum(g.kind == "mamba" for g in groups),
        "attention_groups": sum(g.kind == "attention" for g in groups),
        "group_size": max(layers),
        "layers_per_group": layers,
        "pool_bytes_per_block": p.geometry.bytes_per_block,
        "max_model_len": p.max_model_len,
        "blocks_at_max_model_len": p.pool.longest_blocks,
        "bytes_at_max_model_len": p.pool.longest_bytes,
        "shortest_request_blocks": p.pool.shortest_blocks,
        "shortest_request_bytes": p.pool.shortest_bytes,
    }


def _state(p: Plan) -> Row:
    if p.state is None:
        return {}
    return {
        "state_shapes": [list(shape) for shape in p.state.shapes],
        "state_dtypes": list(p.state.dtypes),
        "state_bytes_per_layer": p.state.bytes_per_layer,
        "state_bytes_total": p.state.total_bytes,
        "state_bytes_allocated": p.state.allocated_bytes,
        "padding_pct": p.state.padding_percent,
    }


def _kv(p: Plan) -> Row:
    if p.kv is None:
        return {}
    return {
        "kv_bytes_per_token_per_layer": p.kv.bytes_per_token_per_layer,
        "block_size": p.geometry.block_tokens,
        "shortest_request_token_equiv": p.pool.shortest_tokens,
        "kv_bytes_per_token": p.kv.bytes_per_token,
        "kv_bytes_per_token_allocated": p.kv.allocated_bytes_per_token,
    }


def _crossover(p: Plan) -> Row:
    if p.crossover is None:
        return {}
    out = {
        "state_equals_llama_kv_at_tokens": p.crossover.state_tokens,
        "hybrid_total_equals_llama_total_at_tokens": p.crossover.total_tokens,
    }
    if p.kv is not None:
        out["allocated_hybrid_le_llama_at_tokens"] = p.crossover.allocated_tokens
    return {"crossover": out}


def is_random(data: Any) -> bool:
    """Whether ``data`` are sizes recorded for random configurations of one vLLM version."""
    return isinstance(data, dict) and "version" in data and isinstance(data.get("cases"), list)


def compare_random(data: Row) -> Iterator[RowResult]:
    """Every ``[seed, config, sizes]``; sizes are null where vLLM refuses to start."""
    for seed, config, recorded in data["cases"]:
        try:
            ours = recorded_form(config, data["version"])
        except GeometryError:
            ours = None
        wrong = None if ours == recorded else f"sizes are {ours}, recorded {recorded}"
        yield RowResult(f"sizes {data['version']} {seed}", wrong)
