"""The block pool: who holds a block, what it is known by, and the queue of free ones.

A key is ``prefix id * groups + group``. Equal blocks are not merged: a key may name several
blocks, of which a lookup gets the one registered first. Block 0 is the null block.

The queue is two pieces. A block without a key joins at the head, one with a key at the tail, and
a free block loses its key only by being taken, so all bare ones stand before all keyed ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

NULL = 0
HELD_FOR_EVER = 1 << 60

Lost = list[tuple[int, int]]


class BlockPool:
    """``where`` names the first block of a key, ``also`` those registered after it. ``bare`` is
    the head of the queue, its first block last; ``queue`` the rest.

    ``on_lost`` hears of ``(key, tokens)`` whose last block was taken for reuse, in order.
    """

    def __init__(
        self, num_blocks: int, caching: bool, on_lost: Callable[[Lost], None] | None = None
    ) -> None:
        self.num_blocks, self.caching = num_blocks, caching
        self.ref = [HELD_FOR_EVER, *[0] * (num_blocks - 1)]
        self.key: list[int | None] = [None] * num_blocks
        self.tokens = [0] * num_blocks
        self.more: dict[int, list[int]] = {}
        self.more_tokens: dict[int, int] = {}
        self.where: dict[int, int] = {}
        self.also: dict[int, dict[int, None]] = {}
        self.bare = list(range(num_blocks - 1, NULL, -1))
        self.queue: OrderedDict[int, None] = OrderedDict()
        self.keyed = 0
        self.evicted: list[tuple[int, int, int]] | None = None
        self.on_lost = on_lost

    # ---------------------------------------------------------------- keys
    def get(self, key: int) -> int | None:
        """The block registered first under ``key``, or None."""
        return self.where.get(key)

    def holds(self, key: int, block: int) -> bool:
        """Whether ``block`` is registered under ``key``."""
        return self.where.get(key) == block or block in self.also.get(key, ())

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
            self.more_tokens[key] = tokens
        self._name(key, block)

    def put_fresh(self, keys: Sequence[int], blocks: Sequence[int], tokens: Iterable[int]) -> None:
        """Register blocks that have no key, one key each; no key stands twice."""
        where, key, length = self.where, self.key, self.tokens
        if where.keys().isdisjoint(keys):
            where.update(zip(keys, blocks, strict=True))
        else:
            for name, block in zip(keys, blocks, strict=True):
                self._name(name, block)
        for name, block, count in zip(keys, blocks, tokens, strict=False):
            key[block] = name
            length[block] = count
        self.keyed += len(keys)

    def _name(self, key: int, block: int) -> None:
        if self.where.setdefault(key, block) != block:
            self.also.setdefault(key, {})[block] = None

    def keys_of(self, block: int) -> list[int]:
        """Every key of ``block``, the primary one first."""
        own = self.key[block]
        return [] if own is None else [own, *self.more.get(block, ())]

    def positions(self, block: int) -> dict[int, int]:
        """Every key of ``block`` with the length of the prefix that it names."""
        first, *more = self.keys_of(block) or (None,)
        out = {} if first is None else {first: self.tokens[block]}
        return out | {key: self.more_tokens[key] for key in more if key is not None}

    def drop(self, block: int) -> list[int]:
        """Forget every key of ``block``; those that now name no block."""
        lost = [key for key in self.keys_of(block) if self._forget(key, block)]
        if self.key[block] is not None:
            self.keyed -= 1
            self.key[block], self.tokens[block] = None, 0
            self.more.pop(block, None)
        return lost

    def _forget(self, key: int, block: int) -> bool:
        """Whether ``block`` was the last of ``key``."""
        others = self.also.get(key)
        if self.where.get(key) != block:
            if others is not None:
                others.pop(block, None)
        elif others is None:
            del self.where[key]
            self.more_tokens.pop(key, None)
            return True
        else:
            self.where[key] = next(iter(others))
            del others[self.where[key]]
        if others is not None and not others:
            del self.also[key]
        return False

    # ---------------------------------------------------------------- the free queue
    @property
    def free(self) -> list[int]:
        """Every free block, the next to be taken first."""
        return [*reversed(self.bare), *self.queue]

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self.bare) + len(self.queue)

    def take(self, count: int) -> list[int]:
        """``count`` blocks from the head of the queue, their keys forgotten, held once."""
        bare, ref = self.bare, self.ref
        if not count:
            return []
        if count <= len(bare):
            out = bare[: -count - 1 : -1]
            del bare[-count:]
        else:
            out = bare[::-1]
            bare.clear()
            out += self._evict(count - len(out))
        for block in out:
            ref[block] = 1
        return out

    def _evict(self, count: int) -> list[int]:
        popitem, own, where, length = self.queue.popitem, self.key, self.where, self.tokens
        out, lost = [], []
        for _ in range(count):
            block = popitem(False)[0]
            out.append(block)
            key, tokens = own[block], length[block]
            assert key is not None
            if self.evicted is not None:
                self.evicted.append((block, key, tokens))
            if block in self.more or key in self.also or where[key] != block:
                positions = self.positions(block)
                lost += [(gone, positions[gone]) for gone in self.drop(block)]
            else:  # nearly every time: one key that names this block alone
                del where[key]
                own[block] = None
                length[block] = 0
                self.keyed -= 1
                lost.append((key, tokens))
        if self.on_lost is not None:
            self.on_lost(lost)
        return out

    def unpublish(self, block: int) -> list[int]:
        """Drop the keys of a block that is in use, counted as an eviction as the engine does;
        those that now name no block."""
        if self.key[block] is not None:
            key, tokens = self.key[block], self.tokens[block]
            if self.evicted is not None and key is not None:
                self.evicted.append((block, key, tokens))
        return self.drop(block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold each block once more; a free one leaves the queue."""
        ref, queue = self.ref, self.queue
        for block in blocks:
            if not ref[block]:
                del queue[block]
            ref[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of each block, in order. Those nobody holds any more join the queue: without a
        key at the head, keeping their order, with one at the tail."""
        ref, key, queue = self.ref, self.key, self.queue
        bare: list[int] = []
        for block in blocks:
            left = ref[block] = ref[block] - 1
            if left:
                continue
            if key[block] is None:
                bare.append(block)
            else:
                queue[block] = None
        if bare:
            bare.reverse()
            self.bare += bare

    def release_each(self, blocks: Iterable[int]) -> None:
        """As one ``release`` for each block: a later one without a key comes before an earlier."""
        ref, key = self.ref, self.key
        for block in blocks:
            left = ref[block] = ref[block] - 1
            if left:
                continue
            if key[block] is None:
                self.bare.append(block)
            else:
                self.queue[block] = None

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds."""
        return list(map(self.ref.__getitem__, blocks)).count(0)

    def check(self) -> None:
        """Every block is free or held, never both; the maps agree with the blocks."""
        free = set(self.free)
        assert len(free) == self.num_free, "a block stands twice in the queue"
        assert all(self.key[block] is None for block in self.bare)
        assert all(self.key[block] is not None for block in self.queue)
        for block in range(1, self.num_blocks):
            assert (self.ref[block] == 0) == (block in free), f"block {block}"
            for key in self.keys_of(block):
                assert self.holds(key, block), f"block {block} is not found under key {key}"
        assert self.keyed == sum(key is not None for key in self.key)
        named = len(self.where) + sum(len(blocks) for blocks in self.also.values())
        assert named == sum(len(self.keys_of(b)) for b in range(self.num_blocks))
