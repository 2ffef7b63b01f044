"""SGLang's decisions, field by field, against cases recorded from its own code."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sim.sglang import parity

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared" / "golden"
SHIPPED = sorted((HERE / "golden").glob("sglang-*.json.gz"))


def rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as f:
        return json.load(f)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name.removesuffix(".json.gz"))
def test_shipped_cases_agree(path):
    cases = rows(path)
    assert len(cases) > 50
    differ = {}
    for row in cases:
        found = parity.compare(row["case"], row["oracle"], row["sglang"])
        if found:
            differ[row["case"]["name"]] = found[0]
    assert not differ


@pytest.mark.parametrize("version", ["0.5.23", "0.5.18"])
def test_recorded_cases_agree(version):
    folder = SHARED / f"sglang-{version}"
    if not folder.is_dir():
        pytest.skip("no recorded cases beside the checkout")
    for file in sorted(folder.glob("*.json")):
        row = json.loads(file.read_text())
        assert not parity.compare(row["case"], row["oracle"], row["sglang"]), file.name


def sample() -> dict:
    """A recording small enough to write here: two requests share 100 tokens."""
    case = {
        "config": {"mode": "serial", "mamba_slots": 8},
        "requests": [
            {"id": "a", "prompt": [[1, 100], [2, 60]], "output": [[3, 2]]},
            {"id": "b", "prompt": [[1, 100], [4, 60]], "output": [[5, 2]]},
        ],
    }
    return {"case": case, "oracle": parity.Replay(case, "0.5.23").run()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o["requests"][1]["admissions"][0].update(hit=64), "request b, admissions"),
        (lambda o: o["requests"][0]["inserts"][0].update(state="dup"), "request a, inserts"),
        (lambda o: o["requests"][0]["after"].update(kv_free=1), "request a, after"),
        (lambda o: o["final"]["state_lru"].reverse(), "final"),
        (lambda o: o.update(iterations=1), "iterations"),
        (lambda o: o["finish_order"].reverse(), "finish_order"),
    ],
)
def test_every_kind_of_difference_is_told(change, words):
    """The comparison can fail."""
    row = sample()
    assert not parity.compare(row["case"], row["oracle"], "0.5.23")
    change(row["oracle"])
    found = parity.compare(row["case"], row["oracle"], "0.5.23")
    assert any(text.startswith(words) for text in found)
