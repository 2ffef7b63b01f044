"""Arrival times: means, variations and shapes with fixed seeds, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traces.arrivals import (
    OpenLoop,
    closed_loop,
    fixed,
    gamma,
    limit,
    poisson,
    scale,
    with_arrivals,
)
from traces.generators import generate
from traces.order import nominal_ns, take
from traces.trace import UNKNOWN, Request, Run, Trace, from_requests

N = 20_000


def requests(*waits: tuple[int, ...], think_ns: int = 0) -> Trace:
    """One request per entry, waiting for the requests that the entry lists."""
    return from_requests(
        Request(f"q{i}", (Run(i * 10, 4),), 2, after=tuple(f"q{j}" for j in w), think_ns=think_ns)
        for i, w in enumerate(waits)
    )


def test_fixed_gaps_are_equal() -> None:
    assert fixed(4.0).starts(4).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert fixed(4.0).starts(0).tolist() == []


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(gamma(5.0, cv, seed=7).starts(N)) / 1e9
    assert gaps.min() >= 0
    # four standard errors of the mean
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 * cv / N**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.sort(np.diff(poisson(5.0, seed=3).starts(N)) / 1e9)
    expected = 1 - np.exp(-5.0 * gaps)
    distance = np.abs(expected - np.arange(len(gaps)) / len(gaps)).max()
    assert distance < 1.63 / N**0.5  # Kolmogorov-Smirnov, 1 %
    bursty = np.sort(np.diff(gamma(5.0, 3.0, seed=3).starts(N)) / 1e9)
    other = np.abs(1 - np.exp(-5.0 * bursty) - np.arange(len(bursty)) / len(bursty)).max()
    assert other > 0.2  # the same test tells a burstier process apart


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    seconds = poisson(20.0, seed=5).starts(N) // 1_000_000_000
    counts = np.bincount(seconds)[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


def test_same_seed_same_times() -> None:
    assert np.array_equal(poisson(2.0, 9).starts(50), poisson(2.0, 9).starts(50))
    assert not np.array_equal(poisson(2.0, 9).starts(50), poisson(2.0, 10).starts(50))
    assert poisson(2.0, 9).starts(50).dtype == np.int64


def test_only_sessions_get_times_and_the_order_is_nominal() -> None:
    trace = with_arrivals(requests((), (0,), (), (2,), think_ns=1_500_000_000), fixed(1.0))
    assert trace.ids == ("q0", "q2", "q1", "q3")
    assert trace.arrival_ns.tolist() == [0, 1_000_000_000, UNKNOWN, UNKNOWN]
    assert trace.after_of(2) == [0] and trace.after_of(3) == [1]
    assert nominal_ns(trace).tolist() == [0, 1_000_000_000, 1_500_000_000, 2_500_000_000]
    assert [r.prompt for r in trace][1] == (Run(20, 4),)


def test_times_that_stand_are_kept_unless_replaced() -> None:
    timed = with_arrivals(requests((), ()), fixed(1.0))
    with pytest.raises(ValueError, match=r"'q0' already arrives at 0 ns.*replace_times"):
        with_arrivals(timed, fixed(2.0))
    again = with_arrivals(timed, fixed(2.0), replace_times=True)
    assert again.arrival_ns.tolist() == [0, 500_000_000]


def test_closed_loop_users_take_turns() -> None:
    trace = with_arrivals(requests((), (0,), (), (), ()), closed_loop(2, 3.0))
    by_id = {r.id: r for r in trace}
    assert by_id["q0"].arrival_ns == 0 and by_id["q2"].arrival_ns == 0
    assert by_id["q3"].after == ("q1",) and by_id["q3"].think_ns == 3_000_000_000
    assert by_id["q4"].after == ("q2",) and by_id["q4"].arrival_ns is None
    assert by_id["q1"].after == ("q0",) and by_id["q1"].think_ns == 0


def test_closed_loop_waits_for_every_leaf_and_for_joined_sessions() -> None:
    trace = with_arrivals(requests((), (0,), (0,), ()), closed_loop(1))
    assert {r.id: r.after for r in trace}["q3"] == ("q1", "q2")
    joined = with_arrivals(requests((), (), (0, 1), (), ()), closed_loop(2))
    assert {r.id: r.after for r in joined}["q4"] == ("q1",)


def test_closed_loop_never_runs_more_than_its_users() -> None:
    """Serve every request in one second and count who overlaps."""
    trace = with_arrivals(
        generate("agentic", {"sessions": 40}, 1), closed_loop(5, 2.0, think_cv=1.0, seed=4)
    )
    start = np.zeros(len(trace), np.int64)
    for i in range(len(trace)):
        waits = trace.after_of(i)
        ready = max((start[j] + 10**9 for j in waits), default=int(trace.arrival_ns[i]))
        start[i] = ready + trace.think_ns[i]
    running = [int(((start <= t) & (start + 10**9 > t)).sum()) for t in start.tolist()]
    assert max(running) == 5
    roots_waiting = np.flatnonzero((trace.arrival_ns == UNKNOWN) & (trace.think_ns > 0))
    assert len(roots_waiting) > 35


def test_closed_loop_think_times_have_their_mean() -> None:
    thinks = closed_loop(1, 4.0, think_cv=1.0, seed=2).thinks(N) / 1e9
    assert thinks.mean() == pytest.approx(4.0, abs=4 * 4.0 / N**0.5)
    assert thinks.std() / thinks.mean() == pytest.approx(1.0, abs=0.05)


def test_scale_slows_arrivals_and_leaves_the_rest() -> None:
    trace = with_arrivals(requests((), (0,), (), think_ns=5), fixed(1.0))
    slow = scale(trace, 2.5)
    assert sorted(slow.arrival_ns.tolist()) == [UNKNOWN, 0, 2_500_000_000]
    assert slow.think_ns.tolist() == trace.think_ns.tolist()
    assert slow.ids == trace.ids and slow.notes["arrival_scale"] == 2.5


def test_limit_keeps_the_first_requests_whole() -> None:
    trace = generate("chat", {"sessions": 30}, 2)
    cut = limit(trace, 17)
    assert list(cut) == [trace.request(i) for i in range(17)]
    assert len(limit(trace, 10**6)) == len(trace)
    assert len(limit(trace, 0)) == 0


def test_take_renames_and_drops_waits() -> None:
    trace = requests((), (0,), (1,))
    assert [r.after for r in take(trace, np.array([2, 1]))] == [("q1",), ()]


def test_waits_may_point_forward_but_not_in_a_circle() -> None:
    forward = requests((1,), (), think_ns=7)
    assert nominal_ns(forward).tolist() == [7, 0]
    circle = replace(forward, after_offsets=np.array([0, 1, 2]), after=np.array([1, 0]))
    with pytest.raises(ValueError, match="circle"):
        nominal_ns(circle)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed(0.0), r"rate is 0.0; allowed: 1e-09 to .*; nearest: 1e-09"),
        (lambda: gamma(1.0, -1.0), r"cv is -1.0; allowed: 0.0 to 1000.0; nearest: 0.0"),
        (lambda: closed_loop(0), r"users is 0; allowed: 1 to .*; nearest: 1"),
        (lambda: OpenLoop(float("nan")), "rate is nan"),
        (lambda: scale(requests(()), 0.0), "factor is 0.0"),
        (lambda: limit(requests(()), -1), "n is -1; allowed: 0"),
        (lambda: fixed(1e-9).starts(100), "raise the rate"),
    ],
)
def test_bad_values_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
