"""The content of one request as prefix ids, and where two requests part."""

from __future__ import annotations

from bisect import bisect_left

from traces.identity import Prefixes


class Content:
    """Extents of a request: prefixes up to ``ends[k]`` have the id length + ``deltas[k]``."""

    __slots__ = ("deltas", "ends")

    def __init__(self, ends: list[int], deltas: list[int]) -> None:
        self.ends, self.deltas = ends, deltas

    def id(self, length: int) -> int:
        """Id of the prefix of ``length`` tokens, 1 or more."""
        return length + self.deltas[bisect_left(self.ends, length)]

    def common(self, other: Content, low: int, high: int) -> int:
        """Length of the prefix shared with ``other``, known to be ``low`` or more, to ``high``."""
        i, j = bisect_left(self.ends, low + 1), bisect_left(other.ends, low + 1)
        shared = low
        while shared < high and self.deltas[i] == other.deltas[j]:
            a, b = self.ends[i], other.ends[j]
            shared = min(a, b, high)
            i += a == shared
            j += b == shared
        return shared


def content_of(prefixes: Prefixes, request: int) -> Content:
    """The extents of ``request``, prompt and output."""
    rows = slice(int(prefixes.offsets[request]), int(prefixes.offsets[request + 1]))
    return Content(prefixes.ends[rows].tolist(), prefixes.deltas[rows].tolist())
