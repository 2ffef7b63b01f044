"""Statistics of the real traces beside the project, figure by figure, against those computed by
other code when the traces were collected."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from traces.identity import Prefixes, identify
from traces.order import take
from traces.placements import Placement, placements, reachable, summed
from traces.registry import detect, read_trace
from traces.shared import shared_lengths
from traces.stats import Stats, trace_stats
from traces.structure import structure, whole_blocks
from traces.trace import UNKNOWN, Ints, Trace

REAL = Path(__file__).parents[2] / "shared" / "traces"
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
WEKA = "claude_code_weka_sample.rle.jsonl.gz"
RAG, TAU = "ragpulse.seg.jsonl.gz", "tau_airline.seg.jsonl.gz"
CONV, CODE = "azure2023_conv.csv.gz", "azure2023_code.csv.gz"
FORMATS = {
    CONVERSATION: "mooncake", WEKA: "weka", RAG: "native", TAU: "native", CONV: "azure",
    CODE: "azure",
}  # fmt: skip


@dataclass(frozen=True)
class Real:
    """A trace and what is computed of it; ``prompt`` are the tokens of which something is known
    (RAG prompts have a few more that no segment stands for)."""

    trace: Trace
    prefixes: Prefixes
    shared: Ints
    prompt: Ints
    stats: Stats


@cache
def real(name: str) -> Real:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{name} is not beside the project")
    trace = read_trace(str(path), **({"sort": True} if name == RAG else {}))
    if name == RAG:  # its time falls back once; the figures go by the order of the file
        trace = take(trace, np.argsort([int(i) for i in trace.ids]))
    prefixes = identify(trace)
    prompt = trace.prompt_tokens if name != RAG else covered(path, trace)
    return Real(trace, prefixes, shared_lengths(trace, prefixes), prompt, trace_stats(trace))


def covered(path: Path, trace: Trace) -> Ints:
    """Tokens of each prompt that its segments cover."""
    with gzip.open(path, "rt") as f:
        lengths = np.array(json.loads(next(f))["segments"])
        tokens = [int(lengths[json.loads(line)["seg"]].sum()) for line in f]
    return np.array([tokens[int(i)] for i in trace.ids], np.int64)


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_file_is_detected(name: str) -> None:
    assert detect(str(REAL / name)) == FORMATS[name] if (REAL / name).exists() else True
    assert real(name).stats.skipped == ()


# --- 1: sizes, lengths, arrivals ----------------------------------------------------------------

#: requests, sessions, prompt tokens in millions, prompts p10/50/90/99, outputs p50/90/99
SIZES = {
    CONVERSATION: (12_031, 0, 144.8, (964, 6909, 27367, 85400), (350, 597, 1118)),
    WEKA: (6_184, 106, 730.0, (42923, 102520, 224520, 521517), (211, 887, 3783)),
    RAG: (7_106, 3_990, 20.9, (1110, 3140, 3958, 5438), (234, 563, 891)),
    TAU: (2_454, 200, 7.2, (1342, 2458, 5254, 8033), (60, 150, 298)),
    CONV: (19_366, 0, 22.4, (207, 1020, 2734, 4142), (129, 424, 601)),
    CODE: (8_819, 0, 18.1, (147, 1469, 5188, 7436), (13, 55, 251)),
}


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes(name: str) -> None:
    s = real(name).stats
    requests, sessions, millions, prompts, outputs = SIZES[name]
    assert (s.requests, s.sessions) == (requests, sessions)
    assert round(s.prompt_tokens / 1e6, 1) == millions
    assert s.prompt_percentiles == pytest.approx(prompts, abs=1)
    assert s.output_percentiles[1:] == pytest.approx(outputs, abs=1)


#: duration s, rate, CV of gaps, Fano 10 s and 60 s, peak over mean in 60 s
ARRIVALS = {
    CONVERSATION: (3537.0, 3.4015, 3.034, 2.09, 2.85, 1.21),
    RAG: (604603.0, 0.0118, 3.061, 1.07, 1.73, 14.18),
    CONV: (3501.7, 5.5304, 1.094, 4.0, 20.55, 1.54),
    CODE: (3435.9, 2.5667, 13.151, 71.3, 160.54, 4.16),
}


@pytest.mark.parametrize("name", list(SIZES))
def test_arrivals(name: str) -> None:
    a = real(name).stats.arrivals
    if name not in ARRIVALS:
        assert a.known == 0 and a.rate_per_s is None
        return
    found = (a.duration_s, a.rate_per_s, a.iat_cv, a.fano_10s, a.fano_60s, a.peak_over_mean_60s)
    assert found == pytest.approx(ARRIVALS[name], rel=2e-3, abs=6e-3)


# --- 2: prefix structure ------------------------------------------------------------------------

#: hit, hit of the second half, mean per request, requests with a hit, whole prompts
HITS = {
    CONVERSATION: (0.3736, 0.3981, 0.4094, 0.9999, 0.0098),
    WEKA: (0.9636, 0.9697, 0.9495, 0.983, 0.0),
    RAG: (0.3143, 0.3148, 0.3373, 0.9996, 0.0),
    TAU: (0.9301, 0.9306, 0.9256, 0.9996, 0.0033),
}
#: roots, branch points, most ways to go on, leaves, hit tokens p50/p90
TREES = {
    CONVERSATION: (1, 3876, 7373, 11905, (512, 12800)),
    WEKA: (105, 373, 9, 509, (99968, 217402)),
    RAG: (3, 64, 1399, 7105, (1024, 1024)),
    TAU: (1, 122, 11, 200, (2238, 5003)),
}
#: first, append, repeat, disjoint, edit, in percent
TURNS = {
    WEKA: (1.7, 91.7, 0.0, 0.2, 6.4),
    RAG: (56.1, 0.0, 0.0, 8.8, 35.0),
    TAU: (8.2, 91.8, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", list(HITS))
def test_hits(name: str) -> None:
    s = real(name).stats
    c = s.ceiling_prompts
    found = (
        c.token_hit_rate, c.second_half_token_hit_rate, c.mean_request_hit_rate,
        c.request_hit_rate, s.structure.full_prompt_hits,
    )  # fmt: skip
    assert [round(x, 4) for x in found] == pytest.approx(HITS[name], abs=1.01e-4)


#: with prompts and outputs that later prompts are taken to begin with
INFERRED = {WEKA: 0.966, RAG: 0.3143, TAU: 0.9548}


@pytest.mark.parametrize("name", list(INFERRED))
def test_hits_with_inferred_appends(name: str) -> None:
    real(name)  # skips where the file is absent
    options = {"infer_appends": "on", **({"sort": True} if name == RAG else {})}
    trace = read_trace(str(REAL / name), **options)
    shared = shared_lengths(trace, identify(trace), outputs=True)
    rate = int(shared.sum()) / int(trace.prompt_tokens.sum())
    assert round(rate, 4) == pytest.approx(INFERRED[name], abs=1e-4)


@pytest.mark.parametrize("name", list(TREES))
def test_trees(name: str) -> None:
    r = real(name)
    s = r.stats.structure
    if name == RAG:  # prompts have 6 to 12 tokens of their own behind the last segment
        s = structure(r.trace, r.prefixes, r.shared, r.prompt)
    found = (s.roots, s.branch_points, s.max_fan_out, s.leaves, s.hit_tokens_percentiles)
    assert found == TREES[name]


@pytest.mark.parametrize("name", list(TURNS))
def test_turns(name: str) -> None:
    t = real(name).stats.structure.turns
    assert t is not None
    shares = (t.first, t.append, t.repeat, t.disjoint, t.edit)
    assert [100 * x for x in shares] == pytest.approx(TURNS[name], abs=0.08)


#: seconds since the last use, and new tokens since, p50/p90/p99
REUSE = {
    CONVERSATION: ((0, 255, 879), (0, 6.5e6, 22.0e6)),
    WEKA: (None, (0, 0, 4e3)),
    RAG: ((83, 847, 7548), (0, 7e3, 80e3)),
    TAU: (None, (0, 0, 225e3)),
}


@pytest.mark.parametrize("name", list(REUSE))
def test_since_the_last_use(name: str) -> None:
    found, (gaps, tokens) = real(name).stats.reuse, REUSE[name]
    assert found.gap_s is None if gaps is None else found.gap_s == pytest.approx(gaps, abs=0.5)
    assert found.new_tokens == pytest.approx(tokens, rel=0.01, abs=500)


# --- 4 and 5: where states are kept -------------------------------------------------------------

PLACES = (
    "exact", "grid 64", "grid 256", "grid 512", "grid 1024", "grid 1040", "grid 4096", "end",
    "end+branch", "end+grid 1040", "end+branch+grid 1040",
)  # fmt: skip
#: token hit rate of each, and prefill over the least
CEILINGS = {
    CONVERSATION: (
        (0.374, 0.374, 0.373, 0.373, 0.340, 0.326, 0.291, 0.350, 0.359, 0.370, 0.371),
        (1.00, 1.00, 1.00, 1.00, 1.05, 1.08, 1.13, 1.04, 1.02, 1.00, 1.00),
    ),
    WEKA: (
        (0.964, 0.964, 0.963, 0.962, 0.960, 0.959, 0.947, 0.957, 0.959, 0.963, 0.963),
        (1.00, 1.00, 1.02, 1.05, 1.11, 1.12, 1.46, 1.19, 1.13, 1.01, 1.00),
    ),
    RAG: (
        (0.314, 0.314, 0.314, 0.313, 0.279, 0.002, 0.000, 0.000, 0.313, 0.002, 0.313),
        (1.00, 1.00, 1.00, 1.00, 1.05, 1.46, 1.46, 1.46, 1.00, 1.46, 1.00),
    ),
    TAU: (
        (0.930, 0.919, 0.885, 0.839, 0.770, 0.771, 0.244, 0.896, 0.930, 0.924, 0.930),
        (1.00, 1.15, 1.64, 2.30, 3.29, 3.28, 10.81, 1.48, 1.01, 1.09, 1.00),
    ),
}


def ends(r: Real) -> Ints:
    """Where the end of a prompt counts as being: of block traces, the last whole block."""
    return whole_blocks(r.trace) if "block_tokens" in r.trace.notes else r.prompt


@pytest.mark.parametrize("name", list(CEILINGS))
def test_where_states_are_kept(name: str) -> None:
    r = real(name)
    shown = {p.name: p for p in r.stats.placements}
    found = {p.name: p for p in placements(r.trace, r.prefixes, r.shared, ends(r))}
    if name != RAG:
        assert found == shown
    rates, ratios = CEILINGS[name]
    assert [found[p].token_hit_rate for p in PLACES] == pytest.approx(rates, abs=1.01e-3)
    told = [found[p].prefill_ratio for p in PLACES]
    assert told == pytest.approx(ratios, abs=0.011)


#: p50, p90 of tokens computed by requests that are not the first of their session, and prefill
#: over the least
WARM: dict[str, dict[str, tuple[int, int, float]]] = {
    CONVERSATION: {
        "exact": (2468, 19014, 1.0),
        "grid 1024": (2896, 19526, 1.05),
        "grid 1040": (3001, 19649, 1.08),
        "grid 4096": (3996, 19875, 1.13),
        "end": (2582, 20171, 1.04),
        "end+branch": (2568, 19731, 1.02),
        "end+branch+grid 1024": (2468, 19046, 1.0),
    },
    WEKA: {
        "exact": (740, 4276, 1.0),
        "grid 256": (843, 4373, 1.03),
        "grid 1040": (1344, 4797, 1.17),
        "end": (768, 4629, 1.27),
        "end+branch": (766, 4570, 1.19),
        "end+branch+grid 1024": (762, 4321, 1.01),
    },
    RAG: {
        "exact": (2373, 3412, 1.0),
        "grid 1024": (2390, 3448, 1.05),
        "grid 1040": (3390, 4429, 1.40),
        "end": (3396, 4436, 1.40),
        "end+branch": (2379, 3436, 1.0),
    },
    TAU: {
        "exact": (139, 402, 1.0),
        "grid 64": (175, 434, 1.14),
        "grid 1040": (691, 1142, 3.21),
        "grid 4096": (2166, 3682, 10.41),
        "end": (140, 402, 1.0),
        "end+branch+grid 1024": (140, 402, 1.0),
    },
}


@pytest.mark.parametrize("name", list(WARM))
def test_warm_requests(name: str) -> None:
    r = real(name)
    hits = reachable(r.prefixes, r.prompt, r.shared, ends(r))
    _, first = np.unique(r.trace.session, return_index=True)
    warm = np.ones(len(r.trace), bool)
    warm[first] = False
    if (r.trace.session == UNKNOWN).all():
        warm = r.shared > 0
    for place, (middle, high, ratio) in WARM[name].items():
        p: Placement = summed(place, r.trace.prompt_tokens, r.shared, hits[place], warm)
        assert p.uncached_percentiles == pytest.approx((middle, high), abs=2), place
        assert p.prefill_ratio == pytest.approx(ratio, abs=0.011), place
