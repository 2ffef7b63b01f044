"""Agentic sessions: many turns on a growing history, with rollbacks, edits and compaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from traces.generators.layout import Plan, lay_out
from traces.generators.parameters import in_range, one_of
from traces.generators.quantiles import Floats, Quantiles, constant, fits, from_summary, through
from traces.generators.sessions import chosen, nanoseconds, tokens
from traces.trace import Ints, Trace

FITS = ("claude_code_weka_sample", "tau_airline")
# tau-bench airline: every prompt begins with the same 1,260 tokens (its first radix segment)
_TAU_SYSTEM_TOKENS = 1260


@dataclass(frozen=True)
class Agentic:
    """``sessions`` agentic sessions; a parameter left None is drawn from the fit.

    ``rollback_share`` of the turns replace the end of the previous prompt instead of appending.
    ``fresh_only`` leaves out sessions that begin in the middle (resumed ones; only
    claude_code_weka_sample tells them apart). Each of ``system_groups`` has a system prompt of
    its own, sessions take them at random. A prompt beyond ``max_prompt_tokens``, or beyond
    1.25 times the session's first if that is more, is compacted to system prompt and
    ``compacted_tokens``; both defaults are what claude_code_weka_sample shows, whose prompts
    mostly shrink at 145,000 to 165,000 tokens, to a median of 33,000.
    """

    sessions: int = 100
    fit: str = "claude_code_weka_sample"
    fresh_only: bool = False
    system_groups: int = 1
    system_tokens: int | None = None
    turns: int | None = None
    first_tokens: int | None = None
    append_tokens: int | None = None
    output_tokens: int | None = None
    think_s: float | None = None
    rollback_share: float | None = None
    max_prompt_tokens: int = 160_000
    compacted_tokens: int = 15_000
    generation_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        in_range("think_s", self.think_s, 0, 1e6)
        one_of("fit", self.fit, FITS)
        for name in ("sessions", "system_groups", "turns", "append_tokens", "output_tokens"):
            in_range(name, getattr(self, name), 1)
        for name in ("system_tokens", "generation_prompt_tokens", "compacted_tokens"):
            in_range(name, getattr(self, name), 0)
        in_range("rollback_share", self.rollback_share, 0, 1)
        system = _system_tokens(self)
        in_range("first_tokens", self.first_tokens, system + 1)
        in_range("max_prompt_tokens", self.max_prompt_tokens, system + self.compacted_tokens + 1)


@dataclass(frozen=True)
class _Fit:
    """A fit in one shape, whatever its trace could tell. Shares are of turns after the first."""

    turns: Quantiles
    first: Quantiles
    append: Quantiles
    output: Quantiles
    think_s: Quantiles
    drops_output: float
    rollback: float
    lost: Quantiles
    replaced: Quantiles


def agentic(params: Agentic, seed: int = 0) -> Trace:
    """The sessions of ``params``, one after the other in the file, without arrival times."""
    return lay_out(
        _plan(params, _fit(params), np.random.default_rng(seed)),
        generator="agentic",
        seed=seed,
        parameters=asdict(params),
    )


def _system_tokens(params: Agentic) -> int:
    if params.system_tokens is not None:
        return params.system_tokens
    fit = fits()[params.fit]
    if "tool_tokens" not in fit:
        return _TAU_SYSTEM_TOKENS
    return int(fit["tool_tokens"]["median"] + fit["system_tokens"]["median"])


def _fit(params: Agentic) -> _Fit:
    fit, low = fits()[params.fit], _system_tokens(params) + 1
    if params.fit == "tau_airline":
        return _tau(fit, low)
    levels = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
    think = fit["think_quantiles_s(10,25,50,75,90,95,99)"]
    return _Fit(
        turns=from_summary(fit["turns"]),
        first=from_summary(fit["first_in_fresh"], low) if params.fresh_only else _first(fit, low),
        append=from_summary(fit["append_new_tokens(in-prev_in-prev_out)"]),
        output=from_summary(fit["output"]),
        think_s=through(levels, think, 0.1, fit["think_s"]["max"]),
        drops_output=fit["append_le0_share"],
        rollback=1 - fit["transition"]["append"],
        lost=from_summary(fit["rollback_lost_tokens"]),
        replaced=from_summary(fit["rollback_new_tokens_after"]),
    )


def _tau(fit: Mapping[str, Any], low: int) -> _Fit:
    """tau-bench tells neither think times nor rollbacks."""
    return _Fit(
        turns=from_summary(fit["turns"]),
        first=from_summary(fit["first_in"], low),
        append=from_summary(fit["new"]),
        output=from_summary(fit["output"]),
        think_s=constant(0.0),
        drops_output=0.0,
        rollback=0.0,
        lost=from_summary(fit["new"]),
        replaced=from_summary(fit["new"]),
    )


def _first(fit: Mapping[str, Any], low: int) -> Quantiles:
    """First prompts of fresh and resumed sessions together: the fresh ones are the lower part."""
    fresh, every, share = fit["first_in_fresh"], fit["first_in"], fit["share_fresh"]
    levels = (0.5 * share, 0.5, share, 0.9, 0.99)
    values = (fresh["median"], every["median"], fresh["max"], every["p90"], every["p99"])
    return through(levels, values, low, every["max"])


def _plan(params: Agentic, fit: _Fit, rng: np.random.Generator) -> Plan:
    s = params.sessions
    turns = tokens(rng, chosen(params.turns, fit.turns), s)
    n = int(turns.sum())
    first = tokens(rng, chosen(params.first_tokens, fit.first), s)
    output = tokens(rng, chosen(params.output_tokens, fit.output), n)
    rollback = fit.rollback if params.rollback_share is None else params.rollback_share
    new, lost, keeps = _turn_kinds(params, fit, rng, output, rollback)
    return Plan(
        turns=turns,
        group=rng.integers(0, params.system_groups, s),
        first=first,
        limit=np.maximum(params.max_prompt_tokens, first + first // 4),
        forked=np.zeros(s, np.int64),
        fork_of=np.zeros(s, np.int64),
        new=new,
        lost=lost,
        keeps_output=keeps,
        output=output,
        think_ns=nanoseconds(rng, chosen(params.think_s, fit.think_s), n),
        system_tokens=_system_tokens(params),
        compacted_tokens=params.compacted_tokens,
        generation_prompt_tokens=params.generation_prompt_tokens,
    )


def _turn_kinds(
    params: Agentic, fit: _Fit, rng: np.random.Generator, output: Ints, rollback: float
) -> tuple[Ints, Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """New and lost tokens of each turn, and whether the previous output stays in history.

    In ``drops_output`` of the appending turns the history grows by less than the output, as when
    reasoning is left out: the output is dropped, and a part of its length, uniform, is new.
    """
    n = len(output)
    kind: Floats = rng.random(n)
    rolls = kind < rollback
    drops = ~rolls & (kind < rollback + (1 - rollback) * fit.drops_output)
    if params.append_tokens is not None:
        drops[:] = False
    z = rng.standard_normal(n)  # one score for both: who loses much also replaces much
    lost = np.where(rolls, np.maximum(1, np.rint(fit.lost.at(z))), 0).astype(np.int64)
    new = tokens(rng, chosen(params.append_tokens, fit.append), n)
    new = np.where(rolls, np.maximum(1, np.rint(fit.replaced.at(z))).astype(np.int64), new)
    before = np.r_[1, output[:-1]]
    kept = np.maximum(1, np.rint(rng.random(n) * before)).astype(np.int64)
    return np.where(drops, kept, new), lost, ~(rolls | drops)
