"""How Hypothesis draws a case: small traces that share much, tight pools, every option."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sim.check.case import OPERATIONS, Asked, Case, Runs
from sim.check.hosts import Host

MOST_REQUESTS, MOST_TOKENS, TEXTS = 7, 260, 3


@st.composite
def cases(draw: st.DrawFn, host: Host, policy: str, parameters: dict[str, Any]) -> Case:
    """A case for ``policy`` on ``host``."""
    requests = draw(_requests())
    settings = {k: draw(st.sampled_from(values)) for k, values in host.choices.items()}
    return Case(
        engine=host.name,
        policy=policy,
        parameters=parameters,
        settings=settings,
        memory_bytes=draw(st.sampled_from(host.memory)),
        requests=tuple(requests),
        operations=tuple(draw(st.lists(st.sampled_from(OPERATIONS), max_size=40))),
        other_bytes=draw(st.sampled_from(host.memory)),
        cut=draw(st.integers(1, len(requests))),
    )


@st.composite
def _requests(draw: st.DrawFn) -> list[Asked]:
    """Requests out of few texts; some go on where an earlier one ended."""
    out: list[Asked] = []
    arrival = 0
    for i in range(draw(st.integers(1, MOST_REQUESTS))):
        arrival += draw(st.sampled_from((0, 700, 9_000, 200_000)))
        out.append(Asked(str(i), draw(_prompt(out, i)), draw(_output(i)), arrival))
    return out


@st.composite
def _prompt(draw: st.DrawFn, before: list[Asked], i: int) -> Runs:
    earlier = draw(st.integers(-1, len(before) - 1))
    own = (TEXTS + 2 * i, draw(st.integers(0, 40)))
    if earlier >= 0 and draw(st.booleans()) and before[earlier].tokens < MOST_TOKENS:
        whole = (*before[earlier].prompt, *before[earlier].output)
    else:
        tokens = draw(st.one_of(st.integers(1, 90), st.sampled_from((16, 32, 48, 64, 65))))
        whole = ((draw(st.integers(0, TEXTS - 1)), tokens),)
    return (*whole, own) if own[1] else whole


@st.composite
def _output(draw: st.DrawFn, i: int) -> Runs:
    tokens = draw(st.one_of(st.integers(1, 40), st.sampled_from((100, 150))))
    return ((TEXTS + 2 * i + 1, tokens),)
