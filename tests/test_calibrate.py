"""Calibration with kernels on the CPU: timings only have to be there, the rest is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")

from typer.testing import CliRunner  # noqa: E402

from executor import calibrate, calibrate_cases, calibrate_timing  # noqa: E402
from executor.calibrate import Options, Runner  # noqa: E402
from executor.calibrate_bench import Bench  # noqa: E402
from executor.calibrate_cases import Limits  # noqa: E402
from executor.calibrate_ops import OPERATIONS  # noqa: E402
from executor.calibrate_steps import pieces_of, rows  # noqa: E402
from executor.calibrate_timing import Ceilings, Reference, Timer  # noqa: E402
from experiments import config  # noqa: E402
from experiments.cli import app  # noqa: E402
from experiments.points import key_of, points_of  # noqa: E402
from experiments.simulate import run_point  # noqa: E402
from sim import models  # noqa: E402
from sim.cost import profile_files  # noqa: E402
from sim.cost.layers import shape_of  # noqa: E402
from sim.cost.profile import ProfileError, backend  # noqa: E402
from sim.cost.profile_cases import Case, Part, Whole, size  # noqa: E402
from sim.step import Chunk, Step  # noqa: E402

NANO = models.load("nano")
SHAPE = shape_of(NANO)
LIMITS = Limits(32, 256, 2, 512)
OPTIONS = Options(grid="coarse", rounds=1, repeats=1, limits=LIMITS)
BEST = Ceilings(5e10, 1e10, 1e10)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ceilings", lambda *_: BEST)
    monkeypatch.setattr(calibrate_timing, "BUSY_CALLS", 1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(NANO)


# ---------------------------------------------------------------------------------------- calls
@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_runs_once_a_layer(bench: Bench, op: str) -> None:
    part = Part(2, 5, 20) if op.startswith("attention_p") else Part(2, 1, 20)
    with torch.inference_mode():
        pieces = pieces_of(bench, Case(op, part))
        for piece in pieces:
            piece()
    one_call = {"head": 1, "sample": 1, "state_copy": 1, "kv_copy": 1, "state_save": 4}
    layers = {"gemm": 8, "elementwise": 1 + 5 + 2 + 2, "kv_write": 1, **one_call}
    attends = op.startswith("attention")
    assert len(pieces) == layers.get(op, 1 if attends else NANO.count("M"))


def test_an_unknown_operation_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="allowed are overhead, gemm"):
        pieces_of(bench, Case("all_reduce", Part(1, 1)))


def test_products_are_those_of_the_decoder(bench: Bench) -> None:
    pieces = pieces_of(bench, Case("gemm", Part(1, 3)))
    with torch.inference_mode():
        widths = [tuple(y.shape) for piece in pieces for y in piece()]
    d, k, n = 128, 128 + 2 * 32, 4
    mamba, mlp = [(3, d + k + n), (3, d)], [(3, 256), (3, d)]
    assert widths == [*mamba, *mlp, *mamba, (3, 4 * 32), (3, d), *mlp]


def test_longer_blocks() -> None:
    bench, step = Bench(NANO, block_tokens=16), Whole(Part(1, 20, 40), Part(2, 1, 33))
    prefills, decodes = rows(bench, step)
    assert [len(row.blocks) for row in (*prefills, *decodes)] == [4, 3, 3]
    with torch.inference_mode():
        for case in (step, Case("attention_decode", Part(2, 1, 33)), Case("kv_copy", Part(1, 20))):
            for piece in pieces_of(bench, case):
                piece()


def test_rows_of_a_step_share_nothing(bench: Bench) -> None:
    step = Whole(Part(2, 20, 40), Part(3, 1, 33), saves=2)
    prefills, decodes = rows(bench, step)
    slots = [p.slot for p in prefills] + [d.slot for d in decodes]
    slots += [slot for p in prefills for _, slot in p.saves]
    blocks = [int(b) for row in (*prefills, *decodes) for b in row.blocks]
    assert len(slots) == len(set(slots)) == 7 and len(blocks) == len(set(blocks))
    assert [len(p.blocks) == 60 for p in prefills] == [True, True]
    with torch.inference_mode():
        for piece in pieces_of(bench, step):
            piece()


def test_timings_are_there() -> None:
    ran = []
    timer = Timer(repeats=4)
    reference = Reference(lambda: ran.append(0), 1e-6)
    found = timer.seconds([lambda: ran.append(1), lambda: ran.append(2)], reference)
    assert len(found) == 4 and min(found) > 0
    assert ran == [0] * 4 + [1] + [0] * 4 + [2] + [0] * 8 + ran[18:]
    assert ran == ran[:18] * 6  # two rounds to warm up
    assert torch.is_grad_enabled()


def test_a_slow_moment_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference and piece take three times as long in every second timing."""
    clock = {"now": 0, "slow": 1}
    monkeypatch.setattr(calibrate_timing.time, "process_time_ns", lambda: clock["now"])

    def spend(ns: int) -> None:
        clock["now"] += ns * clock["slow"]

    def piece() -> None:
        spend(5_000_000)

    timer, reference = Timer(repeats=1), Reference(lambda: spend(1_000_000), 2e-3)
    assert timer.seconds([piece], reference) == [pytest.approx(1e-2)]
    clock["slow"] = 3
    assert timer.seconds([piece], reference) == [pytest.approx(1e-2)]
    assert timer.seconds([piece]) == [pytest.approx(1.5e-2)]


