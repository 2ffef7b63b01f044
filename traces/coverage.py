"""How far the sequences seen so far reach: one number per chain of prefix ids.

Ids run on along a chain, and whoever covers an id covers its whole chain below it.
"""

from __future__ import annotations

from traces.identity import Prefixes


class Coverage:
    """``last[first id of a chain]`` is the furthest id on it that something reached."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self.last: dict[int, int] = {}

    def add(self, request: int, length: int) -> int:
        """Cover the first ``length`` tokens of a request; how many of them were not before."""
        fresh = 0
        for start, end, delta in self.prefixes.extents(request):
            if start >= length:
                break
            head, reached = start + 1 + delta, min(end, length) + delta
            before = self.last.get(head, start + delta)
            if before < reached:
                self.last[head] = reached
                fresh += reached - before
        return fresh

    def common(self, request: int, longest: int) -> int:
        """Length of the covered prefix of a request, at most ``longest``. Pure."""
        reached = 0
        for start, end, delta in self.prefixes.extents(request):
            last = self.last.get(start + 1 + delta)
            if last is None or start >= longest:
                break
            reached = min(end, last - delta, longest)
            if reached < end:
                break
        return reached
