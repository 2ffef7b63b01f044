"""Devices as data files: peak rates, links and overheads, each with its source."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from sim.cost.efficiency import Constant


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s, times in ns. ``launch_ns`` is added to every operation of a
    step that is launched kernel by kernel, ``graph_launch_ns`` to those of a captured graph
    (decode steps of at most ``graph_max_batch``). ``host_ns`` is the engine's own time a step."""

    name: str
    memory_bytes: int
    tensor_flops: Mapping[str, float]
    vector_flops: float
    bandwidth: float
    links: Mapping[str, float]
    launch_ns: int
    graph_launch_ns: int
    graph_max_batch: int
    collective_ns: int
    host_ns: int
    efficiency: Constant
    datasheet: Mapping[str, Any]
    sources: Mapping[str, str]

    def peak(self, dtype: str) -> float:
        """Tensor peak for one dtype. Raises ``ValueError`` for one the device has no figure of."""
        if dtype not in self.tensor_flops:
            have = ", ".join(sorted(self.tensor_flops))
            raise ValueError(f"device {self.name} has no peak for dtype {dtype!r}; it has {have}")
        return self.tensor_flops[dtype]


def names() -> list[str]:
    """Shipped devices."""
    found = files("sim").joinpath("data", "devices").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in found if f.name.endswith(".yaml"))


@lru_cache(maxsize=16)
def load(name: str) -> Device:
    """A shipped device by name. Raises ``ValueError`` naming the nearest one if unknown."""
    if name not in names():
        near = difflib.get_close_matches(name.lower(), names(), 1) or names()
        raise ValueError(f"unknown device {name!r}; nearest: {near[0]}; known: {names()}")
    text = files("sim").joinpath("data", "devices", f"{name}.yaml").read_text("utf-8")
    return from_dict(yaml.safe_load(text), f"{name}.yaml")


def from_dict(data: Mapping[str, Any], where: str = "device") -> Device:
    """A device from a mapping. Raises ``ValueError`` on a missing, unknown or negative field."""
    wanted = {f.name for f in fields(Device)}
    if set(data) != wanted:
        missing, unknown = sorted(wanted - set(data)), sorted(set(data) - wanted)
        raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    for key in ("memory_bytes", "vector_flops", "bandwidth"):
        if not float(data[key]) > 0:
            raise ValueError(f"{where}: {key} is {data[key]}, must be above 0")
    for key in ("launch_ns", "graph_launch_ns", "graph_max_batch", "collective_ns", "host_ns"):
        if int(data[key]) < 0:
            raise ValueError(f"{where}: {key} is {data[key]}, must be 0 or more")
    return Device(**{**data, "efficiency": Constant(**data["efficiency"])})
