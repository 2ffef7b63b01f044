"""What operations reach: FLOP/s and bytes/s of a profile's timings against its own ceilings."""

from __future__ import annotations

from typing import NamedTuple

from sim.cost import profile_cases as cases
from sim.cost.layers import shape_of
from sim.cost.profile import Profile
from sim.cost.profile_cases import Case
from sim.cost.profile_fit import OVERHEAD, point
from sim.model import Model


class Rate(NamedTuple):
    """``share`` is the roofline's time over the measured one, overheads included."""

    op: str
    case: str
    flops_per_s: float
    bytes_per_s: float
    share: float


def rates(profile: Profile, model: Model) -> list[Rate]:
    """Of each operation the timing that comes nearest to the roofline."""
    shape, device, best = shape_of(model), profile.machine, dict[str, Rate]()
    for sample in profile.samples:
        case = cases.parse(sample.case)
        if not isinstance(case, Case) or case.op == OVERHEAD:
            continue
        found = cases.terms(shape, case)
        flops = sum(t.launches * t.work.flops for t in found)
        moved = sum(t.launches * t.work.bytes for t in found)
        seconds = sample.median_s
        share = point(shape, device, profile.dtype, case, seconds).floor_s / seconds
        if case.op not in best or share > best[case.op].share:
            rate = Rate(case.op, sample.case, flops / seconds, moved / seconds, share)
            best[case.op] = rate
    return [best[op] for op in sorted(best)]
