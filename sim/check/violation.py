"""What is checked, in words, and how a check fails."""

from __future__ import annotations

from typing import NoReturn

INVARIANTS = {
    "hosted": "every engine that the policy names can host it",
    "raises": "the policy raises nothing",
    "answers": "a policy's answers lie within what it was offered",
    "work": "a step computes the tokens that come next, within the engine's limits",
    "finish": "every request that is accepted finishes, after all its tokens",
    "identity": "equal ids mean equal prefixes",
    "state": "a state that is published was left at exactly that position",
    "kv": "KV that is published was computed",
    "hit": "a hit is real: shared, with a state at exactly its end and all its KV resident",
    "order": "hit <= matched <= oracle hit, and the last token is recomputed",
    "ceiling": "with a state everywhere and no budget, all that is shared is hit",
    "bytes": "bytes are conserved, and usage never exceeds capacity",
    "held": "what a request held is free once it has finished",
    "locked": "nothing used is evicted",
    "attribution": "every prompt token is a hit or has exactly one reason, as the ledger says",
    "same": "same case, same output; lookups that are said to be pure are",
    "future": "what comes later changes no decision",
    "leap": "leaping equals stepping",
    "off": "with caching off nothing hits",
}


class Violation(Exception):
    """``invariant`` is a key of ``INVARIANTS``; ``phase`` is the kind of run that found it."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant, self.message, self.phase = invariant, message, ""

    @property
    def told(self) -> str:
        """The invariant in words, and what broke it."""
        return f"{self.invariant} ({INVARIANTS[self.invariant]}): {self.message}"


def fail(invariant: str, message: str) -> NoReturn:
    """Raise ``Violation``."""
    raise Violation(invariant, message)


def require(holds: bool, invariant: str, message: str) -> None:
    """Raise ``Violation`` unless ``holds``."""
    if not holds:
        raise Violation(invariant, message)
