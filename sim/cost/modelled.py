"""The modelled backend: the time of a step from a roofline with efficiencies.

time = sum over operations of max(FLOP / (peak * share), bytes / (bandwidth * share)) + launch.
Weights are read once a step, so a small step costs what its weights cost: steps are priced, not
tokens. Prefill and decode tokens of a step share every GEMM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from sim.cost import layers
from sim.cost.device import Device
from sim.cost.efficiency import Efficiency
from sim.cost.layers import Term
from sim.model import Model
from sim.step import Step, StepResult


class ModelledBackend:
    """Prices steps of one model on ``tp`` devices; implements ``StepBackend``.

    ``efficiency`` defaults to the device's constants. ``launches`` are seconds of one launch by
    operation where they were measured, the device's otherwise; its ``overhead`` is added once a
    step.
    Raises ``ValueError`` where the model or the device lacks a figure that the price needs.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        tp: int = 1,
        *,
        efficiency: Efficiency | None = None,
        launches: Mapping[str, float] | None = None,
        sequences: Mapping[str, float] | None = None,
        kv_dtype: str = "auto",
        ssm_dtype: str = "auto",
    ) -> None:
        self.device = device
        self.shape = shape = layers.shape_of(model, tp, kv_dtype, ssm_dtype)
        self.efficiency = device.efficiency if efficiency is None else efficiency
        self._own_s, self._each_s = dict(launches or {}), dict(sequences or {})
        self._step_s = self._own_s.get("overhead", 0.0)
        self._row_s = self._each_s.get("overhead", 0.0)
        self._peak = device.peak(model.dtype)
        self._eager_s, self._graph_s = device.launch_ns * 1e-9, device.graph_launch_ns * 1e-9
        self._token_s: dict[tuple[int, float], float] = {}
        self._head_s: dict[tuple[int, float], float] = {}
        self._update_s: dict[tuple[int, float], float] = {}
        wide = shape.query_heads * shape.head_dim
        self._attention_flops = 4 * wide
        self._query_bytes = 2 * shape.act_bytes * wide
        self._scan_rates = list(self._coefficients())
        self._kv_bytes = 2 * shape.kv_value_bytes * shape.kv_heads * shape.head_dim

    @property
    def host_ns(self) -> int:
        """The engine's own time a step, hidden where a step is planned while another runs."""
        return self.device.host_ns

    def run(self, step: Step) -> StepResult:
        """Durations of the step's repetitions, each rounded to whole nanoseconds."""
        every, once = self._price(step)
        batch, context = len(step.decodes), float(step.decode_context_tokens)
        first = round((every + self._decode_attention_s(context, batch) + once) * 1e9)
        if step.repeat == 1:
            return StepResult(np.array([first], np.int64))
        contexts = context + batch * np.arange(step.repeat, dtype=np.float64)
        durations = np.rint((every + self._many_s(contexts, batch)) * 1e9).astype(np.int64)
        durations[0] = first
        for i, copies in step.copies_at.items():
            if i >= step.repeat:
                continue
            moved = self._seconds(layers.copy_terms(self.shape, copies, 0, 0), self._eager_s)
            attention = self._decode_attention_s(context + batch * i, batch)
            durations[i] = round((every + attention + moved) * 1e9)
        return StepResult(durations)

    def breakdown(self, step: Step) -> dict[str, float]:
        """Seconds of the first repetition by operation; they add up to its duration."""
        launch = self._launch_s(step)
        out: dict[str, float] = {}
        for term in self.terms(step):
            copied = term.op in ("state_copy", "state_save", "kv_copy")
            seconds = self._seconds((term,), self._eager_s if copied else launch)
            if term.op in ("scan", "conv", "attention_prefill"):
                each = self._each_s.get(term.op, 0.0)
                seconds += term.launches * len(step.chunks) * each
            out[term.op] = out.get(term.op, 0.0) + seconds
        if step.decodes and self.shape.attention_layers:
            context = float(step.decode_context_tokens)
            fixed = self._decode_fixed_s(len(step.decodes), launch)
            moved = self._decode_attention_s(context, len(step.decodes))
            out["attention_decode"] = fixed + moved
        if self._step_s or self._row_s:
            out["overhead"] = self._overhead_s(step)
        return out

    def terms(self, step: Step) -> Iterable[Term]:
        """Operations of the first repetition, decode attention apart."""
        shape = self.shape
        if step.tokens:
            yield from layers.token_terms(shape, step.tokens)
        if sampled := len(step.decodes) + sum(c.samples for c in step.chunks):
            yield from layers.head_terms(shape, sampled)
        if step.decodes:
            yield from layers.update_terms(shape, len(step.decodes))
        if step.chunks:
            yield from self._chunk_terms(step)
        yield from self._copy_terms(step)

    def _coefficients(self) -> Iterator[tuple[str, int, float, float, float, float]]:
        """Of scan and convolution: peak, FLOP and bytes a token, bytes a sequence."""
        tokens, sequences = layers.scan_terms(self.shape, 1, 0), layers.scan_terms(self.shape, 0, 1)
        for one, per in zip(tokens, sequences, strict=True):
            peak = self.device.vector_flops if one.work.vector else self._peak
            yield one.op, one.launches, peak, one.work.flops, one.work.bytes, per.work.bytes

    def _overhead_s(self, step: Step) -> float:
        return self._step_s + self._row_s * (len(step.decodes) + len(step.chunks))

    def _launch_s(self, step: Step) -> float:
        captured = not step.chunks and len(step.decodes) <= self.device.graph_max_batch
        return self._graph_s if captured else self._eager_s

    def _price(self, step: Step) -> tuple[float, float]:
        """Seconds of everything but decode attention: of each repetition, of the first alone."""
        launch, batch = self._launch_s(step), len(step.decodes)
        sampled, copies = batch, step.state_copies
        prefill = pairs = context = saves = 0
        for chunk in step.chunks:
            n, p = chunk.tokens, chunk.start
            prefill += n
            pairs += n * p + n * (n + 1) // 2
            context += p + n
            sampled += chunk.samples
            copies += chunk.slot_copies
            saves += chunk.saves
        every = self._overhead_s(step) + self._tokens(batch + prefill, launch)
        if sampled:
            every += self._head(sampled, launch)
        if batch:
            every += self._update(batch, launch)
        if prefill:
            every += self._scan(prefill, len(step.chunks), launch)
            every += self._prefill_attention(pairs, context, prefill, len(step.chunks), launch)
        if not (copies or saves or step.kv_copied_tokens):
            return every, 0.0
        terms = layers.copy_terms(self.shape, copies, saves, step.kv_copied_tokens)
        return every, self._seconds(terms, self._eager_s)

    def _tokens(self, tokens: int, launch: float) -> float:
        if not tokens:
            return 0.0
        key = (tokens, launch)
        if (seconds := self._token_s.get(key)) is None:
            terms = layers.token_terms(self.shape, tokens)
            seconds = self._token_s[key] = self._seconds(terms, launch)
        return seconds

    def _head(self, sampled: int, launch: float) -> float:
        key = (sampled, launch)
        if (seconds := self._head_s.get(key)) is None:
            terms = layers.head_terms(self.shape, sampled)
            seconds = self._head_s[key] = self._seconds(terms, launch)
        return seconds

    def _update(self, batch: int, launch: float) -> float:
        """State updates, and the launches of decode attention, which no context changes."""
        key = (batch, launch)
        if (seconds := self._update_s.get(key)) is None:
            terms = layers.update_terms(self.shape, batch)
            seconds = self._seconds(terms, launch) + self._decode_fixed_s(batch, launch)
            self._update_s[key] = seconds
        return seconds

    def _decode_fixed_s(self, batch: int, launch: float) -> float:
        """Of decode attention what no context changes."""
        own = self._own_s.get("attention_decode", launch)
        each = self._each_s.get("attention_decode", 0.0)
        return self.shape.attention_layers * (own + batch * each)

    def _scan(self, tokens: int, sequences: int, launch: float) -> float:
        """Scan and convolution, from the coefficients of their formulas."""
        total = 0.0
        for op, count, peak, flops, moved, window in self._scan_rates:
            compute, memory = self.efficiency.at(op, tokens)
            busy = max(
                flops * tokens / (peak * compute),
                (moved * tokens + window * sequences) / (self.device.bandwidth * memory),
            )
            fixed = self._own_s.get(op, launch) + sequences * self._each_s.get(op, 0.0)
            total += count * (busy + fixed)
        return total

    def _prefill_attention(
        self, pairs: int, context: int, tokens: int, sequences: int, launch: float
    ) -> float:
        count = self.shape.attention_layers
        if not count:
            return 0.0
        compute, memory = self.efficiency.at("attention_prefill", pairs)
        moved = self._kv_bytes * context + self._query_bytes * tokens
        arithmetic = self._attention_flops * pairs / (self._peak * compute)
        fixed = self._own_s.get("attention_prefill", launch)
        fixed += sequences * self._each_s.get("attention_prefill", 0.0)
        return count * (max(arithmetic, moved / (self.device.bandwidth * memory)) + fixed)

    def _chunk_terms(self, step: Step) -> Iterable[Term]:
        tokens = sum(c.tokens for c in step.chunks)
        pairs = sum(c.tokens * c.start + c.tokens * (c.tokens + 1) // 2 for c in step.chunks)
        context = sum(c.start + c.tokens for c in step.chunks)
        yield from layers.scan_terms(self.shape, tokens, len(step.chunks))
        yield from layers.prefill_attention_terms(self.shape, pairs, context, tokens)

    def _copy_terms(self, step: Step) -> Iterable[Term]:
        copies = step.state_copies + sum(c.slot_copies for c in step.chunks)
        saves = sum(c.saves for c in step.chunks)
        return layers.copy_terms(self.shape, copies, saves, step.kv_copied_tokens)

    def _decode_attention_s(self, context: float, batch: int) -> float:
        if not batch:
            return 0.0
        compute, memory = self.efficiency.at("attention_decode", context)
        moved = self._kv_bytes * context + self._query_bytes * batch
        arithmetic = self._attention_flops * context / (self._peak * compute)
        return self.shape.attention_layers * max(
            arithmetic, moved / (self.device.bandwidth * memory)
        )

    def _many_s(self, contexts: NDArray[np.float64], batch: int) -> NDArray[np.float64]:
        """``_decode_attention_s`` of each context, by the same operations in the same order."""
        compute, memory = self.efficiency.over("attention_decode", contexts)
        moved = self._kv_bytes * contexts + self._query_bytes * batch
        arithmetic = self._attention_flops * contexts / (self._peak * compute)
        longest: NDArray[np.float64] = np.maximum(
            arithmetic, moved / (self.device.bandwidth * memory)
        )
        return self.shape.attention_layers * longest

    def _seconds(self, terms: Iterable[Term], launch: float) -> float:
        device, total = self.device, 0.0
        for op, count, (flops, moved, vector), size in terms:
            compute, memory = self.efficiency.at(op, size)
            if op == "all_reduce":
                link = device.links["nvlink"]
                total += count * (moved / (link * memory) + device.collective_ns * 1e-9)
                continue
            peak = device.vector_flops if vector else self._peak
            busy = max(flops / (peak * compute), moved / (device.bandwidth * memory))
            total += count * (busy + self._own_s.get(op, launch))
        return total
