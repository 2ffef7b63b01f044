"""The contract that every policy file keeps, and the example of CONTRIBUTING.md."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from sim import policies
from sim.loop import serial
from sim.policy import Limits, Prefill, State, View
from sim.pool.engine import PoolEngine
from sim.records import Records
from sim.sglang.engine import SglangEngine
from sim.sglang.options import SglangOptions
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests

ENGINES = ("vllm-0.33", "vllm-0.28", "sglang-0.5.23", "sglang-0.5.18", "pool")
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def trace(shared=70, own=(5, 9, 30, 1), output=4):
    """Requests that share ``shared`` tokens."""
    return from_requests(
        Request(str(i), (Run(0, shared), Run((i + 1) << 32, n)), output) for i, n in enumerate(own)
    )


def engine(policy, version="vllm-0.33", rows=None):
    rows = rows or trace()
    if version.startswith("sglang"):
        options = SglangOptions(version=version.removeprefix("sglang-"), mamba_chunk=16)
        return SglangEngine(rows, identify(rows), policy, options)
    if version == "pool":
        return PoolEngine(rows, identify(rows), policy, VllmOptions(async_scheduling=False))
    hosted = version in policy.engines
    mode = policy.layout(version).mode if hosted else "align"
    number = version.removeprefix("vllm-")
    config = {"layers": "M*", "block_size": 16, "num_blocks": 200, "mode": mode}
    options = VllmOptions(version=number, async_scheduling=False)
    return VllmEngine(rows, identify(rows), geometry_of_case(config, number), policy, options)


def hits(policy, version="vllm-0.33"):
    rows = trace()
    records = Records(rows)
    made = engine(policy, version, rows)
    serial(made, rows, records)
    made.check()
    return records.hit_tokens


@pytest.mark.parametrize("name", policies.names())
class TestContract:
    def test_is_a_frozen_dataclass_that_says_its_rule_and_source(self, name):
        policy = policies.load(name)
        assert dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen
        module = importlib.import_module(type(policy).__module__)
        assert type(policy).__doc__ and module.__doc__

    def test_its_engines_host_it_and_others_refuse_it(self, name):
        policy = policies.load(name)
        assert policy.engines
        for version in ENGINES:
            if version in policy.engines:
                assert engine(policy, version).unfinished == 0
            else:
                with pytest.raises(ValueError, match="cannot run on"):
                    engine(policy, version)

    def test_place_stays_inside_the_chunk(self, name):
        policy = policies.load(name)
        for start, end in ((0, 90), (16, 90), (20, 64), (0, 10)):
            request = Prefill(0, 100, 100, 100, 48)
            limits = [Limits(16, 16, 0, 0, 64, 96), Limits(16, 1, 48, end // 16 * 16, 64, 0, True)]
            for version in policy.engines:
                single = version.startswith("sglang") and end >= start + 16 and start < 48
                if version.startswith("sglang") and not single:
                    continue
                memory = policy.begin(View(version, 1000, 10, 16, 10**6))
                placed, states = policy.place(memory, request, start, end, limits[single])
                assert start <= placed <= end
                assert placed == start or all(start < s <= end for s in states)
                assert not single or len(states) <= 1 or policy.layout(version).mode == "none"

    def test_publish_is_a_plain_answer(self, name):
        policy = policies.load(name)
        for position in (16, 32, 48, 96):
            state = State(0, position, 16, 96, 48)
            first = policy.publish(None, state)
            assert isinstance(first, bool) and policy.publish(None, state) is first

    def test_hits_are_within_what_is_shared(self, name):
        policy = policies.load(name)
        for version in policy.engines:
            assert all(0 <= h <= 70 for h in hits(policy, version))


def test_oracle_hits_all_that_is_shared_and_none_nothing():
    assert hits(policies.load("oracle"), "pool") == [0, 70, 70, 70]
    assert hits(policies.load("none")) == [0, 0, 0, 0]


def test_unknown_names_are_told_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean semantic-only"):
        policies.load("semantic-onl")
    with pytest.raises(ValueError, match="did you mean retention_interval"):
        policies.load("align", retention_intervall=1)


def test_the_guides_policy_runs(tmp_path):
    text = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)[1]
    assert len(text.splitlines()) < 40
    file = tmp_path / "every_second.py"
    file.write_text(text)
    assert hits(policies.load(str(file))) == [0, 64, 64, 64]
    second = State(0, 32, 16, 64, 0)
    assert policies.load(str(file)).publish(None, second)
    assert not policies.load(str(file), every=100).publish(None, second)
