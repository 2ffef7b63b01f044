"""A request inside the engine: its progress and the blocks that it holds."""

from __future__ import annotations


class Live:
    """One arrived, unfinished request. Counts are tokens unless a name says otherwise.

    ``known`` counts prompt and sampled tokens whose values have been read, ``computed`` those
    scheduled so far, ``in_flight`` those scheduled and not yet read back, ``promised`` sampled
    tokens not yet read (async), ``lost`` those computed when it was last preempted,
    ``restored`` those hit at its last admission. ``keys[i]`` is
    the prefix id at ``(i + 1) * unit`` tokens, ``first_keys`` are the keys of the first attention
    group at ends of blocks, once a lookup has made them.

    Tables: ``kv[j]`` lists the blocks of attention group ``j``. All state groups always have the
    same columns filled, so ``states`` maps a column to one block per state group, and
    ``state_columns`` is the table's length, empty columns included. ``room`` is how many tokens
    fit into the blocks that are held, 0 if the next one may not simply be added; below
    ``next_key`` tokens nothing becomes a key, unless there is a state at ``tail_column``.
    """

    __slots__ = (
        "branch", "checkpoint", "commit0", "computed", "first_keys",
        "in_flight", "index", "keys", "known",
        "kv", "kv_cached", "kv_tail", "last_sample", "last_state", "lost", "next_key", "priority",
        "promised", "prompt", "quiet", "quiet_from", "restored", "retired", "room", "seq", "stale",
        "stamp", "started", "state_cached", "state_columns", "state_tail", "states", "status",
        "tail_column", "target", "tick0",
    )  # fmt: skip

    def __init__(
        self, index: int, prompt: int, outputs: int, keys: list[int], priority: int, seq: int
    ) -> None:
        self.index, self.prompt, self.keys = index, prompt, keys
        self.first_keys: list[int] = []
        self.target = prompt + outputs
        self.priority, self.seq, self.stamp = priority, seq, -1
        self.known, self.computed, self.in_flight = prompt, 0, 0
        self.promised = self.stale = self.lost = self.restored = 0
        self.branch = 0
        self.status = "waiting"
        self.last_sample = -2
        self.quiet = False
        self.quiet_from, self.tick0, self.commit0 = 0, 0, 0
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """The tables of a request that holds nothing."""
        self.kv: list[list[int]] = []
        self.kv_cached = 0
        self.kv_tail: tuple[int, list[int]] | None = None
        self.states: dict[int, list[int]] = {}
        self.state_columns = 0
        self.state_cached = 0
        self.state_tail: tuple[int, list[int]] | None = None
        self.started = False
        self.last_state: int | None = None
        self.retired = 0
        self.checkpoint: tuple[int, int] | None = None
        self.room = self.next_key = 0
        self.tail_column = -1

    @property
    def prefill_end(self) -> int:
        """Where prefill ends; a resumed request replays its outputs up to the last one."""
        return max(self.prompt, self.known - 1)
