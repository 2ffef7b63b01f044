"""Settings of an SGLang engine, refused as the engine itself refuses them at start-up.

Sources: specs/sglang-0.5.23, sections 4, 5, 9 and 12; specs/sglang-0.5.18, sections 8, 9 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from sim.dtypes import one_of

VERSIONS = ("0.5.23", "0.5.18")
STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")
POLICIES = ("fcfs", "lpm", "dfs-weight")


@dataclass(frozen=True)
class SglangOptions:
    """Token and slot counts; ``mamba_slots`` and ``int8_slots`` without the padding slot.

    ``tree``: ``unified``, or ``mamba`` (``MambaRadixCache``) on 0.5.18, where it exists but is
    built by no server. ``overlap`` None: on, unless the strategy is ``no_buffer``. ``int8_slots``
    None: twice ``mamba_slots``. ``max_running`` is what is asked for; ``running_limit`` what the
    slots allow. ``radix_cache`` False keeps nothing, without tracking slots.

    Raises ``ValueError`` for what the engine would refuse.
    """

    version: str = "0.5.23"
    tree: str = "unified"
    page_size: int = 1
    mamba_chunk: int = 64
    mamba_slots: int = 64
    kv_tokens: int = 65536
    strategy: str = "extra_buffer"
    overlap: bool | None = None
    track_interval: int = 256
    int8: bool = False
    int8_slots: int | None = None
    chunked_prefill_size: int | None = 8192
    max_prefill_tokens: int = 16384
    max_running: int = 16
    context_len: int = 16384
    schedule_policy: str = "fcfs"
    skip_decode_lock: bool = False
    waiting_refresh: bool = True
    radix_cache: bool = True

    def __post_init__(self) -> None:
        one_of("version", self.version, VERSIONS)
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("schedule_policy", self.schedule_policy, POLICIES)
        one_of(
            "tree", self.tree, ("unified", "mamba") if self.version == "0.5.18" else ("unified",)
        )
        for name in ("page_size", "mamba_chunk", "mamba_slots", "kv_tokens", "track_interval",
                     "max_prefill_tokens", "max_running", "context_len"):  # fmt: skip
            at_least_one(name, getattr(self, name))
        if self.overlap is None:
            object.__setattr__(self, "overlap", self.strategy != "no_buffer")
        if self.int8 and self.int8_slots is None:
            object.__setattr__(self, "int8_slots", 2 * self.mamba_slots)
        self._check_strategy()
        self._check_page()
        self._check_tree()
        if self.running_limit < 1:
            raise ValueError(
                f"mamba_slots is {self.mamba_slots}; one request needs {self.ratio}, the nearest "
                f"valid choice is {self.ratio}"
            )

    def _check_strategy(self) -> None:
        if (
            self.strategy == "no_buffer"
            and self.radix_cache
            and (self.page_size > 1 or self.overlap)
        ):
            raise ValueError(
                f"strategy no_buffer with page_size {self.page_size} and overlap {self.overlap}: "
                "it needs page_size 1 and no overlap; the nearest valid choice is extra_buffer"
            )
        if self.strategy == "extra_buffer_lazy" and not self.overlap:
            raise ValueError(
                "strategy extra_buffer_lazy without overlap: it needs overlap scheduling; the "
                "nearest valid choice is extra_buffer"
            )

    def _check_page(self) -> None:
        page = self.page_size
        low, high = sorted((self.mamba_chunk, page))
        if high % low:
            raise ValueError(
                f"page_size is {page}; it must divide mamba_chunk {self.mamba_chunk} or be a "
                f"multiple of it; the nearest is {_nearest_page(page, self.mamba_chunk)}"
            )
        for name in ("chunked_prefill_size", "track_interval"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value % page):
                raise ValueError(
                    f"{name} is {value}; it must be a positive multiple of page_size {page}; the "
                    f"nearest valid choice is {max(1, round(value / page)) * page}"
                )

    def _check_tree(self) -> None:
        if self.tree == "mamba" and self.skip_decode_lock:
            raise ValueError(
                "skip_decode_lock with tree mamba: MambaRadixCache does not have it; the nearest "
                "valid choice is tree unified"
            )

    @cached_property
    def chunk(self) -> int:
        """Positions at which a kernel can export a state, relative to a chunk's start."""
        return max(self.mamba_chunk, self.page_size)

    @cached_property
    def grid(self) -> int:
        """Grid of checkpoints, relative to a chunk's start: lcm(max(chunk, page), page)."""
        return lcm(self.chunk, self.page_size)

    @cached_property
    def track_grid(self) -> int:
        """Sequence lengths at which a decode is tracked are multiples of it."""
        if self.version == "0.5.18":
            return self.track_interval
        return lcm(self.grid, self.track_interval)

    @cached_property
    def tracking_slots(self) -> int:
        """State slots that a request gets besides its own."""
        if not self.radix_cache or self.strategy == "no_buffer":
            return 0
        return 2 if self.strategy == "extra_buffer" and self.overlap else 1

    @cached_property
    def ratio(self) -> int:
        """Slots reckoned for one running request."""
        if not self.radix_cache:
            return 1
        skip = int(self.skip_decode_lock)
        return 3 - skip + (skip if self.strategy == "no_buffer" else self.tracking_slots)

    @cached_property
    def running_limit(self) -> int:
        """Most requests that run at once."""
        return min(self.max_running, self.mamba_slots // self.ratio)


def at_least_one(name: str, value: int) -> None:
    """Raise ``ValueError`` unless ``value`` is positive."""
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more; the nearest is 1")


def _nearest_page(page: int, chunk: int) -> int:
    fits = [p for p in range(1, 2 * chunk + 1) if chunk % p == 0 or p % chunk == 0]
    return min(fits, key=lambda p: (abs(p - page), p))
