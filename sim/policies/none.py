"""No reuse: one running state per request, nothing is published. Source: vLLM mode ``none``,
SGLang with the radix cache off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout, Memory, State


@dataclass(frozen=True)
class Policy(Base):
    """Publishes no state, so every prompt is computed whole."""

    @property
    def engines(self) -> Sequence[str]:
        """Every engine."""
        return ("vllm-0.33", "vllm-0.28", "sglang-0.5.23", "sglang-0.5.18", "pool")

    def layout(self, engine: str) -> Layout:
        """One running state a request."""
        return Layout("none")

    def publish(self, memory: Memory, state: State) -> bool:
        """Never."""
        return False
