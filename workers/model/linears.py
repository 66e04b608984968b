"""The linear layers of a base model: frozen products for all rows at once, and each segment's adapter added.

For rows of segment s:  y = x W^T + b + scaling_s (x A_s^T) B_s^T.  The backward is written by hand: it never makes dW,
saves the input once for all linears that share it, and adds dA and dB to the adapter's gradient in the bank.

Does not depend on the bank, on losses, tenants or whole models.

Main invariant: the results of a segment depend only on its rows, their number and its adapter (`segments` names the
exception). Nothing is masked by multiplying with zero: 0 x NaN would let one tenant's overflow reach another. Products
of few columns depend on the alignment of their operands, so rows are a multiple of 16 values (64
bytes) apart wherever a segment's position in the pass may vary.

Dimensions: T rows of the pass, N rows of a segment, S segments of a run, D inputs, F outputs, R padded rank, G linears
in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.frozen_products import ExactProducts, FrozenProducts, PackedProducts, PlainProducts
from workers.model.numerics import Numerics
from workers.model.segments import CurrentPass, FusedRun, Routing, Run, backward_segments, forward_segments
from workers.rows import GroupShape, GroupViews


@dataclass(slots=True, eq=False)
class Saved:
    """One run's part of what a forward keeps for the backward: the adapters' views and the scaled x A^T."""

    run: Run
    views: GroupViews
    xa: Tensor
    """(N, G * R), or (S, N, G * R)."""


@dataclass(slots=True, eq=False)
class FusedSaved:
    """One fused run's part of what a forward keeps for the backward."""

    run: FusedRun
    xa: Tensor


class LinearGroup:
    """Linears that read the same input: their frozen weights, and their forward and backward as one operation."""

    def __init__(self, shape: GroupShape, linears: Sequence[nn.Linear], current: CurrentPass) -> None:
        self.shape = shape
        self.weights = [linear.weight.detach() for linear in linears]  # (F, D) each
        self.biases = [cast("Tensor | None", linear.bias) for linear in linears]
        self.products: FrozenProducts
        self.use(Numerics())
        self.current = current
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def use(self, numerics: Numerics) -> None:
        """Compute products with the frozen weights this way from now on."""
        if numerics.block_rows is not None:
            self.products = ExactProducts(self.weights, self.biases, numerics.block_rows)
        elif numerics.is_packed:
            self.products = PackedProducts(self.weights, self.biases)
        else:
            self.products = PlainProducts(self.weights, self.biases)

    def output(self, x: Tensor, position: int) -> Tensor:
        """Return the output of linear `position` for x (..., D). The first call of a group computes all its linears."""
        if self._input is x:
            ready = self._outputs[position]
            if ready is not None:
                self._outputs[position] = None
                if not any(output is not None for output in self._outputs):
                    self._input = None
                return ready
        outputs = self._differentiable(x) if torch.is_grad_enabled() else self._plain(x)
        if len(self.weights) > 1:
            self._input = x
            self._outputs = list(outputs)
            self._outputs[position] = None
        return outputs[position]

    def drop_outputs(self) -> None:
        """Drop outputs of the last pass that were never read."""
        self._input = None
        self._outputs = []

    def _differentiable(self, x: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = _GroupFunction.apply(x, self.current.anchor, self)  # type: ignore[no-untyped-call]
        return outputs

    def _plain(self, x: Tensor) -> Sequence[Tensor]:
        ys, _ = self.forward(x.reshape(-1, self.shape.d_in), self.current.routing)
        return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]

    def forward(
        self, x: Tensor, routing: Routing, outs: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor], list[Saved | FusedSaved]]:
        """Return the outputs (T, F) per linear of x (T, D), in `outs` if given, and the values for `backward`."""
        ys = self.products.forward(x, outs or [None] * len(self.weights))
        self.current.count_matmuls(len(ys))
        saved: list[Saved | FusedSaved] = []
        for fused in routing.fused:
            fused_xa = fused.forward(self.shape.index, x, ys)
            if fused_xa is not None:
                saved.append(FusedSaved(fused, fused_xa))
        for short in routing.short_runs:
            short.add_to(self.shape.index, x, ys)
        for run in routing.runs:
            views = run.views(self.shape.index)
            if views is None:
                continue
            forward = self._forward_short if run.length < self.current.rows_min else forward_segments
            xa = forward(run.rows(x), [run.rows(y) for y in ys], views, run.adapters[0].scaling)
            saved.append(Saved(run, views, xa))
        return ys, saved

    def _forward_short(self, x: Tensor, ys: list[Tensor], views: GroupViews, scaling: float) -> Tensor:
        """Run one segment of few rows, padded, so that its products have the same bits with any number of threads."""
        num_rows = x.shape[0]
        padding = (0, 0, 0, self.current.rows_min - num_rows)
        padded = [F.pad(y, padding) for y in ys]
        xa = forward_segments(F.pad(x, padding), padded, views, scaling)
        for y, longer in zip(ys, padded, strict=True):
            y.copy_(longer[:num_rows])
        return xa[:num_rows]

    def backward(
        self, x: Tensor, saved: Sequence[Saved | FusedSaved], dys: Sequence[Tensor], *, needs_dx: bool = True
    ) -> Tensor | None:
        """Add dA and dB of every segment to its adapter's gradient; return dx (T, D) if it is needed.

        x (T, D), dys (T, F) per linear.
        """
        dx = self.products.backward(dys) if needs_dx else None
        for part in saved:
            if isinstance(part, FusedSaved):
                part.run.backward(self.shape.index, part.xa, x, dys, dx)
                continue
            run = part.run
            dx_rows = None if dx is None else run.rows(dx)
            backward = self._backward_short if run.length < self.current.rows_min else backward_segments
            dA, dBs = backward(
                run.rows(x), [run.rows(dy) for dy in dys], dx_rows, part.xa, part.views, run.adapters[0].scaling
            )
            run.add_gradients(self.shape.index, dA, dBs)
        return dx

    def _backward_short(
        self, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None, xa: Tensor, views: GroupViews, scaling: float
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the backward of `_forward_short`."""
        num_rows = x.shape[0]
        padding = (0, 0, 0, self.current.rows_min - num_rows)
        longer = None if dx is None else F.pad(dx, padding)
        dys = [F.pad(dy, padding) for dy in dys]
        gradients = backward_segments(F.pad(x, padding), dys, longer, F.pad(xa, padding), views, scaling)
        if dx is not None and longer is not None:
            dx.copy_(longer[:num_rows])
        return gradients


class _GroupFunction(torch.autograd.Function):
    """A group as one operation of autograd; the adapters' gradients are a side effect of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, group: LinearGroup) -> tuple[Tensor, ...]:
        del anchor  # see `CurrentPass.anchor`
        ys, ctx.saved = group.forward(x.reshape(-1, group.shape.d_in), group.current.routing)
        ctx.save_for_backward(x)
        ctx.group = group
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])  # (T, D)
        dys_rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        dx = ctx.group.backward(rows, ctx.saved, dys_rows, needs_dx=ctx.needs_input_grad[0])
        return None if dx is None else dx.view(x.shape), None, None


class MultiLoraLinear(nn.Module):
    """Replaces an `nn.Linear` of a model."""

    def __init__(self, linear: nn.Linear, group: LinearGroup, position: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self._position = position

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., F) for x (..., D)."""
        return self._group.output(x, self._position)
