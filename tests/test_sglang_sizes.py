"""SGLang's pools from memory, its strategies by architecture, and what ``plan`` says of both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli_plan import app
from sim.models import load, names
from sim.parity_geometry import compare_file, compare_sglang
from sim.sglang.options import SglangOptions
from sim.sglang.plan import ENGINES, SglangServing, sglang_plan
from sim.sglang.sizes import Slot, Split, pools_of, running_wanted, slot_of
from sim.sglang.strategy import (
    _architectures,
    resolve,
    supports_extra_buffer,
    supports_hybrid_cache,
)
from sim.state_shapes import GeometryError

ROWS = Path(__file__).parents[2] / "shared" / "golden" / "geometry" / "golden_geometry.json"
GOLDEN = Path(__file__).parent / "golden" / "geometry"
GIB = 1 << 30
NEMOTRON = load("nemotron-h-8b")
PLAIN = SglangServing(memory_bytes=40 * GIB)
# 1,000 bytes: conv 100, 225 float32; 425 as int8: conv 100, 225 values, 25 scales of 4.
SLOT = Slot(1, ((50,),), (5, 9, 5), "bfloat16", "float32")


def test_every_recorded_sglang_row_agrees_in_every_field():
    results = compare_file(GOLDEN / "sglang_rows.json.gz")
    assert len(results) == 240
    assert [r for r in results if r.difference] == []


@pytest.mark.skipif(not ROWS.exists(), reason="the recorded files are not here")
def test_the_file_of_recorded_rows_agrees():
    rows = json.loads(ROWS.read_text())["sglang"]
    assert len(rows) >= 240
    assert [r for r in map(compare_sglang, rows) if r.difference] == []


def test_a_wrong_row_is_named():
    row = {"model": "nemotron-h-8b", "sglang": "0.5.23", "tp": 1, "ssm": "float32",
           "default": True, "conv": [[10240, 3]], "temporal": [128, 64, 128],
           "slot_bytes": 102_137_856, "grid_page1": 256, "grid_page64": 256}  # fmt: skip
    assert compare_sglang(row).difference is None
    for field, wrong in (("slot_bytes", 1), ("grid_page64", None), ("temporal", [1]), ("new", 2)):
        assert field in compare_sglang({**row, field: wrong}).difference


# ------------------------------------------------------------------------------- pools
def test_slots_solve_sglangs_own_equation():
    """K is the most for which K + 1 slots fit in rest * r / (1 + r); KV gets the rest."""
    for memory in (40_000, 123_457, 1_000_003):
        for ratio in (0.1, 0.9, 3.0):
            p = pools_of(memory, SLOT, 7, Split(ratio=ratio, inside=False))
            share = memory * ratio / (1 + ratio)
            assert (p.mamba_slots + 1) * 1000 <= share < (p.mamba_slots + 2) * 1000
            assert p.kv_tokens == (memory - (p.mamba_slots + 1) * 1000) // 7


def test_nemotron_h_8b_in_40_gib():
    slot = slot_of(NEMOTRON)
    own = pools_of(40 * GIB, slot, 16_384, Split(inside=False))
    assert (own.mamba_slots, own.kv_tokens) == (198, 1_380_874)
    assert own.total_bytes == 40 * GIB + 16_384, "SGLang's padding page lies beyond its budget"
    fair = pools_of(40 * GIB, slot, 16_384, Split())
    assert (fair.mamba_slots, fair.kv_tokens, fair.total_bytes) == (198, 1_380_873, 40 * GIB)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("int8", [False, True])
def test_total_bytes_count_all_padding_and_never_exceed_the_memory(page, int8):
    p = pools_of(200_000, SLOT, 7, Split(page_size=page, int8=int8))
    assert p.kv_tokens % page == 0
    assert p.state_pool_bytes == (p.mamba_slots + 1) * 1000
    assert p.int8_pool_bytes == ((p.int8_slots + 1) * SLOT.int8_bytes if int8 else 0)
    assert p.kv_pool_bytes == (p.kv_tokens + page) * 7
    assert p.total_bytes <= 200_000 < p.total_bytes + page * 7


def test_the_int8_pool_inside_and_outside():
    inside = pools_of(200_000, SLOT, 7, Split(int8=True))
    outside = pools_of(200_000, SLOT, 7, Split(int8=True, inside=False))
    none = pools_of(200_000, SLOT, 7, Split(inside=False))
    assert (outside.mamba_slots, outside.kv_tokens) == (none.mamba_slots, none.kv_tokens)
    assert outside.int8_slots == 2 * none.mamba_slots
    assert outside.int8_outside_bytes == outside.int8_pool_bytes > 0
    assert outside.total_bytes > 200_000 >= inside.total_bytes
    assert inside.int8_outside_bytes == 0 and inside.mamba_slots < none.mamba_slots
    given = pools_of(200_000, SLOT, 7, Split(int8=True, int8_slots=10))
    assert given.int8_slots == 10 and given.mamba_slots > inside.mamba_slots


def test_explicit_sizes_go_before_the_ratio():
    assert pools_of(200_000, SLOT, 7, Split(max_mamba_cache_size=12)).mamba_slots == 12
    assert pools_of(200_000, SLOT, 7, Split(running_without_cache=5)).mamba_slots == 5


def test_what_runs_at_once_follows_the_kv_pool():
    assert running_wanted(1_000_000, 8192) == 4096
    assert running_wanted(100_000, 131_072) == 2048
    assert running_wanted(1_000, 8192) == 500
    assert running_wanted(1_000_000, 8192, 17) == 17
    assert running_wanted(20, 8192, 17) == 10


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(ratio=0.0), "above 0"),
        (Split(page_size=0), "nearest is 1"),
        (Split(max_mamba_cache_size=500), "lower mamba_full_memory_ratio"),
        (Split(max_mamba_cache_size=0), "nearest is 1"),
    ],
)
def test_impossible_pools_are_refused(split, words):
    with pytest.raises(GeometryError, match=words):
        pools_of(200_000, SLOT, 7, split)


def test_the_least_memory_that_is_named_works():
    with pytest.raises(GeometryError) as error:
        pools_of(3_000, SLOT, 7, Split())
    least = int(str(error.value).split()[-1])
    assert pools_of(least, SLOT, 7, Split()).mamba_slots == 1
    with pytest.raises(GeometryError):
        pools_of(least - 10, SLOT, 7, Split())


# -------------------------------------------------------------------------- strategies
@pytest.mark.parametrize(("version", "radix", "extra"), [("0.5.23", 25, 22), ("0.5.18", 17, 12)])
def test_counts_of_architectures(version, radix, extra):
    known = _architectures()[version]
    # Granite stands beside the list: it is in only if a layer of it is a Mamba layer.
    assert len(set(known["radix"]) - {"GraniteMoeHybridForCausalLM"}) == radix
    assert len(set(known["extra_buffer"])) == extra


@pytest.mark.parametrize(
    ("version", "architecture", "page", "overlap", "strategy"),
    [
        ("0.5.23", "NemotronHForCausalLM", 1, True, "extra_buffer"),
        ("0.5.23", "NemotronHForCausalLM", 16, False, "extra_buffer"),
        ("0.5.23", "NemotronHForCausalLM", 1, False, "no_buffer"),
        ("0.5.23", "Lfm2ForCausalLM", 1, True, "no_buffer"),
        ("0.5.23", "Qwen3_5ForCausalLM", 1, True, "extra_buffer"),
        ("0.5.18", "KimiK3ForConditionalGeneration", 1, True, "extra_buffer"),
        ("0.5.18", "ZayaForCausalLM", 1, True, "no_buffer"),
    ],
)
def test_what_auto_becomes(version, architecture, page, overlap, strategy):
    found = resolve(version, architecture, "auto", page, overlap)
    assert found.name == strategy
    assert found.overlap == (overlap and strategy != "no_buffer")


def test_strategies_that_do_not_start_are_refused():
    with pytest.raises(ValueError, match="nearest valid choice is no_buffer"):
        resolve("0.5.23", "Lfm2ForCausalLM", "extra_buffer", 1, True)
    with pytest.raises(ValueError, match="no cache of KV and states for JambaForCausalLM"):
        resolve("0.5.23", "JambaForCausalLM", "auto", 1, True)
    with pytest.raises(ValueError, match="no cache of KV and states"):
        resolve("0.5.18", "Glm5NextForConditionalGeneration", "auto", 1, True)
    with pytest.raises(ValueError, match="nearest is extra_buffer"):
        resolve("0.5.23", "NemotronHForCausalLM", "extra_bufer", 1, True)


@pytest.mark.parametrize(
    ("options", "tracking", "ratio"),
    [
        ({}, 2, 5),
        ({"overlap": False}, 1, 4),
        ({"strategy": "extra_buffer_lazy"}, 1, 4),
        ({"strategy": "no_buffer"}, 0, 3),
        ({"skip_decode_lock": True}, 2, 4),
        ({"strategy": "no_buffer", "skip_decode_lock": True}, 0, 3),
        ({"radix_cache": False}, 0, 1),
    ],
)
def test_slots_for_one_request(options, tracking, ratio):
    o = SglangOptions(mamba_slots=60, max_running=1000, **options)
    assert (o.tracking_slots, o.ratio, o.running_limit) == (tracking, ratio, 60 // ratio)


def test_grids():
    both = {v: SglangOptions(version=v, mamba_chunk=96, page_size=32) for v in ENGINES.values()}
    assert {o.grid for o in both.values()} == {96}
    assert both["0.5.23"].track_grid == 768 and both["0.5.18"].track_grid == 256
    assert SglangOptions(mamba_chunk=16, page_size=64).grid == 64


# -------------------------------------------------------------------------------- plan
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", names())
def test_every_preset_has_a_plan_or_a_reason(engine, name):
    model, serving = load(name), SglangServing(engine=engine)
    if model.count("M") and supports_hybrid_cache(serving.version, model.architecture):
        p = sglang_plan(model, serving)
        extra = supports_extra_buffer(serving.version, model.architecture)
        assert p.strategy.name == ("extra_buffer" if extra else "no_buffer")
        assert p.pools.total_bytes <= p.pools.memory_bytes
        assert p.pools.max_running <= p.pools.mamba_slots // p.pools.slots_per_request
    else:
        with pytest.raises(ValueError, match=r"no recurrent layers|no cache of KV and states"):
            sglang_plan(model, serving)


def test_plan_of_nemotron_h_8b():
    p = sglang_plan(NEMOTRON, PLAIN)
    assert (p.slot.bytes, p.slot.int8_bytes, p.kv_bytes_per_token) == (
        102_137_856, 28_213_248, 16_384,
    )  # fmt: skip
    assert (p.grid.grid, p.grid.track_grid) == (256, 256)
    assert (p.pools.mamba_slots, p.pools.max_running) == (198, 39)
    assert p.pools.cached_states_full_load == 198 - 39 * 3
    assert p.other.mamba_slots == 127 and p.other.int8_slots == 254
    assert p.other.total_bytes <= 40 * GIB
    back = sglang_plan(NEMOTRON, replace(PLAIN, int8=True))
    assert (back.pools, back.other) == (p.other, p.pools)


def test_radix_cache_off_holds_one_slot_a_request():
    p = sglang_plan(NEMOTRON, replace(PLAIN, radix_cache=False, max_running=40))
    assert (p.pools.mamba_slots, p.pools.max_running, p.pools.cached_states_idle) == (40, 40, 0)
    assert p.other is None and p.grid.grid is None and p.strategy.overlap


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("nemotron-h-8b", {}, "39 requests can run at once, not 4,096"),
        ("lfm2-1.2b", {}, "turns overlap scheduling off"),
        ("lfm2-1.2b", {}, "no state at a branch point"),
        ("lfm2-1.2b", {"int8": True}, "save nothing"),
        ("nemotron-h-8b", {"chunked_prefill_size": 128}, "leave no state"),
        ("nemotron-h-8b", {"chunked_prefill_size": 1000}, "leave the grid"),
        ("nemotron-h-8b", {"max_model_len": 200}, "no prefix can be reused"),
        ("nemotron-h-8b", {"track_interval": 384}, "every 768 tokens, not every 384"),
        ("nemotron-h-8b", {"engine": "sglang-0.5.18", "track_interval": 384}, "off the grid"),
        ("nemotron-h-8b", {"int8": True, "int8_outside": True}, "beside the memory given"),
        ("nemotron-h-8b", {"max_model_len": 2_000_000}, "fewer than the 2,000,000"),
        ("nemotron-h-8b", {"int8": True, "int8_slots": 4}, "fewer than one a request"),
    ],
)  # fmt: skip
def test_warnings(name, change, words):
    assert any(words in w for w in sglang_plan(load(name), replace(PLAIN, **change)).warnings)


def test_no_needless_warnings():
    quiet = replace(PLAIN, max_running=8, max_model_len=4096)
    assert sglang_plan(load("qwen3.5-9b"), quiet).warnings == ()


def test_a_track_interval_below_the_chunk_is_refused_for_mamba_2():
    with pytest.raises(GeometryError, match="nearest valid choice is 256"):
        sglang_plan(NEMOTRON, replace(PLAIN, track_interval=128))
    assert sglang_plan(load("qwen3.5-9b"), replace(PLAIN, track_interval=32)).grid.grid == 64


# ----------------------------------------------------------------------------- command
def told(*args):
    return CliRunner().invoke(app, list(args))


def test_the_command_prints_both_versions():
    for engine in ENGINES:
        out = told("nemotron-h-8b", "--engine", engine, "--memory", "40GiB")
        assert out.exit_code == 0
        for words in ("102,137,856 B", "28,213,248 B", "198 and a padding slot", "39 of 4,096",
                      "127 and 254 int8", "extra_buffer"):  # fmt: skip
            assert words in out.output


def test_the_commands_json_is_the_plan():
    out = told("qwen3.5-4b", "--engine", "sglang-0.5.23", "--page-size", "16", "--int8", "--json")
    data = json.loads(out.output)
    assert data["serving"]["page_size"] == 16 and data["pools"]["int8_slots"] > 0
    assert data["grid"] == {"model_chunk": 64, "grid": 64, "track_grid": 256}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--mode", "all"), "--mode is not a flag of sglang-0.5.23"),
        (("--page-size", "48"), "nearest is 32"),
        (("--max-mamba-cache-size", "4"), "one request needs 5"),
        (("--strategy", "no_buffer", "--page-size", "16"), "nearest valid choice is extra_buffer"),
        (("--strategy", "extra_buffer_lazy", "--no-overlap"), "needs overlap"),
        (("--memory", "300MB"), "the least that works"),
    ],
)
def test_the_command_refuses_what_the_engine_refuses(args, words):
    out = told("nemotron-h-8b", "--engine", "sglang-0.5.23", *args)
    assert out.exit_code == 2 and words in " ".join(out.output.split())


def test_sglangs_flags_are_refused_on_vllm():
    out = told("nemotron-h-8b", "--int8")
    assert out.exit_code == 2 and "--int8 is not a flag of vllm-0.33" in out.output
