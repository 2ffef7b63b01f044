"""What the replay loop tells a recorder, and nothing more; times are integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sim.step import Admission, Step


class Recorder(Protocol):
    """Hears of a run in the order of its clock; ``request`` is an index into the trace.

    Steps run one after another on the device, so ``done`` comes in the order of ``step.index``
    and each finish is after the one before. Leaping and stepping tell the same times: a step
    with ``repeat`` k stands for k steps of index ``step.index`` and on. What a step carries once
    (``admitted``, ``preempted``, ``fresh``, ``paused``) belongs to its first repetition. All steps
    of a stretch are told by ``planned`` when the first is, each with its own time.
    """

    def arrived(self, request: int, now_ns: int) -> None:
        """The request entered the engine's waiting queue."""

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        """The request can never be served; it never enters the engine (no ``arrived``)."""

    def planned(self, step: Step, now_ns: int) -> None:
        """The engine decided on the step now; its ``admitted`` requests are admitted now."""

    def done(
        self, step: Step, start_ns: int, finish_ns: NDArray[np.int64], finished: Sequence[int]
    ) -> None:
        """The step ran: ``finish_ns`` holds one time per repetition, in order.

        Every request that samples (``decodes`` and chunks with ``samples``) gets one token at each
        finish. One in ``fresh`` did not sample in the step before: its gap is since its own
        last token, any other's is since the finish before. ``finished`` got their last token at
        ``finish_ns[-1]``. ``start_ns`` is when the first repetition began on the device.
        """


@runtime_checkable
class HitRecorder(Protocol):
    """A recorder that hears of admissions alone: where no clock runs, steps need not be told."""

    def admitted(self, admission: Admission) -> None:
        """The request was admitted, and is served to its end."""
