"""Times our SSD prefill beside other libraries' on the same inputs, where they are installed.

    python tools/gpu_compare.py [--device cuda] [--json FILE] [--small]

mamba_ssm's ``mamba_chunk_scan_combined`` and flash-linear-attention's ``chunk_simple_gla`` compute
the same recurrence (the latter without dt and D). Sizes are those of one Nemotron-H-8B layer.
Without either library only our own times are printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from executor.calibrate_timing import Timer
from kernels import checks, ssd

FULL = {"heads": 128, "width": 64, "groups": 8, "columns": 128, "tokens": (256, 1024, 4096, 16384)}
SMALL = {"heads": 4, "width": 32, "groups": 1, "columns": 32, "tokens": (64, 256)}


def inputs(size: dict[str, Any], tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Normal values; dt small and positive, A negative."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    h, p, g, n = (size[key] for key in ("heads", "width", "groups", "columns"))

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return {
        "x": make(tokens, h, p).to(dtype),
        "dt": (make(tokens, h).sigmoid() / 10).to(dtype),
        "A": -make(h).exp(),
        "B": make(tokens, g, n).to(dtype),
        "C": make(tokens, g, n).to(dtype),
    }


def ours(i: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our scan."""
    return ssd.prefill(*i.values(), lengths=[len(i["x"])]).y


def mamba_ssm(i: dict[str, torch.Tensor]) -> torch.Tensor:
    """mamba_ssm's five kernels."""
    module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    batch = {k: v if k == "A" else v[None] for k, v in i.items()}
    found: torch.Tensor = module.mamba_chunk_scan_combined(*batch.values(), chunk_size=256)
    return found[0]


def simple_gla(i: dict[str, torch.Tensor]) -> torch.Tensor:
    """flash-linear-attention's scan with a decay a head, on groups spread to heads."""
    module = importlib.import_module("fla.ops.simple_gla")
    each = i["x"].shape[1] // i["B"].shape[1]
    q, k = (i[name].repeat_interleave(each, 1)[None] for name in ("C", "B"))
    g = (i["dt"].float() * i["A"])[None]
    v = (i["x"] * i["dt"][..., None])[None]
    found: torch.Tensor = module.chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]
    return found[0]


LIBRARIES: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "ours": ours,
    "mamba_ssm": mamba_ssm,
    "flash-linear-attention": simple_gla,
}


def compare(size: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """A row for each library and length: median milliseconds, and the difference from ours."""
    timer, rows = Timer(device, 7), []
    for tokens in size["tokens"]:
        made = inputs(size, tokens, device)
        right = ours(made)
        for name, run in LIBRARIES.items():
            row: dict[str, Any] = {"library": name, "tokens": tokens}
            try:
                row["difference"] = checks.error(run(made), right)
                found = sorted(timer.seconds([lambda run=run, made=made: run(made)]))
                row["median_ms"] = 1e3 * found[len(found) // 2]
            except ImportError as error:
                row["not_installed"] = str(error)
            except Exception as error:  # another library's failure is a result
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="sizes for a dry run on a CPU")
    given = parser.parse_args()
    rows = compare(SMALL if given.small else FULL, given.device)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
