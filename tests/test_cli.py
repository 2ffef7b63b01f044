"""The command line as a user meets it: exit status, one line of error, kill and go on."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from experiments.cli import app

RUN = "from experiments.cli import main; main()"
SWEEP = "sweep={trace.parameters.prefix_tokens: {from: 100, to: 2000, step: 100}}"


def command(out):
    return [sys.executable, "-c", RUN, "run", "step_curve", "--out", str(out), "--set", SWEEP]


@pytest.mark.parametrize(
    "setting",
    ["model=nemotron-h-8", "hardware.device=h201", "policies=[{name: alig}]", "memory=1KiB",
     "policies=[{name: align, parameters: {intervall: 1}}]", "policies=[{name: all}]",
     "engine.max_num_seqs=0", "memory=lots"],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(setting, tmp_path):
    result = CliRunner().invoke(
        app, ["run", "worked_example", "--out", str(tmp_path / "o"), "--set", setting]
    )
    assert result.exit_code == 2, result.output
    assert "error:" in result.output and "Traceback" not in result.output
    assert not (tmp_path / "o" / "summary.csv").exists()


@pytest.mark.parametrize("name", ["absent.yaml", "step_curv", "."])
def test_no_such_experiment(name):
    result = CliRunner().invoke(app, ["run", name])
    assert result.exit_code == 2 and "error:" in result.output


def test_schema_is_json():
    result = CliRunner().invoke(app, ["schema"])
    assert json.loads(result.output)["title"] == "Experiment"


def kill_after(out, points, delay, *more):
    """Start the command, kill it and its processes soon after ``points`` more are finished."""
    before = len(list((out / "points").glob("*.json")))
    process = subprocess.Popen(
        [*command(out), *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and len(list((out / "points").glob("*.json"))) < before + points:
        time.sleep(0.005)
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_again_and_again_gives_the_same_bytes(tmp_path):
    whole, cut, chance = tmp_path / "whole", tmp_path / "cut", random.Random(0)
    subprocess.run(command(whole), check=True, capture_output=True)
    total = len(list((whole / "points").glob("*.json")))
    for i in range(4):
        kept = {p: p.stat().st_mtime_ns for p in (cut / "points").glob("*.json")}
        more = ("--jobs", "2") if i % 3 == 2 else ()
        kill_after(cut, chance.randint(1, total // 6), chance.uniform(0, 0.1), *more)
        assert all(p.stat().st_mtime_ns == at for p, at in kept.items())
    assert 3 <= len(kept) < total
    subprocess.run(command(cut), check=True, capture_output=True)
    for name in ("summary.csv", "attribution.csv", "requests.parquet"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert not list(cut.glob("*.part"))
