"""vLLM's sizing: block, page, padding, groups, pool and the admission bound, 0.33 and 0.28.

Rules and their places in vLLM: specs sections 2 and 3. Everything is bytes of one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.state_shapes import GeometryError, LayerState
from sim.vllm.geometry_types import Geometry, Group

MODES = {"0.33": ("none", "align"), "0.28": ("none", "align", "all")}
MLA_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class GeometrySpec:
    """What the planner reads.

    ``token_bytes``: KV of one token in one layer. ``state``: one layer's state; ``sizing_state``
    the one that blocks are sized by, where it is another (the same unless given).
    ``block_tokens``: ``--block-size``, the unit that a hybrid's block is rounded to;
    ``fixed_block_tokens``: a block taken as it is. ``chunk_tokens``: the scan's chunk, which blocks
    of mode ``all`` are multiples of. ``block_alignment``: what layers require of blocks so that
    states can be exported inside a chunk. ``checkpoint_blocks``: blocks a request holds for such
    exports, at multiples of ``checkpoint_alignment`` from the chunk's start.
    """

    version: str
    mode: str
    pattern: str
    token_bytes: int = 0
    state: LayerState | None = None
    sizing_state: LayerState | None = None
    caching: bool = True
    mla: bool = False
    kernel_block_tokens: int = 16
    block_tokens: int | None = None
    fixed_block_tokens: int | None = None
    chunk_tokens: int | None = None
    block_alignment: int = 1
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None
    drafts: int = 0
    unit_tokens: int | None = None
    max_model_len: int = 131_072
    num_blocks: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.version not in MODES:
            raise GeometryError(f"vLLM version {self.version!r}; allowed: {', '.join(MODES)}")
        if self.mode not in MODES[self.version]:
            allowed = ", ".join(MODES[self.version])
            raise GeometryError(f"mode {self.mode!r} on vLLM {self.version}; allowed: {allowed}")
        if not set(self.pattern) & {"M", "*"}:
            raise GeometryError(f"no layer of {self.pattern!r} has a cache; allowed: M and *")
        if "M" in self.pattern and self.state is None:
            raise GeometryError("the model has state layers (M) but no state shapes")
        if "*" in self.pattern and self.token_bytes < 1:
            raise GeometryError("the model has attention layers (*) but no KV bytes per token")

    @property
    def states(self) -> bool:
        """Whether any layer has a state."""
        return "M" in self.pattern

    @property
    def hybrid(self) -> bool:
        """Whether states and KV share the pool."""
        return self.states and "*" in self.pattern

    @property
    def cached(self) -> bool:
        """Whether anything is reusable: mode ``none`` turns caching off where there are states."""
        return self.caching and not (self.states and self.mode == "none")

    @property
    def state_mode(self) -> str:
        """The mode that states are kept in."""
        return self.mode if self.caching else "none"

    @property
    def sizing_bytes(self) -> int:
        """Bytes of the state that the block is sized by."""
        state = self.sizing_state or self.state
        return 0 if state is None else state.bytes


def rounding_tokens(spec: GeometrySpec) -> int:
    """What a hybrid's block must be a multiple of."""
    unit = max(spec.kernel_block_tokens, spec.block_tokens or spec.kernel_block_tokens)
    if spec.mla:
        unit = max(unit, MLA_BLOCK_TOKENS)
    if spec.state_mode == "all":
        return math.lcm(_chunk(spec), unit)
    if spec.version == "0.33" and spec.state_mode == "align":
        return math.lcm(unit, spec.block_alignment)
    return unit


def _chunk(spec: GeometrySpec) -> int:
    if not spec.chunk_tokens:
        raise GeometryError("mode 'all' rounds blocks to the scan's chunk, which is not known")
    return spec.chunk_tokens


