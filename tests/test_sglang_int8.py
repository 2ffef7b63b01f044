"""int8 checkpoints: SGLang's recorded vectors to the bit, and what the rounding costs."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from sim.models import load
from sim.sglang.int8 import DTYPES, dequantise, quantise, rounded
from sim.sglang.sizes import slot_of

VECTORS = Path(__file__).parent / "golden" / "sglang_int8_vectors.json.gz"


def test_the_recorded_vectors_to_the_bit():
    vectors = json.loads(gzip.decompress(VECTORS.read_bytes()))
    assert {v["dtype"] for v in vectors} == set(DTYPES)
    for v in vectors:
        q, scale = quantise(np.array(v["state"], np.float32), v["dtype"])
        assert q.tolist() == v["q"]
        assert scale.tolist() == np.array(v["scale"], np.float32).tolist()
        assert dequantise(q, scale, v["dtype"]).tolist() == v["dequant"]


def test_rounding_to_bfloat16_is_half_to_even():
    step = 2.0**-7
    values = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -1 - step / 2], np.float32)
    assert rounded(values, "bfloat16").tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]
    assert np.isnan(rounded(np.array([np.nan], np.float32), "bfloat16"))[0]
    assert rounded(np.array([np.inf], np.float32), "bfloat16")[0] == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_costs_at_most_half_a_scale(dtype):
    draw = np.random.default_rng(0)
    state = rounded(draw.standard_normal((2, 3, 16, 8)).astype(np.float32), dtype)
    q, scale = quantise(state, dtype)
    assert scale.shape == (2, 3, 1, 8) and q.dtype == np.int8
    error = np.abs(dequantise(q, scale, "float32") - state)
    # A scale rounded down clamps the largest value: at most 127 roundings of the scale itself.
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert (error <= scale * (0.5 + 127 * unit) * 1.0001).all()
    assert error.max() > 0


def test_a_channel_of_zeros_comes_back_as_zeros():
    for dtype in DTYPES:
        q, scale = quantise(np.zeros((1, 2, 4, 3), np.float32), dtype)
        assert not q.any() and not dequantise(q, scale, dtype).any()
        assert (scale == 0).all() == (dtype == "float16")


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="nearest is bfloat16"):
        rounded(np.zeros(1, np.float32), "bfloat15")


@pytest.mark.parametrize(
    ("dtype", "active", "int8"),
    [("float32", 102_137_856, 28_213_248), ("bfloat16", 51_806_208, 27_426_816)],
)
def test_bytes_of_a_slot_of_nemotron_h_8b(dtype, active, int8):
    slot = slot_of(load("nemotron-h-8b"), ssm_dtype=dtype)
    assert (slot.bytes, slot.int8_bytes) == (active, int8)
