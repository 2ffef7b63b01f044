"""Where the readers put what they have checked: lists that become the columns of a trace."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from traces.errors import BadRecord
from traces.order import take
from traces.trace import UNKNOWN, Ints, Trace

Runs = Sequence[tuple[int, int]]


def _longs() -> array[int]:
    return array("q")


@dataclass
class Columns:
    """Requests so far, appended whole or not at all. ``add`` raises ``BadRecord``.

    ``sort`` orders by arrival at the end (stably; a request without a time stays behind the one
    before it) instead of refusing a time that goes backwards.
    """

    sort: bool = False
    ids: list[str] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    session: array[int] = field(default_factory=_longs)
    arrival: array[int] = field(default_factory=_longs)
    prompt: array[int] = field(default_factory=_longs)
    output: array[int] = field(default_factory=_longs)
    known: list[bool] = field(default_factory=list)
    think: array[int] = field(default_factory=_longs)
    generation: array[int] = field(default_factory=_longs)
    priority: array[int] = field(default_factory=_longs)
    after: array[int] = field(default_factory=_longs)
    after_counts: array[int] = field(default_factory=_longs)
    address: array[int] = field(default_factory=_longs)
    length: array[int] = field(default_factory=_longs)
    run_counts: array[int] = field(default_factory=_longs)
    latest: int = 0

    def check(self, id: str, arrival: int) -> None:
        """Raise ``BadRecord`` if ``add`` would refuse this id or this time."""
        if id in self.index:
            raise BadRecord(f"request id {id!r} stands twice, allowed: ids that differ")
        if arrival != UNKNOWN and arrival < self.latest and not self.sort:
            raise BadRecord(
                f"time goes back from {self.latest} to {arrival} ns, allowed: times that do not"
                " fall, or the option sort (stable)"
            )

    def add(
        self,
        id: str,
        prompt_tokens: int,
        output_tokens: int,
        prompt: Runs = (),
        output: Runs | None = None,
        *,
        arrival: int = UNKNOWN,
        session: str | None = None,
        after: Sequence[int] = (),
        think: int = 0,
        generation: int = UNKNOWN,
        priority: int = 0,
    ) -> int:
        """Append a request and return its index.

        Tokens of the prompt beyond its runs, and an output of None, are content of its own.
        """
        self.check(id, arrival)
        self.index[id] = len(self.ids)
        self.ids.append(id)
        self.latest = max(self.latest, arrival)
        self.arrival.append(arrival)
        name = UNKNOWN
        if session is not None:
            name = self.sessions.setdefault(session, len(self.sessions))
        self.session.append(name)
        self.prompt.append(prompt_tokens)
        self.output.append(output_tokens)
        self.known.append(output is not None or not output_tokens)
        self.think.append(think)
        self.generation.append(generation)
        self.priority.append(priority)
        self.after.extend(after)
        self.after_counts.append(len(after))
        self._runs(prompt, output or (), prompt_tokens, output_tokens)
        return len(self.ids) - 1

    def _runs(self, prompt: Runs, output: Runs, prompt_tokens: int, output_tokens: int) -> None:
        runs = list(prompt)
        tail = prompt_tokens - sum(n for _, n in prompt)
        own = output_tokens - sum(n for _, n in output)
        if tail and output:
            runs.append((UNKNOWN, tail))
            tail = 0
        runs.extend(output)
        if tail + own:
            runs.append((UNKNOWN, tail + own))
        self.address.extend([a for a, _ in runs])
        self.length.extend([n for _, n in runs])
        self.run_counts.append(len(runs))

    def build(self, **notes: object) -> Trace:
        """The trace. ``notes`` go along."""
        offsets, address, length = merge_runs(
            _offsets(self.run_counts), *_with_private(_ints(self.address), _ints(self.length))
        )
        trace = Trace(
            ids=tuple(self.ids),
            arrival_ns=_ints(self.arrival),
            prompt_tokens=_ints(self.prompt),
            output_tokens=_ints(self.output),
            output_known=np.array(self.known, bool),
            session=_ints(self.session),
            think_ns=_ints(self.think),
            generation_prompt_tokens=_ints(self.generation),
            priority=_ints(self.priority),
            after_offsets=_offsets(self.after_counts),
            after=_ints(self.after),
            run_offsets=offsets,
            run_address=address,
            run_length=length,
            session_names=tuple(self.sessions),
            notes=dict(notes),
        )
        return sorted_by_arrival(trace) if self.sort else trace


def sorted_by_arrival(trace: Trace) -> Trace:
    """``trace`` in order of arrival, stably; no time means the time of the request before it,
    or of the last one it waits for."""
    when: list[int] = []
    for i, t in enumerate(trace.arrival_ns.tolist()):
        own = t if t != UNKNOWN else (when[-1] if when else 0)
        when.append(max([own, *(when[j] for j in trace.after_of(i) if j < i)]))
    order = np.argsort(np.array(when, np.int64), kind="stable")
    return trace if np.all(np.diff(order) == 1) else take(trace, order)


def _ints(values: array[int]) -> Ints:
    out: Ints = np.array(values, np.int64)
    return out


def _offsets(counts: array[int]) -> Ints:
    out: Ints = np.r_[0, np.cumsum(_ints(counts))].astype(np.int64)
    return out


def _with_private(address: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Give runs at ``UNKNOWN`` addresses of their own above all others, one apart."""
    own = address == UNKNOWN
    fresh = 1 + int((address + length)[~own].max(initial=0))
    sizes = length[own] + 1
    address[own] = fresh + np.cumsum(sizes) - sizes
    return address, length


def merge_runs(offsets: Ints, address: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Join runs of one request whose addresses go on."""
    if not len(address):
        return offsets, address, length
    head = np.ones(len(address), bool)
    head[1:] = address[1:] != address[:-1] + length[:-1]
    head[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(head)
    counts = np.r_[0, np.cumsum(head)]
    return np.asarray(counts[offsets], np.int64), address[starts], np.add.reduceat(length, starts)
