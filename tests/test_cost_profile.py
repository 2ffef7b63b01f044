"""Profiles: cases as text, curves fitted to made-up timings, errors on what was held out, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import models
from sim.cost import device as devices
from sim.cost import profile_cases as cases
from sim.cost import profile_files, profile_rates
from sim.cost.efficiency import Constant
from sim.cost.layers import shape_of
from sim.cost.modelled import ModelledBackend
from sim.cost.profile import (
    ACCEPT,
    Profile,
    ProfileError,
    Sample,
    backend,
    fingerprint,
    refuse_foreign,
)
from sim.cost.profile_cases import Case, Part, Whole
from sim.cost.profile_curve import Curve, Measured, ProfileMiss, octave, one_peak
from sim.cost.profile_fit import (
    WHOLE,
    Point,
    fit,
    fitted,
    never_falling,
    one_peaked,
    point,
    price,
    stats,
)
from sim.step import Chunk, Step

TINY = models.load("tiny")
SHAPE = shape_of(TINY)
CPU = replace(
    devices.load("h200"),
    name="made-up",
    tensor_flops={"float32": 8e10},
    vector_flops=2e10,
    bandwidth=1e10,
    launch_ns=0,
    host_ns=0,
    efficiency=Constant(),
)
SIZES = (1, 4, 16, 64, 256, 1024, 4096)
GRID = [
    *(Case(op, Part(1, n)) for op in ("gemm", "elementwise", "kv_write", "head") for n in SIZES),
    *(Case(op, Part(1, n)) for op in ("sample", "scan", "conv") for n in SIZES),
    *(Case(op, Part(b, 1)) for op in ("update", "conv_update") for b in (1, 2, 8, 32, 128)),
    *(Case("attention_prefill", Part(1, n)) for n in SIZES),
    *(Case("attention_prefill", Part(1, 256, p)) for p in (256, 1024, 4096)),
    *(Case("attention_decode", Part(b, 1, p)) for p in (15, 255, 4095) for b in (1, 8, 32)),
    *(Case("scan", Part(s, n)) for s, n in ((2, 128), (4, 64), (8, 128), (16, 16))),
    *(Case(op, Part(n, 1)) for op in ("state_copy", "state_save") for n in (1, 4, 16)),
]
HELD = [
    *(Case(op, Part(1, n)) for op in ("gemm", "elementwise", "scan") for n in (3, 37, 700)),
    *(Case("attention_prefill", Part(1, n, p)) for n, p in ((100, 300), (500, 1000))),
    *(Case("attention_decode", Part(b, 1, p)) for b, p in ((3, 900), (20, 2000))),
]
STEPS = [
    Whole(Part(1, 256)),
    Whole(Part(1, 256, 1024), saves=1),
    Whole(None, Part(8, 1, 1023)),
    Whole(Part(1, 128, 512), Part(4, 1, 700), copies=1),
]
LAUNCH = {"gemm": 2e-5, "elementwise": 3e-5, "scan": 4e-4, "update": 1e-4}
SEQUENCE = {"attention_decode": 5e-5, "scan": 2e-4}


def share(op: str, size: float) -> float:
    """The truth behind the made-up timings."""
    return min(0.9, 0.1 + 0.04 * octave(size)) * (0.5 if op == "scan" else 1.0)


def truth(op: str, p: Point) -> float:
    fixed = p.launches * LAUNCH.get(op, 1e-5) + p.sequences * SEQUENCE.get(op, 0.0)
    return fixed + p.floor_s / share(op, p.size)


def sample(case: Case | Whole, part: str, seconds: float) -> Sample:
    return Sample(str(case), part, 1, (0.98 * seconds, seconds, 1.05 * seconds))


def timed(case: Case, part: str, slower: float = 1.0) -> Sample:
    p = point(SHAPE, CPU, "float32", case, 1.0)
    return sample(case, part, slower * truth(case.op, p))


def made_up(slower_steps: float = 1.0) -> Profile:
    """A profile of ``tiny`` whose timings follow the truth; whole steps take 1 ms more."""
    data = {**vars(CPU), "efficiency": {"compute": {}, "memory": 1.0, "default": 1.0}}
    samples = [timed(c, "grid") for c in GRID] + [timed(c, "held") for c in HELD]
    samples += [sample(Case("overhead", Part(n, 1)), "grid", 1e-3 + 1e-5 * n) for n in (1, 4, 16)]
    start = Profile(
        "made-up", "measured", "tiny", fingerprint(SHAPE), "float32", data, {"ssd": "1"}, {},
        tuple(samples), {}, {},
    )  # fmt: skip
    first = fitted(start, TINY)
    prices, _ = backend(first, TINY)
    steps = [
        sample(w, "step", slower_steps * int(prices.run(w.step()).durations_ns[0]) / 1e9)
        for w in STEPS
    ]
    return fitted(first.with_samples(steps), TINY)


MADE_UP = made_up()


# ---------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize("case", [*GRID, *HELD, *STEPS], ids=str)
def test_a_case_is_its_text(case: Case | Whole) -> None:
    assert cases.parse(str(case)) == case


@pytest.mark.parametrize("text", ["", "gemm", "gemm 256", "step 3", "step prefil 1x2@0", "a b c"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case"):
        cases.parse(text)


def test_work_of_a_case_is_that_of_the_step_it_stands_for() -> None:
    """The operations of one step, each as a case, add up to the terms of the whole step."""
    step = Step(0, [Chunk(0, 64, 100, True), Chunk(1, 0, 28, True)])
    prices = ModelledBackend(TINY, CPU)
    by_op: dict[str, float] = {}
    for term in prices.terms(step):
        by_op[term.op] = by_op.get(term.op, 0) + term.launches * term.work.bytes
    for op, part in (("gemm", Part(1, 128)), ("scan", Part(2, 64)), ("head", Part(1, 2))):
        found = sum(t.launches * t.work.bytes for t in cases.terms(SHAPE, Case(op, part)))
        assert found == by_op[op]
    decoded = cases.terms(SHAPE, Case("attention_decode", Part(4, 1, 99)))
    assert [t.size for t in decoded] == [400]


def test_an_operation_that_the_model_lacks_has_no_terms() -> None:
    pure = replace(TINY, pattern="M-M-")
    assert cases.terms(shape_of(pure), Case("attention_decode", Part(4, 1, 99))) == []
    with pytest.raises(ValueError, match="no kv_write"):
        point(shape_of(pure), CPU, "float32", Case("kv_write", Part(1, 8)), 1.0)


# ---------------------------------------------------------------------------------------- curves
@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=20))
def test_many_sizes_equal_single_ones_to_the_bit(sizes: list[float]) -> None:
    for curve in (Curve(0, (1, 10, 3000, 1e6), (0.1, 0.2, 0.7, 0.7)), Curve(0, (7,), (0.3,))):
        shares = curve.over(np.array(sizes))
        assert [curve.at(size) for size in sizes] == shares.tolist()
        assert min(shares) >= curve.shares[0] and max(shares) <= curve.shares[-1]


@given(st.floats(1e-3, 1e12), st.floats(1, 100))
def test_octaves_grow_and_are_exact_at_powers_of_two(size: float, factor: float) -> None:
    assert octave(size) <= octave(size * factor)
    assert abs(octave(size) - math.log2(size)) < 0.09
    assert octave(4096) == 12


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_never_falling_is_the_nearest(values: list[float]) -> None:
    found = never_falling(values, [1.0] * len(values))
    assert found == sorted(found) and len(found) == len(values)
    if values == sorted(values):
        assert found == values
    mean = sum(values) / len(values)
    off = sum((a - b) ** 2 for a, b in zip(found, values, strict=True))
    assert off <= sum((mean - b) ** 2 for b in values) + 1e-9


def test_a_curve_that_rises_after_a_fall_is_refused() -> None:
    for sizes, shares in (((1, 2, 3), (0.5, 0.4, 0.5)), ((2, 1), (0.4, 0.5)), ((1,), (0.0,))):
        with pytest.raises(ValueError, match="must"):
            Curve(0, sizes, shares)


def test_the_fit_finds_overhead_and_shares_again() -> None:
    for op in ("gemm", "scan"):
        curve = MADE_UP.curves[op]
        assert curve.launch_s == pytest.approx(LAUNCH[op], rel=0.25)
        for n in (64, 256, 4096):
            p = point(SHAPE, CPU, "float32", Case(op, Part(1, n)), 1.0)
            assert price(curve, p) == pytest.approx(truth(op, p), rel=0.03)


def test_sequences_cost_something_of_their_own() -> None:
    curve = MADE_UP.curves["attention_decode"]
    assert curve.sequence_s == pytest.approx(SEQUENCE["attention_decode"], rel=0.15)
    assert MADE_UP.curves["update"].sequence_s == 0
    parts = backend(MADE_UP, TINY)[0].breakdown(Step(0, [], list(range(8)), 8 * 128))
    p = point(SHAPE, CPU, "float32", Case("attention_decode", Part(8, 1, 127)), 1.0)
    assert parts["attention_decode"] == pytest.approx(price(curve, p))


def test_without_overhead_none_is_found() -> None:
    points = [Point(n, 3, 3, n * 1e-6, n * 1e-6 / 0.5) for n in SIZES]
    curve = fit(points)
    assert curve.launch_s == 0 and set(np.round(curve.shares, 9)) == {0.5}


def test_noise_is_pooled_not_followed() -> None:
    slow = [1.0, 1.3, 1.0, 1.25, 1.0, 1.2, 1.0]
    points = [Point(n, 1, 1, n * 1e-6, f * n * 2e-6) for n, f in zip(SIZES, slow, strict=True)]
    assert max(fit(points).shares) / min(fit(points).shares) < 1.3


def test_a_share_falls_only_where_that_predicts_better() -> None:
    """Data that outgrow a cache at size 256."""
    shares = [0.6, 0.6, 0.6, 0.6, 0.6, 0.3, 0.15]
    points = [Point(n, 1, 1, n * 1e-6, n * 1e-6 / s) for n, s in zip(SIZES, shares, strict=True)]
    assert fit(points).shares == pytest.approx(tuple(shares), rel=0.05)
    assert list(MADE_UP.curves["gemm"].shares) == sorted(MADE_UP.curves["gemm"].shares)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_one_peak_is_at_least_as_near_as_none(values: list[float]) -> None:
    weights = [1.0] * len(values)
    found, rising = one_peaked(values, weights), never_falling(values, weights)
    assert one_peak(found)
    off = [sum((a - b) ** 2 for a, b in zip(f, values, strict=True)) for f in (found, rising)]
    assert off[0] <= off[1] + 1e-9
    if one_peak(values):
        assert found == values


def test_samples() -> None:
    one = Sample("gemm 1x1@0", "grid", 1, (1.0, 3.0, 2.0))
    two = one.more((5.0, 4.0))
    assert (two.rounds, two.median_s, one.median_s) == (2, 3.0, 2.0)
    assert two.spread == pytest.approx((4.6 - 1.4) / 3)
    for part, seconds in (("grid", ()), ("grid", (0.0,)), ("other", (1.0,))):
        with pytest.raises(ProfileError, match="part is one of"):
            Sample("gemm 1x1@0", part, 1, seconds)


# ---------------------------------------------------------------------------------------- errors
def test_held_out_operations_are_predicted() -> None:
    for op in ("gemm", "elementwise", "scan", "attention_prefill", "attention_decode"):
        assert MADE_UP.errors[op]["max"] < 0.08, op
    assert MADE_UP.errors["gemm"]["n"] == 3


def test_whole_steps_are_judged_never_fitted() -> None:
    slow = made_up(slower_steps=1.25)
    assert slow.curves == MADE_UP.curves
    assert MADE_UP.errors[WHOLE]["max"] < 1e-6
    assert slow.errors[WHOLE]["bias"] == pytest.approx(1 / 1.25 - 1)
    assert slow.errors[WHOLE]["n"] == len(STEPS)
    assert {"prefill steps", "decode steps", "mixed steps"} < set(slow.errors)


def test_held_out_timings_change_no_curve() -> None:
    worse = MADE_UP.with_samples(timed(c, "held", 1.5) for c in HELD)
    again = fitted(worse, TINY)
    assert again.curves == MADE_UP.curves
    assert again.errors["gemm"]["bias"] == pytest.approx(1 / 1.5 - 1, abs=0.05)


def test_stats() -> None:
    found = stats([1.1, 0.9, 1.0, 1.2])
    assert found["mean"] == pytest.approx(0.1) and found["bias"] == pytest.approx(0.05)
    assert found["max"] == pytest.approx(0.2) and found["p90"] == pytest.approx(0.17)


def test_rates_are_those_of_the_nearest_timing() -> None:
    found = {rate.op: rate for rate in profile_rates.rates(MADE_UP, TINY)}
    assert set(found) == set(MADE_UP.curves) - {"overhead"}
    gemm = found["gemm"]
    assert gemm.case == "gemm 1x4096@0" and 0.4 < gemm.share < 0.6
    assert gemm.flops_per_s == pytest.approx(gemm.share * 8e10)
    assert found["state_copy"].bytes_per_s == pytest.approx(found["state_copy"].share * 1e10)


# ---------------------------------------------------------------------------------------- prices
def test_prices_come_from_the_curves() -> None:
    prices, shares = backend(MADE_UP, TINY)
    step = STEPS[1].step()
    parts = prices.breakdown(step)
    for case in (Case("gemm", Part(1, 256)), Case("attention_prefill", Part(1, 256, 1024))):
        p = point(SHAPE, CPU, "float32", case, 1.0)
        assert parts[case.op] == pytest.approx(price(MADE_UP.curves[case.op], p))
    assert parts["overhead"] == pytest.approx(1e-3)  # one chunk and no decode
    many = prices.breakdown(STEPS[3].step())["overhead"]
    assert many == pytest.approx(1e-3 + 4e-5)
    price_ns = int(prices.run(step).durations_ns[0])
    assert price_ns == pytest.approx(1e9 * sum(parts.values()), abs=1)
    assert shares.misses == {}


def test_repeated_steps_equal_single_ones() -> None:
    prices, _ = backend(MADE_UP, TINY)
    many = prices.run(Step(0, [], [0, 1], 300, repeat=50)).durations_ns
    single = [int(prices.run(Step(0, [], [0, 1], 300 + 2 * i)).durations_ns[0]) for i in range(50)]
    assert many.tolist() == single


def test_what_is_missing_is_noted_or_refused() -> None:
    big = Step(0, [Chunk(0, 0, 8000, True)])
    prices, shares = backend(MADE_UP, TINY)
    assert prices.run(big).durations_ns[0] > 0
    assert shares.misses["gemm"] == (8000, 8000)
    strict, _ = backend(MADE_UP, TINY, refuse=True)
    strict.run(STEPS[0].step())
    with pytest.raises(ProfileMiss, match=r"elementwise from 1 to 4096, not at 8000"):
        strict.run(big)
    with pytest.raises(ProfileMiss, match="no kv_copy"):
        Measured(MADE_UP.curves, Constant(), True).at("kv_copy", 5)


# ---------------------------------------------------------------------------------------- files
def test_a_file_keeps_everything(tmp_path) -> None:
    path = tmp_path / "deep" / "p.json"
    profile_files.write(MADE_UP, path)
    again = profile_files.find(str(path))
    assert again.curves == MADE_UP.curves
    assert {s.case: s for s in again.samples} == {s.case: s for s in MADE_UP.samples}
    assert profile_files.to_text(again) == profile_files.to_text(MADE_UP)
    step = STEPS[3].step()
    one, two = (backend(p, TINY)[0].run(step).durations_ns for p in (again, MADE_UP))
    assert one.tolist() == two.tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.update(schema=9), "schema"),
        (lambda d: d.pop("curves"), "KeyError"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d["samples"][0].update(part="other"), "part"),
        (lambda d: d["curves"]["gemm"].update(shares=[1.0]), "shares"),
    ],
)
def test_files_that_are_not_profiles_are_refused(tmp_path, change, told) -> None:
    data = json.loads(profile_files.to_text(MADE_UP))
    change(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=told):
        profile_files.read(path)
    path.write_text("{\n{")
    with pytest.raises(ProfileError, match=r"p.json:2: not JSON"):
        profile_files.read(path)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(ProfileError, match="nearest is h200-roofline"):
        profile_files.find("h200-rooflin")


@pytest.mark.parametrize("device", devices.names())
def test_device_files_are_profiles_too(device: str) -> None:
    profile = profile_files.find(f"{device}-roofline")
    assert profile.kind == "modelled" and profile.name in profile_files.names()
    nemotron, step = models.load("nemotron-h-8b"), Step(0, [Chunk(0, 0, 4096, True)], [1], 900)
    plain = ModelledBackend(nemotron, devices.load(device)).run(step).durations_ns
    prices, _ = backend(profile, nemotron, refuse=True)
    assert prices.run(step).durations_ns.tolist() == plain.tolist()
    refuse_foreign(profile, nemotron, {"ssd": "anything"})


@pytest.mark.parametrize("name", [n for n in profile_files.names() if "roofline" not in n])
def test_shipped_measurements_are_whole(name: str) -> None:
    profile = profile_files.find(name)
    assert profile.kind == "measured" and profile.kernels and profile.errors[WHOLE]["n"] >= 8
    again = fitted(profile, models.load(profile.model)).curves
    assert set(again) == set(profile.curves)
    for op, curve in profile.curves.items():
        assert again[op].sizes == curve.sizes
        assert again[op].launch_s == pytest.approx(curve.launch_s, rel=1e-6)
        assert again[op].shares == pytest.approx(curve.shares, rel=1e-6)


# ---------------------------------------------------------------------------------------- whose
def test_other_kernels_are_refused_unless_accepted() -> None:
    refuse_foreign(MADE_UP, TINY, {"ssd": "1"})
    for kernels in ({"ssd": "2"}, {}, {"ssd": "1", "conv": "1"}):
        with pytest.raises(ProfileError, match="other kernels"):
            refuse_foreign(MADE_UP, TINY, kernels)
        refuse_foreign(MADE_UP, TINY, kernels, ACCEPT[:1])


def test_other_layers_are_refused_more_of_the_same_are_not() -> None:
    kernels = MADE_UP.kernels
    refuse_foreign(MADE_UP, replace(TINY, pattern="M-M*-" * 4), kernels)
    for model in (models.load("nano"), replace(TINY, vocab_size=99)):
        with pytest.raises(ProfileError, match="is of model tiny"):
            refuse_foreign(MADE_UP, model, kernels)
        refuse_foreign(MADE_UP, model, kernels, ACCEPT)
    with pytest.raises(ProfileError, match="calibrate this model"):
        refuse_foreign(MADE_UP, TINY, kernels, ssm_dtype="bfloat16")
