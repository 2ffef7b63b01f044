"""The move in Triton: one program a (state, part of it)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import config, launches
from kernels.backend import Backend
from kernels.shapes import Maybe
from kernels.tiles import narrowed


@triton.jit
def move_kernel(
    source,
    target,
    source_slots,
    target_slots,
    source_step,
    target_step,
    size,
    BLOCK: tl.constexpr,
):
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    read, write = pair, pair
    if source_slots is not None:
        read = tl.load(source_slots + pair).to(tl.int64)
    if target_slots is not None:
        write = tl.load(target_slots + pair).to(tl.int64)
    if (read >= 0) & (write >= 0):
        at = part * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source + read * source_step + at, mask=at < size)
        if source.dtype.element_ty != target.dtype.element_ty:
            values = narrowed(values.to(tl.float32), target.dtype.element_ty)
        tl.store(target + write * target_step + at, values, mask=at < size)


def move(
    source: torch.Tensor, target: torch.Tensor, read: Maybe, write: Maybe, backend: Backend
) -> None:
    """Copies a state for each pair of slots; None is 0, 1, 2 and so on."""
    count = len(read) if read is not None else len(source)
    size = source[0].numel() if len(source) else 0
    chosen = dict(config.row(backend, "state_move", size))
    block = config.power(size, most=chosen.pop("BLOCK"))
    launches.start(
        move_kernel,
        (count, -(-size // block)),
        *(source, target, read, write, source.stride(0), target.stride(0), size),
        config=chosen,
        BLOCK=block,
    )
