"""The backend that computes: a ``Step`` of the simulator run by a decoder, and timed.

Prompts and outputs get token ids from the trace's addresses, so equal text is equal tokens; outputs
are forced, as the trace says how long they are and what they share. KV of a token lies where the
id of its prefix says. States lie in slots that follow the ledger (``executor/resident.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor.batch import Decode, Prefill
from executor.decoder import DEFAULT, Decoder, random_weights
from executor.layers.common import Numerics
from executor.pools import KvPool, StatePool
from executor.resident import Left, Resident, Running
from sim.ledger import Ledger
from sim.model import Model
from sim.step import Chunk, Step, StepResult
from traces.identity import Prefixes
from traces.trace import Trace

Ids = NDArray[np.int64]
# Steps from a request's last until the engine has read it and told what it leaves.
READ_BACK = 3
Seen = Callable[[int, int, torch.Tensor], None]


def tokens_of(trace: Trace, request: int, vocabulary: int) -> Ids:
    """Token ids of prompt and output: a hash of each address."""
    runs = [run for part in trace.runs_of(request) for run in part]
    address = np.concatenate([np.arange(r.address, r.address + r.length) for r in runs])
    with np.errstate(over="ignore"):
        mixed = address.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    tokens: Ids = ((mixed >> np.uint64(33)) % np.uint64(vocabulary)).astype(np.int64)
    return tokens


class Placed:
    """A policy whose last answer to ``place`` is kept for each request."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.asked = policy, dict[int, Sequence[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def place(self, memory: Any, request: Any, *given: Any) -> tuple[int, Sequence[int]]:
        """As the policy says."""
        end, states = self.policy.place(memory, request, *given)
        self.asked[request.request] = states
        return end, states


@dataclass
class Setup:
    """What a run executes: the model, where, and ``state_every``: decode steps leave a state at
    multiples of it (the engine's block or track interval; 0 for none), and so do chunks where
    ``inside`` says so (vLLM's ``all``). ``exported(request)`` are positions inside its chunk at
    which the engine has a state exported whatever the policy asked for (vLLM's ``align``)."""

    model: Model
    trace: Trace
    prefixes: Prefixes
    ledger: Ledger
    placed: Placed
    state_every: int = 0
    inside: bool = False
    exported: Callable[[int], Sequence[int]] | None = None
    slots: int = 512
    seed: int = 0
    device: str = "cpu"
    numerics: Numerics = DEFAULT
    seen: Seen | None = field(default=None, repr=False)


