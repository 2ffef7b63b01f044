"""Generated traces: the fits' quantiles come out again, and prompts share what they should."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from itertools import pairwise

import numpy as np
import pytest

from traces.generators import GENERATORS, Agentic, Chat, SharedPrefix, agentic, generate
from traces.generators.quantiles import constant, fits, from_summary, through
from traces.identity import identify, is_chained
from traces.trace import Ints, Run, Trace

MEDIAN, P90 = 0.06, 0.10  # relative tolerance against the fit
SMALL = {
    "shared_prefix": {},
    "chat": {"sessions": 60},
    "agentic": {"sessions": 6},
    "marconi_lmsys": {"sessions": 4},
    "marconi_sharegpt": {"sessions": 6},
    "marconi_swebench": {"sessions": 3},
    "marconi_fewshot": {"requests": 30},
}


def tokens(runs: list[Run]) -> Ints:
    """Every address of ``runs``: what the tokens are, spelled out."""
    return np.concatenate([np.arange(r.address, r.address + r.length) for r in runs])


def firsts(trace: Trace) -> np.ndarray:
    return np.r_[True, trace.session[1:] != trace.session[:-1]]


def appended(trace: Trace) -> tuple[Ints, Ints]:
    """Later turns that keep the whole turn before them, and what they add."""
    prefixes, first = identify(trace), firsts(trace)
    before = trace.prompt_tokens + trace.output_tokens
    turns = np.flatnonzero(~first)
    whole = [i for i in turns.tolist() if prefixes.common(i - 1, i) == before[i - 1]]
    return np.array(whole), (trace.prompt_tokens[whole] - before[np.array(whole) - 1])


def close(values: Ints, summary: dict[str, float]) -> None:
    assert np.median(values) == pytest.approx(summary["median"], rel=MEDIAN)
    assert np.quantile(values, 0.9) == pytest.approx(summary["p90"], rel=P90)
    assert values.max() <= summary["max"]


# --- distributions -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mooncake_conversation", "claude_code_weka_sample"])
def test_a_summary_comes_out_of_its_distribution(name: str) -> None:
    summary = fits()[name]["output"]
    values = from_summary(summary).sample(np.random.default_rng(0), 100_000)
    close(values, summary)
    assert np.quantile(values, 0.99) == pytest.approx(summary["p99"], rel=P90)
    assert np.log(values).mean() == pytest.approx(summary["mu"], abs=0.03)


def test_distributions_pass_through_their_points() -> None:
    curve = through((0.1, 0.5, 0.9), (2.0, 10.0, 400.0), 1.0, 1000.0)
    assert curve.at(np.array([0.0])) == pytest.approx([10.0])
    assert curve.at(np.array([-1.2815515655, 1.2815515655])) == pytest.approx([2.0, 400.0])
    assert curve.at(np.array([-9.0, 9.0])).tolist() == [1.0, 1000.0]
    assert constant(7.0).at(np.array([-1.0, 3.0])).tolist() == [7.0, 7.0]
    assert constant(0.0).at(np.array([1.0])).tolist() == [0.0]


# --- shared prefix -------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [0, 3])
@pytest.mark.parametrize("order", ["grouped", "interleaved", "shuffled"])
def test_groups_share_exactly_their_prefix(order: str, generation: int) -> None:
    trace = generate(
        "shared_prefix",
        {
            "groups": 3,
            "repeats": 4,
            "prefix_tokens": 900,
            "suffix_tokens": 200,
            "generation_prompt_tokens": generation,
            "order": order,
        },
        5,
    )
    prefixes = identify(trace)
    group = [trace.runs_of(i)[0][0].address for i in range(12)]
    assert sorted(group.count(g) for g in set(group)) == [4, 4, 4]
    for a in range(12):
        for b in range(a):
            assert prefixes.common(a, b) == (900 if group[a] == group[b] else 0)
    assert set(trace.prompt_tokens.tolist()) == {1100 + generation}
    assert set(trace.output_tokens.tolist()) == {128}
    assert is_chained(trace) == (generation == 0)


def test_orders_differ_as_named() -> None:
    def groups(order: str, seed: int = 0) -> list[int]:
        trace = generate("shared_prefix", {"groups": 5, "repeats": 4, "order": order}, seed)
        heads = [trace.runs_of(i)[0][0].address for i in range(20)]
        return [sorted(set(heads)).index(h) for h in heads]

    assert groups("grouped") == sorted(groups("grouped"))
    assert groups("interleaved") == [0, 1, 2, 3, 4] * 4
    assert groups("shuffled") not in (groups("grouped"), groups("interleaved"))
    assert groups("shuffled", 1) != groups("shuffled", 2)


def test_serial_requests_wait_for_the_one_before() -> None:
    """What the step curve needs: one prompt after another, each finished before the next."""
    trace = generate("shared_prefix", {"serial": True, "repeats": 3, "think_s": 0.5}, 0)
    assert [r.after for r in trace] == [(), ("r0",), ("r1",)]
    assert [r.arrival_ns for r in trace] == [0, None, None]
    assert [r.think_ns for r in trace] == [0, 500_000_000, 500_000_000]


def test_prompts_without_prefix_or_suffix() -> None:
    alone = generate("shared_prefix", {"prefix_tokens": 0, "repeats": 2}, 0)
    assert identify(alone).common(0, 1) == 0
    same = generate("shared_prefix", {"suffix_tokens": 0, "repeats": 2}, 0)
    assert identify(same).common(0, 1) == 2048 == int(same.prompt_tokens[0])


# --- chat ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talk() -> Trace:
    return generate("chat", {"sessions": 12_000}, 11)


def test_chat_follows_its_fit(talk: Trace) -> None:
    fit = fits()["mooncake_conversation"]
    first = firsts(talk)
    close(talk.prompt_tokens[first], fit["first_in"])
    close(talk.output_tokens, fit["output"])
    close(talk.think_ns[~first] / 1e9, fit["gap_s"])
    whole, new = appended(talk)
    assert len(whole) == np.count_nonzero(~first)
    assert np.median(new) == pytest.approx(fit["append_new_tokens"]["median"], rel=0.1)
    assert np.quantile(new, 0.9) == pytest.approx(fit["append_new_tokens"]["p90"], rel=0.15)


def test_chat_prompts_come_out_as_long_as_the_real_ones(talk: Trace) -> None:
    """Not fitted: follows from first prompts, depths and appended tokens."""
    real = fits()["mooncake_conversation"]["input"]
    assert np.median(talk.prompt_tokens) == pytest.approx(real["median"], rel=0.05)
    assert np.quantile(talk.prompt_tokens, 0.9) == pytest.approx(real["p90"], rel=0.08)
    assert talk.prompt_tokens.mean() == pytest.approx(real["mean"], rel=0.08)


def test_chat_depths_follow_the_fit(talk: Trace) -> None:
    fit = fits()["mooncake_conversation"]
    turns = np.bincount(talk.session)
    depth = np.concatenate([np.arange(1, t + 1) for t in turns.tolist()])
    assert np.mean(depth > 1) == pytest.approx(fit["kinds"]["append"], abs=0.015)
    for level in ("median", "p90", "p99"):
        q = {"median": 0.5, "p90": 0.9, "p99": 0.99}[level]
        assert np.quantile(depth, q) == pytest.approx(fit["depth_of_requests"][level], abs=1)
    assert depth.max() <= fit["depth_of_requests"]["max"]


def test_chat_conversations_share_the_system_prompt_or_a_fork(talk: Trace) -> None:
    prefixes = identify(talk)
    starts = np.flatnonzero(firsts(talk)).tolist()
    owner: dict[int, int] = {}
    shared = []
    for i in starts:
        prompt = talk.runs_of(i)[0]
        parent = owner.setdefault(prompt[1].address, i)
        if parent == i:
            continue
        common = prefixes.common(parent, i)
        assert 512 < common < min(talk.prompt_tokens[i], talk.prompt_tokens[parent])
        assert common == 512 + prompt[1].length
        shared.append(common)
    kinds = fits()["mooncake_conversation"]["kinds"]
    branch = kinds["branch(shares>=2 blocks, not at a prompt end)"]
    assert len(shared) / len(starts) == pytest.approx(branch / (1 - kinds["append"]), abs=0.012)
    plain = sorted(owner.values())[:40]
    assert {prefixes.common(a, b) for a, b in pairwise(plain)} == {512}


def test_a_turn_goes_on_from_the_whole_turn_before(talk: Trace) -> None:
    i = int(np.flatnonzero(~firsts(talk))[0])
    prompt, output = talk.runs_of(i - 1)
    said = np.concatenate([tokens(prompt), tokens(output)])
    assert np.array_equal(tokens(talk.runs_of(i)[0])[: len(said)], said)
    assert talk.request(i).after == (talk.ids[i - 1],)


# --- agentic -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work() -> Trace:
    return generate("agentic", {"sessions": 900}, 3)


def test_agentic_follows_claude_code(work: Trace) -> None:
    fit = fits()["claude_code_weka_sample"]
    first = firsts(work)
    turns = np.bincount(work.session)
    assert np.median(turns) == pytest.approx(fit["turns"]["median"], rel=0.1)
    assert np.quantile(turns, 0.9) == pytest.approx(fit["turns"]["p90"], rel=0.12)
    close(work.output_tokens, fit["output"])
    close(appended(work)[1], fit["append_new_tokens(in-prev_in-prev_out)"])
    think = np.quantile(work.think_ns[~first] / 1e9, [0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
    assert think == pytest.approx(fit["think_quantiles_s(10,25,50,75,90,95,99)"], rel=0.12)


def test_agentic_rollbacks_follow_the_fit(work: Trace) -> None:
    fit = fits()["claude_code_weka_sample"]
    prefixes, first = identify(work), firsts(work)
    later = np.flatnonzero(~first)
    common = np.array([prefixes.common(i - 1, i) for i in later.tolist()])
    lost = work.prompt_tokens[later - 1] - common
    compacted = common == 15_209
    rolled = (lost > 0) & ~compacted
    assert rolled.mean() == pytest.approx(1 - fit["transition"]["append"], abs=0.012)
    assert np.median(lost[rolled]) == pytest.approx(78, rel=0.3)
    small = fit["transition"]["rollback_tail<=128"] / (1 - fit["transition"]["append"])
    assert np.mean(lost[rolled] <= 128) == pytest.approx(small, abs=0.1)
    assert common.min() == 15_209  # a session never loses its system prompt


def test_agentic_prompts_are_about_as_long_as_the_real_ones(work: Trace) -> None:
    """Not fitted: 102,520 at the median, 118,041 on average in the real trace."""
    assert np.median(work.prompt_tokens) == pytest.approx(102_520, rel=0.2)
    assert work.prompt_tokens.mean() == pytest.approx(118_041, rel=0.15)


def test_agentic_first_prompts_follow_the_fit() -> None:
    """By themselves: many sessions are needed, as the median lies on the edge of the fresh ones."""
    fit = fits()["claude_code_weka_sample"]
    trace = generate("agentic", {"sessions": 20_000, "turns": 1}, 3)
    close(trace.prompt_tokens, fit["first_in"])
    fresh = trace.prompt_tokens <= fit["first_in_fresh"]["max"]
    assert fresh.mean() == pytest.approx(fit["share_fresh"], abs=0.02)


def test_fresh_sessions_only() -> None:
    trace = generate("agentic", {"sessions": 900, "fresh_only": True, "turns": 1}, 3)
    close(trace.prompt_tokens, fits()["claude_code_weka_sample"]["first_in_fresh"])


def test_agentic_follows_tau() -> None:
    fit = fits()["tau_airline"]
    trace = generate("agentic", {"sessions": 2000, "fit": "tau_airline"}, 3)
    first = firsts(trace)
    turns = np.bincount(trace.session)
    assert np.median(turns) == pytest.approx(fit["turns"]["median"], abs=1)
    assert np.quantile(turns, 0.9) == pytest.approx(fit["turns"]["p90"], abs=2)
    close(trace.prompt_tokens[first], fit["first_in"])
    close(trace.output_tokens, fit["output"])
    whole, new = appended(trace)
    assert len(whole) == np.count_nonzero(~first)
    close(new, fit["new"])
    prefixes, starts = identify(trace), np.flatnonzero(first).tolist()
    assert {prefixes.common(a, b) for a, b in pairwise(starts[:50])} == {1260}


def test_generation_prompt_is_dropped_from_history() -> None:
    """The next prompt is ``prompt[:-g] + output + new``."""
    settings = {"sessions": 5, "fit": "tau_airline", "generation_prompt_tokens": 4, "turns": 6}
    trace = generate("agentic", settings, 1)
    prefixes = identify(trace)
    assert set(trace.generation_prompt_tokens.tolist()) == {4}
    endings = {trace.runs_of(i)[0][-1] for i in range(len(trace))}
    assert len(endings) == 1 and endings.pop().length == 4
    for i in np.flatnonzero(~firsts(trace)).tolist():
        prompt, output = trace.runs_of(i - 1)
        history = np.concatenate([tokens(prompt)[:-4], tokens(output)])
        assert np.array_equal(tokens(trace.runs_of(i)[0])[: len(history)], history)
        assert prefixes.common(i - 1, i) == trace.prompt_tokens[i - 1] - 4


def test_system_groups_share_within_and_not_across() -> None:
    trace = generate("agentic", {"sessions": 30, "system_groups": 3, "turns": 1}, 1)
    prefixes = identify(trace)
    common = {prefixes.common(a, b) for a in range(30) for b in range(a)}
    assert common == {0, 15_209}
    heads = {trace.runs_of(i)[0][0].address for i in range(30)}
    assert len(heads) == 3


def test_rollbacks_replace_the_end_of_the_prompt() -> None:
    trace = generate("agentic", {"sessions": 4, "turns": 8, "rollback_share": 1.0}, 2)
    prefixes = identify(trace)
    for i in np.flatnonzero(~firsts(trace)).tolist():
        assert 15_209 <= prefixes.common(i - 1, i) < trace.prompt_tokens[i - 1]


def test_long_prompts_are_compacted() -> None:
    params = Agentic(
        sessions=2,
        turns=60,
        system_tokens=1000,
        first_tokens=8000,
        append_tokens=900,
        output_tokens=100,
        rollback_share=0.0,
        max_prompt_tokens=20_000,
        compacted_tokens=4000,
    )
    trace = agentic(params, 0)
    prompts = trace.prompt_tokens[:60].tolist()
    assert prompts[:3] == [8000, 9000, 10_000] and max(prompts) == 20_000
    i = prompts.index(20_000) + 1
    assert prompts[i] == 1000 + 4000 + 900
    assert identify(trace).common(i - 1, i) == 1000


@pytest.mark.parametrize(
    ("name", "settings", "real", "tolerance"),
    [
        ("chat", {"sessions": 8475}, 0.3736, 0.03),
        ("agentic", {"sessions": 1000}, 0.9636, 0.006),
        ("agentic", {"sessions": 200, "fit": "tau_airline"}, 0.9301, 0.006),
    ],
)
def test_prompts_repeat_as_much_as_the_real_ones(
    name: str, settings: dict[str, object], real: float, tolerance: float
) -> None:
    """Not fitted: the share of prompt tokens that stand in another prompt already."""
    trace = generate(name, settings, 1)
    runs = [run for i in range(len(trace)) for run in trace.runs_of(i)[0]]
    starts = np.array([run.address for run in runs])
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(starts + np.array([run.length for run in runs])[order])
    distinct = np.maximum(0, ends - np.maximum(starts, np.r_[-1, ends[:-1]])).sum()
    assert 1 - distinct / trace.prompt_tokens.sum() == pytest.approx(real, abs=tolerance)


# --- all of them ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - {"fleet"}))  # that needs a file
def test_same_seed_same_trace(name: str) -> None:
    settings = {**SMALL[name], **({"order": "shuffled", "groups": 9} if "pre" in name else {})}
    a, b, c = (generate(name, settings, seed) for seed in (4, 4, 5))
    assert list(a) == list(b)
    assert list(a) != list(c)
    assert a.notes["generator"] == name and a.notes["seed"] == 4


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - {"fleet"}))  # that needs a file
def test_columns_are_consistent(name: str) -> None:
    trace = generate(name, SMALL[name], 4)
    counts = np.diff(trace.run_offsets)
    rows = np.repeat(np.arange(len(trace)), counts)
    totals = np.bincount(rows, trace.run_length, len(trace)).astype(np.int64)
    assert np.array_equal(totals, trace.prompt_tokens + trace.output_tokens)
    assert trace.run_length.min() > 0 and trace.run_address.min() >= 0
    ends = trace.run_address + trace.run_length
    inside = rows[1:] == rows[:-1]
    assert not np.any(inside & (ends[:-1] == trace.run_address[1:]))  # merged
    # what follows a dropped observation is named as it was before it was dropped
    assert is_chained(trace) == (name != "marconi_swebench")
    assert all(r.output and sum(o.length for o in r.output) == r.output_tokens for r in trace)
    for column in fields(trace):
        value = getattr(trace, column.name)
        if isinstance(value, np.ndarray):
            assert value.dtype == (bool if column.name == "output_known" else np.int64)


def test_a_long_trace_stays_small() -> None:
    trace = generate("chat", {"sessions": 60_000}, 0)
    assert len(trace) > 80_000
    assert len(trace.run_address) < 3 * len(trace)
    agents = generate("agentic", {"sessions": 1500}, 0)
    assert len(agents) > 70_000
    assert len(agents.run_address) < 4.5 * len(agents)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("shard_prefix", {}, "generator is 'shard_prefix'.*nearest: shared_prefix"),
        ("chat", {"session": 3}, "parameter is 'session'.*nearest: sessions"),
        ("chat", {"sessions": 0}, "sessions is 0; allowed: 1 or more; nearest: 1"),
        ("chat", {"sessions": 2.5}, "sessions is 2.5; allowed: int"),
        ("chat", {"sessions": True}, "sessions is True; allowed: int"),
        ("chat", {"branch_share": 1.5}, "branch_share is 1.5; allowed: 0 to 1; nearest: 1"),
        ("chat", {"first_tokens": 512}, "first_tokens is 512; allowed: 513 or more"),
        ("chat", {"fit": "mooncake"}, "fit is 'mooncake'.*nearest: mooncake_conversation"),
        ("agentic", {"rollback_share": -0.1}, "rollback_share is -0.1; .*nearest: 0"),
        ("agentic", {"max_prompt_tokens": 9}, "max_prompt_tokens is 9; allowed: 30210 or more"),
        ("agentic", {"think_s": float("nan")}, "think_s is nan; allowed: 0"),
        ("shared_prefix", {"order": "shuffle"}, "order is 'shuffle'.*nearest: shuffled"),
        ("shared_prefix", {"output_tokens": 0}, "output_tokens is 0; allowed: 1 or more"),
        ("shared_prefix", {"prefix_tokens": 0, "suffix_tokens": 0}, r"prefix_tokens \+ suffix"),
    ],
)
def test_bad_parameters_are_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(name, settings, 0)


@pytest.mark.parametrize("params", [SharedPrefix(), Chat(), Agentic()])
def test_parameters_are_frozen(params: object) -> None:
    with pytest.raises(FrozenInstanceError):
        params.sessions = 1  # type: ignore[attr-defined]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is -1; allowed: 0 or more"):
        generate("chat", {}, -1)