# ---------------------------------------------------------------------------------------- runs
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    out, seen = tmp_path / "nano.json", []
    first, left = calibrate.calibrate(NANO, out, replace(OPTIONS, budget_s=1e-9))
    assert len(first.samples) == 1 and left > 50 and profile_files.read(out) == first
    profile, left = calibrate.calibrate(
        NANO, out, OPTIONS, lambda done, total, case: seen.append((done, total, case))
    )
    assert left == 0 and len(profile.samples) == len(calibrate.planned(NANO, OPTIONS))
    assert first.samples[0].case in {s.case for s in profile.samples}
    assert not first.provenance.get(calibrate.SETTLED) and profile.provenance[calibrate.SETTLED]
    assert seen[-1][:2] == (len(seen), len(seen)) and first.samples[0].case not in {
        case for *_, case in seen
    }
    assert set(profile.curves) >= set(OPERATIONS) and profile.errors["whole steps"]["n"] > 2
    again, left = calibrate.calibrate(NANO, out, OPTIONS)
    assert left == 0 and again.samples == profile_files.read(out).samples
    more = calibrate.left_to_do(again, NANO, replace(OPTIONS, rounds=2))
    assert len(more) == len(again.samples)
    _other_runs_are_refused(out)
    _a_simulation_measures_what_it_lacks(out)


def _other_runs_are_refused(out: Path) -> None:
    for options, model, told in (
        (replace(OPTIONS, seed=5), NANO, r"another seed \(0, not 5\)"),
        (OPTIONS, replace(NANO, name="other"), "another model"),
        (OPTIONS, replace(NANO, pattern="M-"), "another pattern"),
    ):
        with pytest.raises(ProfileError, match=told):
            calibrate.calibrate(model, out, options)
    profile = profile_files.read(out)
    changed = out.with_name("changed.json")
    profile_files.write(replace(profile, kernels={**profile.kernels, "conv": "0"}), changed)
    with pytest.raises(ProfileError, match="another kernels"):
        calibrate.calibrate(NANO, changed, OPTIONS)
    with pytest.raises(ProfileError, match="other kernels: cannot add"):
        calibrate.measured_too(profile_files.read(changed), NANO, {"gemm": (64, 64)})
    elsewhere = replace(profile, provenance={**profile.provenance, "device": "another"})
    with pytest.raises(ProfileError, match="is of device 'another'"):
        calibrate.measured_too(elsewhere, NANO, {"gemm": (64, 64)})


def _a_simulation_measures_what_it_lacks(out: Path) -> None:
    """The profile ends at 32 tokens; prompts of 90 make a run measure, the next one not."""
    data = {
        "name": "t", "description": "t", "model": "nano", "memory": "64MiB",
        "engine": {"max_model_len": 4096, "max_num_seqs": 8},
        "trace": {"requests": [{"id": i, "prompt": [[0, 60], [1, 30]], "output_tokens": 3}
                               for i in "ab"]},
        "cost": {"profile": str(out), "on_miss": "measure"},
    }  # fmt: skip
    (point,) = points_of(config.checked(data, "t.yaml"))
    before, key = profile_files.read(out), key_of(point)
    run_point(point)
    after = profile_files.read(out)
    new = [s for s in after.samples if s.part == "demand"]
    assert {s.case for s in before.samples} < {s.case for s in after.samples}
    assert "gemm 1x90@0" in {s.case for s in new} and after.curves["gemm"].sizes[-1] == 90
    assert key_of(point) == key
    row = run_point(point).row
    assert profile_files.read(out) == after
    assert run_point(point).row == row


