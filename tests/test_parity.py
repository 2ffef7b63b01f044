"""Recorded cases of vLLM's own scheduler and cache manager, decision by decision."""

import gzip
import json
from pathlib import Path

import pytest

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
