"""Steps of a linear recurrence ``s = a s + b`` as pairs ``(a, b)``, and how they compose.

Composition is associative, which is why a scan may be cut anywhere and why a checkpoint is worth
anything. An error in the state a scan starts from is multiplied by all later ``a``.
"""

from __future__ import annotations

import torch

Step = tuple[torch.Tensor, torch.Tensor]


def compose(first: Step, second: Step) -> Step:
    """The one step that does ``first`` and then ``second``."""
    return second[0] * first[0], second[0] * first[1] + second[1]


def scan(a: torch.Tensor, b: torch.Tensor) -> Step:
    """Composition of all steps up to each, along the first dimension, in log2 of its length."""
    offset = 1
    while offset < a.shape[0]:
        later = compose((a[:-offset], b[:-offset]), (a[offset:], b[offset:]))
        a = torch.cat([a[:offset], later[0]])
        b = torch.cat([b[:offset], later[1]])
        offset *= 2
    return a, b
