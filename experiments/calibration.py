"""Could a profile's error change which policy wins? Policies compared again at perturbed prices.

A held-out case gives a ratio: predicted over measured time. Prices are divided by such ratios: one
operation's by its least and its greatest; prefill and decode steps by each pair of theirs; and, in
seeded draws, every operation and every kind of step by one of its own at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.config import Experiment, PolicyConfig, TraceConfig
from experiments.points import points_of
from experiments.simulate import replay_once
from sim.cost.efficiency import Efficiency, Floats, Share, Shares
from sim.cost.layers import shape_of
from sim.cost.modelled import ModelledBackend
from sim.cost.profile import Profile, backend
from sim.cost.profile_cases import Part, Whole
from sim.cost.profile_fit import WHOLE, ratios
from sim.model import Model
from sim.step import Step, StepResult

STEPS = ("prefill steps", "decode steps", "mixed steps")
METRIC = "ttft_mean_s"
TIE = 1e-3
PREFIX, SUFFIX, OUTPUT, GROUPS, REPEATS = 1500, 200, 16, 6, 5
LOAD = 0.6
POLICIES = (
    PolicyConfig(name="none"),
    PolicyConfig(name="align"),
    PolicyConfig(name="semantic-only"),
    PolicyConfig(name="all", engine="vllm-0.28"),
    PolicyConfig(name="marconi", engine="pool"),
)


@dataclass(frozen=True)
class Change:
    """Prices divided by a factor: of operations, and of kinds of steps."""

    name: str
    ops: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scaled:
    """Shares times a factor by operation; implements ``Efficiency``."""

    shares: Efficiency
    factors: Mapping[str, float]

    def at(self, op: str, size: float) -> Share:
        found, factor = self.shares.at(op, size), self.factors.get(op, 1.0)
        return Share(found.compute * factor, found.memory * factor)

    def over(self, op: str, sizes: Floats) -> Shares:
        found, factor = self.shares.over(op, sizes), self.factors.get(op, 1.0)
        return Shares(found.compute * factor, found.memory * factor)


@dataclass(frozen=True)
class Changed:
    """A backend whose steps take the inner one's times, divided by a factor by kind of step."""

    inner: ModelledBackend
    factors: Mapping[str, float]

    @property
    def host_ns(self) -> int:
        """The engine's own time a step, which no profile measures."""
        return self.inner.host_ns

    def run(self, step: Step) -> StepResult:
        """Durations, rounded to whole nanoseconds."""
        found = self.inner.run(step)
        factor = self.factors.get(_kind(step), 1.0)
        return StepResult((found.durations_ns / factor).round().astype(found.durations_ns.dtype))


def _kind(step: Step) -> str:
    if step.chunks and step.decodes:
        return "mixed steps"
    return "prefill steps" if step.chunks else "decode steps"


@dataclass(frozen=True)
class Perturbed:
    """Backends from a profile with a change; implements ``Prices``."""

    profile: Profile
    model: Model
    change: Change

    def backend(self, ssm_dtype: str) -> Changed:
        """A backend for states of ``ssm_dtype``."""
        ops, curves = self.change.ops, self.profile.curves
        _, shares = backend(self.profile, self.model)
        inner = ModelledBackend(
            self.model,
            self.profile.machine,
            efficiency=Scaled(shares, ops),
            launches={op: c.launch_s / ops.get(op, 1.0) for op, c in curves.items()},
            sequences={op: c.sequence_s / ops.get(op, 1.0) for op, c in curves.items()},
            ssm_dtype=ssm_dtype,
        )
        return Changed(inner, self.change.steps)


# -------------------------------------------------------------------------------- what to try
def changes(found: Mapping[str, Sequence[float]], draws: int, seed: int) -> Iterator[Change]:
    """No change, then every change that held-out ratios allow."""
    yield Change("as calibrated")
    ops = sorted(op for op in found if op not in (*STEPS, WHOLE))
    for op in ops:
        for word, ratio in (("slower", min(found[op])), ("faster", max(found[op]))):
            yield Change(f"{op} {word} ({1 / ratio:.2f}x)", {op: ratio})
    kinds = [k for k in STEPS if k in found]
    extremes = [(min(found[k]), max(found[k])) for k in kinds]
    for pick in itertools.product((0, 1), repeat=len(kinds)):
        ends = {k: ends[i] for k, ends, i in zip(kinds, extremes, pick, strict=True)}
        name = ", ".join(f"{k} {1 / ratio:.2f}x" for k, ratio in ends.items())
        yield Change(name, steps=ends)
    draw = random.Random(seed)
    for i in range(draws):
        drawn = {name: draw.choice(found[name]) for name in (*ops, *kinds)}
        yield Change(f"draw {i}", {op: drawn[op] for op in ops}, {k: drawn[k] for k in kinds})


