"""Every operation once at the sizes of a full model, for offline compiles and checks on a device.

Sizes are those of one Nemotron-H-8B layer; for the gated delta rule of one Qwen3-Next layer, for
Mamba-1 of one Jamba layer (``sim/data/models``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import attention, conv, gdn, int8, scan, ssd, state

Outputs = list[torch.Tensor]
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Sizes:
    """``tokens`` of a prefill (even), ``batch`` of a decode, where and on which backend."""

    tokens: int = 1024
    batch: int = 8
    device: str = "cpu"
    backend: str | None = None


def values(sizes: Sizes, seed: int = 0) -> Callable[..., torch.Tensor]:
    """Makes normal values (never zeros, which run faster), the same ones for the same seed."""
    generator = torch.Generator(sizes.device).manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=sizes.device, dtype=FP32)
        return drawn.to(dtype)

    return make


def operations(sizes: Sizes) -> dict[str, Callable[[], Outputs]]:
    """Callables that make their inputs and run one operation (or two that belong together)."""
    return {
        "ssd_prefill": lambda: _ssd(sizes, (128, 64, 128, 8), BF16),
        "ssd_prefill_fp32": lambda: _ssd(sizes, (8, 32, 128, 1), FP32),
        "ssd_update": lambda: _ssd_update(sizes),
        "conv": lambda: _conv(sizes),
        "scan": lambda: _scan(sizes),
        "gdn": lambda: _gdn(sizes),
        "attention": lambda: _attention(sizes),
        "state": lambda: _state(sizes),
    }


def _slots(sizes: Sizes) -> torch.Tensor:
    return torch.arange(sizes.batch, device=sizes.device).flip(0)


def _ssd(sizes: Sizes, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Outputs:
    (h, p, n, g), t, make = shape, sizes.tokens, values(sizes)
    found = ssd.prefill(
        make(t, h, p, dtype=dtype),
        make(t, h, dtype=dtype),
        -make(h, dtype=FP32).exp(),
        make(t, g, n, dtype=dtype),
        make(t, g, n, dtype=dtype),
        make(h, dtype=FP32),
        lengths=[t],
        initial=make(1, h, p, n, dtype=FP32),
        states_at=[(0, t // 2 + 1)],
        dt_bias=make(h, dtype=FP32) - 3,
        softplus=True,
        backend=sizes.backend,
    )
    return list(found)


def _ssd_update(sizes: Sizes) -> Outputs:
    b, make = sizes.batch, values(sizes)
    pool = make(b, 128, 64, 128, dtype=FP32)
    y = ssd.update(
        pool,
        _slots(sizes),
        make(b, 128, 64),
        make(b, 128),
        -make(128, dtype=FP32).exp(),
        make(b, 8, 128),
        make(b, 8, 128),
        make(128, dtype=FP32),
        dt_bias=make(128, dtype=FP32) - 3,
        softplus=True,
        backend=sizes.backend,
    )
    return [y, pool]


def _conv(sizes: Sizes) -> Outputs:
    t, b, make = sizes.tokens, sizes.batch, values(sizes)
    weight, bias, u, pool = make(10240, 4), make(10240), make(t, 10240), make(b, 3, 10240)
    first, backend = make(1, 3, 10240), sizes.backend
    found = conv.prefill(u, weight, bias, lengths=[t], initial=first, backend=backend)
    y = conv.update(pool, _slots(sizes), u[:b], weight, bias, backend=backend)
    return [found.y, found.last, y, pool]


def _scan(sizes: Sizes) -> Outputs:
    t, b, make, slots = sizes.tokens, sizes.batch, values(sizes), _slots(sizes)
    decay, skip = -make(8192, 16, dtype=FP32).exp(), make(8192, dtype=FP32)
    u, dt, left, right = make(t, 8192), make(t, 8192), make(t, 16), make(t, 16)
    pool, first = make(b, 8192, 16, dtype=FP32), make(1, 8192, 16, dtype=FP32)
    options: dict[str, Any] = {"dt_bias": skip - 3, "softplus": True, "backend": sizes.backend}
    found = scan.prefill(u, dt, decay, left, right, skip, lengths=[t], initial=first, **options)
    y = scan.update(pool, slots, u[:b], dt[:b], decay, left[:b], right[:b], skip, **options)
    return [found.y, found.last, y, pool]


def _gdn(sizes: Sizes) -> Outputs:
    t, b, make, backend = sizes.tokens, sizes.batch, values(sizes), sizes.backend
    q, k, v = make(t, 16, 128), make(t, 16, 128), make(t, 32, 128)
    g, beta = -make(t, 32).exp() / 8, make(t, 32).sigmoid()
    first, pool = make(1, 32, 128, 128, dtype=FP32), make(b, 32, 128, 128, dtype=FP32)
    found = gdn.prefill(q, k, v, g, beta, lengths=[t], initial=first, backend=backend)
    now = (q[:b], k[:b], v[:b], g[:b], beta[:b])
    y = gdn.update(pool, _slots(sizes), *now, backend=backend)
    return [found.y, found.last, y, pool]


def _attention(sizes: Sizes) -> Outputs:
    t, b, make, cached = sizes.tokens, sizes.batch, values(sizes), 96
    columns = -(-(t + cached) // 16)
    k_pool, v_pool, q = (
        make(b * columns, 16, 8, 128),
        make(b * columns, 16, 8, 128),
        make(t, 32, 128),
    )
    table = torch.arange(b * columns, device=sizes.device).flip(0).view(b, columns)
    contexts = torch.full((b,), t + cached, device=sizes.device)
    # On CUDA the default of a prefill is torch's own; here its Triton twin is wanted.
    found = attention.prefill(
        q,
        k_pool,
        v_pool,
        table[:2],
        lengths=[t // 2] * 2,
        starts=[0, cached],
        backend=sizes.backend or "triton",
    )
    y = attention.decode(q[:b], k_pool, v_pool, table, contexts, backend=sizes.backend)
    return [found, y]


def _state(sizes: Sizes) -> Outputs:
    b, make, slots, backend = sizes.batch, values(sizes), _slots(sizes), sizes.backend
    pool, narrow = make(b, 128, 64, 128, dtype=FP32), make(b, 128, 64, 128)
    state.copy(pool, narrow, slots, slots, backend=backend)
    saved = int8.Int8(make(*pool.shape, dtype=torch.int8), make(b, 128, 1, 128, dtype=FP32))
    int8.save(pool, slots, saved, slots, backend=backend)
    int8.restore(saved, slots, pool, slots, backend=backend)
    return [narrow, saved.values, saved.scale, pool]
