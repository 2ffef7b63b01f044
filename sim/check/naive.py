"""The model to compare with: every prefix in a dictionary, token by token, nothing clever.

``names`` gives every prefix a number of its own by walking the addresses, so that the trace's
prefix ids are checked too. States and KV exist as the ledger says; whether that can be is judged
by what the steps computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.check.violation import require
from traces.identity import Prefixes
from traces.trace import Trace


class Names:
    """``of[r][p]`` is the number of the first ``p`` tokens of request ``r`` (0: nothing), and
    ``ids[r][p]`` the trace's prefix id of them (-1: nothing)."""

    def __init__(self, trace: Trace, prefixes: Prefixes) -> None:
        self.step_of: dict[tuple[int, int], int] = {}
        self.of = [self._walk(trace, r) for r in range(len(trace))]
        self.ids = [[-1, *prefixes.grid(r, 1)] for r in range(len(trace))]
        known: dict[int, int] = {}
        for own, ids in zip(self.of, self.ids, strict=True):
            require(len(own) == len(ids), "identity", "a sequence and its ids differ in length")
            for name, key in zip(own, ids, strict=True):
                require(known.setdefault(name, key) == key, "identity", "one prefix has two ids")
        distinct = len(set(known.values())) == len(known)
        require(distinct, "identity", "two prefixes have the same id")

    def _walk(self, trace: Trace, request: int) -> list[int]:
        out = [0]
        for part in trace.runs_of(request):
            for run in part:
                for address in range(run.address, run.address + run.length):
                    edge = (out[-1], address)
                    out.append(self.step_of.setdefault(edge, len(self.step_of) + 1))
        return out

    def common(self, a: int, b: int) -> int:
        """Longest common prefix of the sequences of two requests."""
        same = 0
        for x, y in zip(self.of[a][1:], self.of[b][1:], strict=False):
            if x != y:
                break
            same += 1
        return same


@dataclass
class Work:
    """What a request has computed since it was last admitted, as planned.

    ``left`` are the positions at which its running state stood or a state was saved;
    ``inside`` are chunks ``(start, end, saves)`` with states saved at positions unknown. ``kv``:
    how far whole blocks of its KV are in the index, ``parts``: ends inside blocks that are, too.
    """

    computed: int = 0
    furthest: int = 0
    kv: int = 0
    running: bool = False
    left: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    inside: list[list[int]] = field(default_factory=list)

    def begin(self, hit: int) -> None:
        """Admitted with a hit."""
        self.computed = self.kv = hit
        self.running = True
        self.left, self.parts, self.inside = set(), set(), []

    def compute(self, start: int, end: int, saves: int) -> None:
        """One chunk."""
        self.computed, self.furthest = end, max(self.furthest, end)
        self.left.add(end)
        if saves:
            self.inside.append([start, end, saves])

    def decode(self, count: int) -> None:
        """``count`` tokens, one a step."""
        self.left.update(range(self.computed + 1, self.computed + count + 1))
        self.computed += count
        self.furthest = max(self.furthest, self.computed)

    def has_left(self, position: int) -> bool:
        """Whether a state stood at ``position``; one saved inside a chunk is told here first."""
        if position in self.left:
            return True
        for chunk in self.inside:
            if chunk[0] < position < chunk[1] and chunk[2]:
                chunk[2] -= 1
                self.left.add(position)
                return True
        return False


@dataclass
class Naive:
    """``states``: id -> step of publication, of every state that can be restored. ``kv``: ids of
    resident KV at ends of blocks. ``computed``: names of every prefix that was computed."""

    names: Names
    block: int
    states: dict[int, int] = field(default_factory=dict)
    kv: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=lambda: {0})
    work: dict[int, Work] = field(default_factory=dict)

    def compute(self, request: int, start: int, end: int) -> None:
        """The request computed its tokens ``start:end``."""
        own = self.names.of[request]
        self.computed.update(own[start + 1 : min(end, len(own) - 1) + 1])

    def shared(self, request: int, longest: int) -> int:
        """How many of the first ``longest`` tokens were computed before, by anybody."""
        own, n = self.names.of[request], 0
        while n < longest and own[n + 1] in self.computed:
            n += 1
        return n

    def missing_kv(self, request: int, position: int) -> int:
        """The first block end up to ``position`` whose KV is not resident, 0 for none."""
        ids = self.names.ids[request]
        ends = range(self.block, position + 1, self.block)
        return next((p for p in ends if ids[p] not in self.kv), 0)

    def users(self, key: int, position: int) -> list[int]:
        """Running requests that hold the KV of ``key`` in the index."""
        return [
            r
            for r, w in self.work.items()
            if w.running
            and (w.kv >= position if position % self.block == 0 else position in w.parts)
            and self.names.ids[r][position] == key
        ]
