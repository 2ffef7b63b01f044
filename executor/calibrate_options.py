"""What a calibration is asked to do, and the sizes it goes to."""

from __future__ import annotations

from dataclasses import dataclass

from executor.calibrate_cases import Grid, Limits
from executor.calibrate_timing import Timer
from sim.model import Model

KEPT = ("rounds", "repeats", "seed", "graph", "row_block", "block_tokens")


@dataclass(frozen=True)
class Options:
    """Every case is timed in ``rounds``, far apart, ``repeats`` times in each: a machine's slow
    moments then fall on few timings of any case. ``limits`` default to what fits the model and the
    device; ``budget_s`` of wall time, after which the run stops (0: none) and the same call goes
    on."""

    device: str = "cpu"
    grid: Grid = "full"
    rounds: int = 3
    repeats: int = 3
    seed: int = 0
    graph: bool = False
    row_block: int = 0
    block_tokens: int = 1
    limits: Limits | None = None
    budget_s: float = 0.0

    @property
    def timer(self) -> Timer:
        """How calls are timed."""
        return Timer(self.device, self.repeats, self.graph)


def limits_of(model: Model, device: str = "cpu") -> Limits:
    """Sizes that a calibration of the model goes to: small on a CPU."""
    if device == "cpu":
        context = min(model.max_model_len, 8192)
        return Limits(context, context, 64, min(16 * context, 1 << 17))
    context = min(model.max_model_len, 65_536)
    return Limits(16_384, context, 256, 1 << 20)
