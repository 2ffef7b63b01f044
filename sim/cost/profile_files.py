"""Profiles as files: one JSON each, some shipped, and device files as profiles."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.cost import device as devices
from sim.cost.device import Device
from sim.cost.profile import PARTS, Profile, ProfileError, Sample
from sim.cost.profile_curve import Curve

SCHEMA = 1
SHIPPED = files("sim").joinpath("data/profiles")
MODELLED = "-roofline"


def modelled(device: Device) -> Profile:
    """A device's data file as a profile: constant shares, nothing measured."""
    data = {**vars(device), "efficiency": _plain(device.efficiency)}
    source = {"source": f"device file {device.name}; shares and launches are assumed"}
    return Profile(f"{device.name}{MODELLED}", "modelled", "", {}, "", data, {}, source, (), {}, {})


def _plain(efficiency: Any) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(efficiency).items()}


def names() -> list[str]:
    """Profiles that come with prefixlab."""
    every = SHIPPED.iterdir() if SHIPPED.is_dir() else ()
    found = [f.name.removesuffix(".json") for f in every if f.name.endswith(".json")]
    return sorted([*found, *(f"{name}{MODELLED}" for name in devices.names())])


def find(name: str) -> Profile:
    """A file, or the name of a shipped profile. Raises ``ProfileError`` naming the nearest."""
    if Path(name).is_file():
        return read(Path(name))
    if name.endswith(MODELLED) and name.removesuffix(MODELLED) in devices.names():
        return modelled(devices.load(name.removesuffix(MODELLED)))
    if name in names():
        return _from_text(SHIPPED.joinpath(f"{name}.json").read_text("utf-8"), name)
    near = difflib.get_close_matches(Path(name).stem, names(), 1)
    hint = f"; nearest is {near[0]}" if near else ""
    raise ProfileError(
        f"{name}: no such file, nor a shipped profile ({', '.join(names())}){hint}; "
        "`prefixlab calibrate` makes one"
    )


def read(path: Path) -> Profile:
    """A profile file. Raises ``ProfileError`` if it is not one."""
    try:
        return _from_text(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: not UTF-8 text; expected a profile in JSON") from None


def _from_text(text: str, where: str) -> Profile:
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise ProfileError(f"{where}: schema is not {SCHEMA}, the only one that is known")
        data["samples"] = tuple(_sample(s) for s in data["samples"])
        data["curves"] = {op: _curve(c) for op, c in data["curves"].items()}
        return Profile(**data)
    except json.JSONDecodeError as error:
        raise ProfileError(f"{where}:{error.lineno}: not JSON ({error.msg})") from None
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{where}: not a profile ({type(error).__name__}: {error})") from None


def _curve(data: Mapping[str, Any]) -> Curve:
    sizes, shares = tuple(data["sizes"]), tuple(data["shares"])
    return Curve(data["launch_s"], sizes, shares, data["sequence_s"])


def _sample(data: Mapping[str, Any]) -> Sample:
    return Sample(data["case"], data["part"], data["rounds"], tuple(data["seconds"]))


def to_text(profile: Profile) -> str:
    """The JSON of a profile, one sample a line."""
    head = {"schema": SCHEMA, **{k: v for k, v in vars(profile).items() if k != "samples"}}
    head["curves"] = {
        op: {
            "launch_s": c.launch_s,
            "sequence_s": c.sequence_s,
            "sizes": c.sizes,
            "shares": c.shares,
        }
        for op, c in sorted(profile.curves.items())
    }
    body = ",\n".join("  " + json.dumps(_shown(s)) for s in sorted(profile.samples, key=_order))
    text = json.dumps(head, indent=1)
    return f'{text[:-2]},\n "samples": [\n{body}\n ]\n}}\n'


def _shown(s: Sample) -> dict[str, Any]:
    """A sample with its figures, which are for readers: they follow from the timings."""
    figures = {"median_s": s.median_s, "min_s": min(s.seconds), "spread": round(s.spread, 4)}
    return {"case": s.case, "part": s.part, "rounds": s.rounds, **figures, "seconds": s.seconds}


def _order(s: Sample) -> tuple[int, str]:
    return PARTS.index(s.part), s.case


def write(profile: Profile, path: Path) -> None:
    """Write the file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(to_text(profile), encoding="utf-8")
    os.replace(part, path)
