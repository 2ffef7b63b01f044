"""What a step says it moves: checkpoint writes, copies of restored states, copies of KV."""

import pytest

from sim.loop import serial
from sim.policies import load
from sim.vllm.case_geometry import geometry_of_case
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests

PLAIN = {"layers": "MM*", "block_size": 16, "num_blocks": 300}


class Steps:
    """Keeps every planned step."""

    def __init__(self):
        self.steps = []

    def planned(self, step, now_ns):
        self.steps.append(step)

    def arrived(self, *told):
        """Not of interest."""

    rejected = done = arrived


def planned(policy, version="0.33", shared=70, own=(60, 60, 60), output=3, **config):
    """Steps of requests that share ``shared`` tokens and add their own, one after another."""
    rows = from_requests(
        Request(str(i), (Run(0, shared), Run((i + 1) << 32, n)), output) for i, n in enumerate(own)
    )
    chosen = load(policy)
    mode = chosen.layout(f"vllm-{version}").mode
    geometry = geometry_of_case({**PLAIN, "mode": mode, **config}, version)
    options = VllmOptions(version=version, async_scheduling=False)
    engine, recorder = VllmEngine(rows, identify(rows), geometry, chosen, options), Steps()
    serial(engine, rows, recorder)
    return recorder.steps


def chunks(steps):
    return [(c.request, c.start, c.slot_copies, c.saves) for s in steps for c in s.chunks]


def test_align_saves_one_state_inside_a_chunk_and_copies_a_restored_one_once():
    steps = planned("align")
    assert chunks(steps) == [(0, 0, 0, 1), (1, 0, 0, 1), (1, 64, 0, 1), (2, 64, 1, 1)]
    assert [s.state_copies for s in steps if s.chunks] == [0, 0, 1, 0]


def test_all_writes_a_state_at_every_boundary_and_copies_none():
    steps = planned("all", "0.28")
    assert chunks(steps) == [(0, 0, 0, 8), (1, 64, 0, 4), (2, 64, 0, 4)]
    assert not any(s.state_copies for s in steps)


@pytest.mark.parametrize("policy", ["none", "align"])
def test_attention_alone_moves_no_states(policy):
    config = {"layers": "**"} if policy == "align" else {}
    assert all(c[2:] == (0, 0) for c in chunks(planned(policy, **config)))


def test_decode_into_a_new_block_copies_the_running_state():
    steps = planned(
        "semantic-only", shared=70, own=(56, 56, 56), output=6
    )  # passes 128 while decoding
    moving = [s for s in steps if s.state_copies and not s.chunks]
    assert len(moving) == 3 and all(s.repeat == 1 for s in moving)


def test_kv_copied_on_write_is_counted_in_tokens():
    steps = planned("align", own=(0, 60), prefix_match_unit=2, layers="MM**")
    assert {s.kv_copied_tokens for s in steps} == {0, 16}
