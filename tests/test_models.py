"""Presets, preset files and checkpoints' configurations."""

import json
from pathlib import Path

import pytest

from sim.models import UnknownModel, from_yaml, load, names

SHARED = Path(__file__).parent.parent.parent / "shared" / "golden" / "geometry" / "models.json"

# What a released Nemotron-H configuration holds, as far as it is read.
CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 256,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
PRESET = """
name: mine
pattern: "M*-"
hidden_size: 64
vocab_size: 100
max_model_len: 512
attention: {kind: gqa, num_query_heads: 2, num_kv_heads: 1, head_dim: 32}
state: {family: short_conv, intermediate_size: 64, conv_kernel: 3}
ffn: {kind: dense, intermediate: 128, matrices: 3}
"""


def written(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_every_preset_loads_and_says_where_it_is_from():
    assert len(names()) == 46
    for name in names():
        model = load(name)
        assert model.name == name
        assert model.source
        assert model.certain or model.uncertain, name
        assert model.attention is None or model.attention.num_query_heads > 0


@pytest.mark.skipif(not SHARED.exists(), reason="the list of released models is not here")
def test_presets_hold_the_facts_of_the_released_models():
    for row in json.loads(SHARED.read_text())["models"]:
        model, ffn, attention = load(row["id"]), row["ffn"] or {}, row["attention"] or {}
        assert model.pattern == row["layer_pattern"]
        assert model.hidden_size == row["hidden_size"]
        assert model.vocab_size == (row["vocab_size"] or 0)
        assert {c: model.count(c) for c in row["layers"]} == row["layers"]
        assert model.certain == row["certain"]
        assert model.ffn_intermediate == ffn.get("intermediate", 0)
        assert (model.moe.experts if model.moe else 0) == ffn.get("experts", 0)
        if model.attention is not None:
            assert model.attention.num_kv_heads == attention["num_kv_heads"]
            assert model.attention.head_dim == attention["head_dim"]
        if model.state is not None:
            facts = {k: v for k, v in row["state"].items() if k != "type" and v is not None}
            assert (model.state.family, model.state.args) == (row["state"]["type"], facts)


def test_full_configurations_of_the_small_models():
    tiny, nano = load("tiny"), load("nano")
    assert (tiny.pattern, nano.pattern) == ("M-M-M*-M-M-", "M-M*-")
    assert (tiny.vocab_size, nano.vocab_size) == (2048, 512)
    assert (tiny.ffn_intermediate, nano.ffn_intermediate) == (512, 256)
    assert tiny.state.args["state_size"] == 128 and nano.state.args["state_size"] == 32
    assert tiny.dtype == tiny.conv_dtype == tiny.ssm_dtype == "float32"


def test_unknown_model_names_the_nearest():
    with pytest.raises(UnknownModel, match=r"nearest are qwen3\.5-27b"):
        load("qwen3.5-28b")
    with pytest.raises(UnknownModel, match="known are bamba-9b"):
        load("???")


def test_config_json_is_read(tmp_path):
    read, preset = load(str(written(tmp_path, CONFIG))), load("nemotron-h-8b")
    for field in ("pattern", "hidden_size", "vocab_size", "max_model_len", "attention", "state",
                  "ffn_intermediate", "ffn_matrices", "dtype", "ssm_dtype"):  # fmt: skip
        assert getattr(read, field) == getattr(preset, field), field
    assert load(str(tmp_path)) == read


def test_config_json_of_a_mixture_of_experts(tmp_path):
    moe = {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "hybrid_override_pattern": None,
        "num_hidden_layers": 4,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "mamba_ssm_cache_dtype": "bfloat16",
    }
    model = load(str(written(tmp_path, CONFIG | moe)))
    assert (model.pattern, model.ffn_intermediate) == ("ME*E", 0)
    assert (model.moe.experts, model.moe.shared_intermediate) == (128, 3712)
    assert model.ssm_dtype == "bfloat16"
    assert load(str(written(tmp_path, {"text_config": CONFIG | moe}))).pattern == "ME*E"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "only NemotronHForCausalLM"),
        ({"mamba_num_heads": None}, "mamba_num_heads is missing"),
        ({"n_groups": "8"}, "n_groups is '8', must be a whole number"),
        ({"conv_kernel": -4}, "conv_kernel is -4"),
        ({"num_hidden_layers": 51}, "num_hidden_layers is 51"),
        ({"hybrid_override_pattern": 7}, "must be text"),
        ({"hybrid_override_pattern": "MX" * 26}, "allowed letters"),
        ({"layers_block_type": ["mamba", "rnn"]}, "layers_block_type 'rnn'"),
        ({"torch_dtype": "int3"}, "dtype 'int3'"),
        ({"mamba_ssm_cache_dtype": "fp32"}, "nearest is float32"),
    ],
)
def test_a_bad_config_json_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        load(str(written(tmp_path, CONFIG | change)))


def test_a_broken_config_json_is_refused_with_its_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n"a": ')
    with pytest.raises(ValueError, match=r"config.json:2: not JSON"):
        load(str(path))
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="not UTF-8 at byte 0"):
        load(str(path))
    path.write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        load(str(path))


def test_a_preset_file_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(PRESET)
    model = load(str(path))
    assert (model.name, model.state.family, model.ffn_matrices) == ("mine", "short_conv", 3)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden_size: 64", "hiden_size: 64", "nearest is hidden_size"),
        ("hidden_size: 64", "", "hidden_size"),
        ("hidden_size: 64", "hidden_size: wide", "must be a whole number from 1 up"),
        ("num_kv_heads", "kv_heads", "nearest is num_kv_heads"),
        ("conv_kernel: 3", "conv_kernel: x", "state conv_kernel is 'x'"),
        ("kind: gqa", "kind: mha", "allowed are gqa, mla"),
        ('"M*-"', '"M-"', "pattern and attention"),
        ('"M*-"', '"M*?"', "allowed letters"),
        ("matrices: 3", "matrix: 3", "nearest is matrices"),
        ("name: mine", "name: [", ":4: not YAML"),
    ],
)
def test_a_bad_preset_is_refused(old, new, words):
    with pytest.raises(ValueError, match=words) as error:
        from_yaml(PRESET.replace(old, new), "mine.yaml")
    assert str(error.value).startswith("mine.yaml")
