"""Where and how computations run."""

from __future__ import annotations

import torch

from executor.profile_memory import keep_freed_memory


def one_thread() -> None:
    """One thread on the CPU: what is timed is then the time of this process, and bits repeat."""
    torch.set_num_threads(1)
    keep_freed_memory()


def usable(device: str) -> None:
    """Raise ``ValueError`` for a device that is not there."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; allowed are cpu and cuda, the nearest is cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch sees no GPU; the nearest is cpu")
