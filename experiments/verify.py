"""Random traces through every engine that hosts a policy, computed by the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import config
from experiments.engines import Point, host
from experiments.points import points_of
from sim import models, policies
from sim.ledger import Ledger
from sim.loop import replay
from sim.records import Records
from sim.sglang.pools import EngineCrashError
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

if TYPE_CHECKING:
    from executor.kernel_backend import Setup
    from executor.verify import Verdict

# The oracle is a ceiling that no engine runs: it has a state at every token.
NOT_EXECUTED = ("oracle",)
VLLM: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (False, True),
    "max_num_batched_tokens": (256, 96, 1024),
    "max_num_seqs": (6, 3),
    "memory": ("500KiB", "800KiB", "8MiB"),
}
SGLANG: dict[str, tuple[Any, ...]] = {
    "mamba_radix_cache_strategy": ("extra_buffer", "no_buffer", "extra_buffer_lazy"),
    "page_size": (1, 64),
    "mamba_track_interval": (64, 128),
    "chunked_prefill_size": (256, 128, 1024),
    "memory": ("2MiB", "1200KiB", "8MiB"),
}


@dataclass(frozen=True)
class Verified:
    """One policy on one engine over several traces."""

    policy: str
    engine: str
    verdicts: list[Verdict]


def random_trace(seed: int, count: int = 7) -> Trace:
    """Requests that share beginnings; some go on where an earlier answer ended."""
    chance = np.random.default_rng(seed)
    rows: list[Request] = []
    past: list[tuple[Run, ...]] = []
    at = 0
    for i in range(count):
        base = (i + 8) << 20
        start: tuple[Run, ...] = (
            Run(int(chance.integers(0, 2)) << 16, int(chance.integers(90, 360))),
        )
        if past and chance.random() < 0.5:
            start = past[int(chance.integers(0, len(past)))]
        prompt = (*start, Run(base, int(chance.integers(1, 150))))
        output = Run(base + 5000, int(chance.integers(1, 90)))
        at += int(chance.choice([0, 1_000_000, 200_000_000]))
        rows.append(Request(str(i), prompt, output.length, (output,), arrival_ns=at))
        past.append((*prompt, output))
    return from_requests(rows)


def point_of(policy: str, engine: str, seed: int, model: str) -> Point:
    """The policy on the engine, with settings drawn by the seed."""
    chance = np.random.default_rng((seed, 1))
    choices = SGLANG if engine.startswith("sglang") else VLLM
    drawn: dict[str, Any] = {k: v[int(chance.integers(0, len(v)))] for k, v in choices.items()}
    memory = drawn.pop("memory")
    if engine.startswith("sglang"):
        if drawn["mamba_radix_cache_strategy"] == "no_buffer":
            drawn |= {"page_size": 1, "disable_overlap_schedule": True}
        drawn = {"sglang": drawn | {"max_running_requests": 3}}
    data = {
        "name": "verify",
        "description": "random",
        "model": model,
        "memory": memory,
        "engine": {"version": engine, "max_model_len": 4096, **drawn},
        "policies": [{"name": policy}],
    }
    return points_of(config.checked(data, "verify"))[0]


def engines_of(policy: str) -> Iterator[str]:
    """Engines that host the policy and that the executor can follow."""
    if policy not in NOT_EXECUTED:
        yield from policies.load(policy).engines


def setup_of(
    point: Point, trace: Trace, seed: int, device: str, *, exact: bool = True
) -> tuple[Any, Setup]:
    """The engine, and what its steps are run with; ``exact``: bits do not depend on the batch."""
    from executor.kernel_backend import Placed, Setup
    from executor.layers.common import Numerics

    ledger, prefixes = Ledger(), identify(trace)
    engine: Any = host(point, trace, prefixes, ledger).engine
    engine.cache.policy = placed = Placed(engine.cache.policy)
    return engine, Setup(
        models.load(point.experiment.model),
        trace,
        prefixes,
        ledger,
        placed,
        state_every=_state_every(point, engine),
        inside=placed.layout(point.version).mode == "all",
        exported=_exported(engine) if point.version.startswith("vllm") else None,
        seed=seed,
        device=device,
        numerics=Numerics(
            row_block=64 if exact else 0, backend="torch" if device == "cpu" else None
        ),
    )


def _exported(engine: Any) -> Callable[[int], Sequence[int]]:
    """Where vLLM has a state exported from inside a request's chunk."""

    def positions(request: int) -> Sequence[int]:
        for live in engine.scheduler.running:
            if live.index == request and live.checkpoint is not None:
                return (live.checkpoint[0],)
        return ()

    return positions


def _state_every(point: Point, engine: Any) -> int:
    if point.version.startswith("sglang"):
        return int(engine.options.track_interval) if engine.cache.extra else 0
    return 0 if point.version == "pool" else int(engine.cache.shape.state_block)


def verify(policy: str, engine: str, seeds: range, model: str, device: str) -> Verified:
    """Replay a trace a seed with reuse, computing every step; compare with full prefills."""
    from executor.resident import MissingStateError
    from executor.verify import Verdict, Watched, compare

    verdicts = []
    for seed in seeds:
        trace = random_trace(seed)
        made, setup = setup_of(point_of(policy, engine, seed, model), trace, seed, device)
        watched = Watched(setup)
        try:
            replay(made, trace, watched, Records(trace), host_ns=1000, leap=False)
        except MissingStateError as fault:
            verdicts.append(Verdict(fault=str(fault)))
            continue
        except EngineCrashError:
            pass  # as the engine itself would; what came before is compared
        verdicts.append(compare(watched))
    return Verified(policy, engine, verdicts)
