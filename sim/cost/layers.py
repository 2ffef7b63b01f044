"""The operations of a whole model on one rank, as terms that a backend adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sim.cost import ops
from sim.cost.families import Family, family
from sim.cost.ops import Work
from sim.dtypes import item_bytes
from sim.model import Model, Moe
from sim.state_shapes import LayerState, layer_state


class Term(NamedTuple):
    """One operation, done ``launches`` times; ``size`` is what its efficiency depends on."""

    op: str
    launches: int
    work: Work
    size: float


@dataclass(frozen=True)
class Shape:
    """What one of ``tp`` ranks computes. Counts are layers, sizes are values of one layer;
    ``state_bytes`` is one request's state in all layers of the rank."""

    hidden: int
    vocab: int
    tp: int
    attention_layers: int
    state_layers: int
    ffn_layers: int
    ffn_inner: int
    ffn_matrices: int
    moe_layers: int
    moe: Moe | None
    query_heads: int
    kv_heads: int
    head_dim: int
    act_bytes: int
    kv_value_bytes: int
    conv_value_bytes: int
    state_bytes: int
    family: Family | None

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all layers of this rank."""
        return self.attention_layers * 2 * self.kv_heads * self.head_dim * self.kv_value_bytes


def shape_of(model: Model, tp: int = 1, kv_dtype: str = "auto", ssm_dtype: str = "auto") -> Shape:
    """Sizes of one rank. Raises ``ValueError`` where the model lacks what a price needs."""
    _refuse(model, tp)
    dense, experts = _ffn_layers(model)
    act, a = item_bytes(model.dtype), model.attention
    state = layer_state(model, tp, 0, ssm_dtype)
    return Shape(
        hidden=model.hidden_size,
        vocab=-(-model.vocab_size // tp),
        tp=tp,
        attention_layers=model.count("*"),
        state_layers=model.count("M"),
        ffn_layers=dense,
        moe_layers=experts,
        moe=model.moe,
        ffn_inner=-(-(model.ffn_intermediate or _dense_of(model.moe)) // tp),
        ffn_matrices=model.ffn_matrices,
        query_heads=0 if a is None else -(-a.num_query_heads // tp),
        kv_heads=0 if a is None else max(1, a.num_kv_heads // tp),
        head_dim=0 if a is None else a.head_dim,
        act_bytes=act,
        kv_value_bytes=item_bytes(model.dtype if kv_dtype == "auto" else kv_dtype),
        conv_value_bytes=item_bytes(model.conv_dtype),
        state_bytes=0 if state is None else model.count("M") * state.bytes,
        family=_family(model, state, tp, act),
    )


def _family(model: Model, state: LayerState | None, tp: int, act: int) -> Family | None:
    if model.state is None or state is None:
        return None
    return family(model.state, model.hidden_size, tp, act, item_bytes(state.dtypes[-1]))


def _refuse(model: Model, tp: int) -> None:
    why = None
    if tp < 1:
        why = f"tensor parallelism is {tp}, must be 1 or more"
    elif model.count("E") and model.moe is None:
        why = "its MoE layers (E) need expert counts and widths, which the model file does not give"
    elif model.attention is not None and model.attention.kind != "gqa":
        why = f"attention kind {model.attention.kind!r} is not priced, only gqa is"
    elif model.vocab_size <= 0:
        why = f"its vocabulary is {model.vocab_size}, must be above 0 for the output layer"
    elif not (model.ffn_intermediate or model.moe) and model.count("*"):
        why = "its feed-forward width is not given, so most of its work would be missing"
    if why:
        raise ValueError(f"model {model.name} has no cost: {why}")


def _dense_of(moe: Moe | None) -> int:
    return 0 if moe is None else moe.dense_intermediate


def _ffn_layers(model: Model) -> tuple[int, int]:
    """Dense and expert feed-forward layers: those in the pattern, or one after each mixer.

    Where the pattern names none, Falcon-H1 runs both mixers of a layer side by side, Zamba2 has
    one only with the shared attention, Jamba's are dense and experts in turn. Others that begin
    with a few dense layers are counted as experts throughout.
    """
    if "-" in model.pattern or "E" in model.pattern:
        return model.count("-"), model.count("E")
    layers = model.count("*") + model.count("M")
    if model.architecture.startswith(("FalconH1", "Zamba2")):
        layers = model.count("*")
    if model.moe is None:
        return (layers if model.ffn_intermediate else 0), 0
    dense = layers // 2 if model.architecture.startswith("Jamba") else 0
    return dense, layers - dense


def token_terms(s: Shape, tokens: int) -> Iterator[Term]:
    """Everything that depends only on how many tokens the step computes."""
    act = s.act_bytes

    def product(count: int, k: int, n: int) -> Term:
        return Term("gemm", count, ops.gemm(tokens, k, n, act), tokens)

    def small(count: int, values: int) -> Term:
        return Term("elementwise", count, ops.elementwise(tokens, values, act), tokens)

    layers = s.attention_layers + s.state_layers + s.ffn_layers + s.moe_layers
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
    if s.moe is not None and s.moe_layers:
        yield from _moe_terms(s, s.moe, tokens)
    if s.tp > 1:
        yield Term("all_reduce", layers, ops.all_reduce(tokens, s.hidden, s.tp, act), tokens)


def _moe_terms(s: Shape, moe: Moe, tokens: int) -> Iterator[Term]:
    """Router, the experts that the step's tokens reach (drawn evenly), and shared experts.

    An estimate: weights of every expert reached are read once; ``latent`` experts work between a
    shared projection down and one up.
    """
    act, width = s.act_bytes, moe.latent or s.hidden
    yield Term("gemm", s.moe_layers, ops.gemm(tokens, s.hidden, moe.experts, act), tokens)
    if moe.latent:
        for k, n in ((s.hidden, width), (width, s.hidden)):
            yield Term("gemm", s.moe_layers, ops.gemm(tokens, k, n, act), tokens)
    inner, shared = -(-moe.expert_intermediate // s.tp), -(-moe.shared_intermediate // s.tp)
    picks = tokens * moe.active_experts
    reached = moe.experts * (1 - (1 - moe.active_experts / moe.experts) ** tokens)
    for k, n in ((width, (s.ffn_matrices - 1) * inner), (inner, width)):
        yield Term("gemm", s.moe_layers, ops.experts_gemm(picks, reached, k, n, act), picks)
    if shared:
        for k, n in ((s.hidden, (s.ffn_matrices - 1) * shared), (shared, s.hidden)):
            yield Term("gemm", s.moe_layers, ops.gemm(tokens, k, n, act), tokens)
    values = s.ffn_matrices * (moe.active_experts * inner + shared)
    yield Term("elementwise", s.moe_layers, ops.elementwise(tokens, values, act), tokens)


def head_terms(s: Shape, sampled: int) -> Iterator[Term]:
    """The output layer, for the tokens that are sampled, and the sampling over fp32 logits."""
    yield Term("head", 1, ops.gemm(sampled, s.hidden, s.vocab, s.act_bytes), sampled)
    yield Term("sample", 1, ops.elementwise(sampled, 2 * s.vocab, 4), sampled)


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


def prefill_flops(s: Shape) -> tuple[float, float]:
    """FLOP of a prefill, all layers of the rank: of each token, and of each pair of a token and
    one that it attends to."""
    terms = (*token_terms(s, 1), *scan_terms(s, 1, 0))
    each = sum(term.launches * term.work.flops for term in terms)
    return each, 4.0 * s.attention_layers * s.query_heads * s.head_dim


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
        yield Term("conv_update", s.state_layers, moved, batch)


def decode_attention_term(s: Shape, batch: int, context: int) -> Term:
    """Attention of ``batch`` decodes over ``context`` tokens in all."""
    wide = s.query_heads * s.head_dim
    moved = 2 * s.kv_value_bytes * s.kv_heads * s.head_dim * context
    work = Work(4 * wide * context, moved + 2 * s.act_bytes * wide * batch)
    return Term("attention_decode", s.attention_layers, work, context)


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
