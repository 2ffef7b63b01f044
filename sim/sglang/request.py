"""A request inside the engine: its progress and what it holds."""

from __future__ import annotations

from sim.sglang.content import Content
from sim.sglang.tree import Lock, Node


class Live:
    """One arrived, unfinished request. Counts are tokens unless a name says otherwise.

    ``out`` counts sampled tokens that were read, up to its last prefill; ``base`` is what ``out``
    is once that prefill is read. A decoding request computes one token in every decode step from
    number ``joined`` on, so its progress is not stored. ``prefix`` is where its next chunk starts,
    ``end`` where its last chunk ends, ``protected`` how much of its KV the tree holds and locks.

    ``slots`` counts its tracking slots; ``spare`` says that the second one of the lazy strategy is
    filled, ``swapped`` that the last snapshot goes to a slot of its own. ``track`` is the
    position of the tracked state that could be donated, None for none.
    """

    __slots__ = (
        "aborted", "base", "branch", "content", "deepest", "end", "epoch", "event",
        "finished", "has_slot",
        "index", "joined", "lock", "lost", "matched", "middle", "node", "order", "out", "prefix",
        "prompt", "protected", "restoring", "resumed", "retracted", "row", "slots", "spare",
        "swapped", "target", "track",
    )  # fmt: skip

    def __init__(self, index: int, prompt: int, outputs: int, content: Content, root: Node):
        self.index, self.prompt, self.target, self.content = index, prompt, outputs, content
        self.out = self.lost = self.order = self.epoch = 0
        self.finished = self.resumed = self.aborted = False
        self.forget(root)
        self.retracted = False

    def forget(self, root: Node) -> None:
        """Nothing is computed and nothing held; the outputs stay."""
        self.base = self.joined = self.prefix = self.end = self.protected = 0
        self.matched = self.middle = self.slots = self.event = 0
        self.branch: int | None = None
        self.node, self.lock = root, None
        self.has_slot = self.row = self.restoring = self.spare = self.swapped = False
        self.deepest = root
        self.track: int | None = None

    lock: Lock | None

    @property
    def fill(self) -> int:
        """Tokens to prefill: the prompt and, after a retraction, the outputs so far."""
        return self.prompt + self.out
