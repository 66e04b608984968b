"""The linear layers of a base model, and the state of the pass that they share.

Frozen products are computed for all rows at once, and each segment's adapter is added.

For rows of segment s:  y = x W^T + b + scaling_s (x A_s^T) B_s^T.  The backward is written by hand: it never makes dW,
saves the input once for all linears that share it, and adds dA and dB to the adapter's gradient in the bank.

Does not depend on the bank, on losses, tenants or whole models.

Main invariant: the results of a segment depend only on its rows, their number and its adapter (`segments` names the
exception). Nothing is masked by multiplying with zero: 0 x NaN would let one tenant's overflow reach another. Products
of few columns depend on the alignment of their operands, so rows are a multiple of 16 values (64 bytes) apart wherever
a segment's position in the pass may vary.

Dimensions: T rows of the pass, N rows of a segment, S segments of a run, D inputs, F outputs, R padded rank, G linears
in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from workers.model.frozen_products import FrozenProducts, products_of
from workers.model.numerics import ROWS_MIN, Numerics
from workers.model.packed_delta import Recur
from workers.model.segments import Fuse, Routing, Segment, SegmentRun
from workers.rows import GroupShape

Kept = Sequence[tuple[SegmentRun, Any]]
"""What a forward keeps for the backward: of each run that adapts the group, the result of its forward."""


class CurrentPass:
    """The state of a pass that all layers of one base model share. One per base model; used by one thread."""

    def __init__(self) -> None:
        self.rows_min = ROWS_MIN
        """Products with fewer rows are padded to this many; below it, a row's bits depend on the others."""
        self.can_batch = True
        """Whether segments may be computed as one batch; see `Numerics`."""
        self.in_parts: frozenset[int] = frozenset()
        """Groups, by index, whose adapters add up sums in parts; see `Numerics`."""
        self.fuse: Fuse | None = None
        """`fused_runs.training_runs` if the device has such kernels."""
        self.fuse_forward: Fuse | None = None
        """`fused_runs.forward_runs` if the device has such kernels: for passes without a backward."""
        self.routing = Routing((), self.rows_min)
        self.recur: Recur | None = None
        """The linear attention of the pass; None: the model has none."""
        self.num_base_matmuls = 0
        """Products of activations with frozen weights so far, forward only."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require a gradient although neither the embeddings nor the frozen weights do."""

    def use(self, numerics: Numerics, in_parts: frozenset[int], fuse: Fuse | None, fuse_forward: Fuse | None) -> None:
        """Compute segments this way from now on."""
        self.rows_min = numerics.rows_min or ROWS_MIN
        self.can_batch = numerics.can_batch
        self.in_parts = in_parts
        self.fuse, self.fuse_forward = fuse, fuse_forward

    def begin(self, segments: Sequence[Segment] | Routing, recur: Recur | None = None) -> None:
        """Set the segments and the linear attention of the next forward, and of its backward.

        Segments whose runs are made already come as a routing.
        """
        self.recur = recur
        if isinstance(segments, Routing):
            self.routing = segments
        else:
            self.routing = self.route(segments, needs_grad=torch.is_grad_enabled())

    def reset(self) -> None:
        """Drop the last pass and the count of products."""
        self.routing, self.recur, self.num_base_matmuls = self.route(()), None, 0

    def count_matmuls(self, number: int) -> None:
        """Count products of activations with frozen weights."""
        self.num_base_matmuls += number

    def route(self, segments: Sequence[Segment], *, needs_grad: bool = True, group: int | None = None) -> Routing:
        """Return how these segments are computed, by `group` alone if given; without a gradient there are more ways."""
        fuse = self.fuse if needs_grad else self.fuse_forward
        return Routing(
            segments,
            self.rows_min,
            can_batch=self.can_batch,
            can_batch_short=not needs_grad,
            in_parts=self.in_parts,
            fuse=fuse,
            group=group,
        )


class LinearGroup:
    """Linears that read the same input: their frozen weights, and their forward and backward as one operation."""

    def __init__(self, shape: GroupShape, linears: Sequence[nn.Linear], current: CurrentPass) -> None:
        self.shape = shape
        self.weights = [linear.weight.detach() for linear in linears]  # (F, D) each
        self.biases = [cast("Tensor | None", linear.bias) for linear in linears]
        self.products: FrozenProducts
        self.is_batched = True
        """Whether segments in one batch have the bits that each has solo."""
        self.is_in_parts = False
        """Whether adapters add up sums in parts: one product is for all linears, so they do if one linear needs it."""
        self.use(Numerics())
        self.current = current
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def use(self, numerics: Numerics) -> None:
        """Compute products this way from now on."""
        shapes = {(len(weight), weight.shape[1]) for weight in self.weights}
        self.is_batched = shapes.isdisjoint(numerics.unbatched)
        self.is_in_parts = not shapes.isdisjoint(numerics.in_parts)
        self.products = products_of(self.weights, self.biases, numerics)

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
    ) -> tuple[list[Tensor], Kept]:
        """Return the outputs (T, F) per linear of x (T, D), in `outs` if given, and the values for `backward`."""
        ys = self.products.forward(x, outs or [None] * len(self.weights))
        return ys, self.adapt(x, ys, routing)

    def adapt(self, x: Tensor, ys: Sequence[Tensor], routing: Routing) -> Kept:
        """Add the adapters' parts to ys (T, F), the products of x (T, D) with the frozen weights; count these."""
        self.current.count_matmuls(len(ys))
        parts = [(run, run.forward(self.shape.index, x, ys)) for run in self.runs(routing)]
        return [(run, part) for run, part in parts if part is not None]

    def runs(self, routing: Routing) -> Sequence[SegmentRun]:
        """Return the runs whose products have the bits that each segment has solo."""
        return routing.runs if self.is_batched else routing.single_runs

    def join(self, modules: Sequence[MultiLoraLinear]) -> Tensor:
        """Return the weights of all linears as one tensor (sum of F, D), of which theirs are views from now on.

        `use` must be called afterwards.
        """
        if len(self.weights) == 1:
            return self.weights[0]
        joined = torch.cat(self.weights)
        self.weights = list(joined.split(self.shape.d_outs))
        for module, weight in zip(modules, self.weights, strict=True):
            module.weight.data = weight
        return joined

    def backward(self, x: Tensor, kept: Kept, dys: Sequence[Tensor], *, needs_dx: bool = True) -> Tensor | None:
        """Add dA and dB of every segment to its adapter's gradient; return dx (T, D) if it is needed.

        x (T, D), dys (T, F) per linear.
        """
        dx = self.products.backward(dys) if needs_dx else None
        for run, part in kept:
            run.backward(self.shape.index, part, x, dys, dx)
        return dx


class _GroupFunction(torch.autograd.Function):
    """A group as one operation of autograd; the adapters' gradients are a side effect of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, group: LinearGroup) -> tuple[Tensor, ...]:
        del anchor  # see `CurrentPass.anchor`
        ys, ctx.kept = group.forward(x.reshape(-1, group.shape.d_in), group.current.routing)
        ctx.save_for_backward(x)
        ctx.group = group
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])  # (T, D)
        dys_rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        dx = ctx.group.backward(rows, ctx.kept, dys_rows, needs_dx=ctx.needs_input_grad[0])
        return None if dx is None else dx.view(x.shape), None, None


class MultiLoraLinear(nn.Module):
    """Replaces an `nn.Linear` of a model."""

    def __init__(self, linear: nn.Linear, group: LinearGroup, position: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.group = group
        self._position = position

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., F) for x (..., D)."""
        return self.group.output(x, self._position)
