"""Launch configurations per device, from the files in ``configs``: nothing is tuned at run time.

A file names the devices it is for (``matches``: parts of the device's name) and gives each
operation a list of rows. The first row whose ``up_to`` is not below the size at hand applies, so
rows are ordered by size and the last has no ``up_to``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kernels.backend import Backend

FOLDER = Path(__file__).parent / "configs"
Table = dict[str, list[dict[str, int]]]


@functools.cache
def tables() -> dict[str, dict[str, Any]]:
    """All shipped files by name."""
    files = sorted(FOLDER.glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


@functools.cache
def table(device: str) -> Table:
    """The generic table with the rows for ``device`` laid over it."""
    every = tables()
    found = dict(every["generic"]["operations"])
    for name in sorted(every):
        if any(part in device for part in every[name]["matches"]):
            found.update(every[name]["operations"])
    return found


def row(backend: Backend, operation: str, size: int = 0) -> Mapping[str, int]:
    """The launch configuration of ``operation`` for ``size``: the first row in the interpreter."""
    rows = table(backend.device)[operation]
    fitting = rows if backend.interpreted else [r for r in rows if r.get("up_to", size) >= size]
    return {key: value for key, value in (fitting or rows[-1:])[0].items() if key != "up_to"}


def power(value: int, least: int = 16, most: int = 1 << 20) -> int:
    """The power of two that covers ``value``, within ``least`` and ``most``."""
    return min(max(1 << max(value - 1, 0).bit_length(), least), most)
