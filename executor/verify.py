"""With reuse and without: the states and the logits of a replay against full prefills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from executor.batch import Prefill, plan
from executor.decoder import Decoder
from executor.kernel_backend import KernelBackend, Setup, tokens_of
from executor.pools import KvPool, StatePool
from executor.resident import Kept
from kernels.checks import error
from sim.step import Step, StepResult

LOGITS_LIMIT = 5e-6
STATES_LIMIT = 5e-6
STEP_NS, TOKEN_NS = 200_000, 10_000


@dataclass
class Verdict:
    """What was compared. Errors are relative to the largest value of the full prefill.

    ``bitwise`` of ``exact`` checkpoints, those that prefill alone led to, equal the full
    prefill's; ``states`` counts all. ``fault`` says what could not be compared at all.
    """

    requests: int = 0
    hits: int = 0
    hit_tokens: int = 0
    logits: int = 0
    logits_error: float = 0.0
    states: int = 0
    exact: int = 0
    bitwise: int = 0
    states_error: float = 0.0
    fault: str = ""

    @property
    def holds(self) -> bool:
        """Whether reuse gave what a full prefill gives."""
        return (
            not self.fault
            and self.bitwise == self.exact
            and self.logits_error <= LOGITS_LIMIT
            and self.states_error <= STATES_LIMIT
        )


@dataclass
class Watched:
    """A ``KernelBackend`` whose samples and checkpoints are copied for the comparison.

    ``spoil(backend, request, hit)`` may plant a fault before a step that resumes from a hit.
    """

    setup: Setup
    spoil: Callable[[KernelBackend, int, int], None] | None = None
    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    states: list[tuple[Kept, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    hits: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = KernelBackend(replace(self.setup, seen=self._seen))

    def _seen(self, request: int, position: int, logits: torch.Tensor) -> None:
        self.logits[request, position] = logits.clone()

    def run(self, step: Step) -> StepResult:
        """As the backend does, but in a time that the step alone decides, so that it repeats."""
        for a in step.admitted:
            self.hits[a.request] = self.hits.get(a.request, 0) + a.hit
        if self.spoil is not None:
            for a in step.admitted:
                if a.hit:
                    self.backend.resident.follow(a.event)
                    self.spoil(self.backend, a.request, a.hit)
        self.backend.run(step)
        pools = self.backend.decoder.states
        for kept in self.backend.resident.published:
            slot = kept.state.slot
            self.states.append((kept, pools.conv[slot].clone(), pools.ssm[slot].clone()))
        self.backend.resident.published.clear()
        return StepResult(np.full(step.repeat, STEP_NS + TOKEN_NS * step.tokens, np.int64))


def compare(watched: Watched) -> Verdict:
    """Every sample and every checkpoint against a full prefill of its own."""
    setup, weights = watched.setup, watched.backend.decoder.weights
    reference = Reference(setup, Decoder(weights, *_pools(setup), setup.numerics))
    out = Verdict(requests=len(watched.hits))
    out.hits = sum(1 for hit in watched.hits.values() if hit)
    out.hit_tokens = sum(watched.hits.values())
    by_request: dict[int, list[int]] = {}
    for request, position in watched.logits:
        by_request.setdefault(request, []).append(position)
    for request, positions in by_request.items():
        right = reference.logits(request, positions)
        for position, row in zip(positions, right, strict=True):
            found = error(watched.logits[request, position], row)
            out.logits, out.logits_error = out.logits + 1, max(out.logits_error, found)
    for kept, conv, ssm in watched.states:
        _compare_state(out, kept, (conv, ssm), reference.state(kept))
    return out


def _compare_state(
    out: Verdict,
    kept: Kept,
    found: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
) -> None:
    out.states += 1
    out.states_error = max(out.states_error, *(map(error, found, right)))
    if not kept.state.decoded:
        out.exact += 1
        out.bitwise += all(map(torch.equal, found, right))


def _pools(setup: Setup) -> tuple[StatePool, KvPool]:
    longest = int((setup.trace.prompt_tokens + setup.trace.output_tokens).max(initial=1))
    return StatePool(setup.model, 64, setup.device), KvPool(setup.model, longest, 1, setup.device)


@dataclass
class Reference:
    """Full prefills, each alone and from nothing."""

    setup: Setup
    decoder: Decoder

    def logits(self, request: int, positions: list[int]) -> torch.Tensor:
        """Logits after the tokens at ``positions``, from one pass over the sequence."""
        tokens = self._tokens(request, max(positions) + 1)
        made = plan([Prefill(tokens, 0, 0, np.arange(len(tokens)))], [], 1, self.setup.device)
        at = torch.tensor(positions, dtype=torch.int64, device=self.setup.device)
        with torch.inference_mode():
            return self.decoder.run(replace(made, sampled=at))

    def state(self, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
        """Conv and scan states at the checkpoint's position; set down where its run did so."""
        tokens = self._tokens(kept.request, kept.position)
        cuts = sorted({c for c in kept.state.cuts if 0 < c < kept.position})[-60:]
        saves = [(cut, 1 + i) for i, cut in enumerate(cuts)]
        chunk = Prefill(tokens, 0, 0, np.arange(len(tokens)), saves=saves, samples=False)
        self.decoder.step([chunk])
        states = self.decoder.states
        return states.conv[0].clone(), states.ssm[0].clone()

    def _tokens(self, request: int, count: int) -> np.ndarray:
        return tokens_of(self.setup.trace, request, self.setup.model.vocab_size)[:count]
