"""What of a request's sequence can be reused. Pure: nothing here changes state."""

from __future__ import annotations

from typing import cast

from sim.ledger import Ledger
from sim.vllm.hit import Hit
from sim.vllm.pool import BlockPool
from sim.vllm.request import Live
from sim.vllm.rounding import ceil_div
from sim.vllm.shape import Shape


class Lookup:
    """KV is walked from the start to the first miss, states from there down to the first hit;
    every group of a kind must hold the key. Source: specs/vllm, section 6."""

    def __init__(self, shape: Shape, pool: BlockPool, ledger: Ledger) -> None:
        self.shape, self.pool, self.ledger = shape, pool, ledger

    def find(self, r: Live) -> Hit:
        """The longest usable prefix of ``r``. Pure: changes nothing."""
        if not self.shape.caching:
            return Hit(event=len(self.ledger))
        longest = r.known - 1
        hit = Hit(kv=[[] for _ in self.shape.kv_groups], event=len(self.ledger))
        matched = self._match_kv(r, longest, hit) if self.shape.kv_groups else longest
        if not self.shape.state_groups:
            hit.tokens = hit.matched = matched
            return hit
        hit.tokens = self._match_state(r, matched, hit)
        hit.matched = matched if self.shape.kv_groups else hit.tokens
        keep = ceil_div(hit.tokens, self.shape.block)
        for blocks in hit.kv:
            del blocks[keep:]
        hit.branch = matched if self.shape.kv_groups and matched > hit.tokens else 0
        return hit

    def _keys(self, keys: list[int], per_block: int, group: int) -> list[int]:
        """Keys of a group at every end of a block."""
        width, ends = self.shape.num_groups, keys[per_block - 1 :: per_block]
        return [key * width + group for key in ends] if width > 1 else ends

    def _held(self, keys: list[int]) -> list[int]:
        """Blocks of ``keys`` up to the first that names none."""
        get = self.pool.where.get
        if not keys or get(keys[0]) is None:
            return []
        found = list(map(get, keys))
        if None in found:
            del found[found.index(None) :]
        return cast("list[int]", found)

    def _blocks(self, prefix: int, groups: tuple[int, ...]) -> list[int] | None:
        get, base = self.pool.get, prefix * self.shape.num_groups
        out = []
        for g in groups:
            block = get(base + g)
            if block is None:
                return None
            out.append(block)
        return out

    def _match_kv(self, r: Live, longest: int, hit: Hit) -> int:
        per_block = self.shape.block // self.shape.unit
        count = min(longest // self.shape.block, r.known // self.shape.unit // per_block)
        keys, groups = r.keys, self.shape.kv_groups
        n = 0
        if len(groups) == 1:
            if not r.first_keys:
                r.first_keys = self._keys(keys, per_block, groups[0])
            hit.kv[0] = self._held(r.first_keys[:count])
            n = len(hit.kv[0])
        else:
            while n < count:
                row = self._blocks(keys[(n + 1) * per_block - 1], groups)
                if row is None:
                    break
                for blocks, block in zip(hit.kv, row, strict=True):
                    blocks.append(block)
                n += 1
        if not self.shape.fine:
            return n * self.shape.block
        top = min((n + 1) * per_block - 1, longest // self.shape.unit, r.known // self.shape.unit)
        for f in range(top - 1, n * per_block - 1, -1):
            row = self._blocks(keys[f], groups)
            if row is not None:
                for blocks, block in zip(hit.kv, row, strict=True):
                    blocks.append(block)
                return (f + 1) * self.shape.unit
        return n * self.shape.block

    def _match_state(self, r: Live, matched: int, hit: Hit) -> int:
        step = self.shape.unit if self.shape.fine else self.shape.block
        per_step = step // self.shape.unit
        top = matched // step
        if self.shape.fine:
            top = min(top, r.known // self.shape.unit)
        where, width, first = self.pool.where, self.shape.num_groups, self.shape.state_groups[0]
        keys = r.keys
        for f in range(top, 0, -1):
            prefix = keys[f * per_step - 1]
            if prefix * width + first not in where:
                continue
            row = self._blocks(prefix, self.shape.state_groups)
            if row is not None:
                hit.states, hit.column = row, (f * step - 1) // self.shape.block
                return f * step
        return 0
