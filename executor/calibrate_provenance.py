"""Where timings come from: device, driver, versions, sources; and an empty profile that says so."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from executor.calibrate_options import KEPT, Options
from executor.calibrate_source import ROOT, kernel_hashes
from executor.calibrate_timing import Ceilings
from executor.profile_memory import keep_freed_memory
from sim.cost import device as devices
from sim.cost.layers import shape_of
from sim.cost.profile import Profile, fingerprint
from sim.model import Model


def new_profile(
    model: Model, options: Options, best: Ceilings, known: Mapping[str, Any], name: str
) -> Profile:
    """A profile without timings."""
    return Profile(
        name=name,
        kind="measured",
        model=model.name,
        shape=fingerprint(shape_of(model)),
        dtype=model.dtype,
        device=device_of(model, options, best),
        kernels=kernel_hashes(),
        provenance={**known, "ceilings": vars(best), **_made()},
        samples=(),
        curves={},
        errors={},
    )


def device_of(model: Model, options: Options, best: Ceilings) -> dict[str, Any]:
    """The device with this run's ceilings; what was not measured from its data file if any."""
    cuda = options.device != "cpu"
    name = device_name(options.device)
    known = [d for d in devices.names() if cuda and d in name.lower()]
    sources = {"ceilings": "measured in the same run; shares of 1 where no curve is"}
    if known:
        data = dict(vars(devices.load(known[0])))
        data["efficiency"] = {"compute": dict(data["efficiency"].compute), "memory": 0.8}
        flops = {**data["tensor_flops"], model.dtype: best.tensor_flops}
        return {**data, "tensor_flops": flops, "bandwidth": best.bandwidth}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "name": name,
        "memory_bytes": memory,
        "tensor_flops": {model.dtype: best.tensor_flops},
        "vector_flops": best.vector_flops,
        "bandwidth": best.bandwidth,
        "links": {},
        "launch_ns": 0,
        "graph_launch_ns": 0,
        "graph_max_batch": 0,
        "collective_ns": 0,
        "host_ns": 0,
        "efficiency": {"compute": {}, "memory": 1.0, "default": 1.0},
        "datasheet": {},
        "sources": sources,
    }


def device_name(device: str) -> str:
    """The processor's or the GPU's own name."""
    if device != "cpu":
        return str(torch.cuda.get_device_name(0))
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        found = [
            line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line
        ]
    except OSError:
        found = []
    return found[0] if found else platform.processor() or platform.machine()


def provenance(model: Model, options: Options) -> dict[str, Any]:
    """What the timings depend on beside the kernels."""
    packages = ("torch", "triton", "numpy")
    return {
        "device": device_name(options.device),
        "driver": _driver(options.device),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in packages},
        "model": model.name,
        "pattern": model.pattern,
        "timer": options.timer.method,
        "kind_of_device": options.device,
        **{name: getattr(options, name) for name in KEPT},
        "keeps_freed_memory": keep_freed_memory(),
        "data": "normal values, weights from the seed",
    }


def _made() -> dict[str, str]:
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _told(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
    }


def _driver(device: str) -> str:
    if device == "cpu":
        return f"{platform.system()} {platform.machine()}"
    return _told(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _told(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
