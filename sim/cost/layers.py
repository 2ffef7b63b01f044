"""The operations of a whole model on one rank, as terms that a backend adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sim.cost import ops
from sim.cost.device import ITEM_BYTES
from sim.cost.families import Family, family
from sim.cost.ops import Work
from sim.model import Model


class Term(NamedTuple):
    """One operation, done ``launches`` times; ``size`` is what its efficiency depends on."""

    op: str
    launches: int
    work: Work
    size: float


@dataclass(frozen=True)
class Shape:
    """What one of ``tp`` ranks computes. Counts are layers, sizes are values of one layer."""

    hidden: int
    vocab: int
    tp: int
    attention_layers: int
    state_layers: int
    ffn_layers: int
    ffn_inner: int
    ffn_matrices: int
    query_heads: int
    kv_heads: int
    head_dim: int
    act_bytes: int
    kv_value_bytes: int
    conv_value_bytes: int
    state_value_bytes: int
    family: Family | None

    @property
    def state_bytes(self) -> int:
        """One request's state in all layers of this rank."""
        if self.family is None:
            return 0
        conv = self.conv_value_bytes * (self.family.width - 1) * self.family.channels
        return self.state_layers * (conv + self.state_value_bytes * self.family.state_values)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all layers of this rank."""
        return self.attention_layers * 2 * self.kv_heads * self.head_dim * self.kv_value_bytes


def shape_of(model: Model, tp: int = 1, kv_dtype: str = "auto", ssm_dtype: str = "auto") -> Shape:
    """Sizes of one rank. Raises ``ValueError`` where the model lacks what a price needs."""
    _refuse(model, tp)
    act, a = item_bytes(model.dtype), model.attention
    state = item_bytes(model.ssm_dtype if ssm_dtype == "auto" else ssm_dtype)
    return Shape(
        hidden=model.hidden_size,
        vocab=-(-model.vocab_size // tp),
        tp=tp,
        attention_layers=model.count("*"),
        state_layers=model.count("M"),
        ffn_layers=_ffn_layers(model),
        ffn_inner=-(-model.ffn_intermediate // tp),
        ffn_matrices=model.ffn_matrices,
        query_heads=0 if a is None else -(-a.num_query_heads // tp),
        kv_heads=0 if a is None else max(1, a.num_kv_heads // tp),
        head_dim=0 if a is None else a.head_dim,
        act_bytes=act,
        kv_value_bytes=item_bytes(model.dtype if kv_dtype == "auto" else kv_dtype),
        conv_value_bytes=item_bytes(model.conv_dtype),
        state_value_bytes=state,
        family=None
        if model.state is None
        else family(model.state, model.hidden_size, tp, act, state),
    )


def item_bytes(dtype: str) -> int:
    """Bytes of one value. Raises ``ValueError`` on an unknown dtype."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; allowed: {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _refuse(model: Model, tp: int) -> None:
    why = None
    if tp < 1:
        why = f"tensor parallelism is {tp}, must be 1 or more"
    elif model.count("E"):
        why = "its MoE layers (E) need expert counts and widths, which the model file does not give"
    elif model.attention is not None and model.attention.kind != "gqa":
        why = f"attention kind {model.attention.kind!r} is not priced, only gqa is"
    elif model.vocab_size <= 0:
        why = f"its vocabulary is {model.vocab_size}, must be above 0 for the output layer"
    elif not model.ffn_intermediate and model.count("*"):
        why = "its feed-forward width is not given, so most of its work would be missing"
    if why:
        raise ValueError(f"model {model.name} has no cost: {why}")


def _ffn_layers(model: Model) -> int:
    """Dense feed-forward layers: those in the pattern, or one after each mixer.

    Two architectures differ where the pattern names none: Falcon-H1 runs both mixers of a layer
    side by side, Zamba2 has one only with the shared attention.
    """
    if "-" in model.pattern or not model.ffn_intermediate:
        return model.count("-")
    if model.architecture.startswith(("FalconH1", "Zamba2")):
        return model.count("*")
    return model.count("*") + model.count("M")


