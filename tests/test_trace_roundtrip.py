"""What is written is read again: native exact to the token, Mooncake to the block."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.content import canonical
from traces.errors import TraceError
from traces.identity import identify
from traces.mooncake import read_mooncake, write_mooncake
from traces.native import read_native, write_native
from traces.registry import read_trace
from traces.trace import Request, Run, Trace, from_requests

relaxed = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
runs = st.lists(st.builds(Run, st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4).map(
    tuple
)
COLUMNS = (
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "output_known",
    "session",
    "think_ns",
    "generation_prompt_tokens",
    "priority",
    "after_offsets",
    "after",
    "run_offsets",
    "run_address",
    "run_length",
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows: list[Request] = []
    now = 0
    for i in range(draw(st.integers(1, 7))):
        now += draw(st.integers(0, 10**10))
        prompt, output = draw(runs), draw(st.one_of(st.just(()), runs))
        size = sum(r.length for r in prompt)
        rows.append(
            Request(
                id=f"r{i}",
                prompt=prompt,
                output_tokens=sum(r.length for r in output) or draw(st.integers(0, 9)),
                output=output,
                arrival_ns=draw(st.one_of(st.none(), st.just(now))),
                session=draw(st.one_of(st.none(), st.sampled_from(["a", "b", "ünï"]))),
                after=tuple(draw(st.sets(st.sampled_from([r.id for r in rows])))) if rows else (),
                think_ns=draw(st.integers(0, 10**12)),
                generation_prompt_tokens=draw(st.one_of(st.none(), st.integers(0, size))),
                priority=draw(st.integers(-3, 3)),
            )
        )
    return from_requests(rows, seed=7)


def assert_equal(a: Trace, b: Trace) -> None:
    for name in COLUMNS:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert (a.ids, a.session_names) == (b.ids, b.session_names)


@given(traces(), st.sampled_from(["", ".gz", ".zst"]))
@relaxed
def test_native_comes_back_equal(tmp_path: Path, trace: Trace, ending: str) -> None:
    path = str(tmp_path / f"t.jsonl{ending}")
    write_native(trace, path)
    back = read_native(path)
    assert_equal(back, canonical(trace))
    assert back.notes["seed"] == 7
    first = Path(path).read_bytes()
    write_native(back, path)
    assert Path(path).read_bytes() == first


@given(traces())
@relaxed
def test_canonical_renames_tokens_and_nothing_else(trace: Trace) -> None:
    plain = canonical(trace)
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for i in range(len(trace)):
        for old, new in zip(tokens(trace, i), tokens(plain, i), strict=True):
            assert there.setdefault(old, new) == new
            assert back.setdefault(new, old) == old
    assert_equal(canonical(plain), plain)


def tokens(trace: Trace, i: int) -> list[int]:
    prompt, output = trace.runs_of(i)
    return [a for r in (*prompt, *output) for a in range(r.address, r.address + r.length)]


@st.composite
def hashed(draw: st.DrawFn) -> Trace:
    """Prompts of a radix tree, sessions whose turns wait for each other, times in nanoseconds."""
    rows: list[Request] = []
    last: dict[str, str] = {}
    now = 0
    for i in range(draw(st.integers(1, 8))):
        now += draw(st.integers(0, 10**10))
        session = draw(st.one_of(st.none(), st.sampled_from(["a", "b"])))
        before = last.get(session) if session else None
        rows.append(
            Request(
                id=str(i),
                prompt=draw(runs),
                output_tokens=draw(st.integers(0, 9)),
                arrival_ns=draw(st.one_of(st.none(), st.just(now))) if before else now,
                session=session,
                after=(before,) if before else (),
                think_ns=draw(st.integers(0, 10**12)) if before else 0,
            )
        )
        if session:
            last[session] = str(i)
    return from_requests(rows)


@given(hashed(), st.integers(1, 7))
@relaxed
def test_mooncake_comes_back_equal(tmp_path: Path, trace: Trace, block: int) -> None:
    path = str(tmp_path / "t.jsonl")
    lost = write_mooncake(trace, path, block_tokens=block)
    assert set(vars(lost).values()) == {0}
    once = read_mooncake(path, block_tokens=block)
    for name in COLUMNS[:10]:
        assert np.array_equal(getattr(once, name), getattr(trace, name)), name
    assert_blocks(trace, once, block)
    first = Path(path).read_bytes()
    write_mooncake(once, path, block_tokens=block)
    assert Path(path).read_bytes() == first
    assert_equal(read_mooncake(path, block_tokens=block), once)


def assert_blocks(exact: Trace, read: Trace, block: int) -> None:
    """Two prompts share their common whole blocks, and all of them where they are equal."""
    a, b = identify(exact), identify(read)
    for i in range(len(exact)):
        for j in range(i):
            p, q = int(exact.prompt_tokens[i]), int(exact.prompt_tokens[j])
            shared = min(a.common(i, j), p, q)
            want = shared if shared == p == q else shared // block * block
            assert b.common(i, j) == want


def test_mooncake_says_what_is_lost(tmp_path: Path) -> None:
    one = Run(0, 5)
    trace = from_requests(
        [
            Request("a", (one,), 2, (Run(9, 2),), arrival_ns=0, session="s", priority=2),
            Request("b", (one,), 2, arrival_ns=1, generation_prompt_tokens=1, after=("a",)),
            Request("c", (one,), 2, arrival_ns=2, session="s"),
        ]
    )
    lost = write_mooncake(trace, str(tmp_path / "t"), block_tokens=2)
    assert vars(lost) == {
        "priorities": 1,
        "generation_prompts": 1,
        "known_outputs": 1,
        "dependencies": 1,
        "sessions": 2,
    }
    assert read_mooncake(str(tmp_path / "t"), block_tokens=2).ids == trace.ids


def test_a_request_without_time_among_others_is_refused(tmp_path: Path) -> None:
    one = Run(0, 5)
    trace = from_requests([Request("a", (one,), 2, arrival_ns=0), Request("b", (one,), 2)])
    with pytest.raises(TraceError, match="'b' has no arrival"):
        write_mooncake(trace, str(tmp_path / "t"))
    assert list(tmp_path.iterdir()) == []


def test_a_native_file_never_waits_for_a_request_below(tmp_path: Path) -> None:
    one = Run(0, 5)
    trace = from_requests([Request("a", (one,), 2, after=("b",)), Request("b", (one,), 2)])
    with pytest.raises(TraceError, match="waits for 'b' below it"):
        write_native(trace, str(tmp_path / "t"))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compression_is_seen_in_the_content_not_in_the_name(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    line = b'{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [7]}\n'
    path = tmp_path / "t"
    path.write_bytes(pack(line) + pack(line))
    assert read_trace(str(path)).arrival_ns.tolist() == [5_000_000] * 2


def mooncake(path: Path, rows: list[tuple[int, int, list[int]]]) -> str:
    texts = [
        json.dumps({"timestamp": i, "input_length": n, "output_length": out, "hash_ids": ids})
        for i, (n, out, ids) in enumerate(rows)
    ]
    path.write_text("\n".join(texts))
    return str(path)


@pytest.mark.parametrize(
    ("follow_up", "shared"),
    [
        ((16, 1, [1, 3]), 15),  # prompt of 12 and output of 3
        ((14, 1, [1, 3]), 12),  # too short for the output
        ((11, 1, [1, 3]), 8),  # too short for the prompt
        ((20, 1, [4, 5, 6]), 0),  # no full block in common
        ((20, 1, [1, 5, 6]), 15),
    ],
)
def test_appends_are_inferred(
    tmp_path: Path, follow_up: tuple[int, int, list[int]], shared: int
) -> None:
    path = mooncake(tmp_path / "t", [(12, 3, [1, 2]), follow_up])
    on = read_mooncake(path, block_tokens=8, infer_appends="on")
    off = read_mooncake(path, block_tokens=8)
    assert identify(on).common(0, 1) == shared
    assert identify(off).common(0, 1) == (8 if shared else 0)


def test_a_follow_up_of_a_follow_up_shares_both(tmp_path: Path) -> None:
    rows = [(12, 3, [1, 2]), (18, 4, [1, 3, 4]), (30, 1, [1, 3, 5, 6]), (17, 1, [1, 3, 9])]
    on = read_mooncake(mooncake(tmp_path / "t", rows), block_tokens=8, infer_appends="on")
    p = identify(on)
    assert [p.common(0, 1), p.common(1, 2), p.common(0, 2)] == [15, 22, 15]
    assert [p.common(0, 3), p.common(1, 3)] == [15, 16]  # too short for request 1's prompt


def test_of_several_parents_the_longest_counts(tmp_path: Path) -> None:
    rows = [(13, 9, [1, 3]), (12, 3, [1, 2]), (10, 1, [1, 4]), (30, 1, [1, 5, 6, 7])]
    on = read_mooncake(mooncake(tmp_path / "t", rows), block_tokens=8, infer_appends="on")
    assert [identify(on).common(i, 3) for i in range(3)] == [22, 8, 8]


tree_rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(0, 7), st.integers(0, 20)
    ),
    min_size=1,
    max_size=10,
)


@given(tree_rows)
@relaxed
def test_inferring_looks_at_nothing_later(
    tmp_path: Path, spec: list[tuple[list[int], int, int]]
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for path, rest, out in spec:
        blocks = [ids.setdefault(tuple(path[: k + 1]), len(ids)) for k in range(len(path))]
        n = 8 * len(path)
        if rest:  # a partial tail of its own
            blocks.append(ids.setdefault((*path, -len(ids) - 1), len(ids)))
        rows.append((n + rest, out, blocks))
    whole = read_mooncake(mooncake(tmp_path / "t", rows), block_tokens=8, infer_appends="on")
    off = read_mooncake(str(tmp_path / "t"), block_tokens=8)
    full = identify(whole)
    for i in range(len(rows)):
        for j in range(i):
            assert full.common(i, j) >= identify(off).common(i, j)
    for k in range(1, len(rows)):
        part = identify(
            read_mooncake(mooncake(tmp_path / "t", rows[:k]), block_tokens=8, infer_appends="on")
        )
        assert all(part.common(i, j) == full.common(i, j) for i in range(k) for j in range(i))
