"""The ledger: every event in the life of a saved state or of cached KV, as columns.

Attribution is bookkeeping on these columns after the run; nothing in the loop reads them.
``key`` is the prefix id of the content up to ``position`` tokens. KV is published in stretches
(one event covers everything of the request up to ``position``) and dropped block by block; only
the loss of the *last* copy of a key is an event, and a state that several groups hold in parts
is published when its last part is and dropped when its first part is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import pandas as pd


class Kind(IntEnum):
    """What the event is about."""

    STATE = 0
    KV = 1


class Action(IntEnum):
    """What happened to it."""

    CREATED = 0
    PUBLISHED = 1
    RESTORED = 2
    DROPPED = 3


class Cause(IntEnum):
    """Why: PRESSURE evicts what was published; POLICY keeps a state on a usable position from
    being published, or unpublishes it; ENGINE covers the engine's own housekeeping (a key moved
    to a copy, a partial key replaced by the full block's)."""

    NONE = 0
    PRESSURE = 1
    POLICY = 2
    ENGINE = 3


@dataclass(slots=True)
class Ledger:
    """Append-only columns of equal length; ``on`` False records nothing."""

    on: bool = True
    step: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    request: list[int] = field(default_factory=list)
    key: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)

    def emit(
        self,
        step: int,
        kind: Kind,
        action: Action,
        key: int,
        position: int,
        request: int = -1,
        cause: Cause = Cause.NONE,
    ) -> None:
        """Append one event; ``request`` is the one that caused it, -1 if none did."""
        if not self.on:
            return
        self.step.append(step)
        self.kind.append(kind)
        self.action.append(action)
        self.cause.append(cause)
        self.request.append(request)
        self.key.append(key)
        self.position.append(position)

    def extend(
        self,
        step: int,
        kinds: Sequence[int],
        action: Action,
        cause: Cause,
        keys: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        """Append events of one action that no request caused, in order; the caller asks ``on``."""
        count = len(keys)
        self.step += [step] * count
        self.kind += kinds
        self.action += [action] * count
        self.cause += [cause] * count
        self.request += [-1] * count
        self.key += keys
        self.position += positions

    def __len__(self) -> int:
        return len(self.step)

    def frame(self) -> pd.DataFrame:
        """The events as a DataFrame, in order, with small integer types."""
        return pd.DataFrame(
            {
                "step": np.array(self.step, np.int64),
                "kind": np.array(self.kind, np.int8),
                "action": np.array(self.action, np.int8),
                "cause": np.array(self.cause, np.int8),
                "request": np.array(self.request, np.int32),
                "key": np.array(self.key, np.int64),
                "position": np.array(self.position, np.int32),
            }
        )
