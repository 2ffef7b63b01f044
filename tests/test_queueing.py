"""Queueing limits: one server, Poisson arrivals, constant and exponential service."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.ledger import Ledger
from sim.loop import replay
from sim.step import Admission, Chunk, Step, StepResult
from traces.trace import Request, Run, Trace, from_requests

MEAN_NS, LOAD, REQUESTS, SEEDS = 1_000_000, 0.6, 6000, 8
STUDENT = 3.499  # 99 %, two sides, 7 degrees of freedom


class OneAtATime:
    """A step is one request, from prompt to its only token."""

    depth = 1
    capacity_bytes = 0

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.queue: deque[int] = deque()
        self.index = 0

    def arrive(self, request: int) -> None:
        self.queue.append(request)

    def reject_reason(self, request: int) -> str | None:
        return None

    def plan(self, now_ns: int) -> Step | None:
        if not self.queue:
            return None
        r = self.queue[0]
        self.index += 1
        admitted = [Admission(r, 0, 0, 0, False)]
        return Step(self.index, [Chunk(r, 0, 1, True)], admitted=admitted, fresh=[r])

    def take(self, step: Step, repeat: int) -> None:
        raise AssertionError("no step repeats")

    def commit(self, step: Step) -> Sequence[int]:
        return [self.queue.popleft()]

    @property
    def unfinished(self) -> int:
        return len(self.queue)

    def check(self) -> None:
        return


class Table:
    """The service time of each request."""

    def __init__(self, service_ns: NDArray[np.int64]) -> None:
        self.service_ns = service_ns

    def run(self, step: Step) -> StepResult:
        r = step.chunks[0].request
        return StepResult(self.service_ns[r : r + 1])


class Gauge:
    """Waiting times, and the mean number in the system over time."""

    def __init__(self, n: int) -> None:
        self.arrival, self.start, self.end = (np.zeros(n, np.int64) for _ in range(3))
        self.inside = self.area = self.now = 0

    def _move(self, now_ns: int, change: int) -> None:
        assert now_ns >= self.now
        self.area += self.inside * (now_ns - self.now)
        self.inside, self.now = self.inside + change, now_ns

    def arrived(self, request: int, now_ns: int) -> None:
        self.arrival[request] = now_ns
        self._move(now_ns, 1)

    def rejected(self, request: int, reason: str, now_ns: int) -> None:
        raise AssertionError(reason)

    def planned(self, step: Step, now_ns: int) -> None:
        return

    def done(
        self, step: Step, start_ns: int, finish_ns: NDArray[np.int64], finished: Sequence[int]
    ) -> None:
        for r in finished:
            self.start[r], self.end[r] = start_ns, finish_ns[-1]
            self._move(int(finish_ns[-1]), -1)


def poisson(rng: np.random.Generator) -> Trace:
    times = np.cumsum(rng.exponential(MEAN_NS / LOAD, REQUESTS)).astype(np.int64)
    return from_requests(
        Request(id=str(i), prompt=(Run(2 * i, 1),), output_tokens=1, arrival_ns=t)
        for i, t in enumerate(times.tolist())
    )


def measure(exponential: bool, seed: int) -> tuple[float, float, float]:
    """Mean wait and mean time in the system (in service times), mean number in the system."""
    rng = np.random.default_rng(seed)
    trace = poisson(rng)
    service = np.full(REQUESTS, MEAN_NS, np.int64)
    if exponential:
        service = np.maximum(1, rng.exponential(MEAN_NS, REQUESTS)).astype(np.int64)
    gauge = Gauge(REQUESTS)
    replay(OneAtATime(), trace, Table(service), gauge)
    assert np.array_equal(gauge.end - gauge.start, service)
    wait = float((gauge.start - gauge.arrival).mean() / MEAN_NS)
    stay = float((gauge.end - gauge.arrival).mean() / MEAN_NS)
    return wait, stay, gauge.area / gauge.now


@pytest.mark.parametrize(
    ("exponential", "expected"),
    [(False, LOAD / (2 * (1 - LOAD))), (True, LOAD / (1 - LOAD))],
    ids=["M/D/1", "M/M/1"],
)
def test_waiting_times_and_littles_law(exponential: bool, expected: float) -> None:
    runs = np.array([measure(exponential, seed) for seed in range(SEEDS)])
    half = STUDENT * runs.std(axis=0, ddof=1) / np.sqrt(SEEDS)
    wait, stay, inside = runs.mean(axis=0)
    assert half[0] < 0.15 * expected, "too few requests to say anything"
    assert abs(wait - expected) < half[0]
    assert abs(stay - (expected + 1)) < half[1]
    # Little: number in the system = arrival rate * time in the system, the true rate here.
    assert abs(inside - LOAD * (expected + 1)) < half[2]
    assert np.allclose(runs[:, 2], LOAD * runs[:, 1], rtol=0.05)
