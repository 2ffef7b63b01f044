"""Curves of token hit rate against memory: exact, sampled, and why sizes cannot share a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import config
from experiments.cli import app
from experiments.cli_errors import UsageError
from experiments.config import Experiment
from experiments.curve import _replay, curve, estimate, sample, sizes
from experiments.points import points_of
from traces.generators import generate
from traces.identity import identify
from traces.sampling import chosen, part, roots

POLICIES = (
    "{name: semantic-only}",
    "{name: semantic-only, engine: sglang-0.5.23}",
    "{name: marconi, engine: pool}",
)
GIB = 1 << 30


def chats(policy: str, sessions: int, *more: str) -> Experiment:
    settings = [f"policies=[{policy}]", f"trace.parameters.sessions={sessions}", *more]
    return config.load(config.find("policies_mooncake"), settings)


# ---------------------------------------------------------------- samples
def test_what_shares_a_root_is_chosen_together() -> None:
    trace = generate("agentic", {"sessions": 60, "system_groups": 30}, 0)
    prefixes = identify(trace)
    groups, depth = roots(trace, prefixes)
    for a in range(0, len(trace), 7):
        for b in range(a + 1, min(a + 40, len(trace))):
            shared = min(prefixes.common(a, b), *trace.prompt_tokens[[a, b]].tolist())
            alike = shared >= depth or shared == max(trace.prompt_tokens[[a, b]])
            assert (groups[a] == groups[b]) == alike
    assert depth > 1


@pytest.mark.parametrize("seed", range(3))
def test_smaller_samples_lie_in_larger_ones_and_have_about_the_size(seed: int) -> None:
    groups = np.random.default_rng(seed).integers(0, 1 << 40, 20_000)
    small, large = chosen(groups, 0.1, seed), chosen(groups, 0.4, seed)
    assert not np.any(small & ~large)
    assert abs(small.mean() - 0.1) < 0.01
    assert abs(large.mean() - 0.4) < 0.015
    assert chosen(groups, 1.0, seed).all()
    assert np.any(chosen(groups, 0.1, seed + 1) != small)


@pytest.mark.parametrize("rate", [0, -0.1, 1.01])
def test_rates_out_of_range(rate: float) -> None:
    with pytest.raises(UsageError, match="above 0, at most 1"):
        sample(chats(POLICIES[0], 5), rate, 0)


def test_a_part_keeps_identities() -> None:
    trace = generate("agentic", {"sessions": 20, "system_groups": 3}, 1)
    prefixes = identify(trace)
    which = np.flatnonzero(np.arange(len(trace)) % 3 != 1)
    some, ids = part(trace, prefixes, which)
    assert some.ids == tuple(trace.ids[i] for i in which)
    for row, i in enumerate(which.tolist()):
        assert ids.extents(row) == prefixes.extents(i)


# ---------------------------------------------------------------- curves
def test_the_exact_curve_is_that_of_separate_replays_with_any_number_of_processes() -> None:
    experiment = config.load(
        config.find("policies_mooncake"),
        [f"policies=[{', '.join(POLICIES)}]", "trace.parameters.sessions=40"],
    )
    memory = [6 * GIB, 12 * GIB, 24 * GIB]
    table = curve(experiment, memory, 1.0)
    assert table.equals(curve(experiment, memory, 1.0, jobs=2))
    assert (table.standard_error == 0).all()
    trace = sample(experiment, 1.0, 0).trace
    for size in memory:
        alone = experiment.model_copy(update={"memory": f"{size}B", "sweep": {}})
        for point in points_of(alone):
            hits, served = _replay(point, sample(alone, 1.0, 0))
            row = table[(table.policy == point.policy.shown) & (table.memory_bytes == size)]
            assert row.token_hit_rate.item() == hits.sum() / trace.prompt_tokens[served].sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_is_within_its_error_of_the_whole(policy: str) -> None:
    experiment, memory = chats(policy, 400), [16 * GIB, 48 * GIB]
    exact = curve(experiment, memory, 1.0).token_hit_rate
    for seed in range(3):
        found = curve(experiment, memory, 0.25, seed)
        assert (found.standard_error > 0).all()
        assert (abs(found.token_hit_rate - exact) < 3 * found.standard_error + 0.01).all()


def test_the_standard_error_is_the_spread_over_samples() -> None:
    chance = np.random.default_rng(0)
    groups = np.repeat(np.arange(3000), 4)
    shared = chance.integers(1, 1000, len(groups))
    hits = np.rint(shared * np.repeat(chance.random(3000), 4)).astype(np.int64)
    found = []
    for seed in range(60):
        which = chosen(groups, 0.2, seed)
        found.append(estimate(hits[which], shared[which], groups[which], 0.2))
    rates, errors = np.array(found).T
    assert abs(rates.mean() - hits.sum() / shared.sum()) < 0.003
    assert 0.75 < rates.std() / errors.mean() < 1.25


@pytest.mark.parametrize(
    ("policy", "seed", "small", "large"),
    [(POLICIES[0], 1, 4472, 5172), (POLICIES[1], 0, 11472, 12172), (POLICIES[2], 0, 3772, 4472)],
)
def test_more_memory_can_lose_a_hit(policy: str, seed: int, small: int, large: int) -> None:
    """So evictions have no inclusion property and sizes need replays of their own."""
    experiment = chats(policy, 100, f"seeds=[{seed}]")
    made, found = sample(experiment, 1.0, 0), []
    for mib in (small, large):
        update = {"memory": f"{mib}MiB", "sweep": {}}
        found.append(_replay(points_of(experiment.model_copy(update=update))[0], made))
    (less, served_less), (more, served_more) = found
    assert ((more < less) & served_less & served_more).any()


# ---------------------------------------------------------------- the command
def test_sizes() -> None:
    assert sizes("4GiB:16GiB", 3) == [4 * GIB, 8 * GIB, 16 * GIB]
    assert sizes("8GiB,4GiB", 20) == [4 * GIB, 8 * GIB]
    for wrong in ("4GiB:4GiB", "0GiB:4GiB", "1GiB:2GiB:3GiB"):
        with pytest.raises(UsageError, match="expected FROM:TO"):
            sizes(wrong, 5)
    with pytest.raises(UsageError, match="memory is 'x'"):
        sizes("x", 5)


def test_the_command_writes_table_and_picture(tmp_path: Path) -> None:
    given = ["--memory", "1GiB:16GiB", "--points", "3", "--out", str(tmp_path), "--set",
             "trace.parameters.sessions=20", "--rate", "0.5", "--set",
             "policies=[{name: align}, {name: semantic-only, engine: sglang-0.5.23}]"]  # fmt: skip
    result = CliRunner().invoke(app, ["curve", "policies_agentic", *given])
    assert result.exit_code == 0, result.output
    assert "±" in result.output and "one request needs 5" in result.output
    assert (tmp_path / "curve.csv").read_text().count("\n") == 7
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    result = CliRunner().invoke(app, ["curve", "page_alignment"])
    assert result.exit_code == 2 and "kind geometry" in result.output
