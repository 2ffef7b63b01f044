"""What the replay loop asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sim.ledger import Ledger
from sim.step import Step


class Engine(Protocol):
    """Owns the waiting and running queues, the pools and the index; knows no clock of its own.

    The loop calls ``arrive`` when a request arrives, ``plan`` while fewer than ``depth`` steps
    are in flight, and ``commit`` for the oldest of them when it is done, in order.
    """

    depth: int
    ledger: Ledger
    capacity_bytes: int

    def arrive(self, request: int) -> None:
        """Put the request at its place in the waiting queue."""

    def reject_reason(self, request: int) -> str | None:
        """Why the request can never be served (too long, larger than the pool), or None."""

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None if nothing can be computed now.

        ``repeat`` is how many equal decode steps may be taken in one go. If it is above 1 the
        loop calls ``take`` before anything else. It must be 1 while a step in flight finishes a
        request: others may arrive because of that, which the loop cannot know yet.
        """

    def take(self, step: Step, repeat: int) -> None:
        """Fix how many repetitions (1 to ``step.repeat``) of the last planned step are run."""

    def commit(self, step: Step) -> Sequence[int]:
        """Read the step's outputs; the requests that finished with it, in order."""

    @property
    def unfinished(self) -> int:
        """Requests that arrived and have not finished."""

    def check(self) -> None:
        """Raise ``AssertionError`` unless every invariant holds."""
