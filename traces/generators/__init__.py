"""Seeded generators of traces, by name: a dataclass of parameters and a function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from traces.generators.agentic import Agentic, agentic
from traces.generators.chat import Chat, chat
from traces.generators.fleet import Fleet, fleet
from traces.generators.marconi import (
    FewShot,
    Lmsys,
    ShareGpt,
    SweBench,
    fewshot,
    lmsys,
    sharegpt,
    swebench,
)
from traces.generators.parameters import in_range, one_of, read
from traces.generators.shared_prefix import SharedPrefix, shared_prefix
from traces.trace import Trace

__all__ = [
    "GENERATORS",
    "Agentic",
    "Chat",
    "Fleet",
    "Generator",
    "SharedPrefix",
    "agentic",
    "chat",
    "fleet",
    "generate",
    "shared_prefix",
]


@dataclass(frozen=True)
class Generator:
    """``make(parameters(...), seed)`` is a trace; the parameters are a frozen dataclass."""

    parameters: type[Any]
    make: Callable[[Any, int], Trace]


GENERATORS: Mapping[str, Generator] = {
    "shared_prefix": Generator(SharedPrefix, shared_prefix),
    "chat": Generator(Chat, chat),
    "agentic": Generator(Agentic, agentic),
    "fleet": Generator(Fleet, fleet),
    "marconi_lmsys": Generator(Lmsys, lmsys),
    "marconi_sharegpt": Generator(ShareGpt, sharegpt),
    "marconi_swebench": Generator(SweBench, swebench),
    "marconi_fewshot": Generator(FewShot, fewshot),
}


def generate(name: str, settings: Mapping[str, object], seed: int = 0) -> Trace:
    """The trace of generator ``name``. Raises ``ValueError`` on unknown names, keys and values."""
    one_of("generator", name, GENERATORS)
    in_range("seed", seed, 0)
    generator = GENERATORS[name]
    return generator.make(read(generator.parameters, settings), seed)
