"""The cost model: published sizes, the tables of the specification, exact repetition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import models
from sim.cost import device as devices
from sim.cost import layers, ops
from sim.cost.efficiency import FLOOR, OPS, Constant, Floats, Share, Shares
from sim.cost.modelled import ModelledBackend
from sim.model import Model
from sim.step import Chunk, Step

H200 = devices.load("h200")
QUIET = replace(H200, launch_ns=0)  # the tables leave launches out
NEMOTRON = models.load("nemotron-h-8b")


def ms(step: Step, model: Model = NEMOTRON, **options: object) -> float:
    backend = ModelledBackend(model, QUIET, **options)  # type: ignore[arg-type]
    return float(backend.run(step).durations_ns[0]) / 1e6


def prompt(tokens: int, cached: int = 0) -> Step:
    return Step(0, [Chunk(0, cached, tokens, True)])


def decode(batch: int, context: int) -> Step:
    return Step(0, [], list(range(batch)), batch * context)


# Prompt tokens; floor and estimate in ms; of the estimate GEMM, scan, attention.
PREFILL = [
    (128, 3.7, 4.8, 4.1, 0.1, 0),
    (512, 10.2, 13.9, 12.1, 0.6, 0),
    (1024, 20.2, 27.5, 24.3, 1.1, 0.1),
    (4096, 80.5, 110, 97, 4.4, 1.3),
    (8192, 162, 223, 194, 8.9, 5.1),
    (32768, 682, 950, 777, 35, 81),
    (131072, 3260, 4770, 3109, 142, 1296),
]


@pytest.mark.parametrize(("n", "floor", "estimate", "gemm", "scan", "attention"), PREFILL)
def test_prefill_table(
    n: int, floor: float, estimate: float, gemm: float, scan: float, attention: float
) -> None:
    # At 128 tokens the GEMMs' activations and the elementwise kernels show: 5 % of the floor.
    assert ms(prompt(n), efficiency=FLOOR) == pytest.approx(floor, rel=0.06 if n < 512 else 0.005)
    assert ms(prompt(n)) == pytest.approx(estimate, rel=0.03 if n < 512 else 0.005)
    parts = ModelledBackend(NEMOTRON, QUIET).breakdown(prompt(n))
    assert 1e3 * parts["gemm"] == pytest.approx(gemm, rel=0.005, abs=0.15)
    assert 1e3 * parts["scan"] == pytest.approx(scan, rel=0.02, abs=0.06)
    assert 1e3 * parts["attention_prefill"] == pytest.approx(attention, rel=0.02, abs=0.05)


@pytest.mark.parametrize(
    ("cached", "expected"), [(0, 7.1), (4096, 7.3), (16384, 7.7), (65536, 9.6), (131072, 12.2)]
)
def test_256_new_tokens_on_a_cached_prefix(cached: int, expected: float) -> None:
    assert ms(prompt(256, cached)) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("batch", "context", "expected", "tolerance"),
    [
        (1, 1, 4.5, 0.02),
        (8, 8192, 5.2, 0.02),
        (32, 8192, 7.6, 0.02),
        # The table counts weights, state and KV; activations of the GEMMs come on top here,
        (64, 1024, 8.5, 0.03),
        (64, 8192, 10.7, 0.03),
        (64, 65536, 28, 0.03),
        # and at 256 rows the GEMMs are bound by arithmetic, no longer by weights.
        (256, 8192, 29.6, 0.10),
    ],
)
def test_decode_table(batch: int, context: int, expected: float, tolerance: float) -> None:
    assert ms(decode(batch, context)) == pytest.approx(expected, rel=tolerance)


def test_published_sizes_of_nemotron_h_8b() -> None:
    shape = layers.shape_of(NEMOTRON)
    assert shape.state_bytes == 102_137_856
    assert shape.kv_bytes_per_token == 16_384
    weights = sum(t.launches * t.work.bytes for t in layers.token_terms(shape, 0) if t.op == "gemm")
    assert weights / 2 == pytest.approx(7.03e9, rel=0.001)
    head = next(layers.head_terms(shape, 0)).work.bytes
    assert head / 2 == 131_072 * 4096


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("llama-3-8b", 6.98e9),
        ("nemotron-h-47b", 44.6e9),
        ("nemotron-3-nano-30b-a3b", 2.9e9),
        ("qwen3-next-80b-a3b", 2.6e9),
        ("granite-4.0-h-tiny", 1.06e9),
        ("falcon-h1-34b", 31.0e9),
    ],
)
def test_weights_that_one_token_reads(name: str, active: float) -> None:
    terms = layers.token_terms(layers.shape_of(models.load(name)), 1)
    counted = sum(t.launches * t.work.flops for t in terms if t.op == "gemm") / 2
    assert counted == pytest.approx(active, rel=0.02)


def test_restoring_a_state_costs_two_tokens_of_prefill() -> None:
    chunk = Chunk(0, 4096, 1024, True, restored=4096, slot_copies=1)
    extra = ms(Step(0, [chunk])) - ms(prompt(1024, 4096))
    assert extra == pytest.approx(2 * 102.137856e6 / (4.3e12 * 0.8) * 1e3, rel=0.001)
    saved = ms(Step(0, [replace(chunk, slot_copies=0, saves=1)])) - ms(prompt(1024, 4096))
    assert saved == pytest.approx(extra / 2, rel=0.001)
    marginal = (ms(prompt(2048)) - ms(prompt(1024))) / 1024
    assert marginal == pytest.approx(0.027, rel=0.02)


def test_a_small_step_is_bound_by_weights() -> None:
    assert ms(prompt(64)) < 1.1 * ms(prompt(1))
    together = Step(0, [Chunk(0, 0, 64, True)], list(range(1, 9)), 8 * 1000)
    assert ms(together) < 0.6 * (ms(prompt(64)) + ms(decode(8, 1000)))
    silent = Step(0, [Chunk(0, 0, 1024, False)])
    head = 131_072 * 4096 * 2 / (4.3e12 * 0.8) * 1e3
    assert ms(prompt(1024)) - ms(silent) == pytest.approx(head, rel=0.01)


def test_the_scan_is_a_small_share_of_gemm_work() -> None:
    per_token = [ops.ssd_prefill(1, 0, 128, 64, 128, 8, L, 2, 4).flops for L in (64, 128, 256)]
    assert [round(f / 1e6, 2) for f in per_token] == [5.37, 6.55, 8.91]
    gemm = sum(
        t.launches * t.work.flops
        for t in layers.token_terms(layers.shape_of(NEMOTRON), 1)
        if t.op == "gemm"
    )
    assert 24 * per_token[2] / gemm == pytest.approx(0.015, abs=0.001)
    fused = ops.ssd_prefill(1, 0, 128, 64, 128, 8, 256, 2, 4)
    assert fused.flops / fused.bytes == pytest.approx(238, rel=0.02)


class Bent:
    """An efficiency that depends on the size, as a profile's does."""

    def at(self, op: str, size: float) -> Share:
        share = 0.2 + 0.7 * size / (size + 5000.0)
        return Share(share, share)

    def over(self, op: str, sizes: Floats) -> Shares:
        share = 0.2 + 0.7 * sizes / (sizes + 5000.0)
        return Shares(share, share)


