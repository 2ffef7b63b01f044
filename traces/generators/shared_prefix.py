"""Groups of requests that share a prompt's beginning exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from traces.generators.parameters import in_range, one_of
from traces.trace import UNKNOWN, Ints, Trace

ORDERS = ("grouped", "interleaved", "shuffled")


@dataclass(frozen=True)
class SharedPrefix:
    """``groups`` times ``repeats`` prompts of ``prefix_tokens`` shared in the group, then own ones.

    ``order``: group by group, one of each group in turn, or shuffled by the seed. ``serial``:
    every request waits until the one before it has finished, then ``think_s``. The prompt's last
    ``generation_prompt_tokens``, the same text everywhere, come on top of prefix and suffix.
    """

    groups: int = 1
    repeats: int = 3
    prefix_tokens: int = 2048
    suffix_tokens: int = 200
    output_tokens: int = 128
    generation_prompt_tokens: int = 0
    order: str = "grouped"
    serial: bool = False
    think_s: float = 0.0

    def __post_init__(self) -> None:
        in_range("think_s", self.think_s, 0, 1e6)
        for name in ("groups", "repeats"):
            in_range(name, getattr(self, name), 1)
        for name in ("prefix_tokens", "suffix_tokens", "generation_prompt_tokens"):
            in_range(name, getattr(self, name), 0)
        in_range("output_tokens", self.output_tokens, 1)
        in_range("prefix_tokens + suffix_tokens", self.prefix_tokens + self.suffix_tokens, 1)
        one_of("order", self.order, ORDERS)


def shared_prefix(params: SharedPrefix, seed: int = 0) -> Trace:
    """The requests of ``params`` in their order; only ``shuffled`` uses the seed."""
    n = params.groups * params.repeats
    group = _order(params, seed)
    address, length = _runs(params, group)
    keep = length > 0
    steps = np.arange(n) if params.serial else np.zeros(n, np.int64)
    waits = params.serial and n > 1
    return Trace(
        ids=tuple(f"r{i}" for i in range(n)),
        arrival_ns=_starts(n, params.serial),
        prompt_tokens=np.full(n, int(length[0, :3].sum()), np.int64),
        output_tokens=np.full(n, params.output_tokens, np.int64),
        output_known=np.ones(n, bool),
        session=np.full(n, UNKNOWN, np.int64),
        think_ns=np.where(steps > 0, round(params.think_s * 1e9), 0).astype(np.int64),
        generation_prompt_tokens=np.full(n, params.generation_prompt_tokens, np.int64),
        priority=np.zeros(n, np.int64),
        after_offsets=np.r_[0, steps].astype(np.int64),
        after=np.arange(n - 1 if waits else 0, dtype=np.int64),
        run_offsets=np.r_[0, np.cumsum(keep.sum(axis=1))],
        run_address=address[keep],
        run_length=length[keep],
        notes={"generator": "shared_prefix", "seed": seed, "parameters": asdict(params)},
    )


def _order(params: SharedPrefix, seed: int) -> Ints:
    """The group of each request, in order."""
    groups = np.arange(params.groups)
    if params.order == "interleaved":
        return np.tile(groups, params.repeats)
    grouped = np.repeat(groups, params.repeats)
    if params.order == "shuffled":
        return np.random.default_rng(seed).permutation(grouped)
    return grouped


def _starts(n: int, serial: bool) -> Ints:
    """A serial chain starts at 0; otherwise no time is known."""
    times = np.full(n, UNKNOWN, np.int64)
    if serial:
        times[0] = 0
    return times


def _runs(params: SharedPrefix, group: Ints) -> tuple[Ints, Ints]:
    """Addresses and lengths [n, 4]: prefix, suffix, generation prompt, output.

    Gaps of one keep neighbours from reading as one run.
    """
    n = len(group)
    sizes = (
        params.prefix_tokens,
        params.suffix_tokens,
        params.generation_prompt_tokens,
        params.output_tokens,
    )
    prefix, suffix, generation, output = (size + 1 for size in sizes)
    own = params.groups * prefix + generation + np.arange(n) * (suffix + output)
    address = np.empty((n, 4), np.int64)
    address[:, 0] = generation + group * prefix
    address[:, 1] = own
    address[:, 2] = 0
    address[:, 3] = own + suffix
    return address, np.tile(np.array(sizes, np.int64), (n, 1))
