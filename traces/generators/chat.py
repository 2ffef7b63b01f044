"""Multi-turn chat: many short conversations under one system prompt, some of them forked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from traces.generators.layout import Plan, lay_out
from traces.generators.parameters import in_range, one_of
from traces.generators.quantiles import Floats, fits, from_summary
from traces.generators.sessions import chosen, nanoseconds, tokens
from traces.trace import Ints, Trace

FITS = ("mooncake_conversation",)
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Chat:
    """``sessions`` conversations; a parameter left None is drawn from the fit.

    ``branch_share`` of the conversations begin with a part of an earlier one's first prompt, of
    a length uniform between the system prompt and the shorter of both. ``think_s`` of the fit is
    the time between two arrivals, so it holds the service time of the real system.
    """

    sessions: int = 1000
    fit: str = "mooncake_conversation"
    system_tokens: int = 512
    branch_share: float | None = None
    turns: int | None = None
    first_tokens: int | None = None
    append_tokens: int | None = None
    output_tokens: int | None = None
    think_s: float | None = None
    generation_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        in_range("think_s", self.think_s, 0, 1e6)
        one_of("fit", self.fit, FITS)
        for name in ("sessions", "turns", "append_tokens", "output_tokens"):
            in_range(name, getattr(self, name), 1)
        for name in ("system_tokens", "generation_prompt_tokens"):
            in_range(name, getattr(self, name), 0)
        in_range("first_tokens", self.first_tokens, self.system_tokens + 1)
        in_range("branch_share", self.branch_share, 0, 1)


def chat(params: Chat, seed: int = 0) -> Trace:
    """The conversations of ``params``, one after the other in the file, without arrival times."""
    fit = fits()[params.fit]
    return lay_out(
        _plan(params, fit, np.random.default_rng(seed)),
        generator="chat",
        seed=seed,
        parameters=asdict(params),
    )


def _plan(params: Chat, fit: Mapping[str, Any], rng: np.random.Generator) -> Plan:
    s = params.sessions
    turns = _turns(params, fit, rng)
    n = int(turns.sum())
    low = params.system_tokens + 1
    first = tokens(rng, chosen(params.first_tokens, from_summary(fit["first_in"], low)), s)
    share = _branch_share(fit) if params.branch_share is None else params.branch_share
    forked, fork_of = _forks(rng, first, params.system_tokens, share)
    gap = chosen(params.think_s, from_summary(fit["gap_s"]))
    append = chosen(params.append_tokens, from_summary(fit["append_new_tokens"]))
    output = chosen(params.output_tokens, from_summary(fit["output"]))
    return Plan(
        turns=turns,
        group=np.zeros(s, np.int64),
        first=first,
        limit=np.full(s, _NO_LIMIT),
        forked=forked,
        fork_of=fork_of,
        new=tokens(rng, append, n),
        lost=np.zeros(n, np.int64),
        keeps_output=np.ones(n, bool),
        output=tokens(rng, output, n),
        think_ns=nanoseconds(rng, gap, n),
        system_tokens=params.system_tokens,
        compacted_tokens=0,
        generation_prompt_tokens=params.generation_prompt_tokens,
    )


def _branch_share(fit: Mapping[str, Any]) -> float:
    """Share of conversation starts that share more than the system prompt with an earlier one."""
    new, _, branch = fit["kinds"].values()
    return float(branch / (new + branch))


def _turns(params: Chat, fit: Mapping[str, Any], rng: np.random.Generator) -> Ints:
    """Turns per conversation, such that the depths of all requests are distributed as the fit's.

    A share p(d) of requests at depth d means p(d) / p(1) of the conversations get that far.
    """
    if params.turns is not None:
        return np.full(params.sessions, params.turns)
    reach = np.diff(-_beyond(fit))
    reach = np.minimum.accumulate(reach / reach[0])
    return np.asarray((rng.random(params.sessions)[:, None] < reach).sum(axis=1), np.int64)


def _beyond(fit: Mapping[str, Any]) -> Floats:
    """Share of requests deeper than 0, 1, …: log-log lines through the known points."""
    depth = fit["depth_of_requests"]
    known = [1.0, depth["p90"], depth["p99"], depth["max"]]
    shares = [fit["kinds"]["append"], 0.1, 0.01, 1 / depth["n"]]
    depths = np.arange(1, int(depth["max"]) + 1)
    tail = np.exp(np.interp(np.log(depths), np.log(known), np.log(shares)))
    return np.concatenate(([1.0], tail))


def _forks(rng: np.random.Generator, first: Ints, system: int, share: float) -> tuple[Ints, Ints]:
    """Tokens taken from an earlier conversation that is no fork itself (0: none), and which."""
    s = len(first)
    wants = rng.random(s) < share
    wants[0] = False
    plain = np.flatnonzero(~wants)
    earlier = np.searchsorted(plain, np.arange(s))  # how many plain conversations came before
    parent = plain[(rng.random(s) * earlier).astype(np.int64).clip(0, len(plain) - 1)]
    room = np.minimum(first, first[parent]) - system - 1
    taken = system + 1 + (rng.random(s) * room).astype(np.int64)
    return np.where(wants & (room > 0), taken, 0), parent
