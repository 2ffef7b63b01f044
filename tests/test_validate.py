"""`prefixlab validate`: one trace modelled and executed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")

from typer.testing import CliRunner  # noqa: E402

from experiments.cli import app  # noqa: E402
from experiments.validate import AtSpeed, Replayed  # noqa: E402
from sim.step import Step, StepResult  # noqa: E402


class Fixed:
    def run(self, step: Step) -> StepResult:
        return StepResult(np.array([100, 3], np.int64))


def test_a_slower_machine_takes_longer() -> None:
    assert AtSpeed(Fixed(), 0.5).run(Step(0)).durations_ns.tolist() == [200, 6]
    assert AtSpeed(Fixed(), 100.0).run(Step(0)).durations_ns.tolist() == [1, 1]


def test_recorded_durations_come_in_order() -> None:
    backend = Replayed(iter([5, 7]))
    assert [backend.run(Step(i)).durations_ns.tolist() for i in range(2)] == [[5], [7]]


def test_the_command(tmp_path: Path) -> None:
    given = ["validate", "--policy", "none", "--policy", "semantic-only", "--limit", "6",
             "--out", str(tmp_path)]  # fmt: skip
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    requests, steps = (pd.read_csv(tmp_path / f"{n}.csv") for n in ("requests", "steps"))
    assert set(requests.policy) == {"none", "semantic-only"}
    for run in ("modelled", "executed", "again"):
        assert (requests[f"ttft_{run}_s"] > 0).all() and (requests[f"tpot_{run}_s"] > 0).all()
    assert (steps.executed_s > 0).all() and (steps.modelled_s > 0).all()
    prefilled = steps.groupby("policy").prefill.sum()
    assert prefilled["semantic-only"] < prefilled["none"]  # the hits were computed as hits
    assert "100%" in result.output and "by mean TTFT, executed" in result.output
    assert (tmp_path / "validate.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--device", "tpu"], "nearest is cpu"), (["--policy", "marcony"], "did you mean marconi"),
     (["--trace", "absent.jsonl"], "absent.jsonl")],
)  # fmt: skip
def test_refused(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["validate", *given])
    assert result.exit_code == 2 and said in result.output, result.output