def comparison(profile: Profile, model: Model) -> Experiment:
    """Policies on prompts that share prefixes, on memory for half of the prefixes, at 0.6 of the
    rate that the profile can serve without reuse."""
    shape = shape_of(model)
    alone = Whole(Part(1, PREFIX + SUFFIX)).step()
    busy_s = int(backend(profile, model)[0].run(alone).durations_ns[0]) / 1e9
    each = shape.state_bytes * 3 + (PREFIX + SUFFIX + OUTPUT) * shape.kv_bytes_per_token
    data = {
        "generator": "shared_prefix",
        "parameters": {
            "groups": GROUPS, "repeats": REPEATS, "prefix_tokens": PREFIX,
            "suffix_tokens": SUFFIX, "output_tokens": OUTPUT, "order": "shuffled",
        },
        "arrivals": {"kind": "poisson", "rate": LOAD / busy_s},
    }  # fmt: skip
    return Experiment(
        name="calibration",
        description="Policies compared at a profile's prices.",
        model=model.name,
        memory=f"{GROUPS * each}",
        trace=TraceConfig.model_validate(data),
        policies=list(POLICIES),
        engine={"max_model_len": min(model.max_model_len, 8192), "max_num_seqs": 16},
    )


# -------------------------------------------------------------------------------- outcomes
@dataclass(frozen=True)
class Outcome:
    """Mean TTFT by policy, in seconds, with one change of prices."""

    change: Change
    ttft_s: Mapping[str, float]

    @property
    def order(self) -> list[str]:
        """Policies from the lowest TTFT up."""
        return sorted(self.ttft_s, key=lambda name: self.ttft_s[name])

    def beats(self, one: str, other: str) -> bool:
        """Whether ``one`` is lower by more than a tie."""
        return self.ttft_s[one] < (1 - TIE) * self.ttft_s[other]


def outcomes(
    profile: Profile, model: Model, experiment: Experiment, draws: int = 12, seed: int = 0
) -> Iterator[Outcome]:
    """Every change tried on every policy of the experiment; means over its seeds."""
    points = points_of(experiment)
    for change in changes(ratios(profile, model), draws, seed):
        found: dict[str, list[float]] = {}
        for point in points:
            row = replay_once(point, Perturbed(profile, model, change)).row
            found.setdefault(point.policy.shown, []).append(float(row[METRIC]))
        yield Outcome(change, {name: sum(v) / len(v) for name, v in found.items()})


@dataclass(frozen=True)
class Verdict:
    """``beaten``: each change under which another policy wins, with that policy; ``reordered``:
    changes under which any two policies change places (ties apart)."""

    first: Outcome
    tried: int
    beaten: list[tuple[str, str]]
    reordered: list[str]

    @property
    def text(self) -> str:
        """One sentence for a report."""
        winner = self.first.order[0]
        if not self.beaten:
            said = (
                f"the error does not change which policy wins: {winner} in all {self.tried} tries"
            )
        else:
            change, other = self.beaten[0]
            said = (
                f"the error can change which policy wins: {winner} as calibrated, but {other} "
                f"with {change} ({len(self.beaten)} of {self.tried} tries)"
            )
        said += f"; some two policies change places in {len(self.reordered)}"
        if len(self.first.order) > 1:
            said += f". Next as calibrated: {self.first.order[1]}, {100 * self.lead:.1f} % behind"
        return said

    @property
    def lead(self) -> float:
        """How far the next policy is behind the winner, as calibrated, relative to the winner."""
        winner, following = (self.first.ttft_s[name] for name in self.first.order[:2])
        return following / winner - 1


def verdict(found: Sequence[Outcome]) -> Verdict:
    """What the tries say; the first is the one without a change. Ties count for nobody."""
    first, others = found[0], found[1:]
    winner, beaten, reordered = first.order[0], [], []
    for outcome in others:
        best = outcome.order[0]
        if outcome.beats(best, winner):
            beaten.append((outcome.change.name, best))
        pairs = itertools.permutations(first.ttft_s, 2)
        if any(first.beats(a, b) and outcome.beats(b, a) for a, b in pairs):
            reordered.append(outcome.change.name)
    return Verdict(first, len(others), beaten, reordered)
