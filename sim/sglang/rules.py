"""Where the two trees of SGLang differ, as data. Source: specs/sglang-0.5.18, section 14."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What a named version does.

    ``cascade``: losing the last state of a leaf deletes the leaf, and state-less parents left
    without children with it. ``refresh_duplicate``: an insert that meets a state makes it most
    recent. ``split_refreshes``: the lower part of a split edge takes its state to the most recent
    place. ``lock_tombstones``: a lock counts on a node without a state too.
    ``hint_beyond_hit``: a branching length is only reported above the hit. ``match_again``: a
    running request's insert is followed by a lookup of the same key. ``insert_empty``: a finish
    without a tracked state still inserts its empty key. ``headroom``: states evicted ahead per
    request of a batch, 0 for what the batch needs. ``track_on_grid``: decode positions are
    multiples of lcm(grid, interval), else of the interval. ``overrun``: with overlap a request
    takes part in the step planned before its last token is read. ``refresh_waiting``: fcfs looks
    waiting requests up on every 32nd pass. ``void_in_place``: a lazy snapshot in place voids
    the checkpoint it overwrites when it is planned. ``older``: the scheduler of 0.5.18, which
    leaves finished requests in the running batch until it decodes, stops admitting at the first
    request that does not fit even when nothing runs, and checks a request's tokens before its
    prefix is locked too.
    """

    cascade: bool = False
    refresh_duplicate: bool = True
    split_refreshes: bool = False
    lock_tombstones: bool = True
    hint_beyond_hit: bool = True
    match_again: bool = False
    insert_empty: bool = False
    headroom: int = 0
    overrun: bool = False
    refresh_waiting: bool = True
    void_in_place: bool = True
    older: bool = False


UNIFIED_23 = Rules()
UNIFIED_18 = Rules(
    split_refreshes=True,
    lock_tombstones=False,
    match_again=True,
    insert_empty=True,
    headroom=3,
    overrun=True,
    refresh_waiting=False,
    void_in_place=False,
    older=True,
)
MAMBA_18 = Rules(
    cascade=True,
    refresh_duplicate=False,
    lock_tombstones=False,
    hint_beyond_hit=False,
    match_again=True,
    insert_empty=True,
    headroom=3,
    overrun=True,
    refresh_waiting=False,
    void_in_place=False,
    older=True,
)


def rules_of(version: str, tree: str) -> Rules:
    """The rules of ``version`` with the tree named ``unified`` or ``mamba``."""
    if version == "0.5.23":
        return UNIFIED_23
    return MAMBA_18 if tree == "mamba" else UNIFIED_18
