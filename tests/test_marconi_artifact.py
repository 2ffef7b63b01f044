"""The Marconi artifact, replayed: recorded runs decision by decision, and its errors one by one."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.cli import app
from sim.marconi_artifact import Replay, Sequence, Sizes, replay, replay_trace
from sim.marconi_artifact.parity import compare, expand, is_recorded
from sim.marconi_artifact.replay import trace_sequences
from sim.marconi_artifact.tree import LEAF, MERGED, common_length
from traces.arrivals import fixed, with_arrivals
from traces.generators import generate
from traces.order import take
from traces.trace import Request, Run, Trace, from_requests

GOLDEN = Path(__file__).parent / "golden" / "marconi"
SHARED = Path(__file__).parents[2] / "shared" / "golden" / "marconi"
FILES = sorted(GOLDEN.glob("*.json.gz"))
HUGE = 1e15
SMALL = Sizes(1, 1, 1, width=1, kv_token_bytes=1, state_bytes=10)


def recorded(name: str) -> Any:
    with gzip.open(GOLDEN / f"{name}.json.gz", "rt") as f:
        return json.load(f)


def said(*requests: tuple[str, str]) -> list[Sequence]:
    """Sequences of letters: prompt, output."""
    return [
        Sequence(np.frombuffer((a + b).encode(), np.uint8).astype(np.int64), len(a))
        for a, b in requests
    ]


def run(requests: list[Sequence], version: str, capacity: float = HUGE, **more: Any) -> Replay:
    return replay(requests, version=version, capacity_bytes=capacity, sizes=SMALL, **more)


# --- recorded runs -------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.split(".")[0])
def test_every_recorded_field_agrees(path: Path) -> None:
    data = recorded(path.name.split(".")[0])
    assert is_recorded(data)
    runs = list(compare(data))
    assert len(runs) == len(data["results"]) >= 4
    assert [(name, found) for name, found in runs if found] == []


def test_all_recorded_files_agree() -> None:
    if not SHARED.exists():
        pytest.skip("the recorded runs are not beside the project")
    result = CliRunner().invoke(app, ["parity", str(SHARED)])
    assert result.exit_code == 0
    assert "74 cases, 0 differ" in result.output


@pytest.mark.parametrize("key", ["reused", "evictions", "max_tree_bytes", "flops_saved"])
def test_a_changed_recording_is_noticed(key: str) -> None:
    data = recorded("tiny_cap7")
    changed = data["results"][1]
    assert changed["policy"] == "V1"
    if isinstance(changed[key], list):
        changed[key][3] = changed[key][2]
    else:
        changed[key] += 1
    found = {name: differences for name, differences in compare(data) if differences}
    assert list(found) == ["tiny_cap7 V1 alpha 0"]
    assert [text.split(":")[0] for text in found["tiny_cap7 V1 alpha 0"]] == [key]


def test_a_field_that_is_not_computed_is_told() -> None:
    data = recorded("tiny_phantom")
    data["results"][0]["surprise"] = 1
    assert next(compare(data))[1] == ["surprise: recorded, not computed here"]


def test_the_command_tells_differences_and_bad_files(tmp_path: Path) -> None:
    data = recorded("tiny_phantom")
    data["results"][2]["reused"][2] = 0
    file = tmp_path / "case.json"
    file.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["parity", str(file)])
    assert result.exit_code == 1
    assert "tiny_phantom V3 alpha 0: reused: at 2 recorded 0, here 2" in result.output
    del data["model"]
    file.write_text(json.dumps(data))
    assert CliRunner().invoke(app, ["parity", str(file)]).exit_code == 2


def test_runs_expand_to_the_recorded_tokens() -> None:
    """The test vector of the recording's description."""
    tokens = [expand(seed, n).tolist() for seed, n in ((7, 3), (11, 2), (1018, 4))]
    assert tokens == [[25999, 19133, 11907], [23953, 8889], [16444, 22218, 11214, 11858]]


# --- sizes ---------------------------------------------------------------------------------


def test_the_artifacts_sizes() -> None:
    sizes = Sizes()
    assert sizes.kv_bytes == 65_536
    assert sizes.checkpoint_bytes == 26_787_840
    assert sizes.checkpoint_bytes / sizes.kv_bytes == pytest.approx(409, abs=0.5)
    assert Sizes(state_width=64).checkpoint_bytes < sizes.checkpoint_bytes
    assert Sizes(ssm_layers=0, attention_layers=36).checkpoint_bytes == 0


