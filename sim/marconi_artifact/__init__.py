"""The Marconi artifact (MLSys 2025) as published, errors included: a serial reference replayer.

Outside the engines and exempt from their invariants: it credits tokens that are not cached and
holds more bytes than it is given, because the artifact does. ``docs/marconi.md`` lists where.
"""

from sim.marconi_artifact.outcome import Replay, Sequence
from sim.marconi_artifact.replay import VERSIONS, replay, replay_trace
from sim.marconi_artifact.sizes import Sizes

__all__ = ["VERSIONS", "Replay", "Sequence", "Sizes", "replay", "replay_trace"]
