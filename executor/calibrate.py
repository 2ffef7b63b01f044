"""Makes a profile: times a grid of operations and whole steps on a device, fits, and judges.

A run that was stopped goes on where it was: every timing is in the file, and a case that has its
timings is not timed again. Timings of another device, model or kernels are never mixed in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from executor import calibrate_cases as cases
from executor.calibrate_bench import Bench
from executor.calibrate_options import KEPT, Options, limits_of
from executor.calibrate_provenance import new_profile, provenance
from executor.calibrate_source import kernel_hashes
from executor.calibrate_steps import between, pieces_of
from executor.calibrate_timing import Call, Reference, ceilings, warm_up
from executor.pools import torch_dtype
from sim.cost.layers import shape_of
from sim.cost.profile import Profile, ProfileError, Sample
from sim.cost.profile_cases import Case, Whole
from sim.cost.profile_files import read, write
from sim.cost.profile_fit import fitted
from sim.model import Model

__all__ = ["Options", "Runner", "calibrate", "limits_of", "measured_too", "speed"]

Progress = Callable[[int, int, str], None]
SAVE_EVERY_S = 5.0
DIGITS = 4
LAUNCHED = "launched_one_by_one"
REFERENCE = "reference_s"
SETTLED = "reference_is_median"
SAME = ("device", "driver", "versions", "model", "pattern", "timer", "row_block",
        "block_tokens", "seed")  # fmt: skip


# -------------------------------------------------------------------------------- the whole run
def calibrate(
    model: Model, out: Path, options: Options, progress: Progress | None = None
) -> tuple[Profile, int]:
    """The profile in ``out``, made or completed, and how many cases are still to be timed.

    Raises ``ProfileError`` if ``out`` holds a profile of anything else.
    """
    runner = Runner(model, options)
    profile = started(model, out, options)
    todo = left_to_do(profile, model, options)
    profile, done = runner.run(profile, todo, out, progress)
    if done == len(todo):
        profile = runner.settled(profile)
    profile = fitted(profile, model)
    write(profile, out)
    return profile, len(todo) - done


Timing = tuple[Case | Whole, str]


def left_to_do(profile: Profile, model: Model, options: Options) -> list[Timing]:
    """Timings that the profile lacks, round by round, each round in another order."""
    rounds = {s.case: s.rounds for s in profile.samples}
    every = planned(model, options)
    todo = []
    for i in range(options.rounds):
        left = {c: part for c, part in every.items() if rounds.get(str(c), 0) <= i}
        todo += [(c, left[c]) for c in cases.shuffled(left, options.seed + i)]
    return todo


def planned(model: Model, options: Options) -> dict[Case | Whole, str]:
    """Every case with the part of the profile it belongs to."""
    shape, limits = shape_of(model), options.limits or limits_of(model, options.device)
    parts: dict[Case | Whole, str] = dict.fromkeys(cases.steps(limits, options.grid), "step")
    parts |= dict.fromkeys(cases.held(shape, limits, options.grid, options.seed), "held")
    parts |= dict.fromkeys(cases.grid(shape, limits, options.grid), "grid")
    if options.graph:  # index tensors are made before a graph
        parts = {c: p for c, p in parts.items() if not str(c).startswith("overhead")}
    return parts


def started(model: Model, out: Path, options: Options) -> Profile:
    """The profile in ``out`` if it is of the same things, a new one if there is none."""
    known = provenance(model, options)
    if not out.is_file():
        best = ceilings(options.timer, torch_dtype(model.dtype))
        if options.device == "cpu":
            known[REFERENCE] = options.timer.level(reference_call(options)).seconds
        return new_profile(model, options, best, known, out.stem)
    profile = read(out)
    found = {name: profile.provenance.get(name) for name in SAME}
    differ = [name for name in SAME if found[name] != known[name]]
    changed = ["kernels"] if dict(profile.kernels) != kernel_hashes() else []
    if differ or changed:
        name = (differ + changed)[0]
        told = f" ({found[name]}, not {known[name]})" if differ else ""
        raise ProfileError(
            f"{out} is of another {name}{told}; name another file, or begin again with --fresh"
        )
    return profile


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def reference_call(options: Options) -> Call:
    """The call that stands for the machine's speed."""
    with torch.inference_mode():
        return between(options.seed)


def speed(profile: Profile) -> float:
    """How fast this machine is now, 1 for as fast as when the profile was begun (CPU only)."""
    if REFERENCE not in profile.provenance:
        return 1.0
    options = Options(seed=profile.provenance["seed"])
    now = options.timer.level(reference_call(options)).seconds
    return float(profile.provenance[REFERENCE]) / now


