"""Prefix identity against a comparison of tokens one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.identity import Prefixes, _from_addresses, _tree_runs, identify, is_chained
from traces.order import take
from traces.trace import Request, Run, Trace, from_requests

runs = st.lists(st.builds(Run, st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4).map(
    tuple
)


@st.composite
def traces(draw: st.DrawFn, size: int = 6) -> Trace:
    rows = []
    for i in range(draw(st.integers(1, size))):
        output = draw(st.one_of(st.just(()), runs))
        tokens = sum(r.length for r in output) if output else draw(st.integers(0, 4))
        rows.append(Request(str(i), draw(runs), tokens, output))
    return from_requests(rows)


def tokens(trace: Trace, i: int) -> tuple[int, ...]:
    prompt, output = trace.runs_of(i)
    return tuple(a for r in (*prompt, *output) for a in range(r.address, r.address + r.length))


def all_ids(prefixes: Prefixes, trace: Trace) -> list[tuple[int, tuple[int, ...]]]:
    """Id and tokens of every prefix of every sequence."""
    out = []
    for i in range(len(trace)):
        own = tokens(trace, i)
        ids = prefixes.ids(i, np.arange(1, len(own) + 1)).tolist()
        out += [(ids[p], own[: p + 1]) for p in range(len(own))]
    return out


def assert_identity(prefixes: Prefixes, trace: Trace) -> None:
    pairs = all_ids(prefixes, trace)
    by_id: dict[int, tuple[int, ...]] = {}
    by_prefix: dict[tuple[int, ...], int] = {}
    for id, prefix in pairs:
        assert by_id.setdefault(id, prefix) == prefix
        assert by_prefix.setdefault(prefix, id) == id


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(traces())
@settings(max_examples=150, deadline=None)
def test_ids_are_equal_exactly_where_prefixes_are(trace: Trace) -> None:
    assert_identity(identify(trace), trace)


@given(traces())
@settings(max_examples=150, deadline=None)
def test_common_is_the_longest_common_prefix(trace: Trace) -> None:
    prefixes = identify(trace)
    for a, b in product(range(len(trace)), repeat=2):
        assert prefixes.common(a, b) == common(tokens(trace, a), tokens(trace, b))


@given(traces())
@settings(max_examples=100, deadline=None)
def test_extents_begin_at_heads_of_chains(trace: Trace) -> None:
    prefixes = identify(trace)
    rows = [e for i in range(len(trace)) for e in prefixes.extents(i)]
    heads = {start + 1 + delta: start for start, _, delta in rows}
    for start, end, delta in rows:
        for p in range(start + 2, end + 1):
            assert p + delta not in heads


@given(traces())
@settings(max_examples=100, deadline=None)
def test_chained_addresses_and_the_tree_agree(trace: Trace) -> None:
    """What the tree numbers is chained, and is then its own identity."""
    offsets, address, length = _tree_runs(trace)
    chained = replace(trace, run_offsets=offsets, run_address=address, run_length=length)
    assert is_chained(chained)
    direct, again = identify(chained), _from_addresses(*_tree_runs(chained))
    assert_identity(again, chained)
    for a, b in product(range(len(trace)), repeat=2):
        assert direct.common(a, b) == again.common(a, b) == identify(trace).common(a, b)


@given(traces())
@settings(max_examples=150, deadline=None)
def test_chained_means_one_predecessor_per_address(trace: Trace) -> None:
    before: dict[int, int] = {}
    expected = True
    for i in range(len(trace)):
        own = tokens(trace, i)
        for a, p in zip(own, (-1, *own), strict=False):
            expected = expected and before.setdefault(a, p) == p
    if is_chained(trace):
        assert expected
    if expected:  # a chain may still be refused where a run is cut, never where none is
        assert_identity(_from_addresses(*_tree_runs(trace)), trace)


@given(traces(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_cut_changes_no_equality_before_it(trace: Trace, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(trace)))
    cut = take(trace, np.arange(k))
    whole, part = all_ids(identify(trace), cut), all_ids(identify(cut), cut)
    for (a, _), (b, _) in zip(whole, part, strict=True):
        for (c, _), (d, _) in zip(whole, part, strict=True):
            assert (a == c) == (b == d)


def test_grid_takes_every_multiple_and_nothing_else() -> None:
    trace = from_requests(
        [Request("a", (Run(0, 10),), 0), Request("b", (Run(0, 6), Run(50, 3)), 3)]
    )
    prefixes = identify(trace)
    for i, step in product(range(2), (1, 3, 4, 100)):
        total = len(tokens(trace, i))
        want = [int(prefixes.ids(i, np.array([p]))[0]) for p in range(step, total + 1, step)]
        assert prefixes.grid(i, step) == want


def test_an_unknown_output_is_shared_with_nothing() -> None:
    same = (Run(3, 4),)
    trace = from_requests([Request("a", same, 5), Request("b", same, 5), Request("c", same, 0)])
    prefixes = identify(trace)
    assert [prefixes.common(0, 1), prefixes.common(1, 2)] == [4, 4]


@pytest.mark.parametrize(
    "rows",
    [
        [Request("a", (Run(0, 1),), 1), Request("a", (Run(0, 1),), 1)],
        [Request("a", (Run(0, 1),), 1, after=("b",))],
    ],
)
def test_requests_that_contradict_each_other_are_refused(rows: list[Request]) -> None:
    with pytest.raises(ValueError, match=r"stands twice|not in the trace"):
        from_requests(rows)


@given(traces())
@settings(max_examples=100, deadline=None)
def test_requests_come_back_from_columns(trace: Trace) -> None:
    again = from_requests(list(trace))
    for name in ("run_offsets", "run_address", "run_length", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name
    assert [r.id for r in trace] == list(trace.ids)
