"""A step: one batched forward pass, as the engine plans it and the backend prices or runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Chunk:
    """Tokens ``start:start + tokens`` of one request, computed in one step.

    ``samples`` says that the chunk reaches the end of the sequence, so a token comes out.
    ``slot_copies`` counts states copied for it (a restored state that may not be overwritten),
    ``saves`` the states written besides the running one (checkpoints inside the chunk).
    """

    request: int
    start: int
    tokens: int
    samples: bool
    restored: int = 0
    slot_copies: int = 0
    saves: int = 0


@dataclass(slots=True)
class Admission:
    """A lookup that was acted on: the first one of a request, or one after a preemption.

    ``hit`` tokens are reused; ``matched`` is how far the KV in the index agrees (>= hit).
    ``branch`` is the branch point that the lookup marked, 0 for none. ``event`` counts the
    ledger's events before the lookup. ``lost`` tokens had been computed when it was preempted.
    """

    request: int
    hit: int
    matched: int
    branch: int
    resumed: bool
    event: int = 0
    lost: int = 0


@dataclass(slots=True)
class Step:
    """What the engine plans. ``repeat`` equal decode steps may stand in one ``Step``.

    In repetition ``i`` every decode attends to ``i`` tokens more than in the first, so
    ``decode_context_tokens`` (tokens that all decodes attend to, the new one included, summed
    over ``decodes``) grows by ``len(decodes)`` a repetition. A step with ``repeat > 1`` has no
    chunks. ``fresh`` are requests that sample now and did not in the step before (their first
    token, or one after a pause); ``paused`` those that did and now do not, though unfinished.
    ``copies_at`` counts states copied in single repetitions after the first.
    """

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    decode_context_tokens: int = 0
    repeat: int = 1
    state_copies: int = 0
    kv_copied_tokens: int = 0
    admitted: Sequence[Admission] = field(default_factory=list)
    preempted: Sequence[int] = field(default_factory=list)
    fresh: Sequence[int] = field(default_factory=list)
    paused: Sequence[int] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    used_bytes: int = 0
    cached_bytes: int = 0
    copies_at: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens computed in one repetition."""
        return len(self.decodes) + sum(chunk.tokens for chunk in self.chunks)

    def split(self, head: int) -> tuple[Step, Step]:
        """The first ``head`` repetitions and the rest, as two steps."""
        tail = replace(
            self,
            index=self.index + head,
            repeat=self.repeat - head,
            decode_context_tokens=self.decode_context_tokens + head * len(self.decodes),
            state_copies=0,
            kv_copied_tokens=0,
            admitted=[],
            preempted=[],
            fresh=[],
            paused=[],
            copies_at={i - head: n for i, n in self.copies_at.items() if i > head},
        )
        tail.state_copies = self.copies_at.get(head, 0)
        first = {i: n for i, n in self.copies_at.items() if i < head}
        return replace(self, repeat=head, copies_at=first), tail


@dataclass(slots=True)
class StepResult:
    """``durations_ns``: one integer per repetition, rounded before any sum."""

    durations_ns: NDArray[np.int64]


class StepBackend(Protocol):
    """Prices a step (modelled) or runs it (kernels). The only seam between the two."""

    def run(self, step: Step) -> StepResult: ...
