"""Calibration without kernels: what is timed, prices of runs from a profile, which policy wins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from executor import calibrate_cases as cases
from executor.calibrate_cases import Limits
from executor.calibrate_source import code, kernel_hashes
from experiments import calibration, cli_calibrate, config, costs
from experiments.calibration import (
    Change,
    Outcome,
    Perturbed,
    changes,
    comparison,
    outcomes,
    verdict,
)
from experiments.calibration_plot import held_out
from experiments.cli import app
from experiments.cli_errors import UsageError
from experiments.points import key_of, points_of, refuse_impossible
from experiments.run import manifest
from experiments.simulate import run_point
from sim import models
from sim.cost import profile_files
from sim.cost.layers import shape_of
from sim.cost.modelled import ModelledBackend
from sim.cost.profile import Profile, ProfileError, Sample, backend, fingerprint
from sim.cost.profile_cases import Case, Whole, size, terms
from sim.cost.profile_curve import Curve
from sim.cost.profile_fit import WHOLE, fitted, point, ratios
from sim.step import Chunk, Step

NANO = models.load("nano")
SHAPE = shape_of(NANO)
LIMITS = Limits(4096, 4096, 16, 1 << 15)
SMALL = Limits(64, 256, 4, 1024)
DEVICE = {
    "name": "made-up", "memory_bytes": 1 << 30, "tensor_flops": {"float32": 8e10},
    "vector_flops": 2e10, "bandwidth": 1e10, "links": {}, "launch_ns": 0, "graph_launch_ns": 0,
    "graph_max_batch": 0, "collective_ns": 0, "host_ns": 0, "datasheet": {}, "sources": {},
    "efficiency": {"compute": {}, "memory": 1.0, "default": 1.0},
}  # fmt: skip
MADE = {
    "device": "made-up", "driver": "none", "versions": {}, "model": "nano", "timer": "none",
    "pattern": NANO.pattern,
}  # fmt: skip
PROMPTS = [{"id": f"r{i}", "prompt": [[0, 600], [i + 1, 50]], "output_tokens": 4} for i in range(4)]


def made_up(limits: Limits = LIMITS, off: float = 1.0) -> Profile:
    """A profile of ``nano`` with shares of one half; held-out cases take ``off`` as long."""
    start = Profile("made-up", "measured", "nano", fingerprint(SHAPE), "float32", DEVICE,
                    kernel_hashes(), MADE, (), {}, {})  # fmt: skip

    def timing(case: Case, part: str, slower: float) -> Sample:
        if case.op == "overhead":
            return Sample(str(case), part, 1, (1e-3,))
        p = point(SHAPE, start.machine, "float32", case, 1.0)
        return Sample(str(case), part, 1, (slower * (p.launches * 1e-5 + 2 * p.floor_s),))

    found = [timing(c, "grid", 1.0) for c in cases.grid(SHAPE, limits, "coarse")]
    held = cases.held(SHAPE, limits, "coarse", 0)
    found += [timing(c, "held", off if i % 2 else 1.0) for i, c in enumerate(held)]
    first = fitted(start.with_samples(found), NANO)
    prices, _ = backend(first, NANO)
    steps = []
    for i, whole in enumerate(cases.steps(limits, "coarse")):
        seconds = int(prices.run(whole.step()).durations_ns[0]) / 1e9
        steps.append(Sample(str(whole), "step", 1, ((off if i % 2 else 1.0) * seconds,)))
    return fitted(first.with_samples(steps), NANO)


EXACT = made_up()


# ---------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize("kind", ["coarse", "full"])
@pytest.mark.parametrize("limits", [LIMITS, SMALL], ids=["large", "small"])
def test_the_grid_spans_what_is_held_out(kind, limits) -> None:
    grid = cases.grid(SHAPE, limits, kind)
    assert len(grid) == len(set(grid))
    held = cases.held(SHAPE, limits, kind, 3)
    assert held and not set(held) & set(grid)
    assert held == cases.held(SHAPE, limits, kind, 3) != cases.held(SHAPE, limits, kind, 4)
    for case in held:
        sizes = [size(SHAPE, c) for c in grid if c.op == case.op]
        assert min(sizes) <= size(SHAPE, case) <= max(sizes), case


def test_every_priced_operation_is_in_the_grid() -> None:
    step = Step(0, [Chunk(0, 0, 64, True, slot_copies=1, saves=1)], [1], 9, kv_copied_tokens=16)
    priced = set(ModelledBackend(NANO, EXACT.machine).breakdown(step))
    assert priced <= {c.op for c in cases.grid(SHAPE, LIMITS, "coarse")}


def test_an_operation_that_the_model_lacks_is_not_timed() -> None:
    pure = shape_of(replace(NANO, pattern="M-M-"))
    ops = {c.op for c in cases.grid(pure, LIMITS, "full")}
    assert "scan" in ops and not {"attention_prefill", "kv_write", "kv_copy"} & ops


@pytest.mark.parametrize("limits", [LIMITS, SMALL], ids=["large", "small"])
def test_steps_stay_within_the_limits(limits) -> None:
    found = cases.steps(limits, "full")
    assert len(found) >= (3 if limits is SMALL else 25)
    for step in found:
        made = step.step()
        assert made.tokens <= limits.tokens
        assert made.decode_context_tokens <= limits.pool_tokens
    assert cases.steps(limits, "none") == []


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(sorted({c.op for c in cases.grid(SHAPE, LIMITS, "coarse")} - {"overhead"})),
    low=st.integers(1, 10**6),
    more=st.integers(0, 10**7),
    have=st.none() | st.tuples(st.integers(1, 10**4), st.integers(1, 10**4)),
)
def test_what_is_measured_on_demand_covers_what_was_missing(op, low, more, have) -> None:
    unit = {"kv_copy": SHAPE.kv_bytes_per_token}.get(op, SHAPE.state_bytes if "state" in op else 1)
    low, high = low * unit, (low + more) * unit
    curve = None
    if have:
        curve = Curve(0.0, (have[0] * unit, (have[0] + have[1]) * unit), (0.5, 0.5))
    found = cases.covering(SHAPE, LIMITS, op, low, high, curve)
    sizes = [size(SHAPE, c) for c in found] + list(curve.sizes if curve else ())
    assert min(sizes) <= low and max(sizes) >= high
    assert all(terms(SHAPE, c) for c in found)


def test_on_demand_only_what_is_measured() -> None:
    with pytest.raises(ValueError, match="'all_reduce' is not measured"):
        cases.covering(SHAPE, LIMITS, "all_reduce", 1, 2, None)


# ---------------------------------------------------------------------------------------- sources
def test_a_hash_is_of_what_the_code_does() -> None:
    plain = "def f(x):\n    return x + 1\n"
    other = '"""What."""\n\ndef f(x):  # why\n    """How."""\n    return (x +\n            1)\n'
    assert code(plain) == code(other)
    assert code(plain) != code(plain.replace("1", "2"))
    assert code(plain) != code(plain.replace("+", "-"))


def test_every_kernel_that_runs_has_a_hash() -> None:
    found = kernel_hashes()
    assert {"ssd", "conv", "attention", "state", "int8", "configs", "layers"} <= set(found)
    assert len(set(found.values())) == len(found)


# ---------------------------------------------------------------------------------------- runs
def experiment(path: Path, **cost: object) -> config.Experiment:
    return config.checked(
        {
            "name": "t",
            "description": "t",
            "model": "nano",
            "memory": "64MiB",
            "engine": {"max_model_len": 4096, "max_num_seqs": 8, "async_scheduling": False},
            "trace": {"requests": PROMPTS},
            "cost": {"profile": str(path), **cost},
        },
        "t.yaml",
    )


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "made-up.json"
    profile_files.write(EXACT, path)
    return path


def test_a_run_is_priced_by_its_profile(profile_file: Path) -> None:
    (point_,) = points_of(experiment(profile_file))
    refuse_impossible([point_])
    found = run_point(point_)
    first = found.tables["requests"].iloc[0]
    prices, _ = backend(EXACT, NANO)
    prompt = prices.run(Step(0, [Chunk(0, 0, 650, True)])).durations_ns[0]
    assert first.first_token_ns - first.arrived_ns >= prompt
    said = manifest(point_.experiment, [point_])
    assert said["measured"] == ["step times: profile made-up (measured), on_miss extrapolate"]
    assert said["modelled"] == [] and said["profile"]["device"] == "made-up"


def test_a_profile_that_changes_makes_another_point(profile_file: Path) -> None:
    (point_,) = points_of(experiment(profile_file))
    before = key_of(point_)
    profile_files.write(made_up(off=1.2), profile_file)
    assert key_of(point_) != before


def test_sizes_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    profile_files.write(made_up(SMALL), path)
    (point_,) = points_of(experiment(path, on_miss="refuse"))
    with pytest.raises(UsageError, match=r"not at 6\d\d; on_miss: extrapolate or measure"):
        run_point(point_)
    (point_,) = points_of(experiment(path))
    assert run_point(point_).row["ttft_mean_s"] > 0


def test_profiles_of_something_else_are_refused(profile_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    profile_files.write(replace(EXACT, kernels={**EXACT.kernels, "ssd": "0"}), other)
    with pytest.raises(UsageError, match=r"other kernels \(changed: ssd\)"):
        refuse_impossible(points_of(experiment(other)))
    refuse_impossible(points_of(experiment(other, accept=["other-kernels"])))
    tiny = experiment(profile_file).model_copy(update={"model": "tiny"})
    with pytest.raises(UsageError, match="is of model nano"):
        refuse_impossible(points_of(tiny))
    with pytest.raises(UsageError, match="nearest is h200-roofline"):
        refuse_impossible(points_of(experiment(Path("h200-roofine"))))
    with pytest.raises(UsageError, match="calibrate --grid none"):
        refuse_impossible(points_of(experiment(Path("h200-roofline"), on_miss="measure")))


def test_device_files_price_as_without_a_profile() -> None:
    plain = experiment(Path("h200-roofline")).model_copy(update={"model": "nemotron-h-8b"})
    named = [plain, plain.model_copy(update={"cost": config.CostConfig()})]
    rows = [run_point(points_of(e.model_copy(update={"memory": "20GiB"}))[0]).row for e in named]
    assert rows[0] == rows[1]


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from experiments.cli import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command)
    print(done.exit_code, done.output)
"""


