"""The block pool: who holds a block, what it is known by, and the queue of free ones.

A key is ``prefix id * groups + group``. Equal blocks are not merged: a key may name several
blocks, of which a lookup gets the one registered first. Block 0 is the null block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

NULL = 0


class BlockPool:
    """``on_lost(key, tokens)`` is called when the last block of a key is taken for reuse."""

    def __init__(
        self, num_blocks: int, caching: bool, on_lost: Callable[[int, int], None] | None = None
    ) -> None:
        self.num_blocks, self.caching = num_blocks, caching
        self.ref = [0] * num_blocks
        self.key: list[int | None] = [None] * num_blocks
        self.tokens = [0] * num_blocks
        self.more: dict[int, list[int]] = {}
        self.where: dict[int, int | dict[int, None]] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.keyed = 0
        self.evicted: list[tuple[int, int, int]] | None = None
        self.on_lost = on_lost

    # ---------------------------------------------------------------- keys
    def get(self, key: int) -> int | None:
        """The block registered first under ``key``, or None."""
        found = self.where.get(key)
        if found is None or isinstance(found, int):
            return found
        return next(iter(found))

    def holds(self, key: int, block: int) -> bool:
        """Whether ``block`` is registered under ``key``."""
        found = self.where.get(key)
        return found == block if isinstance(found, int) else found is not None and block in found

    def put(self, key: int, block: int, tokens: int) -> None:
        """Register ``block`` under ``key``; a second key of a block goes beside the first."""
        own = self.key[block]
        if own == key or self.holds(key, block):
            return
        if own is None:
            self.key[block], self.tokens[block] = key, tokens
            self.keyed += 1
        else:
            self.more.setdefault(block, []).append(key)
        found = self.where.get(key)
        if found is None:
            self.where[key] = block
        elif isinstance(found, int):
            self.where[key] = {found: None, block: None}
        else:
            found[block] = None

    def keys_of(self, block: int) -> list[int]:
        """Every key of ``block``, the primary one first."""
        own = self.key[block]
        return [] if own is None else [own, *self.more.get(block, ())]

    def drop(self, block: int) -> list[int]:
        """Forget every key of ``block``; those that now name no block."""
        lost = [key for key in self.keys_of(block) if self._forget(key, block)]
        if self.key[block] is not None:
            self.keyed -= 1
            self.key[block], self.tokens[block] = None, 0
            self.more.pop(block, None)
        return lost

    def _forget(self, key: int, block: int) -> bool:
        found = self.where.get(key)
        if isinstance(found, dict):
            found.pop(block, None)
            if found:
                return False
        elif found != block:
            return False
        del self.where[key]
        return True

    # ---------------------------------------------------------------- the free queue
    def take(self, count: int) -> list[int]:
        """``count`` blocks from the head of the queue, their keys forgotten, held once."""
        popitem, key, ref = self.free.popitem, self.key, self.ref
        out = []
        for _ in range(count):
            block = popitem(last=False)[0]
            if key[block] is not None:
                self._evict(block)
            ref[block] = 1
            out.append(block)
        return out

    def _evict(self, block: int) -> None:
        key, tokens = self.key[block], self.tokens[block]
        assert key is not None
        if self.evicted is not None:
            self.evicted.append((block, key, tokens))
        if block not in self.more and self.where.get(key) == block:
            # nearly every eviction: one key that names this block alone
            del self.where[key]
            self.keyed -= 1
            self.key[block], self.tokens[block] = None, 0
            if self.on_lost is not None:
                self.on_lost(key, tokens)
            return
        for lost in self.drop(block):
            if self.on_lost is not None:
                self.on_lost(lost, tokens)

    def unpublish(self, block: int) -> None:
        """Drop the keys of a block that is in use, counted as an eviction as the engine does."""
        if self.key[block] is not None:
            key, tokens = self.key[block], self.tokens[block]
            if self.evicted is not None and key is not None:
                self.evicted.append((block, key, tokens))
            self.drop(block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold each block once more; a free one leaves the queue."""
        for block in blocks:
            if block != NULL:
                if self.ref[block] == 0:
                    del self.free[block]
                self.ref[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of each block, in order. Those nobody holds any more join the queue: without a
        key at the head, keeping their order, with one at the tail."""
        ref, key, free = self.ref, self.key, self.free
        bare: list[int] = []
        for block in blocks:
            if block == NULL:
                continue
            ref[block] -= 1
            if ref[block]:
                continue
            if self.caching and key[block] is not None:
                free[block] = None
            else:
                bare.append(block)
        for block in reversed(bare):
            free[block] = None
            free.move_to_end(block, last=False)

    def release_each(self, blocks: Iterable[int]) -> None:
        """As one ``release`` for each block: a later one without a key comes before an earlier."""
        ref, key, free = self.ref, self.key, self.free
        for block in blocks:
            ref[block] -= 1
            if ref[block] == 0:
                free[block] = None
                if key[block] is None or not self.caching:
                    free.move_to_end(block, last=False)

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self.free)

    def check(self) -> None:
        """Every block is free or held, never both; the maps agree with the blocks."""
        for block in range(1, self.num_blocks):
            assert (self.ref[block] == 0) == (block in self.free), f"block {block}"
            for key in self.keys_of(block):
                assert self.holds(key, block), f"block {block} is not found under key {key}"
        assert self.keyed == sum(key is not None for key in self.key)
        named = sum(1 if isinstance(v, int) else len(v) for v in self.where.values())
        assert named == sum(len(self.keys_of(b)) for b in range(self.num_blocks))
