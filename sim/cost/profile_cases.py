"""Cases of a profile: what was timed, written as text, and its work by the formulas.

An operation's case is ``OP SxN@P``: S sequences of N new tokens each on P cached ones, in all
layers of the model that have the operation (``gemm 1x256@0``, ``attention_decode 8x1@1023``). For
``head`` and ``sample`` N counts sampled tokens; for the state copies S counts states. A whole step
is ``step`` and its parts: ``step prefill 1x256@1024 decode 8x1@512 saves 1``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.cost import layers
from sim.cost.layers import Shape, Term
from sim.step import Chunk, Step

PARTS = re.compile(r"(\d+)x(\d+)@(\d+)")
BY_TOKENS = ("gemm", "elementwise", "kv_write")


@dataclass(frozen=True, order=True)
class Part:
    """``sequences`` of ``tokens`` new ones each, on ``cached`` ones each."""

    sequences: int
    tokens: int
    cached: int = 0

    def __str__(self) -> str:
        return f"{self.sequences}x{self.tokens}@{self.cached}"

    @property
    def total(self) -> int:
        """New tokens of all sequences."""
        return self.sequences * self.tokens

    @property
    def pairs(self) -> int:
        """Pairs of a new token and one that it attends to."""
        n, p = self.tokens, self.cached
        return self.sequences * (n * p + n * (n + 1) // 2)

    @property
    def context(self) -> int:
        """Tokens of all sequences, cached and new."""
        return self.sequences * (self.cached + self.tokens)


@dataclass(frozen=True, order=True)
class Case:
    """One operation at one size."""

    op: str
    part: Part

    def __str__(self) -> str:
        return f"{self.op} {self.part}"


@dataclass(frozen=True)
class Whole:
    """A whole step: chunks, decodes, states saved inside the first chunk, states copied."""

    prefill: Part | None = None
    decode: Part | None = None
    saves: int = 0
    copies: int = 0

    def __str__(self) -> str:
        words = ["step"]
        for name, value in (("prefill", self.prefill), ("decode", self.decode)):
            words += [f"{name} {value}"] if value else []
        for name, count in (("saves", self.saves), ("copies", self.copies)):
            words += [f"{name} {count}"] if count else []
        return " ".join(words)

    @property
    def kind(self) -> str:
        """Prefill, decode, or both in one step."""
        if self.prefill and self.decode:
            return "mixed steps"
        return "prefill steps" if self.prefill else "decode steps"

    def step(self) -> Step:
        """The step as an engine would plan it."""
        step, first = Step(0), self.prefill
        if first:
            step.chunks = [
                Chunk(i, first.cached, first.tokens, True, saves=0 if i else self.saves)
                for i in range(first.sequences)
            ]
        if self.decode:
            start = first.sequences if first else 0
            step.decodes = list(range(start, start + self.decode.sequences))
            step.decode_context_tokens = self.decode.context
        step.state_copies = self.copies
        return step


def parse(text: str) -> Case | Whole:
    """The case of a text. Raises ``ValueError``."""
    words = text.split()
    if len(words) == 2 and words[0] != "step":
        return Case(words[0], _part(words[1], text))
    if not words or words[0] != "step" or len(words) % 2 == 0:
        raise ValueError(f"case {text!r}: expected e.g. 'gemm 1x256@0' or 'step prefill 1x256@0'")
    named = dict(zip(words[1::2], words[2::2], strict=True))
    unknown = sorted(set(named) - {"prefill", "decode", "saves", "copies"})
    if unknown:
        raise ValueError(
            f"case {text!r}: unknown {unknown}; allowed: prefill, decode, saves, copies"
        )
    prefill, decode = (named.get(name) for name in ("prefill", "decode"))
    return Whole(
        _part(prefill, text) if prefill else None,
        _part(decode, text) if decode else None,
        int(named.get("saves", 0)),
        int(named.get("copies", 0)),
    )


def _part(text: str, whole: str) -> Part:
    found = PARTS.fullmatch(text)
    if not found:
        raise ValueError(f"case {whole!r}: {text!r} is not SxN@P, e.g. 1x256@1024")
    return Part(*(int(number) for number in found.groups()))


def terms(shape: Shape, case: Case) -> list[Term]:
    """The operation in all layers of the model; empty where the model has none of it."""
    return [t for t in _all_terms(shape, case) if t.op == case.op and t.launches]


def _all_terms(s: Shape, case: Case) -> list[Term]:
    op, part = case.op, case.part
    if op in BY_TOKENS:
        return list(layers.token_terms(s, part.total))
    if op in ("head", "sample"):
        return list(layers.head_terms(s, part.total))
    if op in ("scan", "conv"):
        return list(layers.scan_terms(s, part.total, part.sequences))
    if op in ("update", "conv_update"):
        return list(layers.update_terms(s, part.sequences))
    if op == "attention_prefill":
        found = layers.prefill_attention_terms(s, part.pairs, part.context, part.total)
        return list(found)
    if op == "attention_decode":
        return [layers.decode_attention_term(s, part.sequences, part.context)]
    if op == "kv_copy":
        return list(layers.copy_terms(s, 0, 0, part.total))
    copies, saves = (part.sequences if op == name else 0 for name in ("state_copy", "state_save"))
    return list(layers.copy_terms(s, copies, saves, 0))


def size(shape: Shape, case: Case) -> float:
    """What the operation's efficiency depends on; 0 where the model has none of it."""
    return max((term.size for term in terms(shape, case)), default=0.0)