@pytest.mark.parametrize(("block", "gigabytes"), [(8, 34.2), (16, 17.4), (32, 9.0)])
def test_figure_3_of_the_paper(block: int, gigabytes: float) -> None:
    """10,000 tokens in blocks, a checkpoint each: bytes of a whole sequence."""
    sequence = Sequence(np.arange(10_000, dtype=np.int64), 9_990)
    ours = replay([sequence], version="block", capacity_bytes=HUGE, block_tokens=block)
    assert ours.max_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_sizes_of_a_known_model_replace_the_formulas() -> None:
    sizes = Sizes(kv_token_bytes=16_384, state_bytes=102_137_856)
    assert (sizes.kv_bytes, sizes.checkpoint_bytes) == (16_384, 102_137_856)
    assert sizes.prefill_flops(100) == Sizes().prefill_flops(100)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="version is 'V4'; allowed: V1, V2, V3, block"):
        replay([], version="V4", capacity_bytes=1)
    with pytest.raises(ValueError, match="alpha is -1; allowed: 0 or more"):
        replay([], version="V3", capacity_bytes=1, alpha=-1)
    with pytest.raises(ValueError, match="ssm_layers is -1; allowed: 0 or more"):
        Sizes(ssm_layers=-1)
    with pytest.raises(ValueError, match="neither KV nor checkpoints"):
        Sizes(ssm_layers=0, attention_layers=0)


# --- rules, on letters ---------------------------------------------------------------------


def test_common_length() -> None:
    a = np.array([1, 2, 3, 4])
    assert [common_length(a, np.array(b)) for b in ([], [1], [1, 2, 9], [1, 2, 3, 4, 5])] == [
        0,
        1,
        2,
        4,
    ]


@pytest.mark.parametrize("version", ["V1", "V3"])
def test_a_branch_point_is_kept_at_its_second_sight(version: str) -> None:
    ours = run(said(("abcd", "x"), ("abef", "y"), ("abgh", "z")), version)
    assert ours.reused.tolist() == [0, 0, 2]
    assert ours.states_after.tolist() == [1, 3, 4]
    assert ours.kv_tokens_after.tolist() == [5, 8, 11]


def test_the_last_decoded_token_is_kept() -> None:
    assert run(said(("abc", "de"), ("abcdef", "g")), "V1").reused.tolist() == [0, 5]


def test_a_mismatch_inside_an_edge_is_credited_further_down() -> None:
    """The phantom match: "abggh" leaves "abcdef" after two tokens, yet finds "ggh" below it."""
    ours = run(said(("abcde", "f"), ("abcdefgg", "h"), ("abggh", "i")), "V3")
    assert ours.reused.tolist() == [0, 6, 3]
    ours = run(said(("abcde", "f"), ("abcdefgg", "h"), ("abghh", "i")), "V3")
    assert ours.reused.tolist() == [0, 6, 0]


def test_a_leaf_books_the_edge_of_the_last_candidate() -> None:
    """Of two leaves, 5 and 50 tokens, the older and shorter goes and books 60 bytes, not 15."""
    requests = said(("aaaa", "a"), ("b" * 49, "b"), ("cccc" * 6, "c"))
    capacity = 10 + 5 + 10 + 50 + 1
    loose, exact = (run(requests, "V3", capacity, exact_booking=e) for e in (False, True))
    assert [(e.kind, e.edge) for e in loose.evictions] == [(LEAF, 5)]
    assert loose.max_bytes == 10 + 50 + 10 + 25 > capacity
    assert [(e.kind, e.edge) for e in exact.evictions] == [(LEAF, 5), (LEAF, 50)]
    assert exact.max_bytes <= capacity


def test_a_node_with_one_child_is_merged() -> None:
    requests = said(("ab", "c"), ("abcd", "e"), ("xyz", "w"))
    ours = run(requests, "V3", 10 + 3 + 10 + 2 + 4)
    assert [(e.kind, e.depth, e.edge) for e in ours.evictions] == [(MERGED, 3, 3)]
    assert ours.states_after.tolist() == [1, 2, 2]
    assert ours.kv_tokens_after.tolist() == [3, 5, 9]
    assert run(requests, "V1", 10 + 3 + 10 + 2 + 4).evictions[0].kind == LEAF


def test_a_block_is_filled_in_place_and_a_sequence_of_any_size_admitted() -> None:
    ours = run(said(("abcde", "f"), ("abcdefgh", "i")), "block", 21, block_tokens=4)
    assert ours.reused.tolist() == [0, 6]
    assert ours.states_after.tolist() == [2, 3]
    assert ours.kv_tokens_after.tolist() == [6, 9]
    assert ours.max_bytes > ours.capacity_bytes


def test_alpha_is_searched_once_and_only_in_a_window_beyond_the_first_eviction() -> None:
    data = recorded("lmsys_ssm24_attn12")
    found = {r["policy"]: r for r in data["results"]}["V2"]
    assert (found["reqs_before_first_evict"], found["bootstrap_window"]) == (22, 110)
    assert found["alpha_tuned"] == 1.1
    assert found["reused"][:22] == next(
        r["reused"][:22] for r in data["results"] if r["policy"] == "V3"
    )


# --- traces --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats() -> Trace:
    return with_arrivals(generate("marconi_lmsys", {"sessions": 12}, 3), fixed(0.5))


