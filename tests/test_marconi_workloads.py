"""Synthetic workloads of the Marconi artifact's shapes: their counts, and who shares what."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from traces.generators import generate
from traces.identity import identify
from traces.order import nominal_ns
from traces.trace import Trace

# Published or derived from published figures: requests, prompt tokens, P95 of the prompts.
COUNTS = {
    "marconi_lmsys": (2_150, 11.0e6, 14_000),
    "marconi_sharegpt": (1_350, 1.4e6, 2_450),
    "marconi_swebench": (3_675, 52e6, 24_000),
}


def lengths(trace: Trace) -> tuple[int, float, float]:
    prompts = trace.prompt_tokens
    return len(trace), float(prompts.sum()), float(np.percentile(prompts, 95))


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_a_hundred_sessions_come_near_the_published_counts(name: str) -> None:
    seeds = [lengths(generate(name, {}, seed)) for seed in (1, 2, 3)]
    found = [mean(column) for column in zip(*seeds, strict=True)]
    for value, target, tolerance in zip(found, COUNTS[name], (0.04, 0.08, 0.09), strict=True):
        assert value == pytest.approx(target, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "shared", "limit"), [("marconi_lmsys", 5, 32_768), ("marconi_sharegpt", 7, 3000)]
)
def test_chats_append_and_share_a_preamble(name: str, shared: int, limit: int) -> None:
    trace = generate(name, {"sessions": 8}, 2)
    prefixes = identify(trace)
    whole = trace.prompt_tokens + trace.output_tokens
    assert whole.max() <= limit
    for i in range(1, len(trace)):
        expected = whole[i - 1] if trace.after_of(i) else shared
        assert prefixes.common(i - 1, i) == expected
    turns = np.bincount(trace.session)
    assert turns.max() <= 80
    assert all(trace.after_of(i) == [i - 1] for i in np.flatnonzero(trace.think_ns > 0).tolist())


def test_a_chat_turn_waits_as_long_as_typing_takes() -> None:
    trace = generate("marconi_lmsys", {"sessions": 3}, 2)
    for i in range(1, len(trace)):
        if trace.after_of(i):
            before = trace.prompt_tokens[i - 1] + trace.output_tokens[i - 1]
            typed = int(trace.prompt_tokens[i] - before) - 11
            assert int(trace.think_ns[i]) == typed * 500_000_000  # 0.75 / 1.5 s each
    assert nominal_ns(trace).max() > 0


def test_old_observations_leave_an_agents_history() -> None:
    """At turn t the last five messages stand whole, and of the others only the first."""
    trace = generate("marconi_swebench", {"sessions": 1, "turns_spread": 0.0}, 4)
    prefixes = identify(trace)
    assert len(trace) > 12
    whole = (trace.prompt_tokens + trace.output_tokens).tolist()
    for i in range(7):
        assert i == 0 or prefixes.common(i - 1, i) == whole[i - 1]
    message = [int(trace.prompt_tokens[0]) - 1200]
    for i in range(1, 7):
        message.append(int(trace.prompt_tokens[i]) - whole[i - 1])
    answers = trace.output_tokens.tolist()
    kept = 1200 + message[0] + answers[0]
    assert prefixes.common(6, 7) == kept  # the second turn's observation is gone
    assert prefixes.common(7, 8) == kept + answers[1]
    at_hand = int(trace.prompt_tokens[7]) - (1200 + sum(message) - message[1] + sum(answers[:7]))
    assert at_hand > 10
    prompt, answer = trace.runs_of(7)
    assert (
        prompt[-1].length > at_hand and answer[0].address == prompt[-1].address + prompt[-1].length
    )


def test_an_agent_may_keep_everything() -> None:
    trace = generate("marconi_swebench", {"sessions": 3, "keep_last": 0}, 4)
    prefixes = identify(trace)
    whole = trace.prompt_tokens + trace.output_tokens
    later = [i for i in range(len(trace)) if trace.after_of(i)]
    assert all(prefixes.common(i - 1, i) == whole[i - 1] for i in later)
    seconds = trace.think_ns[later] / 1e9
    assert np.array_equal(seconds, np.rint(seconds))
    assert seconds.mean() == pytest.approx(7.5, rel=0.15)


def test_the_recommended_override_shares_less() -> None:
    settings = {"sessions": 4, "system_tokens": 60, "issue_median": 1200.0}
    trace = generate("marconi_swebench", settings, 1)
    starts = [i for i in range(len(trace)) if not trace.after_of(i)]
    prefixes = identify(trace)
    assert [prefixes.common(starts[0], i) for i in starts[1:]] == [60, 60, 60]
    assert trace.prompt_tokens.max() <= 32_768


def test_fewshot_prompts_follow_zipf() -> None:
    trace = generate("marconi_fewshot", {"requests": 4000}, 1)
    heads = [trace.runs_of(i)[0][0] for i in range(len(trace))]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    weights = 1 / np.arange(1, 13)
    expected = 4000 * weights / weights.sum()
    assert len(counts) == 12
    assert counts[0] == pytest.approx(expected[0], rel=0.1)
    assert counts[-1] == pytest.approx(expected[-1], rel=0.25)
    own = trace.prompt_tokens - np.array([head.length for head in heads])
    assert np.median(own) == pytest.approx(80, rel=0.05)
    assert not trace.after.size


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("marconi_lmsys", {"sessions": 0}, "sessions is 0; allowed: 1 or more"),
        ("marconi_sharegpt", {"user_median": 0.0}, "user_median is 0.0; allowed: above 0"),
        ("marconi_swebench", {"keep_last": -1}, "keep_last is -1; allowed: 0 or more"),
        ("marconi_swebench", {"max_tokens": 1200}, "max_tokens is 1200; allowed: 1201 or more"),
        ("marconi_fewshot", {"prompt_spread": 9.0}, "prompt_spread is 9.0; allowed: 0 to 5"),
    ],
)
def test_bad_parameters_are_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(name, settings)