def test_without_torch(profile_file: Path, tmp_path: Path) -> None:
    """Profiles price runs and are reported on; only measuring needs kernels."""
    file = tmp_path / "t.yaml"
    file.write_text(experiment(profile_file).model_dump_json())
    commands = [
        ["run", str(file), "--out", str(tmp_path / "out")],
        ["calibrate", "--report", "--no-compare", "--out", str(profile_file)],
        ["calibrate"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(costs.__file__).parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for told in ("ttft_p50_s", "whole steps", "torch is not installed"):
        assert told in done.stdout
    codes = [line[0] for line in done.stdout.splitlines() if line[:2] in ("0 ", "2 ")]
    assert codes == ["0", "0", "2"]


# ---------------------------------------------------------------------------------------- report
def test_report(profile_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Outcome(Change("as calibrated"), {"none": 2.0, "align": 1.0})
    monkeypatch.setattr(cli_calibrate, "outcomes", lambda *_: [one, replace(one)])
    done = CliRunner().invoke(app, ["calibrate", "--report", "--out", str(profile_file)])
    assert done.exit_code == 0, done.output
    for word in ("gemm", "decode steps", "whole steps", "p90", "bias", "align in all 1 tries"):
        assert word in done.output
    done = CliRunner().invoke(app, ["calibrate", "--report", "--out", "h200-roofline"])
    assert done.exit_code == 2 and "nothing was measured" in done.stderr


def test_a_picture_shows_every_held_out_case(profile_file: Path, tmp_path: Path) -> None:
    table = held_out(EXACT, NANO)
    counts = table.kind.value_counts()
    held = [s for s in EXACT.samples if s.part == "held"]
    assert counts["operations"] == len(held)
    assert len(table) == len(held) + len([s for s in EXACT.samples if s.part == "step"])
    off = table.predicted_s / table.measured_s
    assert off.between(0.97, 1.03).all()
    given, path = ["--report", "--no-compare", "--out", str(profile_file)], tmp_path / "p.svg"
    done = CliRunner().invoke(app, ["calibrate", *given, "--plot", str(path)])
    assert done.exit_code == 0 and "whole steps" in path.read_text(), done.output
    done = CliRunner().invoke(app, ["calibrate", *given, "--plot", "x.pdf"])
    assert done.exit_code == 2 and ".png or .svg" in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--grid", "fine"], "full, coarse and none"),
        (["--pattern", "MX"], "letters M, * and -"),
        (["--model", "nan"], "nearest are"),
        (["--report", "--out", "nothing.json"], "no such file"),
    ],
)
def test_bad_options(given, told) -> None:
    done = CliRunner().invoke(app, ["calibrate", *given])
    assert done.exit_code == 2 and told in done.stderr


# ---------------------------------------------------------------------------------------- policies
def test_changes_are_those_of_the_held_out_ratios() -> None:
    found = {"gemm": [0.8, 1.25], "decode steps": [0.5, 1.0], WHOLE: [0.5, 1.0]}
    made = list(changes(found, draws=3, seed=1))
    assert made[0] == Change("as calibrated")
    assert {c.ops.get("gemm") for c in made[1:3]} == {0.8, 1.25}
    assert [c.steps for c in made[3:5]] == [{"decode steps": 0.5}, {"decode steps": 1.0}]
    assert all(set(c.ops) == {"gemm"} and set(c.steps) == {"decode steps"} for c in made[5:])
    assert made == list(changes(found, draws=3, seed=1)) != list(changes(found, draws=3, seed=2))


def test_a_change_divides_prices() -> None:
    step = Whole.step(cases.steps(LIMITS, "full")[-1])
    ops = dict.fromkeys(EXACT.curves, 0.5)
    plain, slow, whole = (
        Perturbed(EXACT, NANO, change).backend("auto").run(step).durations_ns[0]
        for change in (Change("none"), Change("ops", ops), Change("steps", {}, {"mixed steps": 2}))
    )
    assert slow == pytest.approx(2 * plain, rel=1e-6)
    assert whole == pytest.approx(plain / 2, abs=1)


def test_no_error_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ratios(EXACT, NANO)
    assert all(r == pytest.approx(1, abs=0.03) for found in every.values() for r in found)
    some = {name: every[name] for name in ("scan", "prefill steps")}
    monkeypatch.setattr(calibration, "ratios", lambda *_: some)
    found = list(outcomes(EXACT, NANO, comparison(EXACT, NANO), draws=1))
    assert len({json.dumps(o.order) for o in found}) == 1
    assert verdict(found).beaten == [] and len(found[0].ttft_s) == 5
    assert found[0].ttft_s["none"] > found[0].ttft_s["semantic-only"]


def test_verdict() -> None:
    first = Outcome(Change("as calibrated"), {"a": 1.0, "b": 1.1, "c": 1.1})
    same = Outcome(Change("x"), {"a": 2.0, "b": 2.1, "c": 2.2})
    tied = Outcome(Change("y"), {"a": 1.0, "b": 0.9999, "c": 2.0})
    turned = Outcome(Change("z"), {"a": 1.0, "b": 0.9, "c": 2.0})
    assert verdict([first, same, tied]).beaten == []
    found = verdict([first, same, turned])
    assert found.beaten == [("z", "b")] and found.reordered == ["z"]
    assert "can change which policy wins: a as calibrated, but b with z (1 of 2" in found.text
    assert found.lead == pytest.approx(0.1) and "Next as calibrated: b, 10.0 % behind" in found.text


def test_profile_errors_are_usage_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ProfileError, match="not a profile"):
        costs.profile_of(config.CostConfig(profile=str(bad)))
    file = tmp_path / "t.yaml"
    file.write_text(experiment(bad).model_dump_json())
    done = CliRunner().invoke(app, ["run", str(file)])
    assert done.exit_code == 2 and "not a profile" in done.stderr
