"""Multi-LoRA linear layers: one frozen matmul for all tenants' rows, and a small one per segment for its adapter.

For rows of segment s:  y = x W^T + b + scaling_s (x A_s^T) B_s^T.  The backward is written by hand: never dW, the input
is saved once for all linears that share it, and dA and dB are added straight into the adapter's gradient.

Knows segments and views of adapters; not the bank that owns them, nor losses, tenants or models.

Main invariant: what is computed for a segment depends on that segment's rows, its adapter and the number of its rows
alone. Its gradient is added in the order of the segments of that adapter. Nothing is masked by multiplying with zero:
0 x NaN would let one tenant's overflow reach another.

Dimensions: T rows of the packed pass, N rows of a segment, D inputs, F outputs, R padded rank, G linears in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Linear modules that read the same input (query, key and value; gate and up; the others alone)."""

    index: int
    """Place among the base model's groups."""
    kind: Kind
    names: tuple[str, ...]
    """Full module names, as `named_modules` gives them."""
    d_in: int
    d_outs: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class GroupAdapter:
    """One adapter's part in one group: views into its row of the bank."""

    rank: int
    """Padded rank R."""
    scaling: float
    A: Tensor
    """(G * R, D): the A of every linear, one below the other."""
    Bs: tuple[Tensor, ...]
    """Per linear (F, R)."""
    A_t: Tensor = field(init=False)
    Bs_t: tuple[Tensor, ...] = field(init=False)
    A_grad: Tensor | None
    """(G * R, D), added to by the backward; None for rows that are only sampled from."""
    B_grads: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self.A_t = self.A.t()
        self.Bs_t = tuple(B.t() for B in self.Bs)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of the pass belong to one adapter; `groups[i]` is None where it does not adapt group i."""

    start: int
    stop: int
    groups: Sequence[GroupAdapter | None]


class Routing:
    """Which rows of a pass go through which adapter. Rows in no segment see the base model alone.

    Segments must not overlap and must stand in row order.
    """

    def __init__(self, num_rows: int, segments: Sequence[Segment], num_groups: int) -> None:
        self.num_rows = num_rows
        self.sizes: list[int] = []
        """Cuts all rows into segments and the gaps between them, for `Tensor.split`."""
        self.of_group: list[list[tuple[int, GroupAdapter]]] = [[] for _ in range(num_groups)]
        """Per group: the piece of the split and the adapter it goes through."""
        end = 0
        for segment in segments:
            assert end <= segment.start < segment.stop <= num_rows, "segments overlap or leave the pass"
            if segment.start > end:
                self.sizes.append(segment.start - end)
            for pieces, adapter in zip(self.of_group, segment.groups, strict=True):
                if adapter is not None:
                    pieces.append((len(self.sizes), adapter))
            self.sizes.append(segment.stop - segment.start)
            end = segment.stop
        if end < num_rows:
            self.sizes.append(num_rows - end)


class CurrentPass:
    """What the layers of one base model share during a pass. One per base model; used by one thread."""

    def __init__(self, rows_min: int = 16) -> None:
        self.routing = Routing(0, (), 0)
        self.attend: Any = None
        self.rows_min = rows_min
        """Matmuls with fewer rows are padded to this many; below it, the bits of a row depend on the others."""
        self.num_base_matmuls = 0
        """Products of activations with frozen weights so far, forward only."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require a gradient although neither the embeddings nor the frozen weights do."""


def add_lora(y: Tensor, adapter: GroupAdapter, position: int, xa: Tensor) -> None:
    """y (N, F) += xa_i B_i^T in place, with xa (N, G * R) from `project`."""
    rank = adapter.rank
    y.addmm_(xa[:, position * rank : (position + 1) * rank], adapter.Bs_t[position])


def project(x: Tensor, adapter: GroupAdapter) -> Tensor:
    """Scaled x A^T for every linear of the group: (N, D) -> (N, G * R)."""
    out = x.new_empty(x.shape[0], adapter.A.shape[0])
    return torch.addmm(out, x, adapter.A_t, beta=0, alpha=adapter.scaling, out=out)


