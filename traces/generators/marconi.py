"""Synthetic workloads with the shapes that the Marconi artifact was evaluated on.

LMSys and ShareGPT chats, SWE-bench agents whose old observations leave the history, and few-shot
prompts. Message lengths are log-normal: ``median * exp(spread * z)``. Fitted to what is known of
the artifact's traces (requests, prompt tokens, P95); source: specs/marconi, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from traces.generators.parameters import in_range
from traces.trace import Request, Run, Trace, from_requests

_CHAT_EXTRA, _AGENT_EXTRA = 11, 10  # tokens that a message's JSON adds
_WORDS_PER_TOKEN = 0.75
_WORDS_PER_S = 1.5  # typing at 90 words a minute


@dataclass(frozen=True)
class Lmsys:
    """``sessions`` chats; every prompt begins with ``preamble_tokens`` that all chats share.

    A chat has ``10 + turns`` turns, at most ``max_turns``, and ends before history, message and
    output would exceed ``max_tokens``. A turn waits as long as typing its message takes.
    """

    sessions: int = 100
    preamble_tokens: int = 5
    turns_median: float = 8.0
    turns_spread: float = 0.9
    max_turns: int = 80
    user_median: float = 40.0
    user_spread: float = 1.0
    output_median: float = 200.0
    output_spread: float = 0.9
    output_extra_tokens: int = 13
    max_tokens: int = 32_768

    def __post_init__(self) -> None:
        _checked(self, sessions=1, max_turns=1, preamble_tokens=0, output_extra_tokens=1)
        in_range("max_tokens", self.max_tokens, self.preamble_tokens + 1)


@dataclass(frozen=True)
class ShareGpt(Lmsys):
    """As ``Lmsys``, with ShareGPT's shorter sessions."""

    preamble_tokens: int = 7
    turns_median: float = 3.0
    turns_spread: float = 0.8
    max_turns: int = 40
    user_median: float = 18.0
    user_spread: float = 0.9
    output_median: float = 75.0
    output_extra_tokens: int = 11
    max_tokens: int = 3000


@dataclass(frozen=True)
class SweBench:
    """``sessions`` agents: system prompt, issue, then action and observation in turn.

    Of the turns that are over, the history keeps every answer, but only the first and the last
    ``keep_last`` messages (0: all), so that each prompt leaves the one before it in mid-history.
    Turns are a whole number of seconds
    apart, Poisson with mean ``gap_s``. The defaults share a system prompt of 1,200 tokens, which
    alone lets block caching hit 12 %; ``system_tokens=60, issue_median=1200`` comes closer to the
    paper's figures.
    """

    sessions: int = 100
    system_tokens: int = 1200
    issue_median: float = 400.0
    issue_spread: float = 0.8
    turns_median: float = 38.0
    turns_spread: float = 0.5
    max_turns: int = 51
    observation_median: float = 650.0
    observation_spread: float = 1.2
    max_observation_tokens: int = 8000
    output_median: float = 220.0
    output_spread: float = 0.6
    keep_last: int = 5
    gap_s: float = 7.5
    max_tokens: int = 32_768

    def __post_init__(self) -> None:
        _checked(
            self, sessions=1, system_tokens=0, max_turns=3, max_observation_tokens=1, keep_last=0
        )
        in_range("gap_s", self.gap_s, 0, 1e6)
        in_range("max_tokens", self.max_tokens, self.system_tokens + 1)


@dataclass(frozen=True)
class FewShot:
    """``requests`` of one turn each: one of ``prompts`` examples, by Zipf's law, and a question."""

    requests: int = 1000
    prompts: int = 12
    prompt_median: float = 2000.0
    prompt_spread: float = 0.7
    question_median: float = 80.0
    question_spread: float = 0.8
    output_median: float = 60.0
    output_spread: float = 0.8

    def __post_init__(self) -> None:
        _checked(self, requests=1, prompts=1)


def lmsys(params: Lmsys, seed: int = 0) -> Trace:
    """Chats one after the other in the file, without arrival times."""
    return _trace("marconi_lmsys", params, seed, _chats(params, np.random.default_rng(seed)))


def sharegpt(params: ShareGpt, seed: int = 0) -> Trace:
    """Chats one after the other in the file, without arrival times."""
    return _trace("marconi_sharegpt", params, seed, _chats(params, np.random.default_rng(seed)))


def swebench(params: SweBench, seed: int = 0) -> Trace:
    """Agents one after the other in the file, without arrival times."""
    return _trace("marconi_swebench", params, seed, _agents(params, np.random.default_rng(seed)))


def fewshot(params: FewShot, seed: int = 0) -> Trace:
    """Single requests, without arrival times."""
    return _trace("marconi_fewshot", params, seed, _questions(params, np.random.default_rng(seed)))


@dataclass(frozen=True)
class _Turn:
    """A message and its answer, side by side at ``address``, ``think_ns`` after the turn before."""

    address: int
    message: int
    output: int
    think_ns: int

    @property
    def answer(self) -> Run:
        return Run(self.address + self.message, self.output)

    @property
    def both(self) -> Run:
        return Run(self.address, self.message + self.output)


