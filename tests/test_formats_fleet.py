"""A fleet: recorded conversations in a seeded order, each as it was, sharing nothing anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.cli_trace import app
from traces.arrivals import closed_loop, poisson, with_arrivals
from traces.fleet import interleave
from traces.generators import generate
from traces.identity import identify
from traces.order import nominal_ns
from traces.registry import read_trace
from traces.shared import shared_lengths
from traces.trace import Request, Run, Trace, from_requests

WEKA = str(Path(__file__).parent / "fixtures" / "weka")
REAL = Path(__file__).parents[2] / "shared" / "traces" / "claude_code_weka_sample.rle.jsonl.gz"
SECOND = 1_000_000_000


def fleet(seed: int = 0, **parameters: object) -> Trace:
    return generate("fleet", {"path": WEKA, **parameters}, seed)


@st.composite
def forests(draw: st.DrawFn) -> Trace:
    """Requests that wait for earlier ones of their own conversation, some without a session."""
    rows: list[Request] = []
    for i in range(draw(st.integers(1, 9))):
        earlier = [r.id for r in rows]
        waits = draw(st.sets(st.sampled_from(earlier), max_size=2)) if earlier else set()
        run = Run(draw(st.integers(0, 20)), draw(st.integers(1, 5)))
        session = draw(st.sampled_from([None, "a", "b"]))
        rows.append(Request(f"r{i}", (run,), i, (), None, session, tuple(sorted(waits)), i))
    return from_requests(rows)


@given(forests(), st.integers(0, 5), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_every_copy_is_the_conversation_it_was(trace: Trace, seed: int, wanted: int) -> None:
    out = interleave(trace, seed, wanted)
    origin = {r.id: r for r in trace}
    prefixes = identify(out)
    for i, r in enumerate(out):
        name, _, copy = r.id.partition("#")
        was, mark = origin[name], f"#{copy}" if copy else ""
        assert (r.prompt_tokens, r.output_tokens, r.think_ns) == (
            was.prompt_tokens, was.output_tokens, was.think_ns,
        )  # fmt: skip
        assert r.after == tuple(f"{a}{mark}" for a in was.after)
        assert r.session == (None if was.session is None else f"{was.session}{mark}")
        for j in range(i):
            other, _, of = out.ids[j].partition("#")
            a, b = trace.ids.index(name), trace.ids.index(other)
            same = identify(trace).common(a, b) if copy == of else 0
            assert prefixes.common(i, j) == same
    assert interleave(trace, seed, wanted).ids == out.ids


def test_each_conversation_once_by_default() -> None:
    trace = read_trace(WEKA)
    out = fleet(seed=2)
    assert sorted(out.ids) == sorted(trace.ids)
    assert sorted(shared_lengths(out, identify(out))) == sorted(
        shared_lengths(trace, identify(trace))
    )
    starts = {fleet(seed=s).ids[0] for s in range(8)}
    assert starts == {"conv_a/0", "conv_b/6"}  # the seed draws the order


def test_more_conversations_than_there_are() -> None:
    out = fleet(sessions=5, seed=1)
    ends = [name.partition("#")[2] for name in out.ids]
    assert {"", "2", "3"} == set(ends)
    heads = [i for i in range(len(out)) if not out.after_of(i)]
    assert len(heads) == 5
    assert out.notes["conversations"] == 5 and out.notes["generator"] == "fleet"


def test_answers_are_inferred_before_the_draw() -> None:
    off, on = (fleet(sessions=4, infer_appends=i) for i in (False, True))
    totals = [int(shared_lengths(t, identify(t), outputs=True).sum()) for t in (off, on)]
    assert totals[0] < totals[1] and on.notes["infer_appends"] == "on"
    assert off.ids == on.ids and on.output_known.all()


def test_pauses_are_capped_and_otherwise_kept() -> None:
    as_it_was, capped = fleet(), fleet(idle_cap_s=1.75)
    assert as_it_was.think_ns.max() == 5 * SECOND
    assert np.array_equal(capped.think_ns, np.minimum(as_it_was.think_ns, 1_750_000_000))


def test_a_process_starts_conversations_and_turns_wait() -> None:
    out = with_arrivals(fleet(sessions=40), poisson(0.25, seed=4))
    heads = np.diff(out.after_offsets) == 0
    assert heads.sum() == 40 and (out.arrival_ns[heads] >= 0).all()
    assert (out.arrival_ns[~heads] == -1).all()
    assert (np.diff(nominal_ns(out)) >= 0).all()  # interleaved, not one behind the other
    order = [i.partition("/")[0] + i.partition("#")[2] for i in out.ids]
    again = {talk for k, talk in enumerate(order) if talk in order[:k] and talk != order[k - 1]}
    assert again  # a conversation goes on after another one had a turn


def test_a_closed_loop_has_so_many_conversations_at_a_time() -> None:
    out = with_arrivals(fleet(sessions=6), closed_loop(2, think_s=1.0))
    assert (out.arrival_ns == 0).sum() == 2
    heads = [i for i in range(len(out)) if out.arrival_ns[i] == -1 and not _same(out, i)]
    assert len(heads) == 4
    assert all(out.think_ns[i] == SECOND for i in heads)


def _same(trace: Trace, i: int) -> bool:
    """Whether a request waits for its own conversation."""
    return any(_talk(trace, j) == _talk(trace, i) for j in trace.after_of(i))


def _talk(trace: Trace, i: int) -> tuple[str, str]:
    return trace.ids[i].partition("/")[0], trace.ids[i].partition("#")[2]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for k, seed in enumerate([3, 3, 4]):
        out = str(tmp_path / f"{k}.jsonl")
        arguments = ["generate", "fleet", "--set", f"path={WEKA}", "--set", "sessions=9"]
        more = ["--arrivals", "poisson", "--rate", "0.1", "--seed", str(seed), "--out", out]
        assert CliRunner().invoke(app, [*arguments, *more]).exit_code == 0
        made.append(Path(out).read_bytes())
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "path is ''; allowed: a trace file"),
        (["path=none.jsonl"], "none.jsonl: cannot be read"),
        ([f"path={WEKA}", "format=wekka"], "format 'wekka', nearest 'weka'"),
        ([f"path={WEKA}", "sessions=0"], "sessions is 0; allowed: 1 to"),
        ([f"path={WEKA}", "idle_cap_s=-1"], "idle_cap_s is -1"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, settings: list[str], message: str) -> None:
    given = [x for s in settings for x in ("--set", s)]
    out = CliRunner().invoke(app, ["generate", "fleet", *given, "--out", str(tmp_path / "t")])
    assert out.exit_code == 2 and message in out.stderr and out.stderr.count("\n") == 1


def test_a_fleet_of_the_real_sample() -> None:
    if not REAL.exists():
        pytest.skip(f"{REAL.name} is not beside the project")
    trace = read_trace(str(REAL))
    out = with_arrivals(interleave(trace, 1), poisson(0.05, seed=1))
    assert len(out) == 6184 and (out.arrival_ns >= 0).sum() == 97
    total = int(shared_lengths(out, identify(out)).sum())
    assert total == int(shared_lengths(trace, identify(trace)).sum())
