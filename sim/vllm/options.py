"""Scheduler settings of a vLLM engine, as its own flags name them."""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = ("0.33", "0.28")
LOWEST = {
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_model_len": 2,
    "long_prefill_token_threshold": 0,
    "num_speculative_blocks": 0,
}


@dataclass(frozen=True)
class VllmOptions:
    """Defaults are vLLM's own for a serving engine; token counts and request counts."""

    version: str = "0.33"
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    reserve_full_isl: bool = True
    priority: bool = False
    async_scheduling: bool = True
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(f"vLLM version {self.version!r}; known are {', '.join(VERSIONS)}")
        for name, low in LOWEST.items():
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"{name} is {value}; allowed are whole numbers from {low} up")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; allowed are values from 0 to below 1")

    @property
    def old(self) -> bool:
        """True for 0.28, which has mode ``all`` and cannot export a state from inside a chunk."""
        return self.version == "0.28"

    @property
    def largest_chunk(self) -> int:
        """The most tokens of one request that a step may ever compute, by the settings."""
        budget, threshold = self.max_num_batched_tokens, self.long_prefill_token_threshold
        return min(budget, threshold) if threshold else budget
