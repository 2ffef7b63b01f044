"""Readers and statistics on small traces with known answers, and on real ones where present."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.cli_trace import app
from traces.identity import identify
from traces.mooncake import read_mooncake, write_mooncake
from traces.native import read_native
from traces.registry import read_trace
from traces.shared import shared_lengths
from traces.stats import arrivals, trace_stats
from traces.trace import Request, Run, Trace, from_requests
from traces.weka import read_weka

REAL = Path(__file__).parents[2] / "shared" / "traces"
run_cli = CliRunner().invoke


def real(name: str) -> str:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{name} is not beside the project")
    return str(path)


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace(real("mooncake_conversation_trace.jsonl.gz"))


def test_mooncake_conversation_ceilings(conversation: Trace) -> None:
    s = trace_stats(conversation)
    assert (s.requests, s.prompt_tokens) == (12_031, 144_793_823)
    c = s.ceiling_prompts
    assert (c.hit_tokens, c.hit_tokens_recomputed_last) == (54_098_411, 54_098_293)
    assert round(c.token_hit_rate, 4) == 0.3736
    assert round(c.mean_request_hit_rate, 4) == 0.4094
    assert round(c.second_half_token_hit_rate, 4) == 0.3981
    assert s.ceiling_prompts_and_outputs == c  # outputs are not hashed
    a = s.arrivals
    assert a.fano_10s is not None and a.fano_60s is not None and a.iat_cv is not None
    assert [round(a.iat_cv, 3), round(a.fano_10s, 2), round(a.fano_60s, 2)] == [3.034, 2.09, 2.85]


def test_mooncake_conversation_with_inferred_appends() -> None:
    trace = read_trace(real("mooncake_conversation_trace.jsonl.gz"), infer_appends="on")
    s = trace_stats(trace)
    assert s.infer_appends == "on"
    assert s.ceiling_prompts.hit_tokens == 63_882_288
    assert s.ceiling_prompts_and_outputs.hit_tokens == 65_141_631


def test_the_mooncake_file_is_written_as_it_was(tmp_path: Path, conversation: Trace) -> None:
    write_mooncake(conversation, str(tmp_path / "t.jsonl"))
    with gzip.open(real("mooncake_conversation_trace.jsonl.gz"), "rt") as f:
        assert (tmp_path / "t.jsonl").read_text() == f.read()


#: shares of requests with a hit: 1024: r = 0, 1..256, 257..512, 513..768, > 768, mean, L < 1024;
#: 1040: r = 0, > 768, mean, L < 1040
GRIDS = {
    "mooncake_conversation_trace.jsonl.gz": [
        (0.2014, 0.0023, 0.7912, 0.0013, 0.0037, 409.4, 0.6151),
        (0.0007, 0.1761, 570.2, 0.6589),
    ],
    "claude_code_weka_sample.rle.jsonl.gz": [
        (0.0591, 0.2551, 0.2522, 0.2436, 0.19, 479.4, 0.0002),
        (0.0151, 0.2444, 512.3, 0.0002),
    ],
    "ragpulse.seg.jsonl.gz": [
        (0.7946, 0.0004, 0.2044, 0.0001, 0.0004, 104.7, 0.1988),
        (0.0, 0.7954, 918.7, 0.9938),
    ],
    "tau_airline.seg.jsonl.gz": [
        (0.0008, 0.2703, 0.3327, 0.2051, 0.1912, 469.8, 0.0),
        (0.0, 0.1932, 468.3, 0.0),
    ],
}
RATES = {
    "claude_code_weka_sample.rle.jsonl.gz": (6184, 106, 0.9636, 0.9495),
    "ragpulse.seg.jsonl.gz": (7106, 3990, 0.3143, 0.3373),
    "tau_airline.seg.jsonl.gz": (2454, 200, 0.9301, 0.9256),
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_real_shared_prefixes(name: str) -> None:
    options = {"sort": True} if name.startswith("rag") else {}
    s = trace_stats(read_trace(real(name), **options))
    a, b = s.grids
    shares = (a.on_grid, a.up_to_1_edge, a.up_to_2_edges, a.up_to_3_edges, a.beyond)
    found = [(*shares, a.mean_r, a.below_grid), (b.on_grid, b.beyond, b.mean_r, b.below_grid)]
    for got, want in zip(found, GRIDS[name], strict=True):
        assert got == pytest.approx(want, abs=6e-5, rel=2e-4)
    if name in RATES:
        c = s.ceiling_prompts
        rates = round(c.token_hit_rate, 4), round(c.mean_request_hit_rate, 4)
        assert (s.requests, s.sessions, *rates) == RATES[name]


@pytest.mark.parametrize(
    ("name", "n", "cv", "fano"),
    [
        ("azure2023_conv.csv.gz", 19_366, 1.094, 20.55),
        ("azure2023_code.csv.gz", 8_819, 13.151, 160.54),
    ],
)
def test_azure_arrivals(name: str, n: int, cv: float, fano: float) -> None:
    s = trace_stats(read_trace(real(name)))
    assert s.arrivals.iat_cv is not None and s.arrivals.fano_60s is not None
    assert (s.requests, round(s.arrivals.iat_cv, 3)) == (n, cv)
    assert round(s.arrivals.fano_60s, 2) == fano
    assert s.ceiling_prompts.hit_tokens == 0


def test_ragpulse_time_falls_back_once() -> None:
    result = run_cli(app, ["stats", real("ragpulse.seg.jsonl.gz")])
    assert result.exit_code == 2
    assert "ragpulse.seg.jsonl.gz:3802: time goes back" in result.output


runs = st.lists(st.builds(Run, st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4)


@given(st.lists(st.tuples(runs, st.one_of(st.just([]), runs)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_shared_lengths_against_all_pairs(rows: list[tuple[list[Run], list[Run]]]) -> None:
    trace = from_requests(
        Request(str(i), tuple(p), sum(r.length for r in o), tuple(o))
        for i, (p, o) in enumerate(rows)
    )
    prefixes = identify(trace)
    prompt = trace.prompt_tokens.tolist()
    for outputs in (False, True):
        got = shared_lengths(trace, prefixes, outputs).tolist()
        for i in range(len(trace)):
            pairs = [
                min(prefixes.common(i, j), prompt[i], *([] if outputs else [prompt[j]]))
                for j in range(i)
            ]
            assert got[i] == max(pairs, default=0)


def test_arrivals_by_hand() -> None:
    second = 1_000_000_000
    a = arrivals(np.array([0, 1, 2, 25, -1]) * second * np.array([1, 1, 1, 1, 0]) - [0, 0, 0, 0, 1])
    assert (a.known, a.duration_s) == (4, 25.0)
    assert a.fano_10s == pytest.approx(((3 - 4 / 3) ** 2 + (4 / 3) ** 2 + (1 - 4 / 3) ** 2) / 4)
    gaps = np.array([1, 1, 23])
    assert a.iat_cv == pytest.approx(gaps.std() / gaps.mean())
    assert arrivals(np.array([-1, -1])).rate_per_s is None
    far = arrivals(np.array([0, 2**62]))
    assert far.known == 2 and far.duration_s == 2**62 / second


def weka(path: Path, *lines: object) -> Trace:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_weka(str(path))


def turn(
    agent: str, t: float, h: list[list[int]], tail: int = 3, **more: float
) -> dict[str, object]:
    tokens = sum(n for _, n in h) * 64 + tail
    return {"s": agent, "t": t, "in": tokens, "out": 7, "h": h, "api_time": 2.0, **more}


def test_weka_conversations_share_nothing_and_turns_wait(tmp_path: Path) -> None:
    trace = weka(
        tmp_path / "t",
        {"trace": "x", "block_size": 64},
        turn("", 0.0, [[1, 4]], think_time=0.0),
        turn("", 5.0, [[1, 4], [5, 2]], think_time=3.25),
        turn("kid", 8.0, [[9, 2]], think_time=0.0),
        turn("kid", 11.0, [[9, 3]], think_time=1.0),
        turn("", 20.0, [[1, 3], [30, 1]], think_time=13.0),
        {"trace": "y", "block_size": 64},
        turn("", 0.0, [[1, 4]]),
    )
    second = 1_000_000_000
    assert [trace.after_of(i) for i in range(6)] == [[], [0], [1], [2], [1, 3], []]
    assert trace.think_ns.tolist() == [int(s * second) for s in (0, 3.25, 1, 1, 7, 0)]
    assert trace.arrival_ns.tolist() == [-1] * 6
    assert trace.session_names == ("x", "x/kid", "y")
    p = identify(trace)
    common = [p.common(0, 1), p.common(1, 4), p.common(2, 3), p.common(0, 5), p.common(0, 2)]
    assert common == [256, 192, 128, 0, 0]
    assert trace.prompt_tokens.tolist() == [259, 387, 131, 195, 259, 259]


def test_v0_tails_are_private_and_turns_without_time_wait(tmp_path: Path) -> None:
    head = {"format": "radix-segments-v0", "tokenizer": "t", "segments": [4, 5]}
    rows = [{"t": None, "s": s, "in": 11, "out": 2, "seg": [0, 1]} for s in (0, 1, 0)]
    path = tmp_path / "t"
    path.write_text("\n".join(json.dumps(x) for x in [head, *rows]))
    trace = read_native(str(path))
    assert [identify(trace).common(i, j) for i, j in ((0, 1), (0, 2), (1, 2))] == [9, 9, 9]
    assert [trace.after_of(i) for i in range(3)] == [[], [], [0]]
    assert trace.arrival_ns.tolist() == [-1] * 3
    assert not trace.output_known.any()
    assert trace.notes["tokenizer"] == "t"


def test_mooncake_aliases_sessions_and_float_times(tmp_path: Path) -> None:
    rows = [
        {
            "created_time": 1.5,
            "input_tokens": 5,
            "output_tokens": 2,
            "hash_ids": [90, 7],
            "session_id": 3,
        },
        {
            "input_length": 9,
            "output_length": 2,
            "hash_ids": [90, 8, 5],
            "session_id": 3,
            "delay_ms": 2.25,
        },
    ]
    path = tmp_path / "t"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_mooncake(str(path), block_tokens=4)
    assert trace.arrival_ns.tolist() == [1_500_000, -1]
    assert trace.think_ns.tolist() == [0, 2_250_000]
    assert trace.after_of(1) == [0]
    assert trace.session_names == ("3",)
    assert identify(trace).common(0, 1) == 4


def test_a_floor_tail_is_shared_with_nothing(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1, 2]}] * 2
    path = tmp_path / "t"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert identify(read_mooncake(str(path), block_tokens=4, tail="floor")).common(0, 1) == 8


@pytest.fixture
def small(tmp_path: Path) -> str:
    rows = [
        {"timestamp": i * 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2 + i]}
        for i in range(3)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + "oops\n")
    return str(path)


def test_stats_command(small: str) -> None:
    result = run_cli(app, ["stats", small, "--json", "--skip-bad", "--grid", "500"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["requests"] == 3
    assert found["ceiling_prompts"]["hit_tokens"] == 1024
    assert [g["grid_tokens"] for g in found["grids"]] == [500]
    assert len(found["skipped"]) == 1
    shown = run_cli(app, ["stats", small, "--skip-bad"]).output
    assert "token hit rate" in shown and "1 bad lines skipped" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "{small}"],
        ["stats", "{small}", "--skip-bad", "--grid", "0"],
        ["stats", "{small}", "--format", "mooncak"],
        ["stats", "{small}", "--tail", "up"],
        ["stats", "{small}.none"],
        ["convert", "{small}", "{small}.out"],
        ["convert", "{small}", "{small}.out", "--skip-bad", "--to", "weka"],
        ["convert", "{small}", "{small}/no/out", "--skip-bad"],
    ],
)
def test_what_is_wrong_is_told_in_one_line(small: str, arguments: list[str]) -> None:
    result = run_cli(app, [a.replace("{small}", small) for a in arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_convert_there_and_back(small: str, tmp_path: Path) -> None:
    there, back = str(tmp_path / "a.seg.jsonl.zst"), str(tmp_path / "b.jsonl.gz")
    first = run_cli(app, ["convert", small, there, "--skip-bad"])
    assert (
        first.exit_code == 0 and "nothing lost" in first.output and ":4: not JSON" in first.output
    )
    second = run_cli(app, ["convert", there, back, "--to", "mooncake"])
    assert second.exit_code == 0 and "lost: sharing inside blocks\n" in second.output
    with gzip.open(back, "rt") as f:
        ids = [json.loads(line)["hash_ids"] for line in f]
    assert ids == [[0, 1], [0, 2], [0, 3]]
