"""The check that block or segment ids name whole prefixes: each has one id before it, always."""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.errors import BadRecord

ROOT = -1


@dataclass
class Chain:
    """The id before each id seen so far; ``ROOT`` before the first of a prompt."""

    before: dict[int, int] = field(default_factory=dict)

    def check(self, ids: list[int]) -> None:
        """Raise ``BadRecord`` if ``ids`` contradict what was added."""
        previous = [ROOT, *ids[:-1]]
        if list(map(self.before.get, ids, previous)) != previous:
            self._explain(ids, previous)
        if len(set(ids)) != len(ids):
            twice = next(i for k, i in enumerate(ids) if i in ids[:k])
            raise BadRecord(f"id {twice} stands twice in one prompt, allowed: prefix-chained ids")

    def _explain(self, ids: list[int], previous: list[int]) -> None:
        for i, p in zip(ids, previous, strict=True):
            known = self.before.get(i, p)
            if known != p:
                now, then = (_name(x) for x in (p, known))
                raise BadRecord(
                    f"id {i} follows {now} here but {then} earlier, allowed: prefix-chained ids"
                )

    def add(self, ids: list[int]) -> None:
        """Take ``ids``, which ``check`` has passed."""
        self.before.update(zip(ids, [ROOT, *ids[:-1]], strict=True))


def _name(i: int) -> str:
    return "nothing" if i == ROOT else str(i)