def test_on_demand_from_nothing(tmp_path: Path) -> None:
    out = tmp_path / "none.json"
    options = replace(OPTIONS, grid="none")
    profile, left = calibrate.calibrate(NANO, out, options)
    assert left == 0 and list(profile.curves) == ["overhead"]
    step = Step(0, [Chunk(0, 0, 10, True)], [1], 9)
    for _ in range(4):
        prices, shares = backend(profile, NANO)
        prices.run(step)
        if not shares.misses:
            break
        profile = calibrate.measured_too(profile, NANO, shares.misses)
    assert shares.misses == {}
    _, strict = backend(profile, NANO, refuse=True)
    assert strict.at("scan", 10).compute > 0


def test_a_held_out_case_that_a_run_needs_is_measured_again(tmp_path: Path) -> None:
    profile, _ = calibrate.calibrate(NANO, tmp_path / "p.json", replace(OPTIONS, grid="none"))
    case = Case("gemm", Part(1, 8))
    runner = Runner(NANO, OPTIONS)
    profile, _ = runner.run(profile, [(case, "held")])
    profile, _ = runner.run(profile, [(case, "demand")] * 2)
    (sample,) = [s for s in profile.samples if s.case == str(case)]
    assert sample.part == "demand" and sample.rounds == 2


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Fewer layers of the same shapes give a profile of the whole model."""
    part = replace(NANO, pattern="M*-")
    profile, _ = calibrate.calibrate(part, tmp_path / "p.json", replace(OPTIONS, grid="none"))
    found = calibrate_cases.grid(shape_of(part), LIMITS, "coarse")
    for case in (c for c in found if c.op == "scan"):
        assert size(SHAPE, case) == size(shape_of(part), case)
    assert backend(profile, NANO)[0].run(Step(0, [Chunk(0, 0, 8, True)])).durations_ns[0] > 0


def test_a_finished_profile_is_at_its_median_speed(tmp_path: Path) -> None:
    profile, _ = calibrate.calibrate(NANO, tmp_path / "p.json", replace(OPTIONS, grid="none"))
    begun = replace(profile, provenance={**profile.provenance, calibrate.SETTLED: False})
    runner = Runner(NANO, OPTIONS)
    reference = runner.reference(begun)
    reference.seen.extend([2 * reference.seconds] * 3)
    settled = runner.settled(begun)
    assert settled.provenance["reference_s"] == pytest.approx(2 * reference.seconds, rel=1e-3)
    for one, two in zip(begun.samples, settled.samples, strict=True):
        assert two.median_s == pytest.approx(2 * one.median_s, rel=2e-3)
    assert runner.settled(settled) == settled


def test_bad_devices() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--device", "tpu"])
    assert done.exit_code == 2 and "cpu and cuda" in done.stderr
    if not torch.cuda.is_available():
        done = CliRunner().invoke(app, ["calibrate", "--device", "cuda"])
        assert done.exit_code == 2 and "nearest is --device cpu" in done.stderr


def test_what_no_graph_can_hold_is_launched_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: Timer, pieces: object, reference: object = None) -> list[float]:
        if self.graph:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [1.0]

    profile, _ = calibrate.calibrate(NANO, tmp_path / "p.json", replace(OPTIONS, grid="none"))
    monkeypatch.setattr(Timer, "seconds", capture)
    case = Case("gemm", Part(1, 8))
    runner = Runner(NANO, replace(OPTIONS, graph=True))
    profile, _ = runner.run(profile, [(case, "grid")])
    assert profile.provenance[calibrate.LAUNCHED] == ["gemm 1x8@0"]
    assert profile.case("gemm 1x8@0").seconds == (1.0,)
    monkeypatch.setattr(runner, "timer", Timer())
    monkeypatch.setattr(Timer, "seconds", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.time(case, profile)
