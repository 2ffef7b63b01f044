"""Prefix trees and placements of states, against plain arrays of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.identity import identify
from traces.placements import placements, reachable, summed
from traces.reuse import latest_with, reuse
from traces.shared import shared_lengths
from traces.stats import trace_stats
from traces.structure import known_lengths, structure, whole_blocks
from traces.token_tree import TokenTree
from traces.trace import Request, Run, Trace, from_requests

prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple), min_size=1, max_size=9
)
Prompt = tuple[int, ...]


def traced(rows: Iterable[Prompt], outputs: int = 0) -> Trace:
    """Prompts with the tokens ``rows``, in one session each of two."""
    tree = TokenTree()
    return from_requests(
        Request(
            str(i),
            tuple(Run(a, n) for a, n in tree.add(np.array(row, np.int64))),
            outputs,
            session=f"s{i % 2}",
        )
        for i, row in enumerate(rows)
    )


def lcp(a: Prompt, b: Prompt) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(prompts, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_the_tree_of_prompts_equals_counting_prefixes(rows: list[Prompt], outputs: int) -> None:
    trace = traced(rows, outputs)
    prefixes = identify(trace)
    shared = shared_lengths(trace, prefixes)
    found = structure(trace, prefixes, shared, known_lengths(trace))
    every = {row[:n] for row in rows for n in range(len(row) + 1)}
    fans = {p: sum(q[:-1] == p for q in every if q) for p in every}
    assert found.roots == fans[()]
    inner = [n for p, n in fans.items() if p]
    assert found.branch_points == sum(n > 1 for n in inner)
    assert found.leaves == sum(n == 0 for n in inner)
    assert found.max_fan_out == max((n for n in inner if n > 1), default=0)
    seen = [any(row == b[: len(row)] for b in rows[:i]) for i, row in enumerate(rows)]
    assert found.full_prompt_hits == pytest.approx(sum(seen) / len(rows))


@given(prompts)
@settings(max_examples=200, deadline=None)
def test_turns_are_told_apart(rows: list[Prompt]) -> None:
    trace = traced(rows)
    prefixes = identify(trace)
    found = structure(trace, prefixes, shared_lengths(trace, prefixes), trace.prompt_tokens).turns
    assert found is not None
    kinds = []
    for i, row in enumerate(rows):
        before = rows[i - 2] if i > 1 else None
        common = lcp(row, before) if before else 0
        kinds.append(
            "first" if before is None
            else "repeat" if row == before
            else "append" if common == len(before)
            else "edit" if common else "disjoint"
        )  # fmt: skip
    for kind in ("first", "append", "repeat", "disjoint", "edit"):
        assert getattr(found, kind) == pytest.approx(kinds.count(kind) / len(rows)), kind


@given(prompts, st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_placements_equal_keeping_every_state_in_a_set(rows: list[Prompt], block: int) -> None:
    trace = traced(rows)
    prefixes = identify(trace)
    shared = shared_lengths(trace, prefixes)
    ends = trace.prompt_tokens // block * block
    found = reachable(prefixes, trace.prompt_tokens, shared, ends, (2, 3))

    def replay(grid: int = 0, end: bool = False, branch: bool = False) -> list[int]:
        kept: set[Prompt] = set()
        seen: set[Prompt] = set()
        hits = []
        for row in rows:
            starts = [row[:n] for n in range(1, len(row) + 1)]
            hits.append(max((len(p) for p in starts if p in kept), default=0))
            common = max((len(p) for p in starts if p in seen), default=0)
            kept |= {p for p in starts if grid and len(p) % grid == 0}
            kept |= {row[: len(row) // block * block]} if end else set()
            kept |= {row[:common]} if branch else set()
            seen |= set(starts)
        return hits

    assert found["exact"].tolist() == replay(grid=1)
    assert found["grid 2"].tolist() == replay(grid=2)
    assert found["grid 3"].tolist() == replay(grid=3)
    assert found["end"].tolist() == replay(end=True)
    assert found["end+branch"].tolist() == replay(end=True, branch=True)
    for hit in found.values():
        assert (hit <= shared).all()


@given(prompts)
@settings(max_examples=200, deadline=None)
def test_the_latest_prompt_with_all_that_is_shared(rows: list[Prompt]) -> None:
    trace = traced(rows)
    prefixes = identify(trace)
    shared = shared_lengths(trace, prefixes)
    found = latest_with(prefixes, trace.prompt_tokens, shared).tolist()
    fresh = [len(row) - n for row, n in zip(rows, shared.tolist(), strict=True)]
    between = []
    for i, row in enumerate(rows):
        n = int(shared[i])
        fits = [j for j in range(i) if n and lcp(row, rows[j]) >= n]
        assert found[i] == max(fits, default=-1)
        between += [sum(fresh[fits[-1] + 1 : i])] if fits else []
    told = reuse(trace, prefixes, shared)
    wanted = np.percentile(between, (50, 90, 99)) if between else np.zeros(3)
    assert told.gap_s is None and told.new_tokens == tuple(round(float(x)) for x in wanted)


def test_seconds_since_the_last_use() -> None:
    trace = traced([(1, 2), (1, 3), (1, 2, 4)])
    trace.arrival_ns[:] = np.array([0, 1, 10]) * 1_000_000_000
    prefixes = identify(trace)
    told = reuse(trace, prefixes, shared_lengths(trace, prefixes))
    assert told.gap_s == pytest.approx((5.5, 9.1, 9.91))  # 1 and 10 s
    assert told.new_tokens == (0, 1, 1)


def test_sums_by_hand() -> None:
    rows = [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 9), (1, 2, 9)]
    trace = traced(rows)
    prefixes = identify(trace)
    shared = shared_lengths(trace, prefixes)
    by_name = {
        p.name: p for p in placements(trace, prefixes, shared, trace.prompt_tokens, grids=(4,))
    }
    assert shared.tolist() == [0, 4, 2, 3]
    assert by_name["exact"].token_hit_rate == 9 / 15 and by_name["exact"].prefill_ratio == 1
    assert by_name["grid 4"].token_hit_rate == 4 / 15
    assert by_name["end"].token_hit_rate == 7 / 15
    assert by_name["end"].prefill_ratio == 8 / 6
    warm = summed("x", trace.prompt_tokens, shared, shared, np.array([False, True, True, True]))
    assert warm.token_hit_rate == 9 / 11 and warm.uncached_percentiles == (1, 1)
    same = summed("x", np.array([3]), np.array([3]), np.array([3]))
    assert same.prefill_ratio is None and same.token_hit_rate == 1


def test_partial_blocks_count_only_where_they_have_an_id() -> None:
    trace = traced([(1, 2, 3), (1, 2, 3)])
    assert whole_blocks(trace).tolist() == known_lengths(trace).tolist() == [3, 3]
    for tail, known in (("ceil", 3), ("floor", 2)):
        trace.notes.update(block_tokens=2, tail=tail)
        assert whole_blocks(trace).tolist() == [2, 2]
        assert known_lengths(trace).tolist() == [known, known]


def test_an_empty_trace_has_statistics() -> None:
    s = trace_stats(from_requests([]))
    assert s.structure.turns is None and s.structure.leaves == 0
    assert all(p.token_hit_rate == 0 for p in s.placements)
