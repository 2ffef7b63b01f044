"""Free counts of the KV pool, the state slots and the int8 slots."""

from __future__ import annotations


class EngineCrashError(RuntimeError):
    """What the engine itself does not survive, in the words of its own assertion."""


class Slots:
    """State slots; slot 0, the padding, is not counted. A group of slots can be set aside."""

    __slots__ = ("free", "group")

    def __init__(self, count: int) -> None:
        self.free, self.group = count, 0

    def set_aside(self, count: int) -> None:
        """Reserve ``count`` slots for lookups, if that many are free."""
        if 0 < count <= self.free:
            self.free -= count
            self.group = count

    def give_back(self) -> None:
        """Return what the lookups did not take."""
        self.free += self.group
        self.group = 0

    def take(self) -> bool:
        """One slot, from the group first; False if none is left."""
        if self.group:
            self.group -= 1
        elif self.free:
            self.free -= 1
        else:
            return False
        return True


def pages(tokens: int, page: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page)
