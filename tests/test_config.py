"""Experiment files: what is read, and how mistakes in them are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import config
from experiments.cli_errors import UsageError

HEAD = "name: x\ndescription: y\n"


def written(folder: Path, body: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(HEAD + body, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(config.shipped()))
def test_shipped_experiments_are_valid_and_say_what_they_show(name: str) -> None:
    experiment = config.load(config.find(name))
    assert experiment.name == name
    assert len(experiment.description) > 80


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("engine:\n  max_num_seq: 3\n", ("x.yaml:4:", "did you mean 'max_num_seqs'?")),
        ("polcies: []\n", ("x.yaml:3:", "did you mean 'policies'?", "Allowed: name")),
        ("policies:\n  - name: a\n  - nam: b\n", ("x.yaml:5:", "did you mean 'name'?")),
        ("engine: {max_num_seqs: -3}\n", ("x.yaml:3:", "greater than or equal to 1", "got -3")),
        ("kind: replays\n", ("x.yaml:3:", "'replay', 'hits' or 'geometry'")),
        ("seeds: [a]\n", ("x.yaml:3:", "valid integer", "'a'")),
        ("model: [\n", ("x.yaml:4", "not YAML")),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_fix(
    tmp_path: Path, body: str, said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as told:
        config.load(written(tmp_path, body))
    assert all(part in str(told.value) for part in said), told.value


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as told:
        config.load(written(tmp_path, "modle: a\nseed: 1\n"))
    assert len(str(told.value).splitlines()) == 2


def test_not_text_and_not_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        config.load(path)
    path.write_text("- a\n")
    with pytest.raises(UsageError, match="not list"):
        config.load(path)


def test_set_reaches_into_mappings_and_lists(tmp_path: Path) -> None:
    path = written(tmp_path, "policies: [{name: align}]\n")
    made = config.load(
        path, ["engine.max_num_seqs=7", "policies.0.parameters.retention_interval=1040"]
    )
    assert made.engine.max_num_seqs == 7
    assert made.policies[0].parameters == {"retention_interval": 1040}


@pytest.mark.parametrize("setting", ["engine", "policies.4.name=x", "name.a=1"])
def test_a_set_that_leads_nowhere_is_refused(tmp_path: Path, setting: str) -> None:
    path = written(tmp_path, "policies: [{name: align}]\n")
    with pytest.raises(UsageError):
        config.load(path, [setting])


def test_range_includes_both_ends(tmp_path: Path) -> None:
    made = config.load(written(tmp_path, "sweep: {hardware.tp: {from: 2, to: 8, step: 3}}\n"))
    assert made.axes() == {"hardware.tp": [2, 5, 8]}


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 << 30), ("1.5 KiB", 1536), ("2MB", 2_000_000), ("12", 12)]
)
def test_memory(text: str, size: int) -> None:
    assert config.memory_bytes(text) == size


@pytest.mark.parametrize("text", ["40 gigs", "-1GiB", "", "GiB"])
def test_memory_that_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="GiB"):
        config.memory_bytes(text)


def test_an_unknown_experiment_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean step_curve"):
        config.find("step_curv")
