"""The Mamba-2 layer: projection, convolution, scan, gated norm, projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from executor.batch import Plan
from executor.layers.common import Draw, Numerics, rms_norm
from executor.pools import StatePool
from kernels import conv, ssd, state
from sim.model import Model


@dataclass(frozen=True)
class Mamba2:
    """``inp`` gives gate, convolved channels (x, B, C) and dt; H heads of P, N wide, G groups."""

    heads: int
    width: int
    groups: int
    columns: int
    chunk: int
    norm: torch.Tensor
    inp: torch.Tensor
    taps: torch.Tensor
    tap_bias: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    gate_norm: torch.Tensor
    out: torch.Tensor

    @classmethod
    def draw(cls, model: Model, draw: Draw) -> Mamba2:
        """Random weights; decays spread as at the start of a training: dt from 0.001 to 0.1 in
        the logarithm, A from -1 to -16. Raises ``ValueError`` for another state family."""
        if model.state is None or model.state.family != "mamba2":
            family = model.state.family if model.state else None
            raise ValueError(f"{model.name}: state family {family!r}; executed is mamba2")
        a, hidden = model.state.args, model.hidden_size
        heads, groups, n = a["num_heads"], a["n_groups"], a["state_size"]
        inner = heads * a["head_dim"]
        channels = inner + 2 * groups * n
        step = torch.exp(draw.uniform(-6.9, -2.3, heads))
        return cls(
            *(heads, a["head_dim"], groups, n, a.get("chunk_size") or 64),
            norm=draw.ones(hidden),
            inp=draw.matrix(inner + channels + heads, hidden),
            taps=draw.matrix(channels, a["conv_kernel"]),
            tap_bias=draw.uniform(-0.1, 0.1, channels),
            A=-draw.uniform(1, 16, heads),
            D=draw.uniform(0.5, 1.5, heads),
            dt_bias=step + torch.log(-torch.expm1(-step)),
            gate_norm=draw.ones(inner),
            out=draw.matrix(hidden, inner),
        )

    def forward(
        self, x: torch.Tensor, plan: Plan, states: StatePool, layer: int, numerics: Numerics
    ) -> torch.Tensor:
        """What is added to ``x`` (T, hidden); moves the rows' states in ``layer`` on."""
        inner, pools = self.heads * self.width, (states.conv[:, layer], states.ssm[:, layer])
        channels = inner + 2 * self.groups * self.columns
        found = numerics.linear(rms_norm(x, self.norm), self.inp)
        gate, u, dt = found.split([inner, channels, self.heads], 1)
        rows, backend, parts = plan.prefilled, numerics.backend, []
        if rows:
            parts.append(self._prefill(u[:rows], dt[:rows], plan, pools, backend))
        if len(x) > rows:
            parts.append(self._update(u[rows:], dt[rows:], plan.decode_slots, pools, backend))
        y = (torch.cat(parts).flatten(1) * silu(gate)).unflatten(1, (self.groups, -1))
        normed = rms_norm(y, self.gate_norm.view(self.groups, -1)).flatten(1)
        return numerics.linear(normed, self.out)

    def _prefill(
        self,
        u: torch.Tensor,
        dt: torch.Tensor,
        plan: Plan,
        pools: tuple[torch.Tensor, torch.Tensor],
        backend: str | None,
    ) -> torch.Tensor:
        lengths, starts, at = plan.lengths, plan.starts, plan.states_at
        window, first = (state.gather(pool, plan.sources, backend=backend) for pool in pools)
        conved = conv.prefill(
            u,
            self.taps,
            self.tap_bias,
            initial=window,
            lengths=lengths,
            starts=starts,
            states_at=at,
            backend=backend,
        )
        scanned = ssd.prefill(
            *self._parts(conved.y, dt),
            initial=first,
            dt_bias=self.dt_bias,
            softplus=True,
            chunk=self.chunk,
            lengths=lengths,
            starts=starts,
            states_at=at,
            backend=backend,
        )
        left = ((conved.last, conved.windows), (scanned.last, scanned.states))
        for pool, (last, saved) in zip(pools, left, strict=True):
            state.scatter(pool, plan.targets, last, backend=backend)
            if at:
                state.scatter(pool, plan.save_slots, saved, backend=backend)
        return scanned.y

    def _update(
        self,
        u: torch.Tensor,
        dt: torch.Tensor,
        slots: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        backend: str | None,
    ) -> torch.Tensor:
        y = conv.update(pools[0], slots, u, self.taps, self.tap_bias, backend=backend)
        parts = self._parts(y, dt)
        return ssd.update(
            pools[1], slots, *parts, dt_bias=self.dt_bias, softplus=True, backend=backend
        )

    def _parts(self, y: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner, shared = self.heads * self.width, self.groups * self.columns
        x, b, c = y.split([inner, shared, shared], 1)
        shape = (len(y), self.groups, self.columns)
        values = x.unflatten(1, (self.heads, self.width))
        return values, dt, self.A, b.reshape(shape), c.reshape(shape), self.D
