"""A sweep on a Dask cluster of several processes: the same bytes, whoever is killed."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from experiments import config, run, sweep
from experiments.cli_errors import UsageError

distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")

SETTINGS = ["sweep={memory: [4GiB, 6GiB, 8GiB, 12GiB]}", "trace.parameters.sessions=6"]


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=None
    ) as made:
        yield made


def address(cluster) -> str:
    return cluster.scheduler_address.replace("tcp://", sweep.SCHEME)


def tables(out: Path) -> dict[str, bytes]:
    names = ("summary.csv", "attribution.csv", "requests.parquet")
    return {name: (out / name).read_bytes() for name in names}


def test_a_killed_worker_loses_nothing(cluster, tmp_path: Path, monkeypatch) -> None:
    experiment = config.load(config.find("policies_agentic"), SETTINGS)
    run.run(experiment, tmp_path / "here", 1, quiet())
    keep, kept = sweep.keep, []

    def kill_one_after_two(*given):
        kept.append(keep(*given))
        if len(kept) == 2:
            os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
        return kept[-1]

    monkeypatch.setattr(sweep, "keep", kill_one_after_two)
    run.run(experiment, tmp_path / "there", 1, quiet(), address(cluster))
    assert len(kept) == len(set(kept)) == 36
    assert tables(tmp_path / "there") == tables(tmp_path / "here")


def test_errors_of_workers_and_addresses_are_told(cluster, tmp_path: Path, monkeypatch) -> None:
    experiment = config.load(config.find("worked_example"), [])
    for wrong, said in (("tcp://x", "expected dask://"), ("dask://127.0.0.1:1", "no Dask")):
        monkeypatch.setattr(sweep, "WAIT_S", 1)
        with pytest.raises(UsageError, match=said):
            run.run(experiment, tmp_path, 1, quiet(), wrong)
    monkeypatch.setattr(sweep, "WAIT_S", 30)
    monkeypatch.setattr(sweep, "source_hash", lambda: "of other sources")
    with pytest.raises(UsageError, match="another prefixlab"):
        run.run(experiment, tmp_path, 1, quiet(), address(cluster))
