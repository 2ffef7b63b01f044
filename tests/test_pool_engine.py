"""The pool's budget, against a dictionary that stores every prefix, and its invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import policies
from sim.attribution import attribute
from sim.ledger import Action, Kind, Ledger
from sim.loop import replay, serial
from sim.policies.base import Base
from sim.policy import Layout, State
from sim.pool.budget import RESERVE, BudgetCache
from sim.pool.engine import PoolEngine
from sim.records import Records
from sim.step import StepResult
from sim.vllm.options import VllmOptions
from traces.identity import identify
from traces.trace import Request, Run, from_requests

STATE, TOKEN = 300, 4
FLOPS = (3.0, 0.25)


# -------------------------------------------------------------------------------- small traces
@st.composite
def traces(draw, most=8):
    """Requests out of few texts; some go on where an earlier one's sequence was."""
    rows = []
    for i in range(draw(st.integers(1, most))):
        own = (Run((10 + 2 * i) << 32, n),) if (n := draw(st.integers(0, 30))) else ()
        earlier = draw(st.integers(-1, i - 1))
        if earlier >= 0 and sum(r.length for r in rows[earlier].prompt) < 300:
            base = (*rows[earlier].prompt, *rows[earlier].output)
        else:
            base = (Run(draw(st.integers(0, 2)) << 32, draw(st.integers(1, 90))),)
        output = draw(st.integers(1, 80))
        rows.append(
            Request(
                str(i),
                (*base, *own),
                output,
                output=(Run((11 + 2 * i) << 32, output),),
                arrival_ns=i * draw(st.sampled_from((0, 40, 900))),
            )
        )
    rows.sort(key=lambda r: r.arrival_ns)
    return from_requests(rows)


def made(trace, policy, capacity, ledger=None, **more):
    known = {"async_scheduling": False, "max_model_len": 2000, **more}
    return PoolEngine(
        trace, identify(trace), policy, VllmOptions(**known), ledger,
        kv_bytes_per_token=TOKEN, state_bytes=STATE, capacity_bytes=capacity, flops=FLOPS,
    )  # fmt: skip


