"""Whole steps of a decoder, and any case, as calls that can be timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from executor.batch import Decode, Prefill, plan
from executor.calibrate_bench import Bench
from executor.calibrate_ops import OPERATIONS
from executor.calibrate_timing import Call, Pieces
from executor.decoder import Decoder
from kernels import state
from sim import models
from sim.cost.profile_cases import Case, Part, Whole

PLAN_CONTEXT = 512
Rows = tuple[list[Prefill], list[Decode]]


def pieces_of(bench: Bench, case: Case | Whole) -> Pieces:
    """Calls that do the case's work once. Raises ``ValueError`` for an unknown operation."""
    if isinstance(case, Whole):
        return [whole(bench, case)]
    if case.op == "overhead":
        return [overhead(bench, case.part)]
    if case.op not in OPERATIONS:
        raise ValueError(f"operation {case.op!r}: allowed are overhead, {', '.join(OPERATIONS)}")
    return OPERATIONS[case.op](bench, case.part)


def between(seed: int = 0) -> Call:
    """What runs between two timings on a CPU, and tells the machine's speed: a token through one
    recurrent and one feed-forward layer of ``nano``.

    In a step such layers run between two operations of a kind; without them an operation finds its
    code and its data in the nearest caches and takes down to half the time.
    """
    other = Bench(replace(models.load("nano"), pattern="M-"), seed=seed)
    return whole(other, Whole(None, Part(1, 1, 64)))


def overhead(bench: Bench, part: Part) -> Call:
    """The index tensors of a step with one chunk and so many decodes."""
    made = rows(bench, Whole(Part(1, 64, PLAN_CONTEXT), Part(part.sequences, 1, PLAN_CONTEXT)))
    return lambda: plan(*made, bench.block_tokens, bench.device)


def rows(bench: Bench, step: Whole) -> Rows:
    """Chunks and decodes with slots and blocks of their own."""
    slots, vocab, used = count(), bench.model.vocab_size, 0

    def taken(tokens: int) -> Any:
        nonlocal used
        used += bench.blocks(tokens)
        return np.arange(used - bench.blocks(tokens), used)

    prefills, decodes = [], []
    for i, part in enumerate([step.prefill] * step.prefill.sequences if step.prefill else []):
        cuts = range(1, 1 + (0 if i else step.saves))
        saves = [(part.cached + part.tokens * c // (len(cuts) + 1), next(slots)) for c in cuts]
        tokens: Any = 11 * np.arange(part.tokens) % vocab
        held = taken(part.cached + part.tokens)
        prefills.append(Prefill(tokens, part.cached, next(slots), held, saves=saves))
    for i, part in enumerate([step.decode] * step.decode.sequences if step.decode else []):
        held = taken(part.cached + 1)
        decodes.append(Decode((13 * i) % vocab, part.cached, next(slots), held))
    return prefills, decodes


def whole(bench: Bench, step: Whole) -> Call:
    """State copies, then a forward pass; in a graph the index tensors are made beforehand."""
    made = rows(bench, step)
    prefills, decodes = made
    used = sum(len(p.blocks) for p in prefills) + sum(len(d.blocks) for d in decodes)
    taken = len(prefills) + len(decodes) + step.saves
    states, kv = bench.states(taken + step.copies), bench.kv(used)
    decoder = Decoder(bench.weights, states, kv, bench.numerics)
    source, target = range(step.copies), range(taken, taken + step.copies)
    fixed = plan(*made, bench.block_tokens, bench.device) if bench.graph else None
    read, write = bench.ints(source), bench.ints(target)

    def captured() -> None:
        for pool in (states.conv, states.ssm) if step.copies else ():
            state.copy(pool, pool, read, write, backend=bench.backend)
        assert fixed is not None
        decoder.run(fixed).argmax(-1)

    def eager() -> None:
        if step.copies:
            states.copy(source, target)
        decoder.step(*made).argmax(-1)

    return captured if bench.graph else eager
