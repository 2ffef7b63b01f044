"""The decoding requests: counted, not visited.

Every one of them computes a token in every decode step, so what is true of a request follows from
the number of the step at which it joined. Requests are visited when their last token is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from sim.sglang.request import Live


class Running:
    """``planned`` and ``read`` count decode steps; ``full`` says that nothing more is admitted
    until a request leaves. ``starts[i]`` counts requests that begin a page in the steps whose
    number is ``i`` modulo the page; ``tracks[i]`` holds those that are tracked, alike."""

    def __init__(self, page: int, track: int) -> None:
        self.page, self.track = page, track
        self.requests: dict[Live, None] = {}
        self.full = False
        self.planned = self.read = self.joined = 0
        self.context = 0
        self.starts = [0] * page
        self.tracks: defaultdict[int, dict[Live, None]] = defaultdict(dict)
        self.due: list[tuple[int, int, Live]] = []
        self.exits: list[tuple[int, int, Live]] = []
        self.gone: list[Live] = []
        self.members: list[int] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Live]:
        return iter(self.requests)

    # ---------------------------------------------------------------- coming and going
    def join(self, r: Live, base: int) -> None:
        """``r`` was prefilled; it decodes from the next decode step on."""
        self.joined += 1
        r.epoch = r.order = self.joined
        r.joined, r.base = self.planned, base
        self.requests[r] = None
        self.members = None
        self.context += r.end - r.joined
        self.starts[(r.joined - r.end + 1) % self.page] += 1
        self.tracks[(r.joined - r.end) % self.track][r] = None
        heappush(self.due, (self.last(r), r.epoch, r))
        heappush(self.exits, (self.last(r), r.epoch, r))

    def leave(self, r: Live) -> None:
        """``r`` decodes no more."""
        del self.requests[r]
        self.members = None
        self.context -= r.end - r.joined
        self.starts[(r.joined - r.end + 1) % self.page] -= 1
        residue = (r.joined - r.end) % self.track
        group = self.tracks[residue]
        del group[r]
        if not group:
            del self.tracks[residue]

    def reorder(self, requests: list[Live]) -> None:
        """The batch goes on in this order."""
        self.requests = dict.fromkeys(requests)
        self.members = None
        for r in requests:
            self.joined += 1
            r.order = self.joined

    # ---------------------------------------------------------------- progress
    def last(self, r: Live) -> int:
        """Number of the decode step that computes its last token; where it joined for none."""
        return r.joined + r.target - r.base

    def committed(self, r: Live) -> int:
        """Tokens of ``r`` whose KV is planned."""
        return r.end + (self.planned - r.joined if r in self.requests else 0)

    def out(self, r: Live) -> int:
        """Outputs of ``r`` that were read."""
        return r.out + max(0, self.read - r.joined) if r in self.requests else r.out

    def crossing(self, step: int) -> int:
        """Requests that begin a page in decode step ``step``."""
        return self.starts[step % self.page]

    def tracked(self, step: int) -> dict[Live, None]:
        """Requests whose length after decode step ``step`` is on the track grid."""
        return self.tracks.get(step % self.track, {})

    def finishing(self) -> list[Live]:
        """Requests whose last token was computed in the decode step read last, in batch order."""
        done = []
        while self.due and self.due[0][0] <= self.read:
            last, epoch, r = heappop(self.due)
            if epoch == r.epoch and last > r.joined and not r.finished:
                done.append(r)
        return sorted(done, key=lambda r: r.order)

    def exclude_complete(self) -> int:
        """Take out those whose tokens are all planned: how many."""
        count = 0
        while self.exits and self.exits[0][0] <= self.planned:
            _, epoch, r = heappop(self.exits)
            if epoch == r.epoch and r in self.requests and not r.finished:
                self.leave(r)
                count += 1
        return count

    def exclude_finished(self) -> int:
        """Take out those that finished: how many."""
        if not self.gone:
            return 0
        gone = [r for r in self.gone if r in self.requests]
        self.gone.clear()
        for r in gone:
            self.leave(r)
        return len(gone)

    def next_last(self) -> int:
        """The next decode step that computes somebody's last token."""
        exits = self.exits
        while exits and (exits[0][1] != exits[0][2].epoch or exits[0][2] not in self.requests):
            heappop(exits)
        return exits[0][0] if exits else self.planned

    def crossings(self, after: int, count: int) -> int:
        """Pages begun in the ``count`` decode steps after step ``after``."""
        whole, rest = divmod(count, self.page)
        first = after + 1 + whole * self.page
        return whole * len(self) + sum(self.crossing(first + i) for i in range(rest))

    def next_tracked(self) -> int:
        """Decode steps until the next one after which somebody is tracked, 1 or more."""
        now = self.planned
        ahead = ((i - now - 1) % self.track + 1 for i in self.tracks)
        return min(ahead, default=self.track)

    def unread_end(self) -> bool:
        """Whether a planned step before the last one computes a last token that was not read."""
        due = self.due
        while due and (due[0][1] != due[0][2].epoch or due[0][2].finished):
            heappop(due)
        return bool(due) and due[0][0] < self.planned

    def indices(self) -> list[int]:
        """Trace indices of all, in order; do not change the list."""
        if self.members is None:
            self.members = [r.index for r in self.requests]
        return self.members

    def context_tokens(self) -> int:
        """Tokens that all attend to in the last planned step, the new ones included."""
        return self.context + len(self.requests) * self.planned