class KernelBackend:
    """Implements ``StepBackend``. ``seen(request, position, logits)`` hears of every sample.

    Raises ``MissingStateError`` for a hit on a state that no step left, or that is gone.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, model = setup, setup.model
        rows = range(len(setup.trace))
        self.ids = np.unique(np.concatenate([setup.prefixes.grid(r, 1) for r in rows]))
        states = StatePool(model, setup.slots, setup.device)
        kv = KvPool(model, len(self.ids), 1, setup.device)
        weights = random_weights(model, setup.seed, setup.device)
        self.decoder = Decoder(weights, states, kv, setup.numerics)
        self.resident = Resident(setup.prefixes, setup.ledger, setup.slots)
        self.total = (setup.trace.prompt_tokens + setup.trace.output_tokens).tolist()
        self._tokens: dict[int, Ids] = {}
        self._places: dict[int, Ids] = {}

    # ---------------------------------------------------------------- the seam
    def run(self, step: Step) -> StepResult:
        """Nanoseconds of each repetition, computed for real."""
        chunks = self._begin(step)
        durations = [self._repetition(step, chunks)]
        for _ in range(step.repeat - 1):
            durations.append(self._repetition(step, []))
        for r, run in self.resident.running.items():
            run.idle += self._done(r, run)
        self.resident.settle()
        return StepResult(np.array(durations, np.int64))

    def _timed(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """What it gives, and how long it took: events on a CUDA device, elsewhere CPU time of this
        process. Copies that only the bookkeeping of slots needs lie outside."""
        if self.setup.device.startswith("cuda"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            done = work()
            end.record()
            torch.cuda.synchronize()
            return done, max(1, round(float(start.elapsed_time(end)) * 1e6))
        start_ns = time.process_time_ns()
        done = work()
        return done, max(1, time.process_time_ns() - start_ns)

    # ---------------------------------------------------------------- requests
    def _begin(self, step: Step) -> list[tuple[Chunk, Left | None]]:
        """Follow the ledger up to each lookup; chunks with the state that they resume from."""
        resident, sources = self.resident, dict[int, Left]()
        resident.follow(step.admitted[0].event if step.admitted else len(self.setup.ledger))
        for r in [r for r, run in resident.running.items() if run.idle > READ_BACK]:
            resident.stop(r)
        for r in step.preempted:
            resident.stop(r)
        for a in step.admitted:
            resident.follow(a.event)
            resident.stop(a.request)
            run = resident.running[a.request] = Running(resident.slots.take(), a.hit)
            if a.hit:
                found = sources[a.request] = resident.source(a.request, a.hit)
                run.cuts, run.decoded = (*found.cuts, a.hit), found.decoded
        resident.follow(len(self.setup.ledger))
        return [(chunk, sources.get(chunk.request)) for chunk in step.chunks]

    def _done(self, request: int, run: Running) -> bool:
        return run.computed >= int(self.total[request]) - 1

    def _of(self, request: int) -> tuple[Ids, Ids]:
        """Token ids of a request, and where the KV of each lies."""
        if request not in self._tokens:
            s = self.setup
            self._tokens[request] = tokens_of(s.trace, request, s.model.vocab_size)
            self._places[request] = np.searchsorted(self.ids, s.prefixes.grid(request, 1))
        return self._tokens[request], self._places[request]

    # ---------------------------------------------------------------- one forward pass
    def _repetition(self, step: Step, chunks: list[tuple[Chunk, Left | None]]) -> int:
        decodes = [self._decode(r) for r in step.decodes]
        made = [self._prefill(chunk, source) for chunk, source in chunks]
        prefills = [prefill for prefill, _ in made]
        logits, duration = self._timed(lambda: self.decoder.step(prefills, decodes))
        rows = [c.request for c, _ in chunks if c.samples] + list(step.decodes)
        for (chunk, _), (_, saves) in zip(chunks, made, strict=True):
            self._after_chunk(chunk, saves)
        for r in step.decodes:
            self._after_decode(r)
        if self.setup.seen is not None:
            for r, row in zip(rows, logits, strict=True):
                self.setup.seen(r, self.resident.running[r].computed - 1, row)
        return duration

    def _prefill(self, chunk: Chunk, source: Left | None) -> tuple[Prefill, list[tuple[int, int]]]:
        tokens, places = self._of(chunk.request)
        start, end = chunk.start, chunk.start + chunk.tokens
        asked, every = self.setup.placed.asked.pop(chunk.request, ()), self.setup.state_every
        if self.setup.inside:
            asked = range((start // every + 1) * every, end, every)
        more = self.setup.exported(chunk.request) if self.setup.exported else ()
        inside = sorted({p for p in (*asked, *more) if start < p < end})
        saves = [(p, self.resident.slots.take()) for p in inside]
        slot = self.resident.running[chunk.request].slot
        return Prefill(
            tokens[start:end], start, slot, places[:end],
            source=None if source is None else source.slot, saves=saves, samples=chunk.samples,
        ), saves  # fmt: skip

    def _after_chunk(self, chunk: Chunk, saves: list[tuple[int, int]]) -> None:
        run, cuts = self.resident.running[chunk.request], list[int]()
        for position, slot in saves:
            run.left[position] = Left(slot, (*run.cuts, *cuts), run.decoded)
            cuts.append(position)
        end = chunk.start + chunk.tokens
        run.cuts, run.computed = (*run.cuts, *cuts), end
        self._leave(run)
        run.cuts = (*run.cuts, end)

    def _decode(self, request: int) -> Decode:
        tokens, places = self._of(request)
        run = self.resident.running[request]
        at = run.computed
        return Decode(int(tokens[at]), at, run.slot, places[: at + 1])

    def _after_decode(self, request: int) -> None:
        run, every = self.resident.running[request], self.setup.state_every
        run.computed += 1
        run.decoded = True
        if (every and run.computed % every == 0) or self._done(request, run):
            self._leave(run)

    def _leave(self, run: Running) -> None:
        """A copy of the running state, for whoever may publish it."""
        old = run.left.pop(run.computed, None)
        if old is not None:
            self.resident.slots.give(old.slot)
        slot = self.resident.slots.take()
        self.decoder.states.copy([run.slot], [slot])
        run.left[run.computed] = Left(slot, run.cuts, run.decoded)
