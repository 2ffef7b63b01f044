"""vLLM's sizing against recordings of its own code, and the rules one by one."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sim.model import StateShape
from sim.models import load
from sim.parity_geometry import compare_file, compare_row
from sim.state_shapes import GeometryError, LayerState, extended_groups, layer_state, shapes
from sim.vllm.case_geometry import geometry_of_case, recorded_form
from sim.vllm.geometry import GeometrySpec, geometry, group_layers
from sim.vllm.model_geometry import Serving, geometry_of_model

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "golden"
GOLDEN = HERE / "golden" / "geometry"
NEMOTRON = load("nemotron-h-8b")


def random_cases(version):
    return json.loads(gzip.decompress((GOLDEN / f"random_{version}.json.gz").read_bytes()))["cases"]


def test_every_recorded_row_of_released_models_agrees():
    results = compare_file(GOLDEN / "vllm_rows.json.gz")
    assert len(results) == 1832
    assert [r for r in results if r.difference] == []


@pytest.mark.skipif(not SHARED.exists(), reason="the recorded files are not here")
def test_the_file_of_recorded_rows_agrees():
    results = compare_file(SHARED / "geometry" / "golden_geometry.json")
    assert len(results) >= 1832
    assert [r for r in results if r.difference] == []


def test_a_wrong_row_is_named():
    row = json.loads(gzip.decompress((GOLDEN / "vllm_rows.json.gz").read_bytes()))["vllm"][0]
    assert compare_row(row).difference is None
    assert "block_size" in compare_row({**row, "block_size": 1056}).difference
    assert "nothing" in compare_row({**row, "nothing": 1}).difference
    assert "unknown model" in compare_row({**row, "model": "x"}).difference


@pytest.mark.parametrize("version", ["0.33.0", "0.28.0"])
def test_random_configurations_agree_with_the_planner(version):
    agreed = refused = 0
    for seed, config, recorded in random_cases(version):
        try:
            ours = recorded_form(config, version)
        except GeometryError:
            ours = None
        assert ours == recorded, f"seed {seed}"
        agreed, refused = agreed + (ours is not None), refused + (ours is None)
    assert agreed > 400 and refused > 50


@pytest.mark.skipif(not SHARED.exists(), reason="the recorded cases are not here")
@pytest.mark.parametrize("version", ["0.33.0", "0.28.0"])
def test_recorded_cases_have_our_geometry(version):
    files = sorted((SHARED / f"vllm-{version}").glob("*.json"))
    assert files
    for file in files:
        data = json.loads(file.read_text())
        recorded = data["result"]["geometry"]
        recorded.pop("vllm")
        assert recorded_form(data["case"]["config"], version) == recorded, file.name


# Nemotron-H-8B, as specs and the design's table quote it.
@pytest.mark.parametrize(
    ("serving", "block", "page", "padding", "pool", "blocks"),
    [
        (Serving(), 1040, 4259840, 0.10, 17039360, 2520),
        (Serving(mode="none"), 1040, 4259840, 0.10, 17039360, 2520),
        (Serving(engine="vllm-0.28", mode="all"), 1280, 5242880, 23.20, 20971520, 2048),
        (Serving(tp=2), 1040, 2129920, 0.10, 8519680, 5041),
        (Serving(tp=4), 1040, 1064960, 0.10, 4259840, 10082),
        (Serving(tp=8), 1040, 532480, 0.10, 2129920, 20164),
        (Serving(tp=16), 528, 270336, 1.34, 1081344, 39718),
        (Serving(ssm_dtype="bfloat16"), 528, 2162688, 0.19, 8650752, 4964),
        (
            Serving(engine="vllm-0.28", mode="all", ssm_dtype="bfloat16"),
            768, 3145728, 45.73, 12582912, 3413,
        ),
    ],
)  # fmt: skip
def test_nemotron_h_8b(serving, block, page, padding, pool, blocks):
    g = geometry_of_model(NEMOTRON, replace(serving, memory_bytes=40 << 30))
    assert (g.block_tokens, g.page_bytes, g.bytes_per_block) == (block, page, pool)
    assert round(100 * (page - g.state_bytes) / g.state_bytes, 2) == padding
    assert g.num_blocks == blocks
    assert g.checkpoint_alignment == (
        1 if serving == Serving() or serving.mode == "align" else None
    )


def test_mode_none_keeps_one_state_for_the_whole_length():
    g = geometry_of_model(NEMOTRON, Serving(mode="none", max_model_len=9000))
    assert (g.block_tokens, g.state_block_tokens) == (1040, 9000)
    assert {x.max_memory_usage_bytes // x.page_bytes for x in g.groups if x.kind == "mamba"} == {1}


def test_gated_delta_net_rounds_to_the_export_kernel():
    qwen = load("qwen3.5-4b")
    plain = geometry_of_model(qwen, Serving(ssm_dtype="float32"))
    exporting = geometry_of_model(qwen, Serving(ssm_dtype="float32", export_states=True))
    assert (plain.block_tokens, exporting.block_tokens) == (528, 576)
    assert plain.checkpoint_alignment is None and exporting.checkpoint_alignment == 576
    fine = Serving(ssm_dtype="float32", export_states=True, unit_tokens=48)
    assert geometry_of_model(qwen, fine).checkpoint_alignment == 192
    old = Serving(engine="vllm-0.28", ssm_dtype="float32", export_states=True)
    assert geometry_of_model(qwen, old).block_tokens == 528


def test_latent_attention_rounds_to_128_and_is_not_split():
    kimi = load("kimi-linear-48b-a3b")
    one, four = (geometry_of_model(kimi, Serving(tp=tp)) for tp in (1, 4))
    assert one.block_tokens % 128 == four.block_tokens % 128 == 0
    assert one.page_bytes // one.block_tokens == four.page_bytes // four.block_tokens == 576 * 2


def test_block_size_becomes_the_rounding_unit():
    assert geometry_of_model(NEMOTRON, Serving(block_tokens=64)).block_tokens == 1088
    assert geometry_of_model(NEMOTRON, Serving(block_tokens=2048)).block_tokens == 2048
    assert geometry_of_model(NEMOTRON, Serving(kernel_block_tokens=64)).block_tokens == 1088


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("MM*MM*", [("M", (0, 3)), ("M", (1, 4)), ("*", (2, 5))]),
        ("M**", [("M", (0,)), ("*", (1,)), ("*", (2,))]),
        ("MMM**", [("M", (0, 2)), ("M", (1,)), ("*", (3, 4))]),
        ("MMMM***", [("M", (0, 1, 2, 3)), ("*", (4, 5, 6))]),
        ("-*E-M-", [("*", (1,)), ("M", (4,))]),
        ("***", [("*", (0, 1, 2))]),
    ],
)
def test_groups(pattern, groups):
    assert group_layers(pattern) == groups


def spec(**kw):
    state = LayerState(((1000,),), ("bfloat16",))
    return GeometrySpec(**{"version": "0.33", "mode": "align", "pattern": "M*", "token_bytes": 64,
                           "state": state, "memory_bytes": 1 << 30, **kw})  # fmt: skip


def test_units():
    assert geometry(spec()).unit_tokens == geometry(spec()).block_tokens == 32
    assert geometry(spec(unit_tokens=8)).unit_tokens == 8
    assert geometry(spec(unit_tokens=8)).scheduler_block_tokens == 32
    # Without caching the scheduler's unit is what both kinds of block divide.
    assert geometry(spec(mode="none", max_model_len=100)).scheduler_block_tokens == 800


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.31"}, "version '0.31'"),
        ({"mode": "all"}, "allowed: none, align"),
        ({"pattern": "--"}, "no layer"),
        ({"state": None}, "no state shapes"),
        ({"token_bytes": 0}, "no KV bytes"),
        ({"unit_tokens": 10}, "nearest that does is 8"),
        ({"fixed_block_tokens": 16}, "smallest that fits is 32 tokens"),
        ({"pattern": "**", "unit_tokens": 8}, "with one group"),
        ({"version": "0.28", "mode": "all"}, "chunk, which is not known"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(change, words):
    with pytest.raises(GeometryError, match=words):
        geometry(spec(**change))


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        (Serving(tp=3), "query heads 32 does not divide over tensor parallelism 3"),
        (Serving(tp=0), "allowed are whole numbers from 1"),
        (Serving(block_tokens=100), "multiples of the attention kernel's 16 tokens; nearest is 96"),
        (Serving(ssm_dtype="fp32"), "nearest is float32"),
        (Serving(kv_dtype="fp9"), "nearest is fp8"),
        (Serving(engine="vllm-0.34"), "nearest is vllm-0.33"),
        (Serving(max_model_len=1), "allowed are 2 and more"),
    ],
)
def test_settings_are_checked(serving, words):
    with pytest.raises(ValueError, match=words):
        geometry_of_model(NEMOTRON, serving)


def test_state_shapes_of_every_family():
    mamba2 = {"intermediate_size": 8192, "n_groups": 8, "num_heads": 128, "head_dim": 64,
              "state_size": 128, "conv_kernel": 4}  # fmt: skip
    assert shapes(StateShape("mamba2", mamba2)) == ((3, 10240), (128, 64, 128))
    assert shapes(StateShape("mamba2", mamba2), tp=16, drafts=2) == ((5, 768), (8, 64, 128))
    inner = {"intermediate_size": 64, "state_size": 16, "conv_kernel": 4}
    assert shapes(StateShape("mamba1", inner), tp=2, drafts=3) == ((3, 32), (32, 16))
    assert shapes(StateShape("short_conv", inner), tp=2, drafts=3) == ((6, 32),)
    linear = {"num_heads": 5, "head_dim": 8}
    assert shapes(StateShape("linear_attention", linear), tp=2) == ((2, 8, 8),)
    gdn = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 64,
           "conv_kernel": 4}  # fmt: skip
    assert shapes(StateShape("gdn", gdn), tp=2, drafts=1) == ((4, 3072), (16, 64, 128))
    kda = {"num_heads": 8, "head_dim": 16, "conv_kernel": 4}
    assert shapes(StateShape("kda", kda), tp=2) == ((3, 192), (4, 16, 16))
    more = {**kda, "num_k_heads": 4, "head_k_dim": 8}
    assert shapes(StateShape("kda", more), tp=2) == ((3, 96), (4, 16, 16))


def test_groups_are_extended_or_reduced_to_the_ranks():
    assert [extended_groups(g, tp) for g, tp in ((8, 4), (1, 4), (3, 2), (8, 16))] == [8, 4, 2, 16]


def test_dtypes_follow_the_family():
    kda, lfm = load("kimi-k3"), load("lfm2-1.2b")
    assert layer_state(kda).dtypes == ("bfloat16", "float32")
    assert layer_state(kda, ssm_dtype="bfloat16").dtypes == ("bfloat16", "bfloat16")
    assert layer_state(kda, ssm_dtype="bfloat16", version="0.28").dtypes[1] == "float32"
    with pytest.raises(GeometryError, match="KDA allows"):
        layer_state(kda, ssm_dtype="float16")
    assert layer_state(lfm, ssm_dtype="float32").dtypes == ("bfloat16",)
    assert layer_state(load("qwen3-next-80b-a3b")).dtypes[1] == "bfloat16"
    assert layer_state(load("qwen3.5-9b")).dtypes[1] == "float32"


def test_a_case_without_a_pool_gets_its_memory():
    assert geometry_of_case({"block_size": 16, "num_blocks": 7}, "0.33.0").num_blocks == 7
    assert geometry_of_case({"block_size": 16, "memory_bytes": 5120}, "0.33.0").num_blocks == 10
