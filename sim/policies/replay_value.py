"""Evict the checkpoint that would cost the fewest replayed tokens, weighted by how often its kind
is used, per byte freed and per unit of time unused. Source: docs/replay-value.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.policies.base import Base
from sim.policy import Layout, Limits, Memory, Prefill, State, View
from sim.replay_value.memory import Learned

LEARN = ("none", "kind", "age")


@dataclass(frozen=True)
class Policy(Base):
    """Checkpoints at the branch point, the prompt's end and the answer's end; the one of least
    value goes, be it the newest.

    ``learn``: ``none`` (all kinds alike), ``kind`` (how often checkpoints of a kind are used) or
    ``age`` (and at what age). ``order``: ``value``, or ``lru`` for the same placement with least
    recently used. ``sample``: so many candidates drawn at random at each eviction, null for all.
    ``branch``, ``prompt_end``, ``answer_end`` False leave out that placement.
    """

    learn: Literal["none", "kind", "age"] = "kind"
    order: Literal["value", "lru"] = "value"
    sample: int | None = None
    branch: bool = True
    prompt_end: bool = True
    answer_end: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("learn", self.learn, LEARN),
            ("order", self.order, ("value", "lru")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        if self.sample is not None and self.sample < 1:
            raise ValueError(
                f"sample is {self.sample}; allowed are null and 1 up, the nearest is 1"
            )

    @property
    def engines(self) -> Sequence[str]:
        """The pool: exact positions and one budget."""
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        """Token-exact."""
        return Layout("exact")

    def begin(self, view: View) -> Memory:
        """What is known of checkpoints and of their kinds."""
        return Learned(view, self.learn, self.sample)

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """The branch point and the prompt's end; the engine offers the answer's end itself."""
        branch, last = _positions(request)
        memory.expect(request.request, branch if self.branch else 0, last)
        wanted = (branch if self.branch else 0, last if self.prompt_end else 0)
        return end, tuple(p for p in wanted if start < p <= end)

    def publish(self, memory: Memory, state: State) -> bool:
        """Everything placed, but for an answer's end where that is left out."""
        return self.answer_end or state.position <= state.prompt_tokens

    def victim(self, memory: Memory, candidates: Sequence[State], now_ns: int) -> State | None:
        """The least value; of equals the shallower, then the older."""
        if self.order == "lru":
            return None
        found: State | None = memory.least(candidates)
        return found

    def observe(self, memory: Memory, event: str, state: State) -> None:
        """Keep values true, and count uses."""
        memory.hear(event, state)

    def report(self, memory: Memory) -> dict[str, float]:
        """Checkpoints held in the end."""
        told: dict[str, float] = memory.report()
        return told


def _positions(request: Prefill) -> tuple[int, int]:
    """Branch point (0: none) and the prompt's end before what a template drops from history."""
    dropped = min(max(1, request.generation_prompt_tokens), request.prompt_tokens - 1)
    seen = min(request.seen, request.prompt_tokens - 1)
    return seen, request.prompt_tokens - max(1, dropped)
