"""What is fixed about a cache for a whole run: groups, blocks, units, mode."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from sim.policy import Layout
from sim.vllm.geometry_types import Geometry
from sim.vllm.options import VllmOptions
from sim.vllm.rounding import ceil_div


@dataclass(frozen=True)
class Shape:
    """``order`` walks the groups by id: (id, whether of states, place among its kind); ``runs``
    are its stretches of one kind. ``blocks`` are the distinct block sizes that decodes cross.

    ``unit`` is the distance of hash keys, ``block`` the cache's block, ``state_block`` and
    ``kv_block`` those of each kind (they differ only where nothing is cached). ``fine``: hits may
    end inside a block, on ``hit_unit``. ``alignment``: where layers can export a state from inside
    a chunk, None if they cannot. ``old`` is vLLM 0.28. ``dense``: a checkpoint in every chunk.
    """

    order: tuple[tuple[int, bool, int], ...]
    state_groups: tuple[int, ...]
    kv_groups: tuple[int, ...]
    caching: bool
    mode: str
    dense: bool
    old: bool
    scheduler_block: int
    unit: int
    block: int
    state_block: int
    kv_block: int
    fine: bool
    hit_unit: int
    alignment: int | None
    align: bool
    num_groups: int
    runs: tuple[tuple[bool, tuple[tuple[int, int], ...]], ...]
    blocks: tuple[int, ...]
    no_keys: list[None]

    def tail_of(self, prompt: int) -> int:
        """The last position of a prompt that can be a key."""
        return (prompt if self.old else prompt - 1) // self.unit * self.unit

    def exportable(self, start: int, end: int, position: int) -> bool:
        """Whether layers can export the state at ``position`` from inside ``start:end``."""
        return (
            self.alignment is not None
            and start % self.unit == 0
            and ceil_div(end, self.block) - 2 > (start - 1) // self.block
            and start + self.unit <= position
            and start < position < end
            and (position - start) % self.alignment == 0
        )


def shape_of(geometry: Geometry, options: VllmOptions, layout: Layout) -> Shape:
    """The shape that a geometry takes under an engine's options and a policy's layout."""
    groups = geometry.groups
    states = tuple(i for i, g in enumerate(groups) if g.kind == "mamba")
    kv = tuple(i for i, g in enumerate(groups) if g.kind != "mamba")
    caching = options.enable_prefix_caching and not (states and layout.mode == "none")
    mode = layout.mode if states and caching else "none"
    align = mode == "align"
    block = groups[0].block_tokens if caching else geometry.block_tokens
    fine = align and geometry.unit_tokens < geometry.scheduler_block_tokens and len(groups) > 1
    order = tuple(
        (i, i in states, (states if i in states else kv).index(i)) for i in range(len(groups))
    )
    kv_block = groups[kv[0]].block_tokens if kv else block
    state_block = groups[states[0]].block_tokens if states else block
    return Shape(
        order=order,
        state_groups=states,
        kv_groups=kv,
        caching=caching,
        mode=mode,
        dense=layout.dense,
        old=options.old,
        scheduler_block=geometry.scheduler_block_tokens,
        unit=geometry.unit_tokens,
        block=block,
        state_block=state_block,
        kv_block=kv_block,
        fine=fine,
        hit_unit=geometry.unit_tokens if fine else geometry.scheduler_block_tokens,
        alignment=geometry.checkpoint_alignment if align and not options.old else None,
        align=align,
        num_groups=len(groups),
        runs=tuple(
            (is_state, tuple((i, j) for i, _, j in members))
            for is_state, members in groupby(order, key=lambda item: item[1])
        ),
        blocks=tuple({kv_block, state_block}),
        no_keys=[None] * len(states),
    )  # fmt: skip
