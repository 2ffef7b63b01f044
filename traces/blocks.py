"""Prompts as hashes of whole blocks: what the ids say, checked, and as runs of content."""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.chain import Chain
from traces.errors import BadRecord


@dataclass
class Blocks:
    """Blocks numbered in order of first sight; block ``b`` owns the addresses from
    ``b * block_tokens`` on.

    With ``tail`` floor the last partial block of a prompt has no id. ``chained``: an id names a
    block and all before it, which is checked; otherwise it names the block's content alone.
    """

    block_tokens: int
    tail: str = "ceil"
    chained: bool = True
    chain: Chain = field(default_factory=Chain)
    block: dict[int, int] = field(default_factory=dict)
    partial: dict[int, int] = field(default_factory=dict)

    def check(self, ids: list[int], prompt: int) -> None:
        """Raise ``BadRecord`` where ``ids`` do not fit ``prompt`` tokens or contradict others."""
        full, rest = divmod(prompt, self.block_tokens)
        want = full + (rest > 0 and self.tail == "ceil")
        if len(ids) != want:
            raise BadRecord(
                f"{len(ids)} hash_ids for {prompt} tokens in blocks of {self.block_tokens},"
                f" allowed: {want} with tail {self.tail} (or other options tail, block_tokens)"
            )
        if self.chained:
            self.chain.check(ids)
        self._check_widths(ids, prompt)

    def _check_widths(self, ids: list[int], prompt: int) -> None:
        size = self.block_tokens
        widths = dict.fromkeys(self.partial.keys() & set(ids[:-1]), size)
        if ids:
            widths[ids[-1]] = min(size, prompt - (len(ids) - 1) * size)
        for i, tokens in widths.items():
            known = self.partial.get(i, size if i in self.block else tokens)
            if known != tokens:
                raise BadRecord(
                    f"block {i} has {tokens} tokens here but {known} earlier, allowed: one length"
                )

    def runs(self, ids: list[int], prompt: int) -> list[tuple[int, int]]:
        """Take ``ids``, which ``check`` has passed; their content as ``(address, length)``."""
        if self.chained:
            self.chain.add(ids)
        for i in ids:
            self.block.setdefault(i, len(self.block))
        size = self.block_tokens
        rest = min(prompt, len(ids) * size) - (len(ids) - 1) * size
        if ids and rest < size:
            self.partial[ids[-1]] = rest
        out: list[tuple[int, int]] = []
        start = previous = -2
        for b in map(self.block.__getitem__, ids):
            if b != previous + 1:
                if start >= 0:
                    out.append((start * size, (previous + 1 - start) * size))
                start = b
            previous = b
        if ids:
            out.append((start * size, (previous - start) * size + rest))
        return out
