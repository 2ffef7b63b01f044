"""Points of a sweep, one after the other, in processes, or on a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from joblib import Parallel, delayed, parallel_config
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.cli_errors import UsageError
from experiments.engines import Point
from experiments.points import compute, keep, key_of, run_any, source_hash
from experiments.simulate import Result

SCHEME = "dask://"
WAIT_S = 30


def compute_all(
    todo: list[Point], folder: Path, jobs: int, cluster: str | None, console: Console
) -> bool:
    """Keep each point as it finishes; True if the user stopped it, with what was finished kept."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("points", total=len(todo))
        try:
            for _ in _computed(todo, folder, jobs, cluster):
                bar.advance(task)
        except KeyboardInterrupt:
            return True
    return False


def _computed(todo: list[Point], folder: Path, jobs: int, cluster: str | None) -> Iterator[str]:
    if cluster is not None:
        return _on_cluster(todo, folder, cluster) if todo else iter(())
    if jobs == 1 or len(todo) < 2:
        return (compute(point, folder) for point in todo)
    work = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size="auto")
    kept: Iterator[str] = work(delayed(compute)(point, folder) for point in todo)
    return kept


def _on_cluster(todo: list[Point], folder: Path, cluster: str) -> Iterator[str]:
    """Workers compute, this process keeps: they need not see its disk, but the trace's file."""
    with _client(cluster):
        work = Parallel(return_as="generator_unordered", batch_size=1)
        source = source_hash()
        sent = (delayed(_elsewhere)(i, _absolute(p), source) for i, p in enumerate(todo))
        for i, result in work(sent):
            yield keep(result, key_of(todo[i]), folder)


@contextmanager
def _client(cluster: str) -> Iterator[None]:
    """joblib's backend for the scheduler at ``cluster``, ``dask://host:port``."""
    if not cluster.startswith(SCHEME) or cluster == SCHEME:
        raise UsageError(f"cluster is {cluster!r}; expected {SCHEME}HOST:PORT of a Dask scheduler")
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(
            "--cluster needs Dask, which is not installed; pip install 'prefixlab[cluster]'"
        ) from None
    address = "tcp://" + cluster.removeprefix(SCHEME)
    try:
        client = Client(address, timeout=WAIT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise UsageError(f"{cluster}: no Dask scheduler answers there ({error})") from None
    try:
        if not client.scheduler_info()["workers"]:
            raise UsageError(
                f"{cluster}: the scheduler has no workers; start dask worker {address}"
            )
        with parallel_config(backend="dask"):
            yield
    finally:
        client.close()


def _absolute(point: Point) -> Point:
    """The point with its files named from the root, wherever a worker was started."""
    e, policy = point.experiment, point.policy
    if e.trace.path and Path(e.trace.path).exists():
        trace = e.trace.model_copy(update={"path": str(Path(e.trace.path).resolve())})
        e = e.model_copy(update={"trace": trace})
    if Path(policy.name).is_file():
        policy = policy.model_copy(update={"name": str(Path(policy.name).resolve())})
    return replace(point, experiment=e, policy=policy)


def _elsewhere(index: int, point: Point, source: str) -> tuple[int, Result]:
    """Run on a worker. Raises ``UsageError`` where its prefixlab is another."""
    if source_hash() != source:
        raise UsageError("a worker of the cluster has another prefixlab; install the same sources")
    return index, run_any(point)
