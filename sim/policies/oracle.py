"""A state at every token, in a pool without a budget: the ceiling of what reuse can give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.policies.base import Base
from sim.policy import Layout


@dataclass(frozen=True)
class Policy(Base):
    """Every prefix that was ever computed can be resumed at any of its tokens."""

    @property
    def engines(self) -> Sequence[str]:
        """Our own engine only: no other can keep a state at every token."""
        return ("pool",)

    def layout(self, engine: str) -> Layout:
        """Token-exact."""
        return Layout("exact", dense=True)
