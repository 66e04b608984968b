"""Decoder layers of the usual form (`usual_layers`) in few kernels, for passes without a backward on a GPU.

transformers' modules take 25 kernels a layer for it. Here linears that read one input are one product, a sum is part of
the product before it, and the attention takes the projections as they are (`AttendsProjected`): it normalises and
rotates heads, and writes keys and values, in one kernel; the gate is one, too. Few rows, those of a decode step, are
normalised by the product behind the norm, which applies the gate or multiplies by adapters' A, too (`few_rows`).

Main invariant: a row's result depends only on that row, its segment's adapter and its attention.

Dimensions: T rows of the pass, D hidden size, H query heads, K key-value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from workers.model.attention import Attend
from workers.model.few_rows import ROWS_MAX, can_multiply
from workers.model.fused_modules import FusedRmsNorm, HeadNorms, apply_rotary
from workers.model.layer_operations import gated
from workers.model.segments import Routing
from workers.model.usual_layers import UsualLayer, UsualModel


@dataclass(frozen=True, slots=True)
class Projected:
    """A layer's queries, keys and values as the linears give them, and what is still to be done to the heads."""

    rows: Tensor
    """(T, (H + 2 K) E)."""
    cos: Tensor
    """(T, E) of the rotary embedding, in halves; like `sin`."""
    sin: Tensor
    norms: HeadNorms | None
    scaling: float


@runtime_checkable
class AttendsProjected(Attend, Protocol):
    """An `Attend` that also takes projections."""

    def projected(self, layer: int, projected: Projected) -> Tensor:
        """Normalise, rotate and attend; return (T, H E)."""


class SplitProjections:
    """Implements `AttendsProjected` by an `Attend`, operation by operation: what a kernel is compared with."""

    def __init__(self, attend: Attend, num_heads: int, num_key_heads: int) -> None:
        self._attend = attend
        self._counts = [num_heads, num_key_heads, num_key_heads]

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        return self._attend(layer, query, key, value, scaling=scaling, sliding_window=sliding_window, sinks=sinks)

    def projected(self, layer: int, projected: Projected) -> Tensor:
        """See `AttendsProjected`."""
        head_dim = projected.cos.shape[1]
        heads = projected.rows.unflatten(1, (-1, head_dim)).split(self._counts, 1)  # (T, heads, E) each
        query, key, value = heads
        if (norms := projected.norms) is not None:
            query, key = (
                F.rms_norm(rows, (head_dim,), weight, norms.eps)
                for rows, weight in ((query, norms.query), (key, norms.key))
            )
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))  # (1, heads, T, E)
        query, key = apply_rotary(query, key, projected.cos.unsqueeze(0), projected.sin.unsqueeze(0))
        out = self._attend(layer, query, key, value, scaling=projected.scaling, sliding_window=None)
        return out.squeeze(0).flatten(1)


class SamplingLayers:
    """All decoder layers of a model, and what is before and behind them."""

    def __init__(self, model: UsualModel, *, has_gate: bool) -> None:
        """Take a model; `has_gate`: whether there is a kernel for its gate (`layer_operations.GATE`)."""
        self._model = model
        self._has_gate = has_gate
        norms = [norm for layer in model.layers for norm in layer.norms]
        self.takes_few = has_gate and ROWS_MAX > 0 and all(isinstance(norm, FusedRmsNorm) for norm in norms)
        """Whether few rows have kernels of their own."""

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of the first layer's heads."""
        return self._model.layers[0].head_norms

    def leave_few(self) -> None:
        """Compute few rows as many from now on."""
        self.takes_few = False

    def forward(self, tokens: Tensor, positions: Tensor, routing: Routing, attend: AttendsProjected) -> Tensor:
        """Return the last hidden states (T, D), normalised, of token ids and positions (T,), int64."""
        hidden, cos, sin = self._model.embed(tokens, positions)
        run = self._run_few if self.takes_few and can_multiply(len(tokens), routing.runs) else self._run
        for number, layer in enumerate(self._model.layers):

            def mix(heads: Tensor, number: int = number, layer: UsualLayer = layer) -> Tensor:
                return attend.projected(number, Projected(heads, cos, sin, layer.head_norms, layer.scaling))

            run(layer, hidden, mix, routing)
        normalised: Tensor = self._model.norm(hidden)
        return normalised

    def _run(self, layer: UsualLayer, hidden: Tensor, mix: Callable[[Tensor], Tensor], routing: Routing) -> None:
        """Add to hidden (T, D) what a layer does; `mix` attends (T, H E) with its projections."""
        before_attention, before_mlp = layer.norms
        heads, _ = layer.heads.of(before_attention(hidden), routing)
        layer.out.add_to(hidden, mix(heads), routing)
        gate_up, _ = layer.gated.of(before_mlp(hidden), routing)
        layer.down.add_to(hidden, self._gated(layer, gate_up), routing)

    def _run_few(self, layer: UsualLayer, hidden: Tensor, mix: Callable[[Tensor], Tensor], routing: Routing) -> None:
        """Do as `_run` with few rows: products normalise, and apply the gate."""
        before_attention, before_mlp = layer.norms
        layer.out.add_few(hidden, mix(layer.heads.of_few(hidden, before_attention, routing)), routing)
        layer.down.add_few(hidden, layer.gated.gate_of_few(hidden, before_mlp, routing), routing)

    def _gated(self, layer: UsualLayer, gate_up: Tensor) -> Tensor:
        """Return (T, F) of gate and up (T, 2 F)."""
        if self._has_gate:
            return gated(gate_up)
        gate, up = gate_up.chunk(2, 1)
        return layer.activation(gate).mul_(up)
