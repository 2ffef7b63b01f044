"""The generator of random SGLang cases: repeatable, legal, and covering what it says it covers."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from fuzz_requests import total  # noqa: E402
from fuzz_sglang import MODES, VERSIONS, random_case, slots_per_request  # noqa: E402
from parity_sources import sglang_sources  # noqa: E402

KINDS = [(version, mode) for version in VERSIONS for mode in MODES]
ONLY_UNIFIED = {"max_states_per_path", "skip_decode_lock"}


def cases(version, mode, count=150):
    return [random_case(seed, version, mode) for seed in range(count)]


def configs(version):
    return [c["config"] for mode in MODES for c in cases(version, mode)]


def values(version, key):
    return {config.get(key) for config in configs(version)}


@pytest.mark.parametrize(("version", "mode"), KINDS)
def test_a_seed_is_a_case(version, mode):
    assert cases(version, mode, 20) == cases(version, mode, 20)
    assert random_case(0, version, mode)["config"] != random_case(1, version, mode)["config"]


def test_versions_and_modes_draw_apart():
    drawn = [random_case(5, version, mode)["requests"] for version, mode in KINDS]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


@pytest.mark.parametrize("version", VERSIONS)
def test_configurations_are_ones_that_sglang_starts_with(version):
    for config in configs(version):
        page, chunk = config["page_size"], config["mamba_chunk"]
        if config["strategy"] == "no_buffer":
            assert page == 1 and not config["overlap"]
        if config["strategy"] == "extra_buffer_lazy":
            assert config["overlap"]
        assert max(page, chunk) % min(page, chunk) == 0
        assert config["track_interval"] % page == 0
        assert (config["chunked_prefill_size"] or 0) % page == 0
        assert config["kv_tokens"] % page == 0
        assert config["mamba_slots"] >= slots_per_request(config)


def test_each_version_has_only_its_own_keys():
    for config in configs("0.5.23"):
        assert config.keys() >= ONLY_UNIFIED and "tree" not in config
    for config in configs("0.5.18"):
        assert "waiting_refresh" not in config
        assert bool(ONLY_UNIFIED & config.keys()) == (config["tree"] == "unified")


@pytest.mark.parametrize(
    ("strategy", "overlap", "skips", "ratio"),
    [
        ("no_buffer", False, False, 3),
        ("no_buffer", False, True, 3),
        ("extra_buffer", True, False, 5),
        ("extra_buffer", False, False, 4),
        ("extra_buffer", True, True, 4),
        ("extra_buffer_lazy", True, False, 4),
        ("extra_buffer_lazy", True, True, 3),
    ],
)
def test_slots_per_request(strategy, overlap, skips, ratio):
    config = {"strategy": strategy, "overlap": overlap, "skip_decode_lock": skips}
    assert slots_per_request(config) == ratio


@pytest.mark.parametrize("version", VERSIONS)
def test_every_axis_is_drawn(version):
    assert values(version, "strategy") == {"no_buffer", "extra_buffer", "extra_buffer_lazy"}
    assert values(version, "page_size") >= {1, 16, 32, 64}
    assert values(version, "mamba_chunk") >= {64, 96, 128, 256}
    assert values(version, "policy") == {"fcfs", "lpm", "dfs-weight"}
    assert values(version, "overlap") == {True, False}
    assert {True, None} <= values(version, "int8") and None in values(version, "int8_slots")
    assert {-1, 1, 2, 3, 4} <= values(version, "max_states_per_path")
    assert {True, False} <= values(version, "skip_decode_lock")
    sizes = values(version, "chunked_prefill_size")
    assert None in sizes and any(s and s % 64 for s in sizes)
    if version == "0.5.23":
        assert values(version, "waiting_refresh") == {True, False}
    else:
        assert values(version, "tree") == {"mamba", "unified"}


@pytest.mark.parametrize(("version", "mode"), KINDS)
def test_requests_fit_the_context_and_arrive_in_order(version, mode):
    for case in cases(version, mode):
        requests = case["requests"]
        assert len({r["id"] for r in requests}) == len(requests) >= 3
        for r in requests:
            assert total(r["prompt"]) >= 1 and total(r["output"]) >= 1
            assert total(r["prompt"]) + total(r["output"]) < case["config"]["context_len"]
        if mode == "concurrent":
            arrivals = [r["at"] for r in requests]
            assert arrivals == sorted(arrivals)
        else:
            assert all("at" not in r for r in requests)


def test_prompts_share_repeat_and_continue():
    shared = repeated = continued = one_token = short = 0
    for case in cases("0.5.23", "serial", 60):
        requests = case["requests"]
        for i, r in enumerate(requests):
            earlier = requests[:i]
            shared += any(r["prompt"][0][0] == e["prompt"][0][0] for e in earlier)
            repeated += any(r["prompt"] == e["prompt"] for e in earlier)
            outputs = {run[0] for e in earlier for run in e["output"]}
            continued += bool(outputs & {run[0] for run in r["prompt"]})
            one_token += total(r["output"]) == 1
            short += total(r["prompt"]) <= 10
    assert min(shared, repeated, continued, one_token, short) >= 20


def test_outputs_pass_the_positions_of_decode_states():
    passed = 0
    for config, requests in (
        (c["config"], c["requests"]) for c in cases("0.5.23", "serial") if c["requests"]
    ):
        grid = math.lcm(max(config["mamba_chunk"], config["page_size"]), config["page_size"])
        step = math.lcm(grid, config["track_interval"])
        for r in requests:
            prompt = total(r["prompt"])
            passed += (prompt + total(r["output"])) // step > prompt // step
    assert passed >= 100


def test_a_wheel_is_paired_with_the_driver_of_its_version(tmp_path):
    wheel = tmp_path / "wheel"
    (wheel / "sglang-0.5.18.dist-info").mkdir(parents=True)
    args = SimpleNamespace(
        sglang_wheel_dir=[str(wheel)], sglang_drivers="drivers", sglang_python="python"
    )
    (source,) = sglang_sources(args)
    assert source.version == "0.5.18"
    assert source.driver == "drivers/sglang-0.5.18/oracle_sglang.py"
    command = source.command("concurrent", 7, 3)
    assert command[-4:] == ["--version", "0.5.18", "--mode", "concurrent"]
    assert source.environment()["SGLANG_WHEEL_DIR"] == str(wheel)
