"""What a checkpoint policy can say, what an engine tells it, and how policies are found.

A policy is one file in ``sim/policies``; its name is the file's name with ``_`` as ``-``; its
fields are its parameters. The policy is a frozen dataclass; what it learns in a run is the
``memory`` that ``begin`` returns, passed back to every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Memory = Any
Rehearse = Callable[["Policy", Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """How states share the pool: ``none`` (one running state a request, nothing reusable),
    ``align`` (states at chunk ends on block boundaries), ``all`` (a state in every block),
    ``exact`` (token-exact, the ``pool`` engine).

    ``dense`` False asks vLLM 0.33 for checkpoints inside a chunk only at the prompt's end.
    """

    mode: str
    dense: bool = False


@dataclass(slots=True)
class Prefill:
    """The request that is being prefilled, as ``place`` sees it (token counts).

    ``sequence_tokens`` counts outputs of a resumed request; ``end_tokens`` is where prefill
    ends: max(prompt, sequence - 1). ``branch`` is the branch point its lookup found, 0 for none.
    ``seen`` is how much of it any earlier request had, resident or not (the ``pool`` engine; 0
    elsewhere).
    """

    request: int
    prompt_tokens: int
    sequence_tokens: int
    end_tokens: int
    branch: int
    generation_prompt_tokens: int = -1
    seen: int = 0


@dataclass(slots=True)
class Limits:
    """Where the engine can leave a state in this chunk.

    ``block_tokens``: chunk ends on multiples of it. ``unit_tokens``: the finest position that
    can be a key (equal to ``block_tokens`` unless fine-grained). ``inner``: the one position
    inside the chunk at which a state can be exported, 0 for none. ``tail``: the last position of
    the prompt that can be a key with a chunk end there, 0 for none. ``budget_tokens``: the most
    that one chunk may ever be (a setting, not what is left of it). ``last_block``: the last block
    boundary that a later request could hit.

    ``single``: at most one state leaves a chunk (SGLang), at ``tail``, its last grid position, or
    at ``inner``, the branch point if it can be reached.
    """

    block_tokens: int
    unit_tokens: int
    inner: int
    tail: int
    budget_tokens: int
    last_block: int
    single: bool = False
    anywhere: bool = False


@dataclass(slots=True)
class State:
    """A state that exists at ``position`` of ``request`` and could be published.

    ``replay`` and ``branch``: the engine's key positions (the last cacheable position of the
    prompt, the branch point), already rounded as the engine rounds them; 0 for none. ``pinned``:
    the engine refuses to drop it now (in use, at a fork, a leaf of the tree, or just created).

    The rest only the ``pool`` engine fills in, and keeps true as long as the state is there.
    ``key``: prefix id of its content, which names it. ``prompt_tokens``: of the request that left
    it; a position above is in its answer. ``parent``: position of the nearest checkpoint above it,
    0 for none. ``children``: checkpoints that it is nearest to. ``tokens``: tokens of KV that go
    with it if it is dropped now. ``created`` and ``used``: first admissions counted when it was
    created and last used (created, if never); ``uses`` and ``used_ns`` count and time its uses.
    ``stamp`` orders creations and uses: the smallest is the least recently used.
    """

    request: int
    position: int
    block_tokens: int
    replay: int
    branch: int
    pinned: bool = False
    key: int = -1
    prompt_tokens: int = 0
    parent: int = 0
    children: int = 0
    tokens: int = 0
    created: int = 0
    used: int = 0
    used_ns: int = 0
    uses: int = 0
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What ``begin`` may look at: the model's and engine's sizes, bytes of one rank.

    The prefill of ``n`` tokens takes ``flops_per_token * n + flops_per_pair * n * (n + 1) / 2``
    (0 where the model has no cost). ``rehearse(policy, requests)`` replays finished requests one
    after the other through an empty cache of the same size and answers the hit of each; it raises
    ``ValueError`` for a request that has not finished. None where the engine cannot.
    """

    engine: str
    state_bytes: int
    kv_bytes_per_token: int
    block_tokens: int
    capacity_bytes: int
    state_layers: int = 0
    attention_layers: int = 0
    flops_per_token: float = 0.0
    flops_per_pair: float = 0.0
    rehearse: Rehearse | None = None


class Policy(Protocol):
    """The whole interface. ``sim.policies.base.Base`` has the neutral answers."""

    @property
    def engines(self) -> Sequence[str]:
        """Engine versions that can host it, such as ``vllm-0.33``, ``vllm-0.28``, ``pool``."""

    def layout(self, engine: str) -> Layout:
        """Block rule and slots per request."""

    def place(
        self, memory: Memory, request: Prefill, start: int, end: int, limits: Limits
    ) -> tuple[int, Sequence[int]]:
        """Where the chunk that may reach ``end`` ends, and where it leaves states.

        An end equal to ``start`` means: wait, compute nothing now.
        """

    def publish(self, memory: Memory, state: State) -> bool:
        """Whether the state becomes reusable."""

    def trim(self, memory: Memory, path: Sequence[State]) -> Sequence[State]:
        """States of a root-to-leaf path that are dropped, shallowest first."""

    def victim(self, memory: Memory, candidates: Sequence[State], now_ns: int) -> State | None:
        """Who goes first under pressure; None is the engine's own order.

        ``candidates`` is the engine's own list, in no order: it must not be changed.
        """

    def begin(self, view: View) -> Memory:
        """The mutable learning state of a run, or None."""

    def observe(self, memory: Memory, event: str, state: State) -> None:
        """What happened to ``state``; which of these an engine tells of is in docs/policies.md.

        ``created``, ``used`` (a request resumes from it, and it is pinned), ``released`` (no
        longer pinned), ``dropped``; ``neighbour gone`` and ``changed`` (its parent, children or
        tokens are others now, because a checkpoint next to it was dropped, or else);
        ``request admitted`` (for the first time: ``position`` is its hit) and ``request
        finished`` (``position`` is its last), whose state is no checkpoint.
        """

    def report(self, memory: Memory) -> dict[str, float]:
        """What it learned, for the summary of the run."""
