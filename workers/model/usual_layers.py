"""Decoder layers of the usual form: what `sampling_layers` and `training_layers` compute in few kernels.

The form is that of Llama, Qwen 2 and 3, Mistral and SmolLM2: norm, attention, sum, norm, gated MLP, sum. Linears that
read one input are one product: their weights are one tensor, of which the modules' own are views from then on.

Depends on the names that transformers gives to modules, not on their classes: a model of another kind with these names
gives other numbers, which the probe finds when the model is loaded.

Main invariant: a row of a product depends only on that row and its segment's adapter.

Dimensions: T rows of the pass, D inputs, F outputs of all linears of a group, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from workers.model.frozen_products import FrozenProducts, PlainProducts, products_of
from workers.model.fused_modules import FusedRmsNorm, HeadNorms
from workers.model.fused_runs import ForwardRun, TrainingRun
from workers.model.layer_operations import gated
from workers.model.linears import Kept, LinearGroup, MultiLoraLinear
from workers.model.numerics import Numerics
from workers.model.segments import Routing

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


class Projection:
    """The linears of a group as one product, with their adapters."""

    def __init__(self, modules: Sequence[MultiLoraLinear]) -> None:
        """Join the weights of all linears of a group."""
        self._group: LinearGroup = modules[0].group
        self._weight = self._group.join(modules)  # (F, D)
        biases: list[Tensor | None] = [module.bias for module in modules]
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [
                self._weight.new_zeros(module.out_features) if bias is None else bias
                for module, bias in zip(modules, biases, strict=True)
            ]
            self._bias = torch.cat(filled)
        self._products: FrozenProducts = PlainProducts([self._weight], [self._bias])

    def use(self, numerics: Numerics) -> None:
        """Compute products this way from now on."""
        self._products = products_of([self._weight], [self._bias], numerics)

    def of(self, x: Tensor, routing: Routing) -> tuple[Tensor, Kept]:
        """Return (T, F) for x (T, D), and the values for `backward`."""
        (y,) = self._products.forward(x, [None])
        return y, self._group.adapt(x, self._of_each(y), routing)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        """Add to hidden (T, F) in place, from x (T, D)."""
        hidden.addmm_(x, self._weight.t())
        if self._bias is not None:
            hidden.add_(self._bias)
        self._group.adapt(x, [hidden], routing)

    def of_few(self, hidden: Tensor, norm: FusedRmsNorm, routing: Routing) -> Tensor:
        """Return (T, F) for the normalisation of few rows hidden (T, D), without a backward.

        By one kernel (`few_rows`), and one for adapters. Like the next two, for `few_rows.can_multiply` alone.
        """
        y, run = hidden.new_empty(len(hidden), len(self._weight)), self._forward_run(routing)
        xa = self._multiply_few(y, hidden, run, norm)
        if run is not None:
            run.expand(self._group.shape.index, xa, self._of_each(y))
        return y

    def add_few(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        """Add to hidden (T, F) in place, from few rows x (T, D)."""
        run = self._forward_run(routing)
        xa = self._multiply_few(hidden, x, run, is_added=True)
        if run is not None:
            run.expand(self._group.shape.index, xa, self._of_each(hidden))

    def gate_of_few(self, hidden: Tensor, norm: FusedRmsNorm, routing: Routing) -> Tensor:
        """Return silu(gate) * up (T, F) for the normalisation of few rows hidden (T, D)."""
        out, run = hidden.new_empty(len(hidden), len(self._weight) // 2), self._forward_run(routing)
        if run is None:
            self._multiply_few(out, hidden, None, norm, is_gated=True)
            return out
        gate_up = hidden.new_empty(len(hidden), len(self._weight))
        run.expand_gate(self._group.shape.index, self._multiply_few(gate_up, hidden, run, norm), gate_up, out)
        return out

    def _forward_run(self, routing: Routing) -> ForwardRun | None:
        """Return the run of all adapters, if any of them adapts the group."""
        match routing.runs:
            case [ForwardRun() as run] if run.is_adapted(self._group.shape.index):
                return run
        return None

    def _multiply_few(
        self,
        out: Tensor,
        x: Tensor,
        run: ForwardRun | None,
        norm: FusedRmsNorm | None = None,
        *,
        is_added: bool = False,
        is_gated: bool = False,
    ) -> Tensor:
        """Do as `few_rows.MULTIPLY_FEW`; return scaling x A^T (1, T, M), fp32, of the adapters of a run."""
        index, num_linears = self._group.shape.index, len(self._group.weights)
        rank_max = 0 if run is None else run.tables.rank_max
        xa = x.new_empty(1, len(x), num_linears * rank_max, dtype=torch.float32)
        tables = (None,) * 4 if run is None else (*run.of_group(index), run.tables.scalings)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self._group.current.count_matmuls(num_linears)
        torch.ops.tinkerpool.multiply_few(
            out, xa, x, self._weight, self._bias, weight, eps, is_added, is_gated, *tables, num_linears
        )
        return xa

    def backward(self, x: Tensor, kept: Kept, dy: Tensor, *, needs_dx: bool) -> Tensor | None:
        """Add to the adapters' gradients; return the gradient of x (T, D), if it is needed, from dy (T, F)."""
        dx = self._products.backward([dy]) if needs_dx else None
        self._backward(x, kept, dy, dx)
        return dx

    def gate(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Kept]:
        """Return gate and up (T, 2 F) for x (T, D), silu(gate) * up (T, F), and the values for `backward`."""
        (gate_up,) = self._products.forward(x, [None])
        match self._group.runs(routing):
            case [TrainingRun() as run] if run.is_adapted(self._group.shape.index):
                self._group.current.count_matmuls(len(self._group.weights))
                out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
                return gate_up, out, [(run, run.forward_gate(self._group.shape.index, x, gate_up, out))]
        kept = self._group.adapt(x, self._of_each(gate_up), routing)
        return gate_up, gated(gate_up), kept

    def backward_gate(self, x: Tensor, kept: Kept, dy: Tensor, gate_up: Tensor) -> Tensor:
        """Add to the adapters' gradients; return that of gate and up (T, 2 F), of which x (T, D) was made, from dy."""
        dx, dgate_up = self._products.backward([dy]), torch.empty_like(gate_up)
        match kept:
            case [(TrainingRun() as run, part)]:
                run.backward_gate(self._group.shape.index, part, x, dy, dx, gate_up, dgate_up)
            case _:
                self._backward(x, kept, dy, dx)
                torch.ops.tinkerpool.gate_backward(dgate_up, dx, gate_up)
        return dgate_up

    def _backward(self, x: Tensor, kept: Kept, dy: Tensor, dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and their part to dx (T, D) if given."""
        for run, part in kept:
            run.backward(self._group.shape.index, part, x, self._of_each(dy), dx)

    def _of_each(self, y: Tensor) -> list[Tensor]:
        """Return the columns of each linear."""
        return list(y.split(self._group.shape.d_outs, 1))


class UsualLayer:
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


class UsualModel:
    """All decoder layers of a model, and what is before and behind them."""

    def __init__(self, model: Any) -> None:
        """Take a model of the form; see `has_form`."""
        self._embed, self._rotary, self.norm = model.model.embed_tokens, model.model.rotary_emb, model.model.norm
        self.layers = [UsualLayer(module) for module in model.model.layers]

    @property
    def has_silu(self) -> bool:
        """Whether all layers have the activation that the kernels have (`layer_operations.GATE`)."""
        return all(isinstance(layer.activation, SiLUActivation | nn.SiLU) for layer in self.layers)

    def use(self, numerics: Numerics) -> None:
        """Compute products this way from now on."""
        for layer in self.layers:
            for projection in (layer.heads, layer.out, layer.gated, layer.down):
                projection.use(numerics)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first hidden states (T, D) of token ids and positions (T,), int64, cosines and sines (T, E)."""
        hidden: Tensor = self._embed(tokens)
        cos, sin = (part.squeeze(0) for part in self._rotary(hidden.unsqueeze(0), positions.unsqueeze(0)))
        return hidden, cos, sin


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
        and all(isinstance(getattr(attention, name), FusedRmsNorm) for name in norms)
        and all(getattr(attention, name).weight.shape == (head_dim,) for name in norms)
        and len({getattr(attention, name).eps for name in norms}) <= 1
        and _names(mlp) - {"act_fn"} == MLP_PARTS
        and all(isinstance(linear, MultiLoraLinear) for linear in linears)
    )


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