def block_tokens(spec: GeometrySpec) -> int:
    """Tokens of an attention block; of a state block where there is no attention."""
    if spec.states and not spec.hybrid and not spec.cached:
        return spec.max_model_len
    if spec.fixed_block_tokens:
        return spec.fixed_block_tokens
    start = spec.block_tokens or spec.kernel_block_tokens
    if not spec.hybrid or not spec.sizing_bytes:
        return start
    unit = rounding_tokens(spec)
    block = unit * -(-spec.sizing_bytes // (unit * spec.token_bytes))
    if spec.version == "0.33":
        block = spec.kernel_block_tokens * -(-block // spec.kernel_block_tokens)
    return max(start, block)


def group_layers(pattern: str) -> list[tuple[str, tuple[int, ...]]]:
    """(letter, layer numbers) of each group, in the order of group ids.

    Kinds come in the order of their first layer. The kind with fewest layers sets the group size,
    unless the largest has less than half as many again; a kind is dealt out over its groups.
    """
    kinds = {c: [i for i, x in enumerate(pattern) if x == c] for c in pattern if c in "M*"}
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for letter, layers in kinds.items():
        n = -(-len(layers) // size)
        groups += [(letter, tuple(layers[i::n])) for i in range(n)]
    return groups


def _state_blocks(spec: GeometrySpec, block: int) -> int:
    """State blocks of one request in one group that the admission bound counts."""
    if spec.state_mode == "align":
        extra = spec.checkpoint_blocks if spec.version == "0.33" else 0
        return 2 + spec.drafts + extra
    if spec.state_mode == "all":
        return -(-spec.max_model_len // block) + spec.drafts
    return 1 + spec.drafts


def geometry(spec: GeometrySpec) -> Geometry:
    """Sizes of a pool. Raises ``GeometryError`` where the engine refuses, with the reason."""
    block = block_tokens(spec)
    state_block = (block if spec.cached else spec.max_model_len) if spec.states else None
    page = _page_bytes(spec, block)
    groups = tuple(
        _group(spec, letter, layers, block if letter == "*" else state_block or block, page)
        for letter, layers in group_layers(spec.pattern)
    )
    scheduler, unit = _units(spec, block, groups)
    size = max(len(g.layers) for g in groups) * page
    return Geometry(
        block_tokens=block,
        state_block_tokens=state_block,
        scheduler_block_tokens=scheduler,
        unit_tokens=unit,
        num_blocks=_num_blocks(spec, size),
        groups=groups,
        state_bytes=spec.state.bytes if spec.state else 0,
        page_bytes=page,
        bytes_per_block=size,
        checkpoint_alignment=_alignment(spec),
    )


def _page_bytes(spec: GeometrySpec, block: int) -> int:
    state = spec.state.bytes if spec.state and spec.states else 0
    if "*" not in spec.pattern:
        return state
    page = block * spec.token_bytes
    if state > page:
        raise GeometryError(
            f"a state of {state} B does not fit a block of {block} tokens ({page} B); "
            f"the smallest that fits is {-(-state // spec.token_bytes)} tokens"
        )
    return page


def _group(
    spec: GeometrySpec, letter: str, layers: tuple[int, ...], block: int, page: int
) -> Group:
    if letter == "M":
        return Group("mamba", layers, block, page, _state_blocks(spec, block) * page)
    return Group("attention", layers, block, page, -(-spec.max_model_len // block) * page)


def _units(spec: GeometrySpec, block: int, groups: tuple[Group, ...]) -> tuple[int, int]:
    """Scheduler block and hash unit."""
    if len(groups) == 1:
        if spec.version == "0.33" and spec.cached and spec.unit_tokens not in (None, block):
            raise GeometryError(
                f"prefix match unit {spec.unit_tokens}: with one group hits land on blocks of "
                f"{block} tokens; leave it unset or set it to {block}"
            )
        return block, block
    sizes = [g.block_tokens for g in groups]
    scheduler = math.lcm(*sizes)
    if not spec.cached or (spec.states and spec.state_mode != "align"):
        return scheduler, scheduler
    unit = spec.unit_tokens or math.gcd(*sizes)
    if any(size % unit for size in sizes):
        near = min((n for n in range(1, block + 1) if block % n == 0), key=lambda n: abs(n - unit))
        raise GeometryError(
            f"prefix match unit {unit} does not divide the block of {block} tokens; "
            f"the nearest that does is {near}"
        )
    return scheduler, unit


def _num_blocks(spec: GeometrySpec, bytes_per_block: int) -> int:
    if not bytes_per_block:
        raise GeometryError("a block has no bytes: no state head is left on this rank")
    if spec.num_blocks is not None:
        return spec.num_blocks
    return 0 if spec.memory_bytes is None else spec.memory_bytes // bytes_per_block


def _alignment(spec: GeometrySpec) -> int | None:
    exports = spec.version == "0.33" and spec.states and spec.state_mode == "align"
    return spec.checkpoint_alignment if exports and spec.checkpoint_blocks else None
