"""Settings of an SGLang engine (being written)."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class SglangOptions:
    version: str = "0.5.23"
    tree: str = "unified"
    page_size: int = 1
    mamba_chunk: int = 64
    mamba_slots: int = 64
    kv_tokens: int = 65536
    strategy: str = "extra_buffer"
    overlap: bool | None = None
    track_interval: int = 256
    max_states_per_path: int = -1
    int8: bool = False
    int8_slots: int | None = None
    chunked_prefill_size: int | None = 8192
    max_prefill_tokens: int = 16384
    max_running: int = 16
    context_len: int = 16384
    policy: str = "fcfs"
    skip_decode_lock: bool = False
    waiting_refresh: bool = True
    radix_cache: bool = True

    def __post_init__(self):
        if self.overlap is None:
            object.__setattr__(self, "overlap", self.strategy != "no_buffer")
        if self.int8 and self.int8_slots is None:
            object.__setattr__(self, "int8_slots", 2 * self.mamba_slots)
        object.__setattr__(
            self, "max_running", min(self.max_running, self.mamba_slots // self.ratio)
        )

    @property
    def chunk(self):
        return max(self.mamba_chunk, self.page_size)

    @property
    def grid(self):
        return lcm(self.chunk, self.page_size)

    @property
    def track_grid(self):
        return (
            lcm(self.grid, self.track_interval) if self.version == "0.5.23" else self.track_interval
        )

    @property
    def ratio(self):
        skip = self.skip_decode_lock
        return (
            3
            - skip
            + {
                "no_buffer": int(skip),
                "extra_buffer_lazy": 1,
                "extra_buffer": 2 if self.overlap else 1,
            }[self.strategy]
        )

    @property
    def tracking_slots(self):
        return {"no_buffer": 0, "extra_buffer_lazy": 1, "extra_buffer": 2 if self.overlap else 1}[
            self.strategy
        ]
