"""Content cut into segments that any request uses whole or not at all, in order of first sight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from traces.columns import Columns
from traces.trace import UNKNOWN, Ints, Trace


@dataclass(frozen=True)
class Segments:
    """``lengths`` of all segments; request ``r`` has ``ids[offsets[2r]:offsets[2r + 1]]`` as its
    prompt and ``ids[offsets[2r + 1]:offsets[2r + 2]]`` as its output where that is known."""

    lengths: Ints
    offsets: Ints
    ids: Ints

    def prompt(self, request: int) -> list[int]:
        return self._part(2 * request)

    def output(self, request: int) -> list[int]:
        return self._part(2 * request + 1)

    def _part(self, k: int) -> list[int]:
        out: list[int] = self.ids[int(self.offsets[k]) : int(self.offsets[k + 1])].tolist()
        return out


def segments(trace: Trace) -> Segments:
    """Segments cut where any run of ``trace`` begins or ends."""
    parts, address, length = _parts(trace)
    bounds = np.unique(np.r_[address, address + length])
    low, high = np.searchsorted(bounds, address), np.searchsorted(bounds, address + length)
    counts = high - low
    starts = np.r_[0, np.cumsum(counts)]
    cut = np.arange(starts[-1]) - np.repeat(starts[:-1] - low, counts)
    used, first, inverse = np.unique(cut, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    of_part = np.bincount(parts, weights=counts, minlength=2 * len(trace)).astype(np.int64)
    return Segments(
        lengths=np.asarray((bounds[used + 1] - bounds[used])[order], np.int64),
        offsets=np.r_[0, np.cumsum(of_part)].astype(np.int64),
        ids=np.asarray(rank[inverse], np.int64),
    )


def _parts(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Runs split where prompts end: part (2r prompt, 2r + 1 output), address, length."""
    out: list[tuple[int, int, int]] = []
    for r in range(len(trace)):
        prompt, output = trace.runs_of(r)
        out.extend((2 * r, run.address, run.length) for run in prompt)
        if trace.output_known[r]:
            out.extend((2 * r + 1, run.address, run.length) for run in output)
    table = np.array(out, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def canonical(trace: Trace) -> Trace:
    """``trace`` with tokens addressed in order of first sight; equal content, equal columns."""
    cut = segments(trace)
    address = np.r_[0, np.cumsum(cut.lengths)].tolist()
    length = cut.lengths.tolist()
    columns = Columns(sort=False)
    for r in range(len(trace)):
        columns.latest = 0
        prompt, output = (
            [(address[s], length[s]) for s in ids] for ids in (cut.prompt(r), cut.output(r))
        )
        known = bool(trace.output_known[r])
        columns.add(
            trace.ids[r],
            int(trace.prompt_tokens[r]),
            int(trace.output_tokens[r]),
            prompt,
            output if known else None,
            arrival=int(trace.arrival_ns[r]),
            session=_session(trace, r),
            after=trace.after_of(r),
            think=int(trace.think_ns[r]),
            generation=int(trace.generation_prompt_tokens[r]),
            priority=int(trace.priority[r]),
        )
    return replace(columns.build(), notes=trace.notes)


def _session(trace: Trace, request: int) -> str | None:
    session = int(trace.session[request])
    return None if session == UNKNOWN else trace.session_names[session]
