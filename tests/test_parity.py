"""Recorded cases of vLLM's own scheduler and cache manager, decision by decision."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from sim.vllm.parity import compare

GOLDEN = Path(__file__).parent / "golden"


def rows(version):
    with gzip.open(GOLDEN / f"vllm-{version}.json.gz", "rt") as f:
        return json.load(f)


CASES = [
    pytest.param(row, id=f"{v}-{row['case']['name']}")
    for v in ("0.33.0", "0.28.0")
    for row in rows(v)
]


@pytest.mark.parametrize("row", CASES)
def test_case_agrees(row):
    assert compare(row["case"], row["result"]) == []


@pytest.mark.parametrize("row", CASES[::7])
def test_visiting_every_request_agrees_too(row):
    assert compare(row["case"], row["result"], quiet=False) == []


def test_a_changed_recording_is_noticed():
    row = json.loads(json.dumps(rows("0.33.0")[0]))
    row["result"]["requests"][0]["chunks"][0][2] += 1
    assert any("chunks" in text for text in compare(row["case"], row["result"]))


def test_a_changed_step_is_named_first():
    row = json.loads(json.dumps(rows("0.33.0")[0]))
    row["result"]["steps"][2]["free"] += 1
    assert compare(row["case"], row["result"])[0].startswith("step 2, free")


def test_the_command_takes_the_whole_folder_of_recorded_cases() -> None:
    folder = Path(__file__).parent / "golden"
    result = CliRunner().invoke(app, ["parity", str(folder / "geometry"), str(folder / "marconi"),
                                      str(folder / "sglang_int8_vectors.json.gz")])  # fmt: skip
    assert result.exit_code == 0, result.output[-500:]
    last = result.output.strip().splitlines()[-1].split()
    assert int(last[0]) > 2900 and last[1:] == ["cases,", "0", "differ"]


def test_a_changed_vector_and_a_changed_size_are_named(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "golden"
    vectors = json.loads(gzip.decompress((folder / "sglang_int8_vectors.json.gz").read_bytes()))
    vectors[0]["q"] = None
    data = json.loads(gzip.decompress((folder / "geometry/random_0.33.0.json.gz").read_bytes()))
    data["cases"] = [[seed, config, None] for seed, config, sizes in data["cases"] if sizes][:2]
    for name, kept in (("vectors", vectors[:1]), ("sizes", data)):
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    result = CliRunner().invoke(app, ["parity", str(tmp_path)])
    assert result.exit_code == 1
    assert "q differs" in result.output and "3 cases, 3 differ" in result.output
