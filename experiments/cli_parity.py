"""``prefixlab parity``: replay recorded cases and name every difference from the engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.cli_errors import UsageError, tells_errors
from sim import parity_geometry
from sim.check.case import from_data
from sim.check.replayed import replayed
from sim.marconi_artifact import parity as marconi
from sim.parity_geometry import RowResult
from sim.sglang import int8
from sim.sglang import parity as sglang
from sim.vllm import parity as vllm

console = Console(soft_wrap=True, highlight=False)


def cases(path: Path) -> Iterator[Path]:
    """Case files below ``path``, in order of name."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*.json*")):
        if file.name.split(".")[0] not in ("index", "models"):
            yield file


def differences(path: Path) -> Iterator[tuple[str, list[str]]]:
    """``(name, differences)`` of each case in a file."""
    data = _read(path)
    rows = data if isinstance(data, list) else [data]
    if rows and all(isinstance(row, dict) and "case" in row for row in rows):
        for row in rows:
            yield row["case"].get("name", path.name), _compare(path, row)
    elif isinstance(data, dict) and "vllm" in data:
        yield from _sizes(parity_geometry.compare_file(path))
    elif parity_geometry.is_random(data):
        yield from _sizes(parity_geometry.compare_random(data))
    elif int8.is_vectors(data):
        for i, row in enumerate(data):
            yield f"int8 {row['dtype']} {i}", int8.differences(row)
    elif isinstance(data, dict) and "check" in data:
        yield data.get("name", path.name), _broken(path, data)
    elif marconi.is_recorded(data):
        try:
            yield from marconi.compare(data)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
    else:
        raise UsageError(f"{path}: not a recorded case; expected an object with case and result")


def _sizes(results: Iterable[RowResult]) -> Iterator[tuple[str, list[str]]]:
    return ((r.name, [r.difference] if r.difference else []) for r in results)


def _compare(path: Path, row: dict[str, Any]) -> list[str]:
    """Differences of one recorded case, by the engine that its keys name."""
    case = row["case"]
    if "sglang" in row and "oracle" in row:
        return sglang.compare(case, row["oracle"], row["sglang"])
    if "result" in row:
        return vllm.compare(case, row["result"])
    name = case.get("name", "a case")
    raise UsageError(f"{path}: {name} has no result; expected result, or sglang and oracle")


def _broken(path: Path, data: dict[str, Any]) -> list[str]:
    """The invariant that a case of `prefixlab check` breaks, if it still does."""
    try:
        found = replayed(from_data(data))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return [found.told] if found else []


def _read(path: Path) -> Any:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as f:
            return json.load(f)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from None


@tells_errors
def parity(
    paths: Annotated[list[Path], typer.Argument(help="Case files or folders of them.")],
) -> None:
    """Replay recorded cases; one line each, non-zero exit on any difference."""
    total = differ = 0
    for root in paths:
        for path in cases(root):
            for name, found in differences(path):
                total += 1
                differ += bool(found)
                console.print(f"{name}: {found[0] if found else 'agrees'}")
    console.print(f"{total} cases, {differ} differ")
    if differ or not total:
        raise typer.Exit(1)
