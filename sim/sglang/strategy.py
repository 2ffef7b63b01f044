"""What ``--mamba-radix-cache-strategy auto`` becomes for an architecture, and why.

Sources: specs/sglang-0.5.23, section 0; specs/sglang-0.5.18, section 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from sim.dtypes import one_of

FILE = Path(__file__).parents[1] / "data" / "sglang_architectures.yaml"


@dataclass(frozen=True)
class Strategy:
    """The strategy, whether steps overlap, and why in words."""

    name: str
    overlap: bool
    reason: str


@lru_cache(maxsize=1)
def _architectures() -> dict[str, dict[str, list[str]]]:
    data: dict[str, dict[str, list[str]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return data


def supports_hybrid_cache(version: str, architecture: str) -> bool:
    """Whether SGLang gives the architecture a radix cache of KV and states."""
    return architecture in _architectures()[version]["radix"]


def supports_extra_buffer(version: str, architecture: str) -> bool:
    """Whether its kernels can write states besides the running one."""
    return architecture in _architectures()[version]["extra_buffer"]


def resolve(version: str, architecture: str, asked: str, page_size: int, overlap: bool) -> Strategy:
    """``asked`` as the engine runs it. ``overlap``: the user did not turn it off.

    Raises ``ValueError`` for an architecture that has no cache of KV and states there (an empty
    name is taken for one that has), and for an extra buffer that it cannot use.
    """
    one_of("strategy", asked, ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"))
    if architecture and not supports_hybrid_cache(version, architecture):
        raise ValueError(
            f"SGLang {version} has no cache of KV and states for {architecture}; architectures "
            f"that have one are {', '.join(_architectures()[version]['radix'])}"
        )
    lacks = bool(architecture) and not supports_extra_buffer(version, architecture)
    if lacks and asked.startswith("extra_buffer"):
        raise ValueError(
            f"strategy {asked}: SGLang {version} has no extra buffer for {architecture}; "
            "the nearest valid choice is no_buffer"
        )
    if asked != "auto":
        return Strategy(asked, overlap and asked != "no_buffer", "as asked")
    if not supports_extra_buffer(version, architecture):
        why = f"auto: {architecture or 'the architecture'} is not among those with an extra buffer"
    elif overlap or page_size > 1:
        wish = "overlap scheduling" if overlap else f"pages of {page_size} tokens"
        return Strategy("extra_buffer", overlap, f"auto: {wish} wanted, {architecture} supports it")
    else:
        why = "auto: neither overlap scheduling nor pages of more than one token wanted"
    return Strategy("no_buffer", False, f"{why}; no_buffer turns overlap scheduling off")
