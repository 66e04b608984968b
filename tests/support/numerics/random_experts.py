"""A layer of experts of a model, with random rows and adapters in several slabs, computed by shares or by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.base_model import BaseModel
from workers.model.expert_groups import GroupedDispatch, GroupedSegments
from workers.model.expert_products import AdaptersOfPass, Dispatch, Dispatching, ExpertLayer
from workers.model.expert_shares import ExpertSegments
from workers.model.fused_runs import forward_runs, training_runs
from workers.model.segments import Fuse, Routing, Segment
from workers.rows import AdapterViews, GroupShape, RowLayout

RANK, LARGE_RANK, NUM_ROWS = 8, 32, 1700
LARGE, ATTENTION = 2, 3
"""The slot of an adapter of a larger rank, in another slab; and of one that adapts no experts."""
Rows = tuple[int, int, int]
"""Slot of an adapter, first row, and the row after the last."""


@dataclass(frozen=True)
class Results:
    """What a layer computes."""

    gradients: list[Tensor]
    """(P,) of each slot."""
    of_rows: list[Tensor]
    """The output, and the gradients of inputs and of weights."""

    @property
    def all(self) -> list[Tensor]:
        """Everything."""
        return [*self.gradients, *self.of_rows]


class Layer:
    """The first layer of experts of a model, with random rows, each of which goes to two experts.

    Four adapters: slots 0 and 1 in one slab, `LARGE` and `ATTENTION`.
    """

    def __init__(self, model: BaseModel, num_rows: int = NUM_ROWS) -> None:
        of_layer = model.expert_layers[0]
        generator = torch.Generator().manual_seed(3)
        self.hidden_size, self.inner_size = model.hidden_size, of_layer.inner_size
        attention = GroupShape(index=2, kind="attn", names=("q",), d_in=model.hidden_size, d_outs=(model.hidden_size,))
        shapes = *of_layer.shapes, attention
        self.layouts = [RowLayout(shapes, RANK, ("mlp",)), RowLayout(shapes, LARGE_RANK, ("mlp",))]
        self.layouts.append(RowLayout(shapes, RANK, ("attn",)))
        self.values = [
            torch.randn(num_adapters, layout.num_values, generator=generator).to(model.dtype) / 4
            for num_adapters, layout in zip((2, 1, 1), self.layouts, strict=True)
        ]
        self.layer = ExpertLayer(of_layer.weights, 0, 1)
        self.x, self.dout = torch.randn(2, num_rows, model.hidden_size, generator=generator).to(model.dtype)
        self.weights, choices = torch.rand(num_rows, of_layer.num_experts, generator=generator).topk(2)
        self.choices = choices.numpy()
        self.num_experts = of_layer.num_experts

    def gradient(self, segments: Sequence[Rows]) -> Tensor:
        """Return the gradient (P,) of the first adapter."""
        return self.results(segments).gradients[0]

    def adapters(self) -> tuple[list[AdapterViews], list[Tensor]]:
        """Return all adapters, and their gradients (P,), which are zero."""
        adapters, gradients = list[AdapterViews](), list[Tensor]()
        for layout, values in zip(self.layouts, self.values, strict=True):
            grad = torch.zeros(values.shape)
            slab = layout.views(values, grad)
            for slot in range(len(values)):
                groups = [views and views.row(slot) for views in slab]
                adapters.append(AdapterViews(slab, groups, slot, 2.0 + 0.5 * len(adapters)))
            gradients += grad
        return adapters, gradients

    def routing(self, segments: Sequence[Rows], adapters: Sequence[AdapterViews], fuse: Fuse | None) -> Routing:
        """Return the routing of segments."""
        placed = [Segment(start, stop, adapters[slot]) for slot, start, stop in segments]
        return Routing(placed, 16, fuse=fuse)

    def results(self, segments: Sequence[Rows], *, is_grouped: bool = False) -> Results:
        """Return what the layer computes; `is_grouped`: as on a GPU."""
        adapters, gradients = self.adapters()
        dispatch: Dispatching = Dispatch(self.choices, self.num_experts, 16, self.x.device)
        of_pass: AdaptersOfPass = ExpertSegments(self.routing(segments, adapters, None), len(self.x), 0, 1)
        if is_grouped:
            dispatch = GroupedDispatch(torch.from_numpy(self.choices), self.num_experts)
            of_pass = GroupedSegments(self.routing(segments, adapters, training_runs), self.choices.shape[1], 0)
        with torch.no_grad():
            out, kept = self.layer.forward(self.x, self.weights, dispatch, of_pass)
            return Results(gradients, [out, *self.layer.backward(self.x, self.weights, kept, self.dout)])

    def sampled(self, segments: Sequence[Rows]) -> Tensor:
        """Return the output of a pass without a backward, as on a GPU."""
        adapters, _ = self.adapters()
        of_pass = GroupedSegments(self.routing(segments, adapters, forward_runs), self.choices.shape[1], 0)
        dispatch = GroupedDispatch(torch.from_numpy(self.choices), self.num_experts)
        return self.layer.forward(self.x, self.weights, dispatch, of_pass)[0]

    def added(self, segments: Sequence[Rows], *, has_backward: bool = True) -> Results:
        """Return what adapters alone add, as on a GPU: to gates and to the output, and to their gradients.

        The gates, and the gradients of w_j h_j, are of each row's choices: (T, k, 2 F) and (T, k, F).
        """
        adapters, gradients = self.adapters()
        fuse: Fuse = training_runs if has_backward else forward_runs
        of_pass = GroupedSegments(self.routing(segments, adapters, fuse), self.choices.shape[1], 0)
        dispatch = GroupedDispatch(torch.from_numpy(self.choices), self.num_experts)
        added = of_pass.of_layer(self.layer, dispatch)
        assert added is not None
        num_places = self.choices.size
        gates, out = self.x.new_zeros(num_places, 2 * self.inner_size), torch.zeros_like(self.x)
        generator = torch.Generator().manual_seed(5)
        given = torch.randn(num_places, 3 * self.inner_size, generator=generator).to(self.x.dtype)
        hidden, dgates = given[dispatch.sources].split((self.inner_size, 2 * self.inner_size), 1)
        hidden, dgates = hidden.contiguous(), dgates.contiguous()
        added.add_to_gates(self.x, gates)
        added.add_to_output(hidden, self.weights, out)
        of_rows = [gates[dispatch.places], out]
        if has_backward:
            row_weights = self.weights.reshape(-1)[dispatch.sources][:, None].to(self.x.dtype)
            dweighted, dx = torch.zeros_like(hidden), torch.zeros_like(self.x)
            added.backward_output(self.dout, hidden, row_weights, dweighted)
            added.backward_gates(self.x, dgates, dx)
            of_rows += [dweighted[dispatch.places], dx]
        return Results(gradients, of_rows)
