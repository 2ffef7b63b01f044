"""Runs: the numbers shipped experiments must give, what is refused, what is kept."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from experiments import config, points, run, sweep
from experiments.cli_errors import UsageError
from experiments.config import Experiment
from experiments.engines import Point
from experiments.points import key_of, points_of


def quiet() -> Console:
    return Console(file=io.StringIO())


def shipped(name: str, *overrides: str) -> Experiment:
    return config.load(config.find(name), list(overrides))


def hits(out: Path) -> dict[str, list[int]]:
    table = pd.read_parquet(out / "requests.parquet")
    return {str(k): v.tolist() for k, v in table.groupby("policy").hit_tokens}


def test_worked_example(tmp_path: Path) -> None:
    run.run(shipped("worked_example"), tmp_path, 1, quiet())
    assert hits(tmp_path) == {
        "none": [0, 0, 0, 0],
        "align": [0, 3120, 0, 0],
        "all (vllm-0.28)": [0, 3840, 0, 0],
        "semantic-only": [0, 3120, 0, 0],
        "oracle (pool)": [0, 4000, 0, 900],
    }
    reasons = pd.read_csv(tmp_path / "attribution.csv")
    assert reasons.groupby("policy").tokens.sum().tolist() == [4000 + 4200 + 2 * 1100] * 5


def test_issue_45238(tmp_path: Path) -> None:
    run.run(shipped("issue_45238"), tmp_path, 1, quiet())
    found = hits(tmp_path)
    assert found["semantic-only"] == [0, 0, 2080, 2080]
    assert found["all (vllm-0.28)"] == [0, 2560, 2560, 2560]
    table = pd.read_parquet(tmp_path / "requests.parquet")
    assert table[table.policy == "semantic-only"].branch_tokens.tolist() == [0, 2080, 0, 0]


def test_step_curve_steps_at_block_boundaries(tmp_path: Path) -> None:
    edges = "sweep={trace.parameters.prefix_tokens: [1039, 1040, 1279, 1280, 2000]}"
    run.run(shipped("step_curve", edges), tmp_path, 1, quiet())
    table = pd.read_parquet(tmp_path / "requests.parquet")
    at = table.pivot_table("hit_tokens", ["policy", "request"], "prefix_tokens")
    assert at.loc[("semantic-only (0.33)", 1)].tolist() == [0, 1040, 1040, 1040, 0]
    assert at.loc[("semantic-only (0.33)", 2)].tolist() == [0, 1040, 1040, 1040, 1040]
    assert at.loc[("all (0.28)", 1)].tolist() == [0, 0, 0, 1280, 1280]


def test_geometry_experiments_need_no_replay(tmp_path: Path) -> None:
    run.run(shipped("page_alignment"), tmp_path, 1, quiet())
    rows = pd.read_csv(tmp_path / "summary.csv")
    one = rows[(rows.tp == 1) & (rows.ssm_dtype == "float32")].set_index("policy")
    assert one.block_tokens.tolist() == [1040, 1280]
    assert one.padding_pct.round(1).tolist() == [0.1, 23.2]
    assert not (tmp_path / "requests.parquet").exists()


def test_memory_crossover(tmp_path: Path) -> None:
    run.run(shipped("memory_crossover"), tmp_path, 1, quiet())
    rows = pd.read_csv(tmp_path / "summary.csv").pivot_table(
        "request_bytes", "request_tokens", "model"
    )
    smaller = rows["nemotron-h-8b"] < rows["llama-3-8b"]
    assert smaller[smaller].index.min() == 891
    assert round(rows["llama-3-8b"][131072] / rows["nemotron-h-8b"][131072], 2) == 7.64


def test_a_second_run_computes_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = shipped("worked_example")
    run.run(experiment, tmp_path, 1, quiet())
    before = (tmp_path / "summary.csv").read_bytes()
    lost = points_of(experiment)[2]
    (tmp_path / "points" / f"{key_of(lost)}.json").unlink()
    computed: list[Point] = []

    def counted(point: Point, folder: Path) -> str:
        computed.append(point)
        return points.compute(point, folder)

    monkeypatch.setattr(sweep, "compute", counted)
    run.run(experiment, tmp_path, 1, quiet())
    assert computed == [lost]
    assert (tmp_path / "summary.csv").read_bytes() == before


def test_stopping_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def stops(point: Point, folder: Path) -> str:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return points.compute(point, folder)

    monkeypatch.setattr(sweep, "compute", stops)
    with pytest.raises(KeyboardInterrupt):
        run.run(shipped("worked_example"), tmp_path, 1, quiet())
    assert pd.read_csv(tmp_path / "summary.csv").policy.tolist() == ["none", "align"]
    assert not list(tmp_path.rglob("*.part"))


def test_the_key_depends_on_what_changes_the_result_and_on_nothing_else() -> None:
    def first(*overrides: str) -> str:
        return key_of(points_of(shipped("worked_example", *overrides))[0])

    same = ["description=other", "plots=[]", "table=[]"]
    other = ["engine.max_num_seqs=3", "hardware.device=h100", "memory=41GiB", "seeds=[1]"]
    assert {first(s) for s in same} == {first()}
    assert len({first(), *map(first, other)}) == 1 + len(other)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model=nemotron", "unknown model 'nemotron'"),
        ("policies=[{name: all}]", "cannot run on vllm-0.33; it can on vllm-0.28"),
        ("policies=[{name: algin}]", "did you mean align"),
        ("hardware.device=h300", "nearest: h200"),
        ("hardware.tp=3", "does not divide"),
        ("memory=100MiB", "not even the shortest request"),
        ("trace.requests=[]", "no trace"),
        ("sweep={engine.max_num_sek: [1]}", "did you mean 'max_num_seqs'"),
        (
            "policies=[{name: align, parameters: {retention_interval: 7}}]",
            "multiples of the block of 1040 tokens, the nearest is 1040",
        ),
    ],
)
def test_refused_before_the_run(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(UsageError) as told:
        run.run(shipped("worked_example", setting), tmp_path, 1, quiet())
    assert said in str(told.value)
    assert not list(tmp_path.iterdir())


def test_manifest_says_what_it_rests_on(tmp_path: Path) -> None:
    run.run(shipped("worked_example"), tmp_path, 1, quiet())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    again = Experiment.model_validate(manifest["experiment"])
    assert again == shipped("worked_example")
    assert manifest["measured"] == [] and manifest["modelled"]
    assert manifest["seeds"] == [0] and len(manifest["source_sha256"]) == 64


def test_plots_are_drawn_again_from_records_of_older_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = shipped("worked_example")
    (png,) = run.run(experiment, tmp_path, 1, quiet())
    before = png.read_bytes()
    png.unlink()
    monkeypatch.setattr(points, "source_hash", lambda: "other")
    assert run.redraw(experiment, tmp_path) == [png]
    assert png.read_bytes() == before


def test_tokens_lost_at_preemption_have_a_table(tmp_path: Path) -> None:
    settings = (
        "memory=1GiB",
        "sweep={}",
        "policies=[{name: semantic-only}]",
        "engine.max_num_seqs=8",
    )
    chat = "trace={generator: chat, parameters: {sessions: 40, first_tokens: 4000, turns: 1}}"
    run.run(shipped("capacity", *settings, chat), tmp_path, 1, quiet())
    lost = pd.read_csv(tmp_path / "preemptions.csv")
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    assert len(lost) == requests.preemptions.sum() > 0
    assert (lost.lost_tokens == lost.computed_tokens - lost.hit_tokens).all()
    assert set(lost.policy) == {"semantic-only"}


def test_a_bare_on_is_told_as_such() -> None:
    for word in ("on", "off"):
        made = shipped("bench_mooncake", f"trace.options.infer_appends={word}")
        assert made.trace.options["infer_appends"] == word


def test_the_pool_engine_gets_the_memory_of_the_experiment(tmp_path: Path) -> None:
    experiment = shipped(
        "policies_agentic",
        "policies=[{name: marconi, engine: pool}]",
        "sweep={memory: [1GiB, 4GiB]}",
        "trace.parameters.sessions=20",
    )
    run.run(experiment, tmp_path, 1, quiet())
    small, large = pd.read_csv(tmp_path / "summary.csv").to_dict("records")
    assert 0 < small["token_hit_rate"] < large["token_hit_rate"]
    assert 0.9 < small["pool_used_max"] <= 1