def smallest(trace):
    """A budget in which every request fits alone, and little else."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    return 2 * STATE + TOKEN * -(-longest // RESERVE) * RESERVE


# -------------------------------------------------------------------------------- naive model
class Naive:
    """One request after the other, token by token: states by prefix id, KV as the set of ids that
    lie on the way to a state or to the request that runs."""

    def __init__(self, trace, capacity, alpha):
        self.trace, self.capacity, self.alpha = trace, capacity, alpha
        prefixes = identify(trace)
        self.ids = [[-1, *prefixes.grid(r, 1)] for r in range(len(trace))]
        self.states: dict[int, dict] = {}
        self.clock = 0

    def request(self, r):
        prompt, ids = int(self.trace.prompt_tokens[r]), self.ids[r]
        total = len(ids) - 1
        kv = self.kv([])
        hit = max((p for p in range(1, prompt) if ids[p] in self.states), default=0)
        matched = max((p for p in range(1, prompt) if ids[p] in kv), default=0)
        self.pinned = {ids[hit]} if hit else set()
        if hit:
            self.stamp(ids[hit])
        self.running = ids[1 : hit + 1]
        branch = matched if matched > hit else 0
        self.running = ids[1 : prompt + 1]
        if branch:
            self.create(r, branch)
        self.fit(prompt)
        if branch and ids[branch] in self.states:
            self.pinned = set()
        for computed in range(prompt + 1, total):
            self.running = ids[1 : computed + 1]
            self.fit(computed)
        if ids[total - 1] not in self.states:
            self.create(r, total - 1)
        self.running, self.pinned = [], set()
        return hit, matched

    def create(self, r, position):
        key = self.ids[r][position]
        self.states[key] = {"path": self.ids[r][1 : position + 1]}
        self.stamp(key)

    def stamp(self, key):
        self.clock += 1
        self.states[key]["stamp"] = self.clock

    def kv(self, running):
        return set(running).union(*(s["path"] for s in self.states.values()))

    def bytes(self, computed):
        ahead = -(-computed // RESERVE) * RESERVE - computed
        tokens = len(self.kv(self.running)) + ahead
        return STATE * (1 + len(self.states)) + TOKEN * tokens

    def fit(self, computed):
        while self.bytes(computed) > self.capacity:
            del self.states[self.victim()]

    def parent(self, key):
        path = self.states[key]["path"]
        return next((i + 1 for i in range(len(path) - 2, -1, -1) if path[i] in self.states), 0)

    def victim(self):
        free = [k for k in self.states if k not in self.pinned]
        oldest = min(free, key=lambda k: self.states[k]["stamp"])
        if self.alpha is None:
            return oldest
        parents = {k: self.parent(k) for k in self.states}
        below = dict.fromkeys(self.states, 0)
        for key, parent in parents.items():
            if parent:
                below[self.states[key]["path"][parent - 1]] += 1
        few = [k for k in free if below[k] <= 1]
        if not few:
            return oldest
        recent = norm([1.0 / (1 + self.clock - self.states[k]["stamp"]) for k in few])
        worth = norm([self.worth(len(self.states[k]["path"]), parents[k]) for k in few])
        score = {k: x + self.alpha * y for k, x, y in zip(few, recent, worth, strict=True)}
        return min(few, key=lambda k: (score[k], self.states[k]["stamp"]))

    def worth(self, position, parent):
        saved = flops(position) - flops(parent)
        return saved / (STATE + TOKEN * (position - parent))


def flops(n):
    return FLOPS[0] * n + FLOPS[1] * n * (n + 1) / 2


def norm(values):
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 1.0 for v in values]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traces(), st.integers(0, 3000), st.sampled_from((None, 0, 0.7, 2.0)))
def test_hits_are_those_of_a_dictionary_of_prefixes(trace, extra, alpha):
    capacity = smallest(trace) + extra
    engine, records = made(trace, policies.load("marconi", alpha=alpha), capacity), Records(trace)
    serial(engine, trace, records)
    naive = Naive(trace, capacity, alpha)
    assert [naive.request(r) for r in range(len(trace))] == list(
        zip(records.hit_tokens, records.matched_tokens, strict=True)
    )
    engine.check()
    assert engine.cache.total_bytes == naive.bytes(0) - STATE


# -------------------------------------------------------------------------------- many at once
@dataclass(frozen=True)
class Whim(Base):
    """Places, publishes, sheds and drops at random."""

    seed: int = 0

    @property
    def engines(self) -> Sequence[str]:
        return ("pool",)

    def layout(self, engine):
        return Layout("exact")

    def place(self, memory, request, start, end, limits):
        assert limits.anywhere
        if memory.random() < 0.2 and end - start > 1:
            end = memory.randint(start + 1, end)
        return end, [memory.randint(start + 1, end) for _ in range(memory.randint(0, 3))]

    def publish(self, memory, state):
        return memory.random() < 0.8

    def trim(self, memory, path):
        assert [s.position for s in path] == sorted(s.position for s in path)
        return [s for s in path if not s.pinned and memory.random() < 0.1]

    def victim(self, memory, candidates, now_ns):
        assert all(not s.pinned for s in candidates)
        return memory.choice(candidates) if memory.random() < 0.7 else None

    def begin(self, view):
        return Random(self.seed)


class Constant:
    """A step takes 10 ns, and 1 ns a token."""

    def run(self, step):
        return StepResult(np.full(step.repeat, 10 + step.tokens, np.int64))


class Checked:
    """An engine whose every answer is followed by ``check``, and every hit looked up anew."""

    def __init__(self, engine):
        self.engine = engine
        self.states: dict[int, int] = {}
        self.at = 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def advance(self, to):
        log = self.engine.ledger
        for i in range(self.at, to):
            if log.kind[i] == Kind.STATE and log.action[i] == Action.PUBLISHED:
                self.states[log.key[i]] = log.step[i]
            elif log.kind[i] == Kind.STATE and log.action[i] == Action.DROPPED:
                self.states.pop(log.key[i], None)
        self.at = to

    def plan(self, now_ns):
        step = self.engine.plan(now_ns)
        self.engine.check()
        if step is None:
            return None
        assert max(step.used_bytes, step.cached_bytes) <= self.engine.capacity_bytes
        assert step.used_bytes <= step.cached_bytes
        for a in step.admitted:
            self.advance(a.event)
            ids = [-1, *self.engine.cache.prefixes.grid(a.request, 1)]
            deepest = max((p for p in range(1, a.matched + 1) if ids[p] in self.states), default=0)
            assert a.hit == deepest
        self.advance(len(self.engine.ledger))
        return step

    def commit(self, step):
        done = self.engine.commit(step)
        self.engine.check()
        return done


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    traces(), st.integers(0, 2500), st.integers(0, 99), st.booleans(), st.sampled_from((40, 8192))
)
def test_bytes_locks_and_hits_hold_with_many_at_once(trace, extra, seed, in_flight, budget):
    settings_ = {"async_scheduling": in_flight, "max_num_batched_tokens": budget, "max_num_seqs": 4}
    told = []
    for leap in (True, False):
        ledger, records = Ledger(), Records(trace)
        engine = made(trace, Whim(seed), smallest(trace) + extra, ledger, **settings_)
        replay(Checked(engine), trace, Constant(), records, host_ns=5, leap=leap)
        assert not engine.cache.held and not engine.cache.ahead and engine.cache.used_bytes == 0
        reasons = attribute(trace, engine.cache.prefixes, records, ledger, grid_tokens=1, tree=True)
        assert reasons["hit"].tolist() == records.hit_tokens
        told.append((records.hit_tokens, records.finished_ns, records.preemptions))
    assert told[0] == told[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(traces(), st.integers(0, 2500), st.integers(1, 7))
def test_the_future_changes_nothing(trace, extra, cut):
    whole = list(trace)
    first = from_requests(whole[:cut])
    capacity = smallest(trace) + extra
    hits = []
    for rows in (trace, first):
        records = Records(rows)
        serial(made(rows, policies.load("marconi", multiplier=1), capacity), rows, records)
        hits.append(records.hit_tokens[:cut])
    assert hits[0] == hits[1]


# -------------------------------------------------------------------------------- by hand
def shared(*own, output=3, shared=100):
    return from_requests(
        Request(str(i), (Run(0, shared), Run((i + 1) << 32, n)), output) for i, n in enumerate(own)
    )


def test_the_third_to_share_a_prefix_resumes_at_the_branch_point():
    trace = shared(20, 20, 20)
    records = Records(trace)
    serial(made(trace, policies.load("marconi"), 1 << 20), trace, records)
    assert records.hit_tokens == [0, 0, 100] and records.matched_tokens == [0, 100, 100]
    assert records.branch_tokens == [0, 100, 0]


def test_without_reuse_only_running_requests_take_bytes():
    trace = shared(20, 20)
    engine, records = made(trace, policies.load("none"), 4000), Records(trace)
    for r in range(2):
        engine.arrive(r)
    step = engine.plan(0)
    assert step.used_bytes == step.cached_bytes == 2 * (STATE + TOKEN * 128)
    engine = made(trace, policies.load("none"), 4000)
    serial(engine, trace, records)
    assert records.hit_tokens == [0, 0] and engine.cache.total_bytes == 0


def test_running_requests_that_do_not_fit_are_preempted_and_finish():
    trace = shared(1, 1, 1, output=200, shared=20)
    engine, records = made(trace, policies.load("marconi"), 2 * STATE + TOKEN * 400), Records(trace)
    replay(engine, trace, Constant(), records)
    assert sum(records.preemptions) > 0 and min(records.finished_ns) > 0
    engine.check()


def test_a_request_larger_than_the_pool_is_refused_with_both_sizes():
    engine = made(shared(20), policies.load("marconi"), 1000)
    assert engine.reject_reason(0) == "needs 1112 bytes, the pool has 1000"
    assert made(shared(20), policies.load("marconi"), 1112).reject_reason(0) is None


def test_a_burst_waits_for_the_checkpoint_that_is_being_written():
    trace = shared(20, 20, 20, 20)
    engine = made(trace, policies.load("marconi"), 1 << 20)
    serial_first = Records(trace)
    engine.arrive(0)
    while engine.unfinished:
        engine.commit(engine.plan(0))
    del serial_first
    for r in (1, 2, 3):
        engine.arrive(r)
    first = engine.plan(0)
    assert [a.request for a in first.admitted] == [1] and first.chunks[0].saves == 1
    engine.commit(first)
    assert [(a.request, a.hit) for a in engine.plan(0).admitted] == [(2, 100), (3, 100)]


@pytest.mark.parametrize("answer", ["stranger", "pinned"])
def test_a_victim_that_may_not_go_is_refused(answer):
    @dataclass(frozen=True)
    class Wrong(Whim):
        def place(self, memory, request, start, end, limits):
            return end, (end,)

        def publish(self, memory, state):
            return True

        def trim(self, memory, path):
            return ()

        def begin(self, view):
            return []

        def observe(self, memory, event, state):
            if event == "used":
                memory.append(state)

        def victim(self, memory, candidates, now_ns):
            return State(0, 5, 1, 0, 0) if answer == "stranger" else (memory or [None])[0]

    trace = from_requests(
        [
            Request("a", (Run(0, 60),), 2),
            Request("b", (Run(0, 60), Run(1 << 32, 60)), 2),
            Request("c", (Run(0, 60), Run(2 << 32, 60)), 2),
        ]
    )
    with pytest.raises(ValueError, match="in use or not there"):
        serial(made(trace, Wrong(), 1500), trace, Records(trace))


def test_a_layout_that_the_pool_cannot_host_is_refused():
    @dataclass(frozen=True)
    class Aligned(Whim):
        def layout(self, engine):
            return Layout("align")

    with pytest.raises(ValueError, match="the pool hosts exact and none"):
        made(shared(5), Aligned(), 5000)


def test_states_tell_of_their_neighbours():
    trace = shared(20, 30)
    engine = made(trace, policies.load("marconi"), 1 << 20)
    serial(engine, trace, Records(trace))
    assert isinstance(engine.cache, BudgetCache)
    told = sorted(
        (s.position, s.parent, s.children, s.tokens, s.uses) for s in engine.cache.states.candidates
    )
    # The branch point's own KV would stay, since two ends hang below it.
    assert told == [(100, 0, 2, 0, 0), (122, 100, 0, 22, 0), (132, 100, 0, 32, 0)]
