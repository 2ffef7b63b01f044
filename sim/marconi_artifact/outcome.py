"""What goes into a replay and what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.marconi_artifact.sizes import Sizes
from sim.marconi_artifact.tree import Eviction, Tokens
from traces.trace import Ints


@dataclass(frozen=True, slots=True)
class Sequence:
    """Prompt and output of a request as token ids, the first ``prompt`` of them the prompt."""

    tokens: Tokens
    prompt: int


@dataclass(frozen=True)
class Replay:
    """Outcome by request, in order; of V2 also the alpha it found and the requests it took.

    ``first_evicting`` counts the requests up to the first that evicted, it included; ``window``
    those up to the alpha search. Both are None where it never came to that, and outside V2.
    """

    sizes: Sizes
    capacity_bytes: float
    prompt_tokens: Ints
    reused: Ints
    states_after: Ints
    kv_tokens_after: Ints
    evictions: tuple[Eviction, ...]
    alpha: float
    first_evicting: int | None = None
    window: int | None = None

    @property
    def bytes_after(self) -> Ints:
        """Bytes held after each request."""
        sizes = self.sizes
        return self.states_after * sizes.checkpoint_bytes + self.kv_tokens_after * sizes.kv_bytes

    @property
    def max_bytes(self) -> int:
        """The most bytes held after any request; may exceed the capacity."""
        return int(self.bytes_after.max(initial=0))

    @property
    def token_hit_rate(self) -> float:
        """Credited tokens over prompt tokens."""
        return int(self.reused.sum()) / max(1, int(self.prompt_tokens.sum()))

    @property
    def request_hit_rate(self) -> float:
        """Share of requests with any credited token."""
        return int((self.reused > 0).sum()) / max(1, len(self.reused))

    @property
    def flops_saved(self) -> int:
        """FLOPs that prefilling the credited tokens would have taken."""
        return flops_saved(self.sizes, self.reused.tolist())


def flops_saved(sizes: Sizes, reused: Iterable[int]) -> int:
    """FLOPs that prefilling prefixes of these lengths takes."""
    return sum(sizes.prefill_flops(n) for n in reused)
