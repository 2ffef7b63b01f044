"""Why a block has the size it has, in words."""

from __future__ import annotations

from sim.vllm.geometry import MLA_BLOCK_TOKENS, GeometrySpec, block_tokens, rounding_tokens


def block_reason(spec: GeometrySpec) -> str:
    """One sentence that leads from the state's bytes to the block's tokens."""
    block = block_tokens(spec)
    if not spec.states:
        return f"{_start(spec)}: no states to fit"
    if not spec.hybrid:
        if spec.cached:
            return f"{_start(spec)}: no attention page to match"
        return "max-model-len: without caching a request has one state for its whole length"
    tokens = -(-spec.sizing_bytes // spec.token_bytes)
    reason = (
        f"a state of {spec.sizing_bytes:,} B is as large as {tokens:,} tokens of KV at "
        f"{spec.token_bytes:,} B; rounded up to a multiple of {_unit(spec)}"
    )
    needed = rounding_tokens(spec) * -(-tokens // rounding_tokens(spec))
    return reason if block == needed else f"{reason}, and to the kernel's {block:,}"


def _start(spec: GeometrySpec) -> str:
    return "--block-size" if spec.block_tokens else "the attention kernel's smallest block"


def _unit(spec: GeometrySpec) -> str:
    unit = rounding_tokens(spec)
    parts = [f"{_start(spec)} {spec.block_tokens or spec.kernel_block_tokens}"]
    if spec.mla and unit % MLA_BLOCK_TOKENS == 0:
        parts.append(f"{MLA_BLOCK_TOKENS} of latent attention kernels")
    if spec.state_mode == "all":
        parts.append(f"the scan's chunk {spec.chunk_tokens}")
    if spec.state_mode == "align" and spec.version == "0.33" and spec.block_alignment > 1:
        parts.append(f"{spec.block_alignment} of kernels that export states")
    return f"{unit} ({', '.join(parts)})"
