"""Requests of which the tokens are known, as turns of their sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from traces.columns import Columns
from traces.errors import BadRecord
from traces.token_tree import Tokens, TokenTree, cut
from traces.trace import UNKNOWN

NONE: Tokens = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Turn:
    """One request. ``prompt`` is empty and ``output`` None where only lengths are known;
    ``session`` None is a request on its own."""

    prompt_tokens: int
    output_tokens: int
    prompt: Tokens
    output: Tokens | None
    id: str | None = None
    session: str | None = None
    arrival_ns: int | None = None
    think_ns: int | None = None
    generation_tokens: int = UNKNOWN


@dataclass
class Turns:
    """Turns so far: each waits for the one before it in its session, then for its think time;
    with a time as well, the later of the two holds."""

    columns: Columns
    tree: TokenTree = field(default_factory=TokenTree)
    last: dict[str, int] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        """Append ``turn``; nothing changes where it raises ``BadRecord``."""
        before = self.last.get(turn.session) if turn.session is not None else None
        arrival = UNKNOWN if turn.arrival_ns is None else turn.arrival_ns
        self._check_times(turn, before)
        id = turn.id or str(len(self.columns.ids))
        self.columns.check(id, arrival)
        prompt, output = self._content(turn)
        row = self.columns.add(
            id,
            turn.prompt_tokens,
            turn.output_tokens,
            prompt,
            output,
            arrival=arrival,
            session=turn.session,
            after=() if before is None else (before,),
            think=turn.think_ns or 0,
            generation=turn.generation_tokens,
        )
        if turn.session is not None:
            self.last[turn.session] = row

    def _content(
        self, turn: Turn
    ) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]] | None]:
        if not len(turn.prompt):
            return (), None
        known = turn.output if turn.output is not None else NONE
        runs = self.tree.add(np.concatenate((turn.prompt, known)))
        prompt, output = cut(runs, len(turn.prompt))
        return prompt, None if turn.output is None else output

    def _check_times(self, turn: Turn, before: int | None) -> None:
        if turn.think_ns and before is None:
            what = "has no session" if turn.session is None else "is the first of its session"
            raise BadRecord(f"a delay on a request that {what}, allowed: on later turns")
        timed = bool(self.columns.ids) and self.columns.arrival[0] != UNKNOWN
        if turn.arrival_ns is None and before is None and timed:
            raise BadRecord("no time, though others have one, allowed: a time on first turns")
