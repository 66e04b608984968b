"""Decoder layers of the usual form (`usual_layers`) in few kernels, for passes with a backward on a GPU.

transformers' modules take 75 kernels a layer for both ways, ours 36. Linears that read one input are one product, both
ways; heads are normalised and rotated, and a sum is normalised, in one kernel each (`layer_operations`); the gate is
applied where adapters are added (`fused_runs`). What is between kernels is autograd's: each is an operation of it, an
MLP is one, and a layer that runs again in the backward is one, too.

Main invariants: a row's result, and its gradient, depend only on that row, its segment's adapter and its attention.
Between two layers there are a sum of the residual stream and what is still to be added to it. The gradient of a sum
goes to both of its parts in one tensor, and on to the sum before, which adds to it in place: by then whatever the
second part came from has read it.

Dimensions: T rows of the pass, D hidden size, H query heads, K key-value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.model.attention import Attend
from workers.model.layer_operations import add_norm, rotated_heads
from workers.model.linears import CurrentPass
from workers.model.recomputation import recomputed
from workers.model.segments import Routing
from workers.model.usual_layers import Projection, UsualLayer, UsualModel


class _Project(torch.autograd.Function):
    """A projection as one operation of autograd; the adapters' gradients are a side effect of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, projection: Projection, routing: Routing) -> Tensor:
        del anchor  # see `CurrentPass.anchor`
        y, ctx.kept = projection.of(x, routing)
        ctx.save_for_backward(x)
        ctx.projection = projection
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.projection.backward(x, ctx.kept, dys[0], needs_dx=ctx.needs_input_grad[0]), None, None, None


class _GatedMlp(torch.autograd.Function):
    """A layer's MLP as one operation of autograd: two projections, with a gate between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: UsualLayer, routing: Routing) -> Tensor:
        del anchor  # see `CurrentPass.anchor`
        gate_up, out, ctx.kept_before = layer.gated.gate(x, routing)
        y, ctx.kept_behind = layer.down.of(out, routing)
        ctx.save_for_backward(x, gate_up, out)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, gate_up, out = ctx.saved_tensors
        dgate_up = ctx.layer.down.backward_gate(out, ctx.kept_behind, dys[0], gate_up)
        dx = ctx.layer.gated.backward(x, ctx.kept_before, dgate_up, needs_dx=ctx.needs_input_grad[0])
        return dx, None, None, None


class TrainingLayers:
    """All decoder layers of a model, and what is before and behind them."""

    def __init__(self, model: UsualModel, current: CurrentPass, num_heads: int) -> None:
        """Take a model that `has_silu`."""
        self._model = model
        self._current = current
        self._num_heads = num_heads

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, *, recompute: bool) -> Tensor:
        """Return the last hidden states (T, D), normalised, of token ids and positions (T,), int64.

        With gradients enabled, autograd adds those of the adapters. `recompute`: see `BaseModel.forward`.
        """
        hidden, cos, sin = self._model.embed(tokens, positions)
        added: Tensor | None = None
        for number, layer in enumerate(self._model.layers):
            run = partial(self._run, layer, partial(attend, number), cos, sin)
            parts = (hidden,) if added is None else (hidden, added)
            if recompute and torch.is_grad_enabled():
                hidden, added = recomputed(run, self._current, *parts)
            else:
                hidden, added = run(*parts)
        assert added is not None
        return add_norm(hidden, added, self._model.norm.weight, self._model.norm.eps)[1]

    def _run(
        self,
        layer: UsualLayer,
        attend: Callable[..., Tensor],
        cos: Tensor,
        sin: Tensor,
        hidden: Tensor,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states (T, D) before the layer's last sum, and what that adds to them."""
        before_attention, before_mlp = layer.norms
        if added is None:
            normalised = before_attention(hidden)  # of embeddings, which need no gradient
        else:
            hidden, normalised = add_norm(hidden, added, before_attention.weight, before_attention.eps)
        heads = rotated_heads(self._project(layer.heads, normalised), cos, sin, layer.head_norms, self._num_heads)
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in heads)  # (1, heads, T, E)
        mixed = attend(query, key, value, scaling=layer.scaling, sliding_window=None).squeeze(0).flatten(1)
        added = self._project(layer.out, mixed)
        hidden, normalised = add_norm(hidden, added, before_mlp.weight, before_mlp.eps)
        y: Tensor = _GatedMlp.apply(normalised, self._current.anchor, layer, self._current.routing)  # type: ignore[no-untyped-call]
        return hidden, y

    def _project(self, projection: Projection, x: Tensor) -> Tensor:
        y: Tensor = _Project.apply(x, self._current.anchor, projection, self._current.routing)  # type: ignore[no-untyped-call]
        return y