def test_sequences_of_a_trace_are_its_addresses() -> None:
    trace = from_requests(
        [
            Request("a", (Run(0, 3), Run(10, 2)), 2, (Run(12, 2),)),
            Request("b", (Run(0, 3),), 1, (Run(2**40, 1),)),
        ]
    )
    a, b = trace_sequences(trace)
    assert (a.tokens.tolist(), a.prompt) == ([0, 1, 2, 10, 11, 12, 13], 5)
    assert (b.tokens.tolist(), b.prompt) == ([0, 1, 2, 2**40], 3)


def test_without_pressure_every_turn_reuses_the_turn_before(chats: Trace) -> None:
    ours = replay_trace(chats, version="V1", capacity_bytes=HUGE)
    first, expected = 0, []
    for i, request in enumerate(chats):
        if request.after:
            j = chats.after_of(i)[0]
            expected.append(int(chats.prompt_tokens[j] + chats.output_tokens[j]))
        else:  # the preamble has a checkpoint from the second chat's first request on
            expected.append(5 if first > 1 else 0)
            first += 1
    assert ours.reused.tolist() == expected
    for alpha in (0.0, 2.0):
        same = replay_trace(chats, version="V3", capacity_bytes=HUGE, alpha=alpha)
        assert same.reused.tolist() == expected


def test_names_of_tokens_do_not_matter(chats: Trace) -> None:
    there = list(trace_sequences(chats))
    mixed = [Sequence(s.tokens.astype(np.int64) * 48_271 % 2_147_483_647, s.prompt) for s in there]
    for version in ("V1", "V2", "block"):
        a, b = (
            replay(s, version=version, capacity_bytes=1.5e9, bootstrap_multiplier=2)
            for s in (there, mixed)
        )
        assert a.reused.tolist() == b.reused.tolist()
        assert a.evictions == b.evictions
        assert a.alpha == b.alpha


@pytest.mark.parametrize("version", ["V1", "V2", "V3", "block"])
def test_the_future_does_not_leak(chats: Trace, version: str) -> None:
    whole = replay_trace(chats, version=version, capacity_bytes=2e9, alpha=0.5)
    half = len(chats) // 2
    part = replay_trace(
        take(chats, np.arange(half)), version=version, capacity_bytes=2e9, alpha=0.5
    )
    assert part.reused.tolist() == whole.reused[:half].tolist()
    assert part.bytes_after.tolist() == whole.bytes_after[:half].tolist()
    assert part.evictions == tuple(e for e in whole.evictions if e.request < half)


def test_v3_holds_more_than_its_capacity_and_v1_does_not() -> None:
    trace = with_arrivals(generate("marconi_lmsys", {"sessions": 60}, 3), fixed(0.5))
    capacity = 3 * 10**9
    assert replay_trace(trace, version="V1", capacity_bytes=capacity).max_bytes <= capacity
    loose = replay_trace(trace, version="V3", capacity_bytes=capacity, alpha=0.5)
    exact = replay_trace(
        trace, version="V3", capacity_bytes=capacity, alpha=0.5, exact_booking=True
    )
    assert loose.max_bytes > 1.15 * capacity
    assert exact.max_bytes < 1.02 * capacity
    assert 0.05 < (loose.bytes_after > capacity).mean() < 0.3


def test_the_example_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "marconi.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    exec(code, {})
    rate, bytes_held = map(float, capsys.readouterr().out.split())
    said = code.split("# ")[-1].split(",")
    assert rate == pytest.approx(float(said[0]), abs=5e-5)
    assert bytes_held == pytest.approx(float(said[1]), abs=5e-4)


def test_counts_hold_together(chats: Trace) -> None:
    """What came in less what the evictions took is what is there."""
    ours = replay_trace(chats, version="V1", capacity_bytes=2e9)
    assert ours.evictions and {e.kind for e in ours.evictions} == {LEAF}
    before = np.r_[0, ours.kv_tokens_after[:-1]]
    lost = np.bincount(
        [e.request for e in ours.evictions],
        [e.edge for e in ours.evictions],
        minlength=len(chats),
    )
    gained = ours.kv_tokens_after - before + lost
    assert np.all(gained >= 0)
    assert np.all(gained <= chats.prompt_tokens + chats.output_tokens)
    assert ours.token_hit_rate == ours.reused.sum() / chats.prompt_tokens.sum()
    assert ours.flops_saved == sum(Sizes().prefill_flops(n) for n in ours.reused.tolist())


def test_sequences_may_be_an_iterator(chats: Trace) -> None:
    some = islice(trace_sequences(chats), 5)
    assert len(replay(some, version="V1", capacity_bytes=HUGE).reused) == 5
    nothing = replay([], version="V2", capacity_bytes=HUGE)
    assert (nothing.max_bytes, nothing.token_hit_rate, nothing.window) == (0, 0.0, None)
