"""A trace as columns, and one request of it as a record.

Content is named by *addresses*: every distinct piece of text owns a range of integers, and a
``Run`` is ``length`` tokens from ``address`` on. Two sequences share a prefix exactly as far as
their addresses agree. Nothing else is known of a token, and nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` tokens at consecutive addresses from ``address`` on."""

    address: int
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request. It arrives at ``arrival_ns``, or ``think_ns`` after all of ``after`` finish.

    ``arrival_ns`` is None where the trace gives no time. With both, the later one holds.
    ``output`` is empty where the format does not say what was generated; ``output_tokens`` is
    then the only thing known of it. ``generation_prompt_tokens`` is the end of the prompt that
    the chat template drops from history, None where unknown.
    """

    id: str
    prompt: tuple[Run, ...]
    output_tokens: int
    output: tuple[Run, ...] = ()
    arrival_ns: int | None = None
    session: str | None = None
    after: tuple[str, ...] = ()
    think_ns: int = 0
    generation_prompt_tokens: int | None = None
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(run.length for run in self.prompt)


@dataclass(frozen=True)
class Trace:
    """``n`` requests as columns, in file order (arrival order for open-loop traces).

    ``runs`` hold prompt then output of each request, consecutive addresses merged; request ``r``
    owns rows ``run_offsets[r]:run_offsets[r + 1]``. An output of unknown content has addresses of
    its own that nothing else uses, so prompts and outputs always cover
    ``prompt_tokens + output_tokens`` addresses. ``-1`` stands for unknown in ``arrival_ns``,
    ``session`` and ``generation_prompt_tokens``. ``after`` holds request indices (CSR).
    """

    ids: tuple[str, ...]
    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    output_known: NDArray[np.bool_]
    session: Ints
    think_ns: Ints
    generation_prompt_tokens: Ints
    priority: Ints
    after_offsets: Ints
    after: Ints
    run_offsets: Ints
    run_address: Ints
    run_length: Ints
    session_names: tuple[str, ...] = ()
    notes: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def __iter__(self) -> Iterator[Request]:
        return (self.request(i) for i in range(len(self)))

    def after_of(self, i: int) -> Sequence[int]:
        """Indices of the requests that request ``i`` waits for."""
        return [int(j) for j in self.after[self.after_offsets[i] : self.after_offsets[i + 1]]]

    def runs_of(self, i: int) -> tuple[list[Run], list[Run]]:
        """Prompt and output of request ``i`` as runs."""
        rows = slice(int(self.run_offsets[i]), int(self.run_offsets[i + 1]))
        prompt: list[Run] = []
        output: list[Run] = []
        left = int(self.prompt_tokens[i])
        for a, n in zip(
            self.run_address[rows].tolist(), self.run_length[rows].tolist(), strict=True
        ):
            head = min(left, n)
            if head:
                prompt.append(Run(a, head))
            if n > head:
                output.append(Run(a + head, n - head))
            left -= head
        return prompt, output

    def request(self, i: int) -> Request:
        """Request ``i`` as a record."""
        prompt, output = self.runs_of(i)
        known = bool(self.output_known[i])
        arrival, session = int(self.arrival_ns[i]), int(self.session[i])
        generation = int(self.generation_prompt_tokens[i])
        return Request(
            id=self.ids[i],
            prompt=tuple(prompt),
            output_tokens=int(self.output_tokens[i]),
            output=tuple(output) if known else (),
            arrival_ns=None if arrival == UNKNOWN else arrival,
            session=None if session == UNKNOWN else self.session_names[session],
            after=tuple(self.ids[j] for j in self.after_of(i)),
            think_ns=int(self.think_ns[i]),
            generation_prompt_tokens=None if generation == UNKNOWN else generation,
            priority=int(self.priority[i]),
        )


def from_requests(requests: Iterable[Request], **notes: object) -> Trace:
    """Columns of ``requests``. Raises ``ValueError`` on a duplicate id or an unknown ``after``."""
    rows = list(requests)
    index: dict[str, int] = {}
    for i, r in enumerate(rows):
        if index.setdefault(r.id, i) != i:
            raise ValueError(f"request id {r.id!r} stands twice; ids must differ")
    sessions: dict[str, int] = {}
    run_rows, offsets = _merged_runs(rows)
    after, after_offsets = _dependencies(rows, index)

    def column(values: Iterable[int]) -> Ints:
        return np.fromiter(values, np.int64, len(rows))

    return Trace(
        ids=tuple(r.id for r in rows),
        arrival_ns=column(UNKNOWN if r.arrival_ns is None else r.arrival_ns for r in rows),
        prompt_tokens=column(r.prompt_tokens for r in rows),
        output_tokens=column(r.output_tokens for r in rows),
        output_known=np.array([bool(r.output) or not r.output_tokens for r in rows], bool),
        session=column(
            UNKNOWN if r.session is None else sessions.setdefault(r.session, len(sessions))
            for r in rows
        ),
        think_ns=column(r.think_ns for r in rows),
        generation_prompt_tokens=column(
            UNKNOWN if r.generation_prompt_tokens is None else r.generation_prompt_tokens
            for r in rows
        ),
        priority=column(r.priority for r in rows),
        after_offsets=after_offsets,
        after=after,
        run_offsets=offsets,
        run_address=run_rows[:, 0].copy(),
        run_length=run_rows[:, 1].copy(),
        session_names=tuple(sessions),
        notes=dict(notes),
    )


def forget_outputs(trace: Trace) -> Trace:
    """The same requests with outputs of unknown content, which no later prompt can share."""
    return from_requests((replace(r, output=()) for r in trace), **trace.notes)


def _merged_runs(rows: Sequence[Request]) -> tuple[Ints, Ints]:
    fresh = 1 + max(
        (run.address + run.length for r in rows for run in (*r.prompt, *r.output)), default=0
    )
    out: list[tuple[int, int]] = []
    offsets = [0]
    for r in rows:
        runs = [*r.prompt, *r.output]
        if not r.output and r.output_tokens:
            runs.append(Run(fresh, r.output_tokens))
            fresh += r.output_tokens + 1
        end = None
        for run in runs:
            if run.length <= 0:
                continue
            if end == run.address:
                address, length = out[-1]
                out[-1] = (address, length + run.length)
            else:
                out.append((run.address, run.length))
            end = run.address + run.length
        offsets.append(len(out))
    return np.array(out, np.int64).reshape(-1, 2), np.array(offsets, np.int64)


def _dependencies(rows: Sequence[Request], index: dict[str, int]) -> tuple[Ints, Ints]:
    after: list[int] = []
    offsets = [0]
    for r in rows:
        for name in r.after:
            if name not in index:
                raise ValueError(f"request {r.id!r} waits for {name!r}, which is not in the trace")
            after.append(index[name])
        offsets.append(len(after))
    return np.array(after, np.int64), np.array(offsets, np.int64)
