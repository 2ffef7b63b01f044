"""Marconi's artifact and the mended policy as experiments, on equal bytes."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from experiments import config, run
from experiments.cli_errors import UsageError
from experiments.engines import flops_of, sizes_of
from experiments.points import points_of, refuse_impossible
from experiments.simulate import load_trace
from sim.marconi_artifact.replay import replay_trace


def ran(name: str, out: Path, *settings: str) -> pd.DataFrame:
    experiment = config.load(config.find(name), list(settings))
    run.run(experiment, out, 1, Console(file=io.StringIO()))
    return pd.read_csv(out / "summary.csv").set_index("policy")


def test_equal_bytes(tmp_path: Path) -> None:
    settings = ["sweep={}", "memory=1GB", "trace.parameters={sessions: 12}"]
    rows = ran("marconi_equal_bytes", tmp_path, *settings)
    assert len(rows) == 8
    over = rows.bytes_over_capacity.dropna()
    assert over["V2 (artifact)"] > 1
    ceiling = rows.token_hit_rate["oracle (pool)"]
    assert (rows.token_hit_rate <= ceiling).all()
    tuned = rows.loc["marconi tuned, parent"]
    assert tuned.tuned_at_request > 0
    assert tuned.bootstrap_token_hit_rate != tuned.tuned_token_hit_rate
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    assert requests.groupby("policy").hit_tokens.sum().to_dict() == rows.hit_tokens.to_dict()


def test_the_artifact_s_row_is_its_replay(tmp_path: Path) -> None:
    settings = ["sweep={}", "memory=1GB", "trace.parameters={sessions: 12}"]
    rows = ran("marconi_equal_bytes", tmp_path, *settings)
    experiment = config.load(config.find("marconi_equal_bytes"), settings)
    trace, _ = load_trace(experiment.trace, 1)
    assert experiment.sizes is not None
    done = replay_trace(trace, version="V1", capacity_bytes=10**9, sizes=sizes_of(experiment.sizes))
    assert rows.token_hit_rate["V1 (artifact)"] == done.token_hit_rate


def test_without_state_layers_block_and_tree_meet(tmp_path: Path) -> None:
    settings = ["sweep={sizes.layers: [[32, 4, 28], [0, 36, 28]]}",
                "trace.parameters={sessions: 15}"]  # fmt: skip
    rows = ran("marconi_layers", tmp_path, *settings).reset_index()
    rates = rows.pivot_table(index="policy", columns="layers", values="token_hit_rate")
    gap = rates.loc["V1 (artifact)"] - rates.loc["block 32 (artifact)"]
    assert gap["[32, 4, 28]"] > 0.1 > abs(gap["[0, 36, 28]"])


def test_flop_of_a_prefill_is_the_artifact_s() -> None:
    experiment = config.load(config.find("marconi_equal_bytes"))
    assert experiment.sizes is not None
    sizes = sizes_of(experiment.sizes)
    token, pair = flops_of(sizes)
    for n in (1, 2, 777, 30_000):
        assert token * n + pair * n * (n + 1) / 2 == pytest.approx(sizes.prefill_flops(n))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["kind=replay"], "kind must be hits"),
        (["policies=[{name: align}]"], "pool takes them"),
        (["policies=[{name: artifact, engine: marconi-artifact, parameters: {version: V4}}]"],
         "allowed are V1, V2, V3, block"),
        (["policies=[{name: artifact, engine: marconi-artifact, parameters: {beta: 1}}]"], "beta"),
    ],
)  # fmt: skip
def test_refused(settings: list[str], said: str) -> None:
    experiment = config.load(config.find("marconi_equal_bytes"), settings)
    with pytest.raises(UsageError, match=said):
        refuse_impossible(points_of(experiment))