class LinearGroup:
    """The frozen weights of a group, and the packed forward and backward of all its linears at once."""

    def __init__(self, shape: GroupShape, linears: Sequence[nn.Linear], current: CurrentPass) -> None:
        self.shape = shape
        self.weights = [linear.weight.detach() for linear in linears]  # (F, D) each
        self.weights_t = [weight.t() for weight in self.weights]
        self.biases = [cast("Tensor | None", linear.bias) for linear in linears]
        self.current = current
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def output(self, x: Tensor, position: int) -> Tensor:
        """The output of linear `position` for x (..., D). The first call of a group computes its siblings' too."""
        if self._input is x:
            ready = self._outputs[position]
            if ready is not None:
                self._outputs[position] = None
                if not any(output is not None for output in self._outputs):
                    self._input = None
                return ready
        outputs = self._differentiable(x) if torch.is_grad_enabled() else self.forward(x)[0]
        if len(self.weights) > 1:
            self._input = x
            self._outputs = list(outputs)
            self._outputs[position] = None
        return outputs[position]

    def _differentiable(self, x: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = _GroupFunction.apply(x, self.current.anchor, self)  # type: ignore[no-untyped-call]
        return outputs

    def forget(self) -> None:
        """Drop outputs that nobody asked for."""
        self._input = None
        self._outputs = []

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """x (..., D) -> outputs (..., F) per linear, and per adapted segment the scaled x A^T (N, G * R)."""
        current = self.current
        routing = current.routing
        rows = x.reshape(-1, self.shape.d_in)  # (T, D)
        ys = []
        for weight_t, bias in zip(self.weights_t, self.biases, strict=True):
            ys.append(rows @ weight_t if bias is None else torch.addmm(bias, rows, weight_t))  # (T, F)
        current.num_base_matmuls += len(ys)
        xas = []
        pieces = routing.of_group[self.shape.index]
        if pieces:
            x_split = rows.split(routing.sizes)
            y_splits = [y.split(routing.sizes) for y in ys]
            for piece, adapter in pieces:
                segment = x_split[piece]  # (N, D)
                if segment.shape[0] < current.rows_min:
                    xas.append(self._forward_short(segment, [split[piece] for split in y_splits], adapter))
                    continue
                xa = project(segment, adapter)  # (N, G * R)
                xas.append(xa)
                for position, split in enumerate(y_splits):
                    add_lora(split[piece], adapter, position, xa)
        return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys], xas

    def _forward_short(self, x: Tensor, ys: list[Tensor], adapter: GroupAdapter) -> Tensor:
        """A segment with few rows, padded so that its matmuls have the bits of a longer one."""
        num_rows = x.shape[0]
        padding = (0, 0, 0, self.current.rows_min - num_rows)
        x = F.pad(x, padding)  # (rows_min, D)
        xa = project(x, adapter)
        for position, y in enumerate(ys):
            padded = F.pad(y, padding)
            add_lora(padded, adapter, position, xa)
            y.copy_(padded[:num_rows])
        return xa[:num_rows]

    def backward(self, x: Tensor, xas: list[Tensor], dys: Sequence[Tensor], *, input_needs_grad: bool) -> Tensor | None:
        """Add dA and dB of every segment into its adapter's gradient; return dx (..., D) if it is needed."""
        routing = self.current.routing
        rows = x.reshape(-1, self.shape.d_in)  # (T, D)
        dy_rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]  # (T, F) each
        dx = None
        if input_needs_grad:
            dx = dy_rows[0] @ self.weights[0]  # (T, D)
            for dy, weight in zip(dy_rows[1:], self.weights[1:], strict=True):
                dx.addmm_(dy, weight)
        pieces = routing.of_group[self.shape.index]
        if pieces:
            x_split = rows.split(routing.sizes)
            dy_splits = [dy.split(routing.sizes) for dy in dy_rows]
            dx_split = None if dx is None else dx.split(routing.sizes)
            for (piece, adapter), xa in zip(pieces, xas, strict=True):
                segment_dys = [split[piece] for split in dy_splits]
                dxa = backward_segment(x_split[piece], xa, segment_dys, adapter)
                if dx_split is not None:
                    dx_split[piece].addmm_(dxa, adapter.A)
        return None if dx is None else dx.view(x.shape)


def backward_segment(x: Tensor, xa: Tensor, dys: Sequence[Tensor], adapter: GroupAdapter) -> Tensor:
    """Add one segment's dA and dB to its adapter's gradient; return d(x A^T), scaled: (N, G * R).

    x (N, D), xa (N, G * R) scaled, dys per linear (N, F). With y = s x A^T B^T:  dB = dy^T (s x A^T),
    dA = (s dy B)^T x,  and the caller adds dx = (s dy B) A.
    """
    assert adapter.A_grad is not None, "a row that is only sampled from has no gradient"
    rank, scaling = adapter.rank, adapter.scaling
    dxa = torch.empty_like(xa, memory_format=torch.contiguous_format)
    for position, (dy, B, B_grad) in enumerate(zip(dys, adapter.Bs, adapter.B_grads, strict=True)):
        columns = slice(position * rank, (position + 1) * rank)
        part = dxa[:, columns]  # (N, R)
        torch.addmm(part, dy, B, beta=0, alpha=scaling, out=part)
        B_grad.addmm_(dy.t(), xa[:, columns])
    adapter.A_grad.addmm_(dxa.t(), x)
    return dxa


class _GroupFunction(torch.autograd.Function):
    """Autograd sees a group as one operation of its input; the adapters' gradients are a side effect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, group: LinearGroup) -> tuple[Tensor, ...]:
        del anchor
        outputs, ctx.xas = group.forward(x)
        ctx.save_for_backward(x)
        ctx.group = group
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        needs_grad: bool = ctx.needs_input_grad[0]
        return ctx.group.backward(x, ctx.xas, dys, input_needs_grad=needs_grad), None, None


class MultiLoraLinear(nn.Module):
    """Stands in a model where an `nn.Linear` stood."""

    def __init__(self, linear: nn.Linear, group: LinearGroup, position: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self._position = position

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., F)."""
        return self._group.output(x, self._position)
