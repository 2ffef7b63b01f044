"""Where the step times of a point come from: a device's data file, or a profile."""

from __future__ import annotations

import hashlib
import importlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from executor.calibrate_source import kernel_hashes
from experiments.cli_errors import UsageError
from experiments.config import CostConfig, Experiment
from sim import models
from sim.cost import device as devices
from sim.cost.modelled import ModelledBackend
from sim.cost.profile import OTHER_MODEL, Profile, ProfileError, backend, refuse_foreign
from sim.cost.profile_curve import Measured
from sim.cost.profile_files import find, read, to_text, write
from sim.cost.profile_fit import fitted
from sim.step import StepBackend

ROUNDS = 8


class Timed(StepBackend, Protocol):
    """A backend of steps, and the engine's own time a step."""

    @property
    def host_ns(self) -> int: ...


class Prices(Protocol):
    """Makes a backend for states of a dtype."""

    def backend(self, ssm_dtype: str) -> Timed: ...


class Pricing:
    """The step times of one experiment; ``misses`` what the last backend lacked."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.cost = experiment, experiment.cost
        self._shares: Measured | None = None

    def backend(self, ssm_dtype: str) -> ModelledBackend:
        """A backend with the profile as it is now. Raises ``ValueError`` where it has no price."""
        e = self.experiment
        model, tp, kv_dtype = models.load(e.model), e.hardware.tp, e.engine.kv_dtype
        if self.cost.profile is None:
            device = devices.load(e.hardware.device)
            return ModelledBackend(model, device, tp, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype)
        profile = profile_of(self.cost)
        refuse_foreign(profile, model, kernel_hashes(), self.cost.accept, tp, kv_dtype, ssm_dtype)
        refuse = self.cost.on_miss == "refuse"
        made, self._shares = backend(
            profile, model, tp, refuse=refuse, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype
        )
        return made

    @property
    def misses(self) -> dict[str, tuple[float, float]]:
        """Sizes by operation that the profile lacked in the last run."""
        return self._shares.misses if self._shares else {}

    def measured_misses(self) -> bool:
        """With ``on_miss: measure``, whether sizes were missing; they are in the file now."""
        if self.cost.on_miss != "measure" or not self.misses:
            return False
        measure(self.cost, self.experiment.model, self.misses)
        return True


@lru_cache(maxsize=8)
def _read(name: str, changed_ns: int) -> Profile:
    return find(name)


def profile_of(cost: CostConfig) -> Profile:
    """The profile that a configuration names. Raises ``ProfileError``."""
    assert cost.profile is not None, "checked by the caller"
    path = Path(cost.profile)
    profile = _read(cost.profile, path.stat().st_mtime_ns if path.is_file() else 0)
    if cost.on_miss == "measure" and not path.is_file():
        raise ProfileError(
            f"on_miss: measure adds to the profile, but {cost.profile!r} is not a file; "
            "`prefixlab calibrate --grid none --out FILE` begins one"
        )
    if cost.on_miss == "measure" and (profile.kind == "modelled" or OTHER_MODEL in cost.accept):
        raise ProfileError(
            f"profile {profile.name} is {profile.kind}; on_miss: measure adds to a measured "
            "profile of the experiment's own model only"
        )
    return profile


def measure(cost: CostConfig, model: str, misses: dict[str, tuple[float, float]]) -> None:
    """Measure on this machine what the profile lacks, and keep it in the file."""
    path, loaded = Path(cost.profile or ""), models.load(model)
    made: Profile = kernels().measured_too(read(path), loaded, misses)
    added = [s for s in made.samples if s.part == "demand"]
    # Another process may have added to the file meanwhile.
    write(fitted(read(path).with_samples(added), loaded), path)


def kernels() -> Any:
    """``executor.calibrate``, which needs torch. Raises ``UsageError`` where that is missing."""
    try:
        return importlib.import_module("executor.calibrate")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"measuring runs kernels, and {error.name} is not installed: "
            "pip install 'prefixlab[executor]'; on_miss: extrapolate and --report need none"
        ) from None


def identity(cost: CostConfig) -> str:
    """Changes when prices may: the profile's content, or which one it is where runs add to it."""
    if cost.profile is None:
        return ""
    profile = profile_of(cost)
    if cost.on_miss != "measure":
        return hashlib.sha256(to_text(profile).encode()).hexdigest()
    parts = [profile.name, dict(profile.kernels), dict(profile.provenance)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check(experiment: Experiment) -> None:
    """Raise ``ValueError`` for a profile that cannot price the experiment."""
    Pricing(experiment).backend(experiment.engine.ssm_dtype)


def origin(cost: CostConfig) -> dict[str, Any]:
    """What a manifest says of the step times: measured or modelled, and by what."""
    if cost.profile is None:
        said = "step times: roofline with the device file's efficiencies"
        return {"measured": [], "modelled": [said]}
    profile = profile_of(cost)
    keys = ("device", "driver", "versions", "made", "timer")
    given = {k: profile.provenance[k] for k in keys if k in profile.provenance}
    said = f"step times: profile {profile.name} ({profile.kind}), on_miss {cost.on_miss}"
    found: dict[str, Any] = {"measured": [], "modelled": [], "profile": given}
    found[profile.kind] = [said]
    return found
