"""Profiles: measured (or modelled) operation times of one device and model, with provenance.

``samples`` are timings; ``curves`` are fitted to those of the parts ``grid`` and
``demand`` only; ``held`` operations and whole ``step`` samples judge the fit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from sim.cost import device as devices
from sim.cost.device import Device
from sim.cost.layers import Shape, shape_of
from sim.cost.modelled import ModelledBackend
from sim.cost.profile_curve import Curve, Measured
from sim.model import Model

PARTS = ("grid", "held", "demand", "step")
OTHER_KERNELS, OTHER_MODEL = "other-kernels", "other-model"
ACCEPT = (OTHER_KERNELS, OTHER_MODEL)


class ProfileError(ValueError):
    """A profile that cannot be read, or does not belong to what it is wanted for."""


@dataclass(frozen=True)
class Sample:
    """Timings of one case, taken in ``rounds`` over all cases; ``part`` is one of ``PARTS``."""

    case: str
    part: str
    rounds: int
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.part not in PARTS or self.rounds < 1 or min(self.seconds, default=0) <= 0:
            raise ProfileError(f"sample {self}: part is one of {PARTS}, rounds and times above 0")

    @property
    def median_s(self) -> float:
        """What curves are fitted to."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Between the 10th and the 90th percentile, over the median."""
        low, high = np.quantile(self.seconds, (0.1, 0.9))
        return float(high - low) / self.median_s

    def more(self, seconds: Iterable[float]) -> Sample:
        """With the timings of one more round."""
        return replace(self, rounds=self.rounds + 1, seconds=(*self.seconds, *seconds))


@dataclass(frozen=True)
class Profile:
    """``kind`` is measured or modelled; ``shape`` what the model's layers look like; ``kernels``
    SHA-256 by part of the sources that ran (none if modelled); ``errors`` on held-out cases."""

    name: str
    kind: str
    model: str
    shape: Mapping[str, Any]
    dtype: str
    device: Mapping[str, Any]
    kernels: Mapping[str, str]
    provenance: Mapping[str, Any]
    samples: tuple[Sample, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    errors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> Device:
        """The device with its ceilings. Raises ``ValueError`` on a bad field."""
        return devices.from_dict(self.device, f"profile {self.name}")

    def case(self, text: str) -> Sample | None:
        """The sample of a case, if there is one."""
        return next((s for s in self.samples if s.case == text), None)

    def with_samples(self, new: Iterable[Sample]) -> Profile:
        """With ``new`` samples in place of earlier ones of the same case; curves are not fitted."""
        every = {s.case: s for s in self.samples} | {s.case: s for s in new}
        return replace(self, samples=tuple(every.values()))


def fingerprint(shape: Shape) -> dict[str, Any]:
    """What times depend on beside the device: sizes of single layers, not how many there are."""
    counted = {"attention_layers", "state_layers", "ffn_layers", "moe_layers", "state_bytes"}
    found = {k: v for k, v in vars(shape).items() if k not in {*counted, "family", "moe"}}
    found["moe"] = None if shape.moe is None else asdict(shape.moe)
    found["state_bytes"] = shape.state_bytes // max(shape.state_layers, 1)
    if shape.family is not None:
        found["projections"] = [list(p) for p in shape.family.projections]
        found["conv"] = [shape.family.channels, shape.family.width]
    return found


def backend(
    profile: Profile,
    model: Model,
    tp: int = 1,
    *,
    refuse: bool = False,
    kv_dtype: str = "auto",
    ssm_dtype: str = "auto",
) -> tuple[ModelledBackend, Measured]:
    """Prices from a profile, and the shares they come from, which note what was missing."""
    device = profile.machine
    shares = Measured(profile.curves, device.efficiency, refuse and profile.kind == "measured")
    made = ModelledBackend(
        model,
        device,
        tp,
        efficiency=shares,
        launches={op: curve.launch_s for op, curve in profile.curves.items()},
        sequences={op: curve.sequence_s for op, curve in profile.curves.items()},
        kv_dtype=kv_dtype,
        ssm_dtype=ssm_dtype,
    )
    return made, shares


def refuse_foreign(
    profile: Profile,
    model: Model,
    kernels: Mapping[str, str],
    accept: Collection[str] = (),
    tp: int = 1,
    kv_dtype: str = "auto",
    ssm_dtype: str = "auto",
) -> None:
    """Raise ``ProfileError`` if the profile is of other kernels or layers and that is not accepted.

    Modelled profiles are anybody's: they hold constants.
    """
    if profile.kind == "modelled":
        return
    changed = sorted(
        k for k in {*kernels, *profile.kernels} if kernels.get(k) != profile.kernels.get(k)
    )
    if changed and OTHER_KERNELS not in accept:
        raise ProfileError(
            f"profile {profile.name} was measured with other kernels (changed: "
            f"{', '.join(changed)}); calibrate again, or accept [{OTHER_KERNELS}]"
        )
    wanted = json.loads(json.dumps(fingerprint(shape_of(model, tp, kv_dtype, ssm_dtype))))
    differ = sorted(k for k in wanted if profile.shape.get(k) != wanted[k])
    if differ and OTHER_MODEL not in accept:
        first = differ[0]
        raise ProfileError(
            f"profile {profile.name} is of model {profile.model}, whose layers differ from those "
            f"of {model.name} ({first}: {profile.shape.get(first)}, not {wanted[first]}); "
            f"calibrate this model, or accept [{OTHER_MODEL}]"
        )
