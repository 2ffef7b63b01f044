"""How much of each prompt was seen before: the longest prefix shared with anything earlier."""

from __future__ import annotations

import numpy as np

from traces.identity import Prefixes
from traces.trace import Ints, Trace


def shared_lengths(trace: Trace, prefixes: Prefixes, outputs: bool = False) -> Ints:
    """Tokens of each prompt shared with an earlier prompt, or with ``outputs`` also with an
    earlier prompt and its output. Earlier means before it in the trace.
    """
    reach: dict[int, int] = {}
    out = np.zeros(len(trace), np.int64)
    totals = trace.prompt_tokens + (trace.output_tokens if outputs else 0)
    for r, (prompt, total) in enumerate(
        zip(trace.prompt_tokens.tolist(), totals.tolist(), strict=True)
    ):
        shared, going = 0, True
        for start, end, delta in prefixes.extents(r):
            if start >= total:
                break
            head = start + 1 + delta
            known = reach.get(head, 0)
            if going and known >= head:
                shared = min(end, known - delta)
            going = going and shared == end
            reach[head] = max(known, min(end, total) + delta)
        out[r] = min(shared, prompt)
    return out
