"""Decoder layers of the usual form in few kernels, for passes without a backward on a GPU.

The form is that of Llama, Qwen 2 and 3, Mistral and SmolLM2: norm, attention, sum, norm, gated MLP, sum. transformers'
modules take 25 kernels a layer for it. Here linears that read one input are one product, a sum is part of the product
before it, and the attention takes the projections as they are (`AttendsProjected`): it normalises and rotates heads,
and writes keys and values, in one kernel.

The weights of joined linears are one tensor, of which the modules' own are views: training computes as before.

Depends on the names that transformers gives to modules, not on their classes: a model of another kind with these names
gives other numbers, which the probe finds when the model is loaded.

Main invariant: a row's result depends only on that row, its segment's adapter and its attention.

Dimensions: T rows of the pass, D hidden size, F outputs of all linears of a group, H query heads, K key-value heads, E
head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.attention import Attend
from workers.model.fused_modules import FusedRmsNorm, HeadNorms, LibraryRmsNorm, apply_rotary
from workers.model.linears import LinearGroup, MultiLoraLinear
from workers.model.segments import Routing

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


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


class Projection:
    """The linears of a group as one product, with their adapters."""

    def __init__(self, modules: Sequence[MultiLoraLinear]) -> None:
        """Join the weights of all linears of a group."""
        self._group: LinearGroup = modules[0].group
        self._weight_t = self._group.join(modules).t()
        biases: list[Tensor | None] = [module.bias for module in modules]
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [
                self._weight_t.new_zeros(module.out_features) if bias is None else bias
                for module, bias in zip(modules, biases, strict=True)
            ]
            self._bias = torch.cat(filled)

    def of(self, x: Tensor, routing: Routing) -> Tensor:
        """Return (T, F) for x (T, D)."""
        y = x @ self._weight_t if self._bias is None else torch.addmm(self._bias, x, self._weight_t)
        self._group.adapt(x, list(y.split(self._group.shape.d_outs, 1)), routing)
        return y

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        """Add to hidden (T, F) in place, from x (T, D)."""
        hidden.addmm_(x, self._weight_t)
        if self._bias is not None:
            hidden.add_(self._bias)
        self._group.adapt(x, [hidden], routing)


class _Layer:
    """One decoder layer."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.norms = module.input_layernorm, module.post_attention_layernorm
        self.heads = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Projection([attention.o_proj])
        self.gated = Projection([mlp.gate_proj, mlp.up_proj])
        self.down = Projection([mlp.down_proj])
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.scaling = float(attention.scaling)
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self.head_norms = HeadNorms(query.weight, key.weight, query.eps)


class SamplingLayers:
    """All decoder layers of a model, and what is before and behind them."""

    def __init__(self, model: Any) -> None:
        """Take a model of the form; see `has_form`."""
        self._embed, self._rotary, self._norm = model.model.embed_tokens, model.model.rotary_emb, model.model.norm
        self._layers = [_Layer(module) for module in model.model.layers]

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of the first layer's heads."""
        return self._layers[0].head_norms

    def forward(self, tokens: Tensor, positions: Tensor, routing: Routing, attend: AttendsProjected) -> Tensor:
        """Return the last hidden states (T, D), normalised, of token ids and positions (T,), int64."""
        hidden: Tensor = self._embed(tokens)  # (T, D)
        cos, sin = (part.squeeze(0) for part in self._rotary(hidden.unsqueeze(0), positions.unsqueeze(0)))  # (T, E)
        for number, layer in enumerate(self._layers):
            before_attention, before_mlp = layer.norms
            heads = layer.heads.of(before_attention(hidden), routing)
            mixed = attend.projected(number, Projected(heads, cos, sin, layer.head_norms, layer.scaling))
            layer.out.add_to(hidden, mixed, routing)
            gate, up = layer.gated.of(before_mlp(hidden), routing).chunk(2, 1)
            layer.down.add_to(hidden, layer.activation(gate).mul_(up), routing)
        normalised: Tensor = self._norm(hidden)
        return normalised


def has_form(model: Any, head_dim: int) -> bool:
    """Return whether the modules of a model, whose layers were replaced, have the names and kinds of the form.

    Not for a model with sliding windows or sinks.
    """
    inner = getattr(model, "model", None)
    if inner is None or not all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return False
    return all(_is_usual(layer, head_dim) for layer in inner.layers)


def _is_usual(layer: nn.Module, head_dim: int) -> bool:
    if _names(layer) != LAYER_PARTS:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    norms = {"q_norm", "k_norm"} & _names(attention)
    linears = [getattr(attention, name, None) for name in ATTENTION_PARTS]
    linears += [getattr(mlp, name, None) for name in MLP_PARTS]
    return (
        _names(attention) - norms == ATTENTION_PARTS
        and len(norms) in {0, 2}
        and all(isinstance(getattr(attention, name), FusedRmsNorm | LibraryRmsNorm) for name in norms)
        and all(getattr(attention, name).weight.shape == (head_dim,) for name in norms)
        and len({getattr(attention, name).eps for name in norms}) <= 1
        and _names(mlp) - {"act_fn"} == MLP_PARTS
        and all(isinstance(linear, MultiLoraLinear) for linear in linears)
    )


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
