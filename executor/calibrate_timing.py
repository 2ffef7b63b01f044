"""How long a call takes, and what the device can do at best.

On a CPU a timing is the process's own time on one thread, which other processes do not add to, but
slow down (shared caches, cores and clocks): so a reference call is timed around it, and the timing
is scaled to the speed at which the reference takes its set time. On CUDA a timing is the time
between two device events around calls in a row, eager or from a graph.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.profile_memory import keep_freed_memory

Call = Callable[[], Any]
Pieces = Sequence[Call]
LONG_S = 0.2  # what takes this long is timed once in a round
IN_A_ROW = 3
AROUND = 4  # at least so many times of the reference go with a timing
WARM_CALLS = 3
BURSTS, BUSY_CALLS = 61, 30


@dataclass(frozen=True)
class Reference:
    """A call whose time tells how fast the machine is now: ``seconds`` at the profile's speed,
    ``seen`` at each timing."""

    call: Call
    seconds: float
    seen: list[float] = field(default_factory=list, compare=False)

    def now(self) -> float:
        """Its time now. Runs before, so that caches hold the same whatever ran last."""
        for _ in range(WARM_CALLS):
            self.call()
        self.seen.append(_process_s(self.call))
        return self.seen[-1]


@dataclass(frozen=True)
class Timer:
    """``repeats`` timings of a call after two to warm up; ``graph``: replays of a CUDA graph."""

    device: str = "cpu"
    repeats: int = 3
    graph: bool = False

    @property
    def method(self) -> str:
        """In words, for a profile's provenance."""
        if self.device == "cpu":
            return "process time on one torch thread, at the speed of a reference"
        return "device events around replays of a graph" if self.graph else "device events"

    def seconds(self, pieces: Pieces, reference: Reference | None = None) -> list[float]:
        """Timings of all pieces together, on a CPU at the machine's speed of ``reference``."""
        with _quiet(self.device):
            self._timed(pieces, reference)
            if self.graph:
                pieces = [_captured(pieces)]
            first = self._timed(pieces, reference)
            if first > LONG_S:
                return [first]
            return [self._timed(pieces, reference) for _ in range(self.repeats)]

    def level(self, call: Call) -> Reference:
        """The call as a reference, at the speed the machine has over the next second. It runs
        without a pause: after one, caches and clocks would be those of an idle core."""
        with _quiet(self.device):
            found = []
            for _ in range(BURSTS):
                for _ in range(BUSY_CALLS):
                    call()
                found.append(_process_s(call))
            return Reference(call, sorted(found)[BURSTS // 2])

    def _timed(self, pieces: Pieces, reference: Reference | None) -> float:
        """Seconds of the pieces once."""
        if self.device != "cpu":
            return _between_events(pieces)
        if reference is None:
            return sum(_process_s(piece) for piece in pieces)
        total, around = 0.0, []
        for piece in pieces:
            around.append(reference.now())
            total += _process_s(piece)
        around += [reference.now() for _ in range(AROUND - len(pieces))]
        return total * reference.seconds * len(around) / sum(around)


@contextmanager
def _quiet(device: str) -> Iterator[None]:
    """One thread, no garbage collection, no gradients; freed memory is kept from here on."""
    keep_freed_memory()
    threads, collected = torch.get_num_threads(), gc.isenabled()
    if device == "cpu":
        torch.set_num_threads(1)
    gc.disable()
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)
        if collected:
            gc.enable()


def _process_s(call: Call) -> float:
    """The process's own time, at least a nanosecond."""
    start = time.process_time_ns()
    call()
    return max(time.process_time_ns() - start, 1) / 1e9


def _between_events(pieces: Pieces) -> float:
    """Seconds of the pieces, run so often in a row that the first launch does not show."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(IN_A_ROW):
        for piece in pieces:
            piece()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / IN_A_ROW


def _captured(pieces: Pieces) -> Call:
    """A graph of the pieces. Raises ``RuntimeError`` where one waits for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for piece in pieces:
            piece()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for piece in pieces:
            piece()
    replay: Call = graph.replay
    return replay


# -------------------------------------------------------------------------------- ceilings
@dataclass(frozen=True)
class Ceilings:
    """Best rates seen in this run: FLOP/s of a large product and of vector work, bytes/s of a large
    copy (read and written)."""

    tensor_flops: float
    vector_flops: float
    bandwidth: float


def ceilings(timer: Timer, dtype: torch.dtype) -> Ceilings:
    """Measured on normal values, never zeros."""
    cuda = timer.device != "cpu"
    n, copied, values = (8192, 1 << 32, 1 << 24) if cuda else (768, 1 << 26, 1 << 14)
    a, b = (torch.randn(n, n, device=timer.device).to(dtype) for _ in range(2))
    source = torch.randn(copied // 4, device=timer.device)
    target = torch.empty_like(source)
    x, y, z, out = (torch.randn(values, device=timer.device) for _ in range(4))
    eager = Timer(timer.device, timer.repeats)

    def best(call: Call) -> float:
        return min(eager.seconds([call]))

    return Ceilings(
        2 * n**3 / best(lambda: a @ b),
        2 * values / best(lambda: torch.addcmul(x, y, z, out=out)),
        2 * copied / best(lambda: target.copy_(source)),
    )


def warm_up(timer: Timer, seconds: float = 1.5) -> None:
    """Keep the device busy until its clock has risen."""
    a = torch.randn(512, 512, device=timer.device)
    until = time.monotonic() + (seconds if timer.device != "cpu" else 0.2)
    while time.monotonic() < until:
        a = torch.tanh(a @ a)
        if timer.device != "cpu":
            torch.cuda.synchronize()
