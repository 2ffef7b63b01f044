"""The order of a trace's requests: who waits for whom, and parts of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traces.trace import UNKNOWN, Ints, Trace


def take(trace: Trace, which: Ints) -> Trace:
    """The requests ``which``, in that order; waits for requests not among them are dropped."""
    place = np.full(len(trace), UNKNOWN, np.int64)
    place[which] = np.arange(len(which))
    after_offsets, after_rows = _slices(trace.after_offsets, which)
    after = place[trace.after[after_rows]]
    there = np.concatenate(([0], np.cumsum(after != UNKNOWN)))
    run_offsets, run_rows = _slices(trace.run_offsets, which)
    return replace(
        trace,
        ids=tuple(trace.ids[i] for i in which.tolist()),
        arrival_ns=trace.arrival_ns[which],
        prompt_tokens=trace.prompt_tokens[which],
        output_tokens=trace.output_tokens[which],
        output_known=trace.output_known[which],
        session=trace.session[which],
        think_ns=trace.think_ns[which],
        generation_prompt_tokens=trace.generation_prompt_tokens[which],
        priority=trace.priority[which],
        after_offsets=there[after_offsets],
        after=after[after != UNKNOWN],
        run_offsets=run_offsets,
        run_address=trace.run_address[run_rows],
        run_length=trace.run_length[run_rows],
    )


def nominal_ns(trace: Trace) -> Ints:
    """When each request would arrive if serving took no time; unknown starts count as 0.

    Raises ``ValueError`` where requests wait for each other in a circle.
    """
    times = np.maximum(trace.arrival_ns, 0).tolist()
    thinks = trace.think_ns.tolist()
    for i in _waits_last(trace):
        waits = trace.after_of(i)
        times[i] = max(times[i], max(times[j] for j in waits) + thinks[i])
    return np.array(times, np.int64)


def _waits_last(trace: Trace) -> Sequence[int]:
    """The requests that wait, every one behind those that it waits for."""
    waits = np.diff(trace.after_offsets)
    waiting = np.flatnonzero(waits)
    owner = np.repeat(np.arange(len(trace)), waits)
    if np.all(trace.after < owner):
        return [int(i) for i in waiting]
    left = waits.tolist()
    followers: dict[int, list[int]] = {}
    for parent, child in zip(trace.after.tolist(), owner.tolist(), strict=True):
        followers.setdefault(parent, []).append(child)
    ready = [int(i) for i in np.flatnonzero(waits == 0)]
    order: list[int] = []
    while ready:
        for child in followers.get(ready.pop(), ()):
            left[child] -= 1
            if not left[child]:
                order.append(child)
                ready.append(child)
    if len(order) < len(waiting):
        stuck = next(int(i) for i in waiting if left[int(i)])
        raise ValueError(f"request {trace.ids[stuck]!r} waits for itself in a circle of `after`")
    return order


def roots(trace: Trace) -> Ints:
    """Requests that wait for no other, in file order."""
    return np.flatnonzero(np.diff(trace.after_offsets) == 0)


def leaves(trace: Trace, roots: Ints) -> dict[int, list[int]]:
    """By root, the requests that nothing waits for; the first `after` says to whom one belongs."""
    root = np.arange(len(trace)).tolist()
    for i in _waits_last(trace):
        root[i] = root[trace.after_of(i)[0]]
    inner = np.zeros(len(trace), bool)
    inner[trace.after] = True
    leaves: dict[int, list[int]] = {int(r): [] for r in roots}
    for i in np.flatnonzero(~inner).tolist():
        leaves[root[i]].append(i)
    return leaves


def _slices(offsets: Ints, which: Ints) -> tuple[Ints, Ints]:
    """CSR rows of ``which``: their new offsets, and their places in the old values."""
    counts = np.diff(offsets)[which]
    new = np.concatenate(([0], np.cumsum(counts)))
    shift = np.repeat(offsets[:-1][which] - new[:-1], counts)
    return new, np.arange(int(new[-1])) + shift