steps = st.builds(
    lambda batch, mean, repeat, copies, kv: Step(
        0,
        [],
        list(range(batch)),
        batch * mean + copies,
        repeat,
        state_copies=copies,
        kv_copied_tokens=kv,
    ),
    st.integers(1, 300),
    st.integers(1, 140_000),
    st.integers(1, 50),
    st.integers(0, 3),
    st.integers(0, 100),
)


@settings(max_examples=60, deadline=None)
@given(
    step=steps,
    name=st.sampled_from(["nemotron-h-8b", "llama-3-8b", "tiny", "mamba-codestral-7b"]),
    bent=st.booleans(),
)
def test_repetitions_equal_single_steps_to_the_bit(step: Step, name: str, bent: bool) -> None:
    backend = ModelledBackend(models.load(name), H200, efficiency=Bent() if bent else None)
    durations = backend.run(step).durations_ns
    assert durations.dtype == np.int64 and len(durations) == step.repeat
    single, rest = step, step
    for i in range(step.repeat):
        single, rest = rest.split(1)
        assert single.decode_context_tokens == step.decode_context_tokens + i * len(step.decodes)
        assert backend.run(single).durations_ns.tolist() == [durations[i]]


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(
        st.builds(
            Chunk,
            request=st.just(0),
            start=st.integers(0, 100_000),
            tokens=st.integers(1, 8192),
            samples=st.booleans(),
            slot_copies=st.integers(0, 1),
            saves=st.integers(0, 2),
        ),
        max_size=5,
    ),
    batch=st.integers(0, 64),
    name=st.sampled_from(["nemotron-h-8b", "llama-3-8b", "qwen3-next-80b-a3b", "jamba-1.5-mini"]),
    tp=st.sampled_from([1, 2]),
)
def test_the_parts_add_up_to_the_price(chunks: list[Chunk], batch: int, name: str, tp: int) -> None:
    step = Step(0, chunks, list(range(batch)), 1000 * batch)
    for device in (H200, QUIET):
        backend = ModelledBackend(models.load(name), device, tp)
        parts = backend.breakdown(step)
        assert set(parts) <= set(OPS)
        assert all(seconds >= 0 for seconds in parts.values())
        price = int(backend.run(step).durations_ns[0])
        assert price == pytest.approx(1e9 * sum(parts.values()), abs=1)


