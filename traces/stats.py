"""What a trace is like: sizes, burstiness, ceilings of reuse, and where shared prefixes end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.identity import identify
from traces.placements import GRIDS, Placement, placements
from traces.reuse import Reuse, reuse
from traces.shared import shared_lengths
from traces.structure import Structure, known_lengths, structure, whole_blocks
from traces.trace import UNKNOWN, Ints, Trace

PERCENTILES = (10, 50, 90, 99)
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Arrivals:
    """Burstiness of arrivals; a figure that too few arrivals leave undefined is None.

    ``iat_cv`` is standard deviation over mean of the gaps between arrivals; ``fano_*`` variance
    over mean of arrivals per window of 10 or 60 s, the last one included though it may be cut.
    """

    known: int
    duration_s: float | None
    rate_per_s: float | None
    iat_cv: float | None
    fano_10s: float | None
    fano_60s: float | None
    peak_over_mean_60s: float | None


@dataclass(frozen=True)
class Ceiling:
    """What an unlimited cache with a state at every token could hit, each request finishing
    before the next: tokens shared with anything earlier, and the same where at least the last
    token of a prompt is computed (``recomputed_last``)."""

    hit_tokens: int
    token_hit_rate: float
    mean_request_hit_rate: float
    request_hit_rate: float
    second_half_token_hit_rate: float
    hit_tokens_recomputed_last: int
    token_hit_rate_recomputed_last: float


@dataclass(frozen=True)
class Grid:
    """Where the shared prefixes of requests that have one end: ``r`` is what lies past the last
    multiple of ``grid_tokens``. Shares of those requests; ``edge`` is 256, or a quarter of a
    smaller grid."""

    grid_tokens: int
    edge_tokens: int
    on_grid: float
    up_to_1_edge: float
    up_to_2_edges: float
    up_to_3_edges: float
    beyond: float
    mean_r: float
    below_grid: float


@dataclass(frozen=True)
class Stats:
    """Statistics of a whole trace. Percentiles are 10, 50, 90 and 99 of tokens per request."""

    requests: int
    sessions: int
    prompt_tokens: int
    output_tokens: int
    prompt_percentiles: tuple[int, ...]
    output_percentiles: tuple[int, ...]
    arrivals: Arrivals
    ceiling_prompts: Ceiling
    ceiling_prompts_and_outputs: Ceiling
    outputs_known: int
    infer_appends: str
    grids: tuple[Grid, ...]
    structure: Structure
    reuse: Reuse
    placements: tuple[Placement, ...]
    skipped: tuple[str, ...]


def trace_stats(trace: Trace, grids: Sequence[int] = (1024, 1040)) -> Stats:
    """Statistics of ``trace``; ``grids`` in tokens."""
    prefixes = identify(trace)
    shared = shared_lengths(trace, prefixes)
    with_outputs = shared_lengths(trace, prefixes, outputs=True)
    skipped = trace.notes.get("skipped", ())
    return Stats(
        requests=len(trace),
        sessions=len(np.unique(trace.session[trace.session != UNKNOWN])),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        output_tokens=int(trace.output_tokens.sum()),
        prompt_percentiles=_percentiles(trace.prompt_tokens),
        output_percentiles=_percentiles(trace.output_tokens),
        arrivals=arrivals(trace.arrival_ns),
        ceiling_prompts=_ceiling(trace, shared),
        ceiling_prompts_and_outputs=_ceiling(trace, with_outputs),
        outputs_known=int(np.count_nonzero(trace.output_known & (trace.output_tokens > 0))),
        infer_appends=str(trace.notes.get("infer_appends", "off")),
        grids=tuple(_grid(shared[shared > 0], g) for g in grids),
        structure=structure(trace, prefixes, shared, known_lengths(trace)),
        reuse=reuse(trace, prefixes, shared),
        placements=placements(
            trace, prefixes, shared, whole_blocks(trace), sorted({*GRIDS, *grids})
        ),
        skipped=tuple(str(s) for s in skipped) if isinstance(skipped, tuple | list) else (),
    )


def arrivals(arrival_ns: Ints) -> Arrivals:
    """Burstiness of the arrivals that are known."""
    t = np.sort(arrival_ns[arrival_ns != UNKNOWN])
    span = float(t[-1] - t[0]) / SECOND if len(t) > 1 else 0.0
    if not span:
        return Arrivals(len(t), None, None, None, None, None, None)
    gaps = np.diff(t)
    per_60s = _windows(t, 60)
    return Arrivals(
        known=len(t),
        duration_s=span,
        rate_per_s=len(t) / span,
        iat_cv=float(gaps.std() / gaps.mean()),
        fano_10s=_windows(t, 10).fano,
        fano_60s=per_60s.fano,
        peak_over_mean_60s=per_60s.peak / per_60s.mean,
    )


@dataclass(frozen=True)
class _Windows:
    mean: float
    peak: int
    fano: float


def _windows(t: Ints, window_s: int) -> _Windows:
    """Arrivals per window from the first arrival to the last; empty windows are not stored."""
    _, counts = np.unique((t - t[0]) // (window_s * SECOND), return_counts=True)
    n = int((t[-1] - t[0]) // (window_s * SECOND)) + 1
    mean = len(t) / n
    variance = float((counts.astype(float) ** 2).sum()) / n - mean**2
    return _Windows(mean, int(counts.max()), variance / mean)


def _percentiles(values: Ints) -> tuple[int, ...]:
    if not len(values):
        return (0,) * len(PERCENTILES)
    return tuple(int(v) for v in np.percentile(values, PERCENTILES))


def _ceiling(trace: Trace, shared: Ints) -> Ceiling:
    prompt, half = trace.prompt_tokens, len(trace) // 2
    short = np.minimum(shared, prompt - 1)
    return Ceiling(
        hit_tokens=int(shared.sum()),
        token_hit_rate=_ratio(shared, prompt),
        mean_request_hit_rate=float((shared / prompt).mean()) if len(prompt) else 0.0,
        request_hit_rate=float((shared > 0).mean()) if len(prompt) else 0.0,
        second_half_token_hit_rate=_ratio(shared[half:], prompt[half:]),
        hit_tokens_recomputed_last=int(short.sum()),
        token_hit_rate_recomputed_last=_ratio(short, prompt),
    )


def _ratio(part: Ints, whole: Ints) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0


def _grid(shared: Ints, grid: int) -> Grid:
    r = shared % grid
    edge = 256 if grid >= 1024 else max(grid // 4, 1)

    def share(mask: NDArray[np.bool_]) -> float:
        return float(mask.mean()) if len(mask) else 0.0

    return Grid(
        grid_tokens=grid,
        edge_tokens=edge,
        on_grid=share(r == 0),
        up_to_1_edge=share((r > 0) & (r <= edge)),
        up_to_2_edges=share((r > edge) & (r <= 2 * edge)),
        up_to_3_edges=share((r > 2 * edge) & (r <= 3 * edge)),
        beyond=share(r > 3 * edge),
        mean_r=float(r.mean()) if len(r) else 0.0,
        below_grid=share(shared < grid),
    )
