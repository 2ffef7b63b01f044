"""Where states lie: slots of requests, of states they left, and of checkpoints by prefix id.

The ledger says what the simulated cache keeps; a slot whose checkpoint was dropped is given to the
next state that needs one, so a hit on what is gone would read somebody else's state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sim.ledger import Action, Kind, Ledger
from traces.identity import Prefixes

KEPT_LEFT = 6


class MissingStateError(Exception):
    """A hit, or a checkpoint, of a state that no computation left."""


@dataclass
class Running:
    """A request on the device: its slot, how far it has got, and the states that it left, by
    position. ``cuts`` are the positions at which its state was set down on the way; ``decoded``
    says that some of it came from decode steps, ``idle`` counts steps since its last."""

    slot: int
    computed: int = 0
    cuts: tuple[int, ...] = ()
    decoded: bool = False
    idle: int = 0
    left: OrderedDict[int, Left] = field(default_factory=OrderedDict)


@dataclass(frozen=True)
class Left:
    """A state in a slot, and how it came about."""

    slot: int
    cuts: tuple[int, ...]
    decoded: bool


@dataclass(frozen=True)
class Kept:
    """A checkpoint that the simulated cache published."""

    request: int
    position: int
    state: Left


class Slots:
    """Free slots, the one freed last first."""

    def __init__(self, count: int) -> None:
        self.count, self.free = count, list(range(count - 1, -1, -1))
        self.later: list[int] = []

    def take(self) -> int:
        """A free slot. Raises ``MissingStateError`` if there is none."""
        if not self.free:
            raise MissingStateError(f"all {self.count} state slots of the executor are in use")
        return self.free.pop()

    def give(self, slot: int) -> None:
        """Free from the next step on: this one may still read it."""
        self.later.append(slot)

    def settle(self) -> None:
        """A step is over."""
        self.free += self.later
        self.later.clear()


class Resident:
    """Follows the ledger; ``kept`` are checkpoints by prefix id."""

    def __init__(self, prefixes: Prefixes, ledger: Ledger, slots: int) -> None:
        self.prefixes, self.ledger, self.slots = prefixes, ledger, Slots(slots)
        self.running: dict[int, Running] = {}
        self.kept: dict[int, Kept] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.published: list[Kept] = []
        self.at = 0

    def follow(self, to: int) -> None:
        """Events up to ``to``: checkpoints come and go."""
        log = self.ledger
        for i in range(self.at, to):
            if log.kind[i] != Kind.STATE:
                continue
            if log.action[i] == Action.PUBLISHED:
                self._publish(log.key[i], log.request[i], log.position[i])
            elif log.action[i] == Action.DROPPED:
                self._drop(log.key[i])
        self.at = max(self.at, to)

    def _publish(self, key: int, request: int, position: int) -> None:
        if key in self.kept:
            return
        run = self.running.get(request)
        if run is None:
            raise MissingStateError(f"request {request} publishes a state and is not running")
        left = run.left.pop(position, None)
        if left is not None:
            self._keep(key, request, position, left)
        else:
            self.waiting[key] = (request, position)

    def _keep(self, key: int, request: int, position: int, state: Left) -> None:
        self.kept[key] = kept = Kept(request, position, state)
        self.published.append(kept)

    def _drop(self, key: int) -> None:
        self.waiting.pop(key, None)
        if (kept := self.kept.pop(key, None)) is not None:
            self.slots.give(kept.state.slot)

    def source(self, request: int, hit: int) -> Left:
        """The checkpoint that a hit of ``hit`` tokens resumes from."""
        key = self.prefixes.grid(request, 1)[hit - 1]
        if key not in self.kept:
            raise MissingStateError(f"request {request} resumes at {hit}, where no state is kept")
        return self.kept[key].state

    def settle(self) -> None:
        """After a step: what it was to publish, and states that nobody asked for."""
        for key, (request, position) in list(self.waiting.items()):
            left = self.running[request].left.pop(position, None)
            if left is not None:
                del self.waiting[key]
                self._keep(key, request, position, left)
        for run in self.running.values():
            while len(run.left) > KEPT_LEFT:
                self.slots.give(run.left.popitem(last=False)[1].slot)
        self.slots.settle()

    def stop(self, request: int) -> None:
        """The request is off the device; what it left and nobody published goes."""
        run = self.running.pop(request, None)
        if run is None:
            return
        for key in [k for k, (r, _) in self.waiting.items() if r == request]:
            del self.waiting[key]
        for slot in (run.slot, *(left.slot for left in run.left.values())):
            self.slots.give(slot)