def test_more_work_never_costs_less() -> None:
    for name in ("nemotron-h-8b", "qwen3.5-4b", "jamba-reasoning-3b", "ring-mini-linear-2.0"):
        backend = ModelledBackend(models.load(name), H200)
        for grow in (lambda n: prompt(n), lambda n: prompt(64, n), lambda n: decode(8, n)):
            times = [int(backend.run(grow(n)).durations_ns[0]) for n in (1, 64, 1000, 30_000)]
            assert times == sorted(times) and times[0] < times[-1]


def test_every_preset_has_a_price_or_a_reason() -> None:
    refused = {}
    for name in models.names():
        try:
            backend = ModelledBackend(models.load(name), H200)
        except ValueError as error:
            refused[name] = str(error)
            continue
        assert backend.run(decode(4, 100)).durations_ns[0] > 0
    assert {name for name, why in refused.items() if "mla" in why} == {
        "glm-5.3-flash", "kimi-k3", "kimi-linear-48b-a3b", "ling-3.0-flash",
    }  # fmt: skip
    assert all("has no cost:" in why for why in refused.values())
    assert len(refused) <= 7


def test_splitting_over_devices() -> None:
    one, two = ms(prompt(4096)), ms(prompt(4096), tp=2)
    assert 0.5 * one < two < 0.75 * one
    assert layers.shape_of(NEMOTRON, 8).state_bytes * 8 == 102_137_856
    assert layers.shape_of(NEMOTRON, 16).kv_bytes_per_token == 4 * 2 * 128 * 2
    work = ops.all_reduce(100, 4096, 4, 2)
    assert work.bytes == 2 * 3 / 4 * 100 * 4096 * 2


def test_state_and_kv_dtypes_change_the_traffic() -> None:
    half = ms(decode(64, 1), ssm_dtype="bfloat16")
    saved = 64 * 24 * 128 * 64 * 128 * 2 * 2 / (4.3e12 * 0.8) * 1e3
    assert ms(decode(64, 1)) - half == pytest.approx(saved, rel=0.01)
    long = decode(64, 65536)
    assert ms(long, kv_dtype="fp8") < ms(long) - 8


def test_launches_count_where_no_graph_is() -> None:
    slow = replace(QUIET, launch_ns=4000)
    eager, free = (ModelledBackend(NEMOTRON, d) for d in (slow, QUIET))
    gap = eager.run(prompt(1024)).durations_ns[0] - free.run(prompt(1024)).durations_ns[0]
    terms = list(free.terms(prompt(1024)))
    assert gap == pytest.approx(4000 * sum(t.launches for t in terms), abs=2)
    assert eager.run(decode(512, 9)).durations_ns == free.run(decode(512, 9)).durations_ns
    assert eager.run(decode(513, 9)).durations_ns > free.run(decode(513, 9)).durations_ns


@pytest.mark.parametrize("name", devices.names())
def test_every_figure_of_a_device_has_a_source(name: str) -> None:
    device = devices.load(name)
    stated = set(device.__dataclass_fields__) - {"name", "datasheet", "sources"}
    assert set(device.sources) == stated
    assert device.bandwidth < device.datasheet["bandwidth"]
    assert device.tensor_flops["bfloat16"] < device.datasheet["bfloat16_dense"]


def test_bad_input_names_the_value_and_the_choice() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'h20'; nearest: h200"):
        devices.load("h20")
    with pytest.raises(ValueError, match="no peak for dtype 'int4'"):
        H200.peak("int4")
    raw = {f: getattr(H200, f) for f in H200.__dataclass_fields__} | {"efficiency": {}}
    with pytest.raises(ValueError, match="bandwidth is -1"):
        devices.from_dict(raw | {"bandwidth": -1})
    with pytest.raises(ValueError, match=r"unknown fields \['speed'\]"):
        devices.from_dict(raw | {"speed": 1})
    with pytest.raises(ValueError, match=r"gemm is 1\.5, must be"):
        Constant({"gemm": 1.5})
    with pytest.raises(ValueError, match="unknown operation 'gem'"):
        Constant({"gem": 0.5})
    with pytest.raises(ValueError, match="feed-forward width is not given"):
        ModelledBackend(models.load("lfm2-1.2b"), H200)
    with pytest.raises(ValueError, match="tensor parallelism is 0"):
        ModelledBackend(NEMOTRON, H200, 0)
