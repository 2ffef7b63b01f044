"""The plan's figures (the design's table), its warnings, and the command."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from experiments.cli_plan import app, memory_bytes
from sim.crossover import allocated_tokens
from sim.models import load
from sim.plan import plan
from sim.state_shapes import GeometryError
from sim.vllm.geometry import GeometrySpec, geometry
from sim.vllm.model_geometry import Serving

GIB = 1 << 30
NEMOTRON = load("nemotron-h-8b")
LONG = Serving(max_model_len=131_072)
ALL = replace(LONG, engine="vllm-0.28", mode="all")


def test_state_and_kv_bytes():
    p = plan(NEMOTRON, LONG)
    assert p.state.bytes_per_layer == 4_255_744
    assert p.state.total_bytes == 102_137_856
    assert round(p.state.total_bytes / 2**20, 1) == 97.4
    conv, recurrent = p.state.tensor_bytes
    assert round(100 * conv / (conv + recurrent), 1) == 1.4
    assert p.kv.bytes_per_token == 16_384
    assert plan(load("llama-3-8b"), LONG).kv.bytes_per_token == 131_072


def test_crossover_with_llama():
    full = plan(NEMOTRON, LONG).crossover
    half = plan(NEMOTRON, replace(LONG, ssm_dtype="bfloat16")).crossover
    assert (full.state_exact, half.state_exact) == (779.25, 395.25)
    assert (full.state_tokens, half.state_tokens) == (780, 396)
    assert round(full.total_exact, 1) == 890.6
    assert (full.total_tokens, full.allocated_tokens) == (891, 912)


def test_a_long_request_against_llama():
    r = plan(NEMOTRON, LONG).request
    assert r.reference_bytes == 16 * GIB
    assert round(r.bytes / GIB, 3) == 2.095
    assert round(r.ratio, 2) == 7.64


def test_states_of_256_requests():
    assert round(plan(NEMOTRON, LONG).states_of_all_bytes / GIB, 2) == 24.35


def test_block_page_padding():
    align, every = plan(NEMOTRON, LONG), plan(NEMOTRON, ALL)
    assert (align.geometry.block_tokens, align.geometry.page_bytes) == (1040, 4_259_840)
    assert align.state.padding_percent == 0.10
    assert (every.geometry.block_tokens, every.geometry.page_bytes) == (1280, 5_242_880)
    assert every.state.padding_percent == 23.20


def test_state_blocks_of_one_long_request_in_all():
    r = plan(NEMOTRON, ALL).request
    assert r.state_blocks == 103
    assert round(r.state_blocks_bytes / GIB, 1) == 9.8
    assert round(r.state_blocks_padded_bytes / GIB, 2) == 12.07


def test_pool():
    p = plan(NEMOTRON, replace(LONG, memory_bytes=40 * GIB)).pool
    assert (p.num_blocks, p.usable_blocks) == (2520, 2519)
    assert (p.shortest_blocks, p.shortest_tokens) == (7, 7280)
    # 127 blocks of KV and three states in each of six groups.
    assert p.longest_blocks == 145
    assert p.states == 2519 // 6
    assert p.memory_bytes == p.num_blocks * 17_039_360 + p.unused_bytes


def test_the_reason_leads_to_the_block():
    assert "1,039 tokens" in plan(NEMOTRON, LONG).block_reason
    assert "multiple of 256" in plan(NEMOTRON, ALL).block_reason
    assert "scan's chunk 256" in plan(NEMOTRON, ALL).block_reason
    assert "128 of latent" in plan(load("kimi-k3"), Serving()).block_reason
    assert "no states" in plan(load("llama-3-8b"), Serving()).block_reason
    codestral = replace(LONG, memory_bytes=200 * GIB)
    assert "no attention page" in plan(load("mamba-codestral-7b"), codestral).block_reason


def warned(model, serving, words, **kw):
    return any(words in text for text in plan(load(model), serving, **kw).warnings)


def test_warns_of_a_block_longer_than_any_request():
    assert warned("nemotron-h-8b", Serving(max_model_len=1000), "no prefix can ever be reused")
    assert not warned("nemotron-h-8b", Serving(max_model_len=1040), "no prefix")
    assert warned("nemotron-h-8b", Serving(mode="none", max_model_len=1000), "a whole block")


def test_warns_of_fewer_states_than_requests():
    small = Serving(num_blocks=600)
    assert warned("nemotron-h-8b", small, "99 requests, fewer than max-num-seqs 256")
    assert not warned("nemotron-h-8b", small, "fewer than max-num-seqs", max_num_seqs=99)


def test_all_goes_back_to_align_where_it_is_not_declared():
    old = Serving(engine="vllm-0.28", mode="all")
    for name in ("qwen3.5-4b", "kimi-k3", "lfm2-1.2b", "bamba-9b", "ring-mini-linear-2.0"):
        assert warned(name, old, "goes back to align")
        assert plan(load(name), old).mode == "align"
    for name in ("nemotron-h-8b", "falcon-h1-0.5b", "granite-4.0-h-tiny", "jamba-reasoning-3b",
                 "zamba2-7b"):  # fmt: skip
        assert plan(load(name), old).mode == "all"


def test_warns_of_uncertain_fields_and_of_lengths_beyond_the_checkpoint():
    assert warned("nemotron-h-8b", LONG, "beyond the 8,192")
    assert warned("nemotron-h-8b", LONG, "chunk size")
    assert plan(load("qwen3.5-9b"), Serving()).warnings == ()


def test_a_pool_too_small_for_one_request_is_refused():
    small = replace(LONG, memory_bytes=GIB)
    with pytest.raises(GeometryError, match=r"needs 145 blocks .* that fits is 45760"):
        plan(NEMOTRON, small)
    plan(NEMOTRON, replace(small, max_model_len=45_760))
    with pytest.raises(GeometryError, match="that fits is 45760"):
        plan(NEMOTRON, replace(small, max_model_len=45_761))


def test_an_assumed_pool_only_warns():
    assert warned("minimax-text-01", Serving(), "would not start")


@pytest.mark.parametrize("pattern", ["M*", "MM*", "MMM**", "M***", "MMMM***"])
@pytest.mark.parametrize("reference", [40, 100, 1000])
def test_allocated_crossover_is_the_first_that_costs_no_more(pattern, reference):
    from sim.state_shapes import LayerState

    state = LayerState(((1500,),), ("bfloat16",))
    g = geometry(GeometrySpec("0.33", "align", pattern, token_bytes=24, state=state))
    kinds = [x.kind for x in g.groups]

    def cost(tokens):
        blocks = kinds.count("attention") * -(-tokens // g.block_tokens) + kinds.count("mamba")
        return blocks * g.bytes_per_block

    first = next((t for t in range(16, 40_000, 16) if cost(t) <= reference * t), None)
    assert allocated_tokens(g, reference) == first


# ------------------------------------------------------------------ the command
def run(*args):
    return CliRunner().invoke(app, list(args))


def test_command_shows_every_topic():
    text = run("nemotron-h-8b", "--max-model-len", "131072", "--memory", "40GiB").stdout
    for words in ("4,255,744 B", "1,040 tokens", "0.10 %", "2,520", "779.25", "890.6", "912 tokens",
                  "0, 13, 26, 39", "145 blocks", "7.64", "warning:"):  # fmt: skip
        assert words in text
    assert "assumed" not in text


def test_command_shows_the_state_blocks_of_all():
    out = run(
        "nemotron-h-8b", "--engine", "vllm-0.28", "--mode", "all", "--max-model-len", "131072"
    )
    text = " ".join(out.stdout.split())
    assert "103: 10,520,199,168 B (9.80 GiB) unpadded, 12,960,399,360 B (12.07 GiB) padded" in text


def test_command_writes_json():
    data = json.loads(run("tiny", "--json").stdout)
    assert data["geometry"]["block_tokens"] % 16 == 0
    assert data["state"]["total_bytes"] == 686_080
    assert data["model"]["name"] == "tiny"


def test_command_lists_models():
    assert "llama-3-8b\n" in run("--list").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nemotron-h8b"], "nearest are nemotron-h-8b"),
        (["nemotron-h-8b", "--tp", "3"], "does not divide over tensor parallelism 3"),
        (["nemotron-h-8b", "--ssm-dtype", "fp32"], "nearest is float32"),
        (["nemotron-h-8b", "--kv-dtype", "int3"], "allowed are auto, bfloat16"),
        (["nemotron-h-8b", "--mode", "all"], "allowed: none, align"),
        (["nemotron-h-8b", "--engine", "vllm-0.3"], "allowed are vllm-0.33, vllm-0.28"),
        (["nemotron-h-8b", "--memory", "lots"], "such as 40GiB"),
        (["nemotron-h-8b", "--memory", "0"], "above 0"),
        (["nemotron-h-8b", "--memory", "100MiB"], "pool too small"),
        (["nemotron-h-8b", "--max-num-seqs", "0"], "from 1 up"),
        (["lfm2-1.2b", "--export-states"], "cannot export states"),
        ([], "which model"),
    ],
)
def test_command_refuses_in_one_line(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_memory_sizes():
    assert memory_bytes("40GiB") == memory_bytes("40 gib") == 40 * GIB
    assert memory_bytes("1.5GB") == 1_500_000_000
    assert memory_bytes("123") == 123
