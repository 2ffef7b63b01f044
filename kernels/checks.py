"""What tests and the device script share: poison, errors, tolerances, which backends are there."""

from __future__ import annotations

import torch

from kernels import backend

# Relative to the largest value; fp32 measured at most 2e-6, bf16 2.3e-3 (docs/kernels.md).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}


def poisoned(tensor: torch.Tensor, before: int = 1, after: int = 1) -> torch.Tensor:
    """The same values as a view between rows of NaN, so that a read outside them is seen."""
    rows = tensor.shape[0]
    whole = tensor.new_full((before + rows + after, *tensor.shape[1:]), torch.nan)
    whole[before : before + rows] = tensor
    return whole[before : before + rows]


def error(found: torch.Tensor, judge: torch.Tensor) -> float:
    """Largest difference over the judge's largest value; infinite if a value is not finite."""
    if found.shape != judge.shape:
        raise ValueError(f"shape {tuple(found.shape)}: allowed is {tuple(judge.shape)}")
    if not judge.numel():
        return 0.0
    gap = (found.double().cpu() - judge.double().cpu()).abs().max()
    scale = judge.double().abs().max().clamp_min(1e-30).cpu()
    return float(gap / scale) if torch.isfinite(gap) else float("inf")


def runnable() -> list[tuple[str, str]]:
    """Pairs (backend, device) that this process can run: the interpreter shuts torch out, since
    there only the kernels are of interest."""
    if backend.interpreted():
        return [("triton", "cpu")]
    cuda = [("triton", "cuda"), ("torch", "cuda")] if torch.cuda.is_available() else []
    return [("torch", "cpu"), *cuda]
