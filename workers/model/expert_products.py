"""A layer of experts: rows sorted by expert, one product with the frozen weights for all tenants' rows, and what
adapters add to the rows that their tokens send to an expert.

With w_j the weight of the j-th of k experts that a row x chooses, and e its number:

    g, u = x W_gu[e]^T + s (x A13^T) (B1[e]^T, B3[e]^T)
    h_j  = act(g) u
    y    = sum_j w_j h_j Wd[e]^T + s (sum_j w_j h_j A2[e]^T) B2^T

With biases, g, u and h_j Wd[e]^T have those of their expert on top. All experts of a layer share A13 (A of gate and
up) and B2; B1, B3 and A2 are each expert's own (*shared-outer* LoRA). The backward is written by hand, like that of a
linear: d(loss)/d(w_j) = h_j . d(loss)/d(w_j h_j) needs no output; the bias of Wd adds its product with d(loss)/dy.

Does not depend on whole models, on the bank, on how rows choose experts, or on how adapters are computed
(`expert_shares`, `expert_groups`).

Main invariants: a row's results depend on that row, its choices and its adapter. An expert's rows are padded to at
least `Numerics.expert_rows`, from which a product keeps a row's bits (`selftest.expert_invariance` finds it).

Dimensions: T rows of the pass, k experts of a row, P rows of all experts with their padding, D hidden size, F inner
size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device

ROWS_MULTIPLE = 4
"""Rows of an expert are padded to a multiple of this, so that elementwise kernels work on whole vectors."""
ALIGNED_BYTES = 16
"""The products of `grouped_mm` take rows of weights and activations of a multiple of this."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The frozen weights of a layer's experts."""

    gate_up: Tensor
    """(E, 2 F, D), in any order in memory."""
    down: Tensor
    """(E, D, F), in any order in memory."""
    apply_gate: Callable[[Tensor], Tensor]
    """(P, 2 F) -> (P, F): the activation of the gates, times the others."""
    gate_up_bias: Tensor | None = None
    """(E, 2 F)."""
    down_bias: Tensor | None = None
    """(E, D)."""
    is_interleaved: bool = False
    """Whether each gate is followed by its other value, instead of all gates by all others."""

    def halves(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the gates and of the others, (.., F) each of (.., 2 F)."""
        if self.is_interleaved:
            return gates[..., ::2], gates[..., 1::2]
        first, second = gates.chunk(2, -1)
        return first, second


class Dispatching(Protocol):
    """Which row of the pass goes to which expert: the rows of all experts, sorted by expert, then by row."""

    @property
    def sources(self) -> Tensor:
        """(P,) which of the T k choices a row is."""

    @property
    def rows(self) -> Tensor:
        """(P,) which row of the pass it is."""

    @property
    def places(self) -> Tensor:
        """(T, k) where each row's choices are among the P."""

    @property
    def ends(self) -> Tensor:
        """(E,) int32: the row after the last of each expert."""

    @property
    def row_experts(self) -> Tensor:
        """(P,) the expert of each row, for biases."""

    def sum_choices(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum (T, F) over each row's choices, in their order, of values (P, F), times weights (T, k)."""


class Dispatch:
    """Implements `Dispatching` from choices on the host."""

    def __init__(self, choices: Ints, num_experts: int, rows_min: int, device: torch.device) -> None:
        """Take the experts (T, k) that each row has chosen; an expert's rows are padded to a minimum."""
        num_rows, self.num_choices = choices.shape
        experts = choices.reshape(-1)
        order = np.argsort(experts.astype(np.int32), kind="stable")
        counts = np.bincount(experts, minlength=num_experts)
        padded = np.where(counts > 0, np.maximum(-(-counts // ROWS_MULTIPLE) * ROWS_MULTIPLE, rows_min), 0)
        starts, begins = np.cumsum(padded) - padded, np.cumsum(counts) - counts
        self.experts = experts[order]
        """(T k,) of the sorted choices."""
        self.sorted_places = starts[self.experts] + np.arange(len(order)) - begins[self.experts]
        """(T k,) their rows among the experts' P."""
        self.rows_of_pass = order // self.num_choices
        """(T k,) the rows that made them."""
        # Padding repeats an expert's first row: no product reads memory that nothing has written.
        sources = np.repeat(order[np.minimum(begins, len(order) - 1)], padded)
        sources[self.sorted_places] = order
        places = np.empty(len(order), np.int64)
        places[order] = self.sorted_places
        self.sources = on_device(sources, device)
        self.rows = on_device(sources // self.num_choices, device)
        self.places = on_device(places.reshape(num_rows, -1), device)
        self.ends = on_device(np.cumsum(padded).astype(np.int32), device)
        self._padded = padded
        """(E,) the rows of each expert."""

    @cached_property
    def row_experts(self) -> Tensor:
        """See `Dispatching`."""
        return on_device(np.repeat(np.arange(len(self._padded)), self._padded), self.rows.device)

    def sum_choices(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Dispatching`."""
        return summed_choices(self.places, values, weights)


def summed_choices(places: Tensor, values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum (T, F) of values (P, F) at places (T, k), times weights (T, k) if given."""
    if weights is not None:
        weights = weights.to(values.dtype)
    return F.embedding_bag(places, values, mode="sum", per_sample_weights=weights)


def grouped(rows: Tensor, weights: Tensor, dispatch: Dispatching, bias: Tensor | None = None) -> Tensor:
    """Return each row (P, D) times its expert's matrix, (E, D, F), plus its expert's bias, (E, F): (P, F)."""
    product: Tensor = F.grouped_mm(rows, weights, offs=dispatch.ends)
    return product if bias is None else product.add_(bias.index_select(0, dispatch.row_experts))


class AdaptersOfLayer(Protocol):
    """What the adapters of a pass add to one layer of experts. Keeps what its backward needs."""

    def add_to_gates(self, x: Tensor, gates: Tensor) -> None:
        """Add s (x A13^T) (B1[e]^T, B3[e]^T) to gates (P, 2 F), from x (T, D)."""

    def add_to_output(self, hidden: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add s (sum_j w_j h_j A2[e]^T) B2^T to out (T, D), from h (P, F) and weights (T, k)."""

    def backward_output(self, dout: Tensor, hidden: Tensor, row_weights: Tensor, dweighted: Tensor) -> None:
        """Add to the gradients of A2 and B2, and to dweighted (P, F), the gradient of w_j h_j.

        From dout (T, D), h (P, F), and w (P, 1) of each row in the dtype of h.
        """

    def backward_gates(self, x: Tensor, dgates: Tensor, dx: Tensor) -> None:
        """Add to the gradients of A13, B1 and B3, and to dx (T, D), from x (T, D) and dgates (P, 2 F)."""


class AdaptersOfPass(Protocol):
    """The adapters of a pass that adapt its layers of experts."""

    def of_layer(self, layer: ExpertLayer, dispatch: Any) -> AdaptersOfLayer | None:
        """Return what they add to a layer whose rows go there; None: nothing. Called once for each dispatch."""


@dataclass(slots=True)
class Kept:
    """What a forward keeps for the backward, besides the input."""

    dispatch: Dispatching
    adapters: AdaptersOfLayer | None
    gates: Tensor
    """(P, 2 F) before the activation, adapters included."""


class ExpertLayer:
    """The forward and the backward of a layer's experts."""

    def __init__(self, weights: ExpertWeights, gate_up: int, down: int) -> None:
        """Take the weights, and the indices of the groups of gate and up, and of down."""
        self.weights = weights
        self.gate_up, self.down = gate_up, down

    def forward(
        self, x: Tensor, weights: Tensor, dispatch: Dispatching, of_pass: AdaptersOfPass
    ) -> tuple[Tensor, Kept]:
        """Return the output (T, D) of x (T, D), whose choices have these weights (T, k)."""
        own = self.weights
        adapters = of_pass.of_layer(self, dispatch)
        gates = grouped(x.index_select(0, dispatch.rows), own.gate_up.transpose(1, 2), dispatch, own.gate_up_bias)
        if adapters is not None:
            adapters.add_to_gates(x, gates)
        hidden = own.apply_gate(gates)
        out = dispatch.sum_choices(grouped(hidden, own.down.transpose(1, 2), dispatch, own.down_bias), weights)
        out = out.to(x.dtype)
        if adapters is not None:
            adapters.add_to_output(hidden, weights, out)
        return out, Kept(dispatch, adapters, gates)

    def backward(self, x: Tensor, weights: Tensor, kept: Kept, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (T, D) and of the weights (T, k); add those of the adapters to theirs."""
        own, dispatch, adapters = self.weights, kept.dispatch, kept.adapters
        with torch.enable_grad():
            gates = kept.gates.detach().requires_grad_()
            hidden = own.apply_gate(gates)
        values = hidden.detach()
        # The gradient of w_j h_j, from which follow those of w_j and h_j.
        dout_rows = dout.index_select(0, dispatch.rows)  # (P, D)
        dweighted = grouped(dout_rows, own.down, dispatch)
        row_weights = weights.reshape(-1).index_select(0, dispatch.sources)[:, None].to(x.dtype)  # (P, 1)
        if adapters is not None:
            adapters.backward_output(dout, values, row_weights, dweighted)
        dweights = (values * dweighted).sum(1)  # (P,)
        if own.down_bias is not None:
            dweights += (dout_rows * own.down_bias.index_select(0, dispatch.row_experts)).sum(1)
        del dout_rows
        (dgates,) = torch.autograd.grad(hidden, gates, dweighted * row_weights)
        dx = dispatch.sum_choices(grouped(dgates, own.gate_up, dispatch))
        if adapters is not None:
            adapters.backward_gates(x, dgates, dx)
        return dx, dweights[dispatch.places].to(weights.dtype)


class ExpertFunction(torch.autograd.Function):
    """A layer's experts as one operation of autograd; the adapters' gradients are a side effect of its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        anchor: Tensor,
        layer: ExpertLayer,
        dispatch: Dispatching,
        of_pass: AdaptersOfPass,
    ) -> Tensor:
        """Return (T, D)."""
        del anchor  # see `CurrentPass.anchor`
        out, ctx.kept = layer.forward(x, weights, dispatch, of_pass)
        ctx.save_for_backward(x, weights)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weights."""
        x, weights = ctx.saved_tensors
        dx, dweights = ctx.layer.backward(x, weights, ctx.kept, douts[0].contiguous())
        return dx, dweights, None, None, None, None


def each_choice(choices: Tensor) -> Ints:
    """Return the chosen experts (T, k) on the host."""
    chosen: Ints = choices.cpu().numpy()
    return chosen