def token_terms(s: Shape, tokens: int) -> Iterator[Term]:
    """Everything that depends only on how many tokens the step computes."""
    act = s.act_bytes

    def product(count: int, k: int, n: int) -> Term:
        return Term("gemm", count, ops.gemm(tokens, k, n, act), tokens)

    def small(count: int, values: int) -> Term:
        return Term("elementwise", count, ops.elementwise(tokens, values, act), tokens)

    layers = s.attention_layers + s.state_layers + s.ffn_layers
    yield small(1, 2 * s.hidden)
    yield small(layers, 4 * s.hidden)
    if s.family is not None:
        for k, n in s.family.projections:
            yield product(s.state_layers, k, n)
        yield small(s.state_layers, s.family.norm_values)
    if s.attention_layers:
        width = s.query_heads * s.head_dim
        yield product(s.attention_layers, s.hidden, width + 2 * s.kv_heads * s.head_dim)
        yield product(s.attention_layers, width, s.hidden)
        written = ops.kv_write(tokens, s.kv_heads, s.head_dim, act, s.kv_value_bytes)
        yield Term("kv_write", s.attention_layers, written, tokens)
    if s.ffn_layers:
        yield product(s.ffn_layers, s.hidden, (s.ffn_matrices - 1) * s.ffn_inner)
        yield product(s.ffn_layers, s.ffn_inner, s.hidden)
        yield small(s.ffn_layers, s.ffn_matrices * s.ffn_inner)
    if s.tp > 1:
        yield Term("all_reduce", layers, ops.all_reduce(tokens, s.hidden, s.tp, act), tokens)


def head_terms(s: Shape, sampled: int) -> Iterator[Term]:
    """The output layer, for the tokens that are sampled, and the sampling over fp32 logits."""
    yield Term("head", 1, ops.gemm(sampled, s.hidden, s.vocab, s.act_bytes), sampled)
    yield Term("elementwise", 1, ops.elementwise(sampled, 2 * s.vocab, 4), sampled)


def scan_terms(s: Shape, tokens: int, sequences: int) -> Iterator[Term]:
    """Scan and convolution of the step's prefill chunks."""
    f = s.family
    if f is None:
        return
    if f.prefill is not None:
        yield Term("scan", s.state_layers, f.prefill(tokens, sequences), tokens)
    if f.channels:
        moved = ops.conv(tokens, sequences, f.channels, f.width, s.act_bytes)
        yield Term("conv", s.state_layers, moved, tokens)


def prefill_attention_terms(s: Shape, pairs: int, context: int, tokens: int) -> Iterator[Term]:
    """Attention of the step's prefill chunks, summed over them."""
    if s.attention_layers:
        dims = (s.query_heads, s.kv_heads, s.head_dim, s.act_bytes, s.kv_value_bytes)
        work = ops.attention_prefill(pairs, context, tokens, *dims)
        yield Term("attention_prefill", s.attention_layers, work, pairs)


def update_terms(s: Shape, batch: int) -> Iterator[Term]:
    """State and convolution updates of ``batch`` decoding requests."""
    f = s.family
    if f is None:
        return
    if f.update is not None:
        yield Term("update", s.state_layers, f.update(batch), batch)
    if f.channels:
        moved = ops.conv(batch, batch, f.channels, f.width, s.conv_value_bytes)
        yield Term("conv", s.state_layers, moved, batch)


def copy_terms(s: Shape, copies: int, saves: int, kv_tokens: int) -> Iterator[Term]:
    """State copies (read and written), states saved beside the running one, and KV copies.

    A state is two tensors in each layer, so it takes two launches a layer.
    """
    if copies and s.state_layers:
        moved = copies * s.state_bytes
        yield _spread("state_copy", 2 * s.state_layers, ops.copy(moved), moved)
    if saves and s.state_layers:
        moved = saves * s.state_bytes
        yield _spread("state_save", 2 * s.state_layers, Work(0, moved), moved)
    if kv_tokens and s.attention_layers:
        moved = kv_tokens * s.kv_bytes_per_token
        yield _spread("kv_copy", s.attention_layers, ops.copy(moved), moved)


def _spread(op: str, launches: int, whole: Work, size: float) -> Term:
    return Term(op, launches, Work(whole.flops / launches, whole.bytes / launches), size)
