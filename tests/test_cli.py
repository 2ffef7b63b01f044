"""The command line as a user meets it: exit status, one line of error, kill and go on."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from experiments.cli import app

RUN = "from experiments.cli import main; main()"
SWEEP = "sweep={trace.parameters.prefix_tokens: {from: 100, to: 2000, step: 50}}"


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


def test_killed_and_repeated_gives_the_same_bytes(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(whole), check=True, capture_output=True)
    process = subprocess.Popen(command(cut), stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list((cut / "points").glob("*.json"))) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = {p: p.stat().st_mtime_ns for p in (cut / "points").glob("*.json")}
    assert kept
    subprocess.run(command(cut), check=True, capture_output=True)
    assert (cut / "summary.csv").read_bytes() == (whole / "summary.csv").read_bytes()
    assert all(p.stat().st_mtime_ns == at for p, at in kept.items())