class Runner:
    """Times cases of one model on one device."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model, self.options, self.timer = model, options, options.timer
        self._bench: Bench | None = None
        self._reference: Reference | None = None
        self.launched: list[str] = []

    @property
    def bench(self) -> Bench:
        """Weights and pools, made when first needed."""
        if self._bench is None:
            warm_up(self.timer)
            o = self.options
            self._bench = Bench(self.model, o.device, o.seed, o.graph, o.block_tokens)
            self._bench.numerics = replace(self._bench.numerics, row_block=o.row_block)
        return self._bench

    def time(self, case: Case | Whole, profile: Profile) -> list[float]:
        """Seconds. Where a graph cannot hold the case, its launches are timed one by one."""
        with torch.inference_mode():
            pieces = pieces_of(self.bench, case)
        try:
            return self.timer.seconds(pieces, self.reference(profile))
        except RuntimeError:
            if not self.timer.graph:
                raise
        self.launched.append(str(case))
        return replace(self.timer, graph=False).seconds(pieces)

    def reference(self, profile: Profile) -> Reference | None:
        """What runs around timings, with its time at the profile's speed; none on a GPU."""
        if REFERENCE not in profile.provenance:
            return None
        if self._reference is None:
            call = reference_call(self.options)
            self._reference = Reference(call, profile.provenance[REFERENCE])
        return self._reference

    def settled(self, profile: Profile) -> Profile:
        """A finished profile at the speed that the machine had at its median timing.

        Until then timings are at the speed of the first second.
        """
        seen = self._reference.seen if self._reference else []
        if not seen or profile.provenance.get(SETTLED):
            return profile
        level = float(f"{statistics.median(seen):.{DIGITS}g}")
        factor = level / profile.provenance[REFERENCE]
        made = {**profile.provenance, REFERENCE: level, SETTLED: True}
        return replace(profile, provenance=made).with_samples(
            replace(s, seconds=tuple(_rounded(factor * t) for t in s.seconds))
            for s in profile.samples
        )

    def run(
        self,
        profile: Profile,
        todo: Sequence[Timing],
        out: Path | None = None,
        progress: Progress | None = None,
    ) -> tuple[Profile, int]:
        """The profile with the timings, kept in ``out`` as they come, and how many were made."""
        start = saved = time.monotonic()
        done = 0
        for done, (case, part) in enumerate(todo, 1):
            seconds = [_rounded(s) for s in self.time(case, profile)]
            before = profile.case(str(case))
            same = before is not None and before.part == part
            fresh = Sample(str(case), part, 1, tuple(seconds))
            new = before.more(seconds) if before and same else fresh
            profile, now = profile.with_samples([new]), time.monotonic()
            if progress:
                progress(done, len(todo), str(case))
            if out and now - saved > SAVE_EVERY_S:
                write(profile, out)
                saved = now
            if self.options.budget_s and now - start > self.options.budget_s:
                break
        return self._noted(profile), done

    def _noted(self, profile: Profile) -> Profile:
        """With the cases that no graph could hold in its provenance."""
        if not self.launched:
            return profile
        every = sorted({*profile.provenance.get(LAUNCHED, ()), *self.launched})
        return replace(profile, provenance={**profile.provenance, LAUNCHED: every})


def measured_too(
    profile: Profile, model: Model, misses: Mapping[str, tuple[float, float]]
) -> Profile:
    """The profile with the sizes it lacked measured as its others, and its curves fitted again.

    ``misses`` is the range of sizes by operation. Raises ``ProfileError`` on another device or
    other kernels, ``ValueError`` for what is not measured.
    """
    made = profile.provenance
    options = Options(made["kind_of_device"], **{name: made[name] for name in KEPT})
    refuse_elsewhere(profile, model, options)
    shape, limits = shape_of(model), limits_of(model, options.device)
    todo: list[Timing] = []
    for op, (low, high) in misses.items():
        found = cases.covering(shape, limits, op, low, high, profile.curves.get(op))
        todo += [(case, "demand") for case in found]
    return fitted(Runner(model, options).run(profile, todo * options.rounds)[0], model)


def refuse_elsewhere(profile: Profile, model: Model, options: Options) -> None:
    """Raise ``ProfileError`` where timings made here would not belong into the profile."""
    known = provenance(model, options)
    for name in ("device", "timer"):
        if profile.provenance.get(name) != known[name]:
            raise ProfileError(
                f"profile {profile.name} is of {name} {profile.provenance.get(name)!r}, this is "
                f"{known[name]!r}: cannot measure what it lacks; use on_miss: extrapolate"
            )
    if dict(profile.kernels) != kernel_hashes():
        raise ProfileError(
            f"profile {profile.name} was measured with other kernels: cannot add to it; "
            "calibrate again, or use on_miss: extrapolate"
        )
