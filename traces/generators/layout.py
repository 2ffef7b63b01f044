"""Give planned sessions their addresses: sessions of turns become the columns of a trace.

A session's history lies at consecutive addresses, so that a prompt is a few runs: the system
prompt, the history, and one more per rollback. What no later prompt repeats (an output that is
dropped from history, the generation prompt) lies aside, to leave the history in one piece.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.trace import UNKNOWN, Ints, Trace


@dataclass(frozen=True)
class Plan:
    """``S`` sessions and their ``N`` turns, session by session, before they have addresses.

    ``first`` counts the tokens of a session's first prompt, system prompt included. Where
    ``forked`` is positive that many of them are the first prompt of the session ``fork_of``.
    A later turn's prompt is the previous one without its last ``lost`` tokens, then the previous
    output where ``keeps_output``, then ``new`` tokens. ``lost`` never reaches the system prompt.
    A prompt of more than ``limit`` tokens is replaced by system prompt and ``compacted_tokens``.
    """

    turns: Ints  # [S], as all down to fork_of
    group: Ints
    first: Ints
    limit: Ints
    forked: Ints
    fork_of: Ints
    new: Ints  # [N], as all down to think_ns; new, lost, keeps_output unused in first turns
    lost: Ints
    keeps_output: NDArray[np.bool_]
    output: Ints
    think_ns: Ints
    system_tokens: int
    compacted_tokens: int
    generation_prompt_tokens: int


def lay_out(plan: Plan, **notes: object) -> Trace:
    """The trace of ``plan``: a turn waits for the one before it and its think time."""
    rows = _Rows(plan)
    n = 0
    for session, turns in enumerate(plan.turns.tolist()):
        rows.session(session, n, n + turns)
        n += turns
    return rows.trace(notes)


class _History:
    """What the next prompt begins with, as runs."""

    __slots__ = ("addresses", "lengths", "total")

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.lengths: list[int] = []
        self.total = 0

    def append(self, address: int, n: int) -> None:
        if n <= 0:
            return
        if self.addresses and self.addresses[-1] + self.lengths[-1] == address:
            self.lengths[-1] += n
        else:
            self.addresses.append(address)
            self.lengths.append(n)
        self.total += n

    def cut(self, keep: int) -> None:
        while self.total > keep:
            last = self.lengths[-1]
            if self.total - last >= keep:
                self.addresses.pop()
                self.lengths.pop()
                self.total -= last
            else:
                self.lengths[-1] -= self.total - keep
                self.total = keep


class _Rows:
    """The columns under construction; addresses aside stay ``-1 - address`` until the end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.address, self.length = array("q"), array("q")
        self.counts, self.prompts = array("q"), array("q")
        self.new, self.lost = plan.new.tolist(), plan.lost.tolist()
        self.keeps, self.output = plan.keeps_output.tolist(), plan.output.tolist()
        groups = int(plan.group.max()) + 1
        # a gap of one keeps two contents from reading as one run
        self.fresh = groups * (plan.system_tokens + 1)
        self.aside = plan.generation_prompt_tokens + 1
        self.private: list[int] = []

    def session(self, session: int, begin: int, end: int) -> None:
        history = self._first(session)
        limit = int(self.plan.limit[session])
        for i in range(begin, end):
            if i > begin:
                self._go_on(history, i, limit)
            kept = i + 1 < end and self.keeps[i + 1] and not self.lost[i + 1]
            self._request(history, self.output[i], kept)
        self.fresh += 1

    def _first(self, session: int) -> _History:
        plan, history = self.plan, _History()
        system, first = plan.system_tokens, int(plan.first[session])
        forked = int(plan.forked[session])
        history.append(int(plan.group[session]) * (system + 1), system)
        if forked:
            history.append(self.private[int(plan.fork_of[session])], forked - system)
        self.private.append(self.fresh)
        self._extend(history, first - history.total)
        return history

    def _extend(self, history: _History, n: int) -> None:
        history.append(self.fresh, n)
        self.fresh += n

    def _go_on(self, history: _History, i: int, limit: int) -> None:
        system = self.plan.system_tokens
        if self.lost[i]:
            history.cut(max(system, history.total - self.lost[i]))
        if history.total + self.new[i] > limit:
            history.cut(system)
            self._extend(history, self.plan.compacted_tokens)
        self._extend(history, self.new[i])

    def _request(self, history: _History, output: int, kept: bool) -> None:
        generation = self.plan.generation_prompt_tokens
        before = len(self.address)
        self.address.extend(history.addresses)
        self.length.extend(history.lengths)
        self.prompts.append(history.total + generation)
        if generation:
            self._row(-1, generation)
        if kept:
            self._row(self.fresh, output)
            self._extend(history, output)
        else:
            self._row(-1 - self.aside, output)
            self.aside += output + 1
        self.counts.append(len(self.address) - before)

    def _row(self, address: int, n: int) -> None:
        if address >= 0 and self.address[-1] + self.length[-1] == address:
            self.length[-1] += n
        elif n:
            self.address.append(address)
            self.length.append(n)

    def trace(self, notes: dict[str, object]) -> Trace:
        plan, n = self.plan, len(self.prompts)
        raw = np.array(self.address, np.int64)
        sessions = np.repeat(np.arange(len(plan.turns)), plan.turns)
        starts = np.cumsum(plan.turns) - plan.turns
        turn = np.arange(n) - starts[sessions]
        waits = np.flatnonzero(turn)
        return Trace(
            ids=tuple(f"s{s}-{t}" for s, t in zip(sessions.tolist(), turn.tolist(), strict=True)),
            arrival_ns=np.full(n, UNKNOWN, np.int64),
            prompt_tokens=np.array(self.prompts, np.int64),
            output_tokens=plan.output,
            output_known=np.ones(n, bool),
            session=sessions,
            think_ns=np.where(turn > 0, plan.think_ns, 0),
            generation_prompt_tokens=np.full(n, plan.generation_prompt_tokens, np.int64),
            priority=np.zeros(n, np.int64),
            after_offsets=np.r_[0, np.cumsum(turn > 0)],
            after=waits - 1,
            run_offsets=np.r_[0, np.cumsum(np.array(self.counts, np.int64))],
            run_address=np.where(raw < 0, self.fresh - 1 - raw, raw),
            run_length=np.array(self.length, np.int64),
            session_names=tuple(f"s{s}" for s in range(len(plan.turns))),
            notes=notes,
        )