def _chats(params: Lmsys, rng: np.random.Generator) -> Iterator[Request]:
    shared, fresh = _head(params.preamble_tokens), params.preamble_tokens + 1
    for s in range(params.sessions):
        n = min(params.max_turns, 10 + _one(rng, params.turns_median, params.turns_spread))
        typed = _lengths(rng, params.user_median, params.user_spread, n)
        outputs = _lengths(rng, params.output_median, params.output_spread, n)
        outputs += params.output_extra_tokens
        turns: list[_Turn] = []
        total = params.preamble_tokens
        for typed_tokens, output in zip(typed.tolist(), outputs.tolist(), strict=True):
            user = typed_tokens + _CHAT_EXTRA
            total += user + output
            if total > params.max_tokens:
                break
            think_s = typed_tokens * _WORDS_PER_TOKEN / _WORDS_PER_S
            turns.append(_Turn(fresh, user, output, round(think_s * 1e9)))
            fresh += user + output
        fresh += 1
        yield from _session(s, shared, turns, keep_last=0)


def _agents(params: SweBench, rng: np.random.Generator) -> Iterator[Request]:
    shared, fresh = _head(params.system_tokens), params.system_tokens + 1
    for s in range(params.sessions):
        n = _one(rng, params.turns_median, params.turns_spread)
        n = min(max(n, 3), params.max_turns)
        messages = _lengths(rng, params.observation_median, params.observation_spread, n)
        messages = np.minimum(messages, params.max_observation_tokens)
        messages[0] = _one(rng, params.issue_median, params.issue_spread)
        messages += _AGENT_EXTRA
        outputs = _lengths(rng, params.output_median, params.output_spread, n) + _AGENT_EXTRA
        gaps = rng.poisson(params.gap_s, n)
        turns: list[_Turn] = []
        for message, output, gap in zip(
            messages.tolist(), outputs.tolist(), gaps.tolist(), strict=True
        ):
            turn = _Turn(fresh, message, output, gap * 1_000_000_000)
            history = sum(run.length for run in _history(turns, params.keep_last))
            if params.system_tokens + history + message > params.max_tokens:
                break
            turns.append(turn)
            fresh += message + output
        fresh += 1
        yield from _session(s, shared, turns, params.keep_last)


def _questions(params: FewShot, rng: np.random.Generator) -> Iterator[Request]:
    lengths = np.maximum(
        _lengths(rng, params.prompt_median, params.prompt_spread, params.prompts), 1
    )
    starts = (np.cumsum(lengths + 1) - lengths - 1).tolist()
    fresh = int(np.sum(lengths + 1))
    weights = 1 / np.arange(1, params.prompts + 1)
    n = params.requests
    chosen = rng.choice(params.prompts, n, p=weights / weights.sum()).tolist()
    questions = np.maximum(_lengths(rng, params.question_median, params.question_spread, n), 1)
    outputs = np.maximum(_lengths(rng, params.output_median, params.output_spread, n), 1)
    for i, (question, output) in enumerate(zip(questions.tolist(), outputs.tolist(), strict=True)):
        k = chosen[i]
        turn = _Turn(fresh, question, output, 0)
        yield from _session(i, (Run(starts[k], int(lengths[k])),), [turn], keep_last=0)
        fresh += question + output + 1


def _session(
    session: int, shared: tuple[Run, ...], turns: list[_Turn], keep_last: int
) -> Iterator[Request]:
    """The requests of a session, each waiting for the one before it."""
    for t, turn in enumerate(turns):
        history = _history(turns[:t], keep_last)
        yield Request(
            id=f"s{session}-{t}",
            prompt=(*shared, *history, Run(turn.address, turn.message)),
            output_tokens=turn.output,
            output=(turn.answer,),
            session=f"s{session}",
            after=(f"s{session}-{t - 1}",) if t else (),
            think_ns=turn.think_ns if t else 0,
            generation_prompt_tokens=0,
        )


def _history(turns: list[_Turn], keep_last: int) -> list[Run]:
    """What is left of ``turns``: between the first and the last ones, answers only."""
    if not keep_last or len(turns) <= keep_last:
        return [turn.both for turn in turns]
    first_whole = len(turns) - keep_last
    return [turn.answer if 0 < i < first_whole else turn.both for i, turn in enumerate(turns)]


def _head(tokens: int) -> tuple[Run, ...]:
    return (Run(0, tokens),) if tokens else ()


def _lengths(
    rng: np.random.Generator, median: float, spread: float, n: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.rint(median * np.exp(spread * rng.standard_normal(n))).astype(np.int64)


def _one(rng: np.random.Generator, median: float, spread: float) -> int:
    return int(_lengths(rng, median, spread, 1)[0])


def _trace(name: str, params: Any, seed: int, requests: Iterator[Request]) -> Trace:
    return from_requests(requests, generator=name, seed=seed, parameters=asdict(params))


def _checked(params: Any, **least: int) -> None:
    for name, low in least.items():
        in_range(name, getattr(params, name), low)
    for name, value in vars(params).items():
        if name.endswith("_median"):
            in_range(name, value, 0, 1e6, above=True)
        elif name.endswith("_spread"):
            in_range(name, value, 0, 5)
