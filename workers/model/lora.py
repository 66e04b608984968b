"""Multi-LoRA linear layers: one frozen matmul for all tenants' rows, and a small one per segment for its adapter.

For rows of segment s:  y = x W^T + b + scaling_s (x A_s^T) B_s^T.  The backward is written by hand: never dW, the input
is saved once for all linears that share it, and dA and dB are added straight into the adapter's gradient.

Knows segments and views of adapters; not the bank that owns them, nor losses, tenants or models.

Main invariant: what is computed for a segment depends on that segment's rows, its adapter and the number of its rows
alone (where `grouped` computes many at once, to rounding). Its gradient is added in the order of the segments of that
adapter. Nothing is masked by multiplying with zero: 0 x NaN would let one tenant's overflow reach another. Products of
a few columns depend on the alignment of their operands, so rows are a multiple of 16 values (64 bytes) apart wherever a
segment's place in the pass may vary.

Dimensions: T rows of the packed pass, N rows of a segment, S segments of a run, D inputs, F outputs, R padded rank, G
linears in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.frozen import BlockProducts, FrozenProducts, PackedProducts, PlainProducts
from workers.model.numerics import ROWS_MIN, Numerics
from workers.rows import AdapterViews, GroupShape, GroupViews


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of the pass go through one adapter (`Row.groups` of the bank)."""

    start: int
    stop: int
    adapter: AdapterViews


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive segments of equal length whose adapters lie in one slab, at rising slots: computed as one batch."""

    start: int
    length: int
    adapters: list[AdapterViews]

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.length * len(self.adapters)

    def can_take(self, segment: Segment) -> bool:
        """Whether a segment that comes next may join. An adapter's own next segment may not: sums keep their order."""
        is_next = segment.start == self.stop and segment.stop - segment.start == self.length
        return is_next and segment.adapter.can_follow(self.adapters[-1])

    def rows(self, tensor: Tensor) -> Tensor:
        """This run's rows of (T, F): a view (N, F) of a single segment, (S, N, F) of several."""
        part = tensor[self.start : self.stop]
        return part if len(self.adapters) == 1 else part.view(len(self.adapters), self.length, -1)

    def views(self, group: int) -> GroupViews | None:
        """The adapters' A (G * R, D) and B^T (R, F) in a group; of several (S, ...), copied if the slots have gaps."""
        if len(self.adapters) == 1:
            return self.adapters[0].groups[group]
        slab = self.adapters[0].slab[group]
        if slab is None:
            return None
        rows = self._rows()
        if isinstance(rows, slice):
            return GroupViews(A=slab.A[rows], Bs=tuple(B[rows] for B in slab.Bs), A_grad=None, B_grads=())
        Bs = tuple(B.index_select(0, rows) for B in slab.Bs)
        return GroupViews(A=slab.A.index_select(0, rows), Bs=Bs, A_grad=None, B_grads=())

    def add_gradients(self, group: int, dA: Tensor, dBs: Sequence[Tensor]) -> None:
        """Add to the adapters' gradients; shapes as in `views`."""
        if len(self.adapters) == 1:
            own = self.adapters[0].groups[group]
            assert own is not None
            assert own.A_grad is not None, "a row that is only sampled from has no gradient"
            own.A_grad.add_(dA)
            for B_grad, dB in zip(own.B_grads, dBs, strict=True):
                B_grad.add_(dB)
            return
        slab, rows = self.adapters[0].slab[group], self._rows()
        assert slab is not None
        assert slab.A_grad is not None, "a row that is only sampled from has no gradient"
        for gradient, value in zip((slab.A_grad, *slab.B_grads), (dA, *dBs), strict=True):
            if isinstance(rows, slice):
                gradient[rows].add_(value)
            else:
                gradient.index_add_(0, rows, value.to(gradient.dtype))

    def _rows(self) -> slice | Tensor:
        """The adapters' rows of their slab: a slice if they are consecutive, else indices (S,)."""
        first, last = self.adapters[0].slot, self.adapters[-1].slot + 1
        if last - first == len(self.adapters):
            return slice(first, last)
        device = next(views.A.device for views in self.adapters[0].slab if views is not None)
        return torch.tensor([adapter.slot for adapter in self.adapters]).to(device, non_blocking=True)


class ShortRun:
    """Segments of few rows, wherever they stand, whose adapters lie in one slab at rising slots: one batch, in which
    each is filled up to `rows_min` rows. Without a gradient."""

    def __init__(self, segments: Sequence[Segment], rows_min: int) -> None:
        self._run = Run(0, rows_min, [segment.adapter for segment in segments])
        self._rows_min = rows_min
        first, lengths = segments[0].start, {segment.stop - segment.start for segment in segments}
        self._length = min(lengths)
        self._beside: slice | None = None
        """All rows, if segments of equal length stand one behind the other: no row needs to be looked up."""
        if len(lengths) == 1 and segments[-1].stop == first + self._length * len(segments):
            self._beside = slice(first, segments[-1].stop)
            return
        index: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for number, segment in enumerate(segments):
            own = list(range(segment.start, segment.stop))
            index += own + own[:1] * (rows_min - len(own))
            places += range(number * rows_min, number * rows_min + len(own))
            rows += own
        self._index = torch.tensor(index)
        self._places, self._rows = torch.tensor(places), torch.tensor(rows)

    def add_to(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """Add the adapters' part to ys (T, F), from x (T, D); nothing where the group is not adapted."""
        views = self._run.views(group)
        if views is None:
            return
        scaling = self._run.adapters[0].scaling
        parts = [self._filled_up(y) for y in ys]
        forward_segments(self._filled_up(x), parts, views, scaling)
        for y, part in zip(ys, parts, strict=True):
            if self._beside is not None:
                y[self._beside].view(len(part), self._length, -1).copy_(part[:, : self._length])
            else:
                y[self._rows] = part.flatten(0, 1)[self._places]

    def _filled_up(self, tensor: Tensor) -> Tensor:
        """The segments' rows of (T, F) and others, (S, rows_min, F)."""
        if self._beside is None:
            return self._run.rows(tensor[self._index])
        rows = tensor[self._beside].view(-1, self._length, tensor.shape[1])
        return F.pad(rows, (0, 0, 0, self._rows_min - self._length))


class FusedRun(Protocol):
    """Segments whose products are one kernel each; `grouped.GroupedRun`."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """Add the adapters' part to ys (T, F); what the backward needs, None where the group is not adapted."""

    def backward(self, group: int, xa: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; `xa` is what `forward` gave."""


Fuse = Callable[[Sequence[Segment]], Sequence[FusedRun]]
"""Makes fused runs of a pass's segments."""


class Routing:
    """Which rows of a pass go through which adapter. Rows in no segment see the base model alone.

    Segments must not overlap and must stand in row order. Those shorter than `rows_min` are computed alone, padded.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        rows_min: int,
        *,
        can_batch: bool = True,
        can_batch_short: bool = False,
        fuse: Fuse | None = None,
    ) -> None:
        """With `fuse` all segments are computed by what it returns, and `runs` is empty."""
        self.runs: list[Run] = []
        self.short_runs: list[ShortRun] = []
        self.fused: Sequence[FusedRun] = () if fuse is None else fuse(segments)
        if fuse is not None:
            return
        end = 0
        if can_batch and can_batch_short:
            segments = self._without_short(segments, rows_min)
        for segment in segments:
            assert end <= segment.start < segment.stop, "segments overlap or are empty"
            end = segment.stop
            length = segment.stop - segment.start
            if can_batch and length >= rows_min and self.runs and self.runs[-1].can_take(segment):
                self.runs[-1].adapters.append(segment.adapter)
            else:
                self.runs.append(Run(segment.start, length, [segment.adapter]))

    def _without_short(self, segments: Sequence[Segment], rows_min: int) -> list[Segment]:
        """Put segments of few rows into `short_runs` where there are several that can be one; the others."""
        left: list[Segment] = []
        joined: list[list[Segment]] = []
        for segment in segments:
            if segment.stop - segment.start >= rows_min:
                left.append(segment)
                continue
            if joined and segment.adapter.can_follow(joined[-1][-1].adapter):
                joined[-1].append(segment)
            else:
                joined.append([segment])
        for short in joined:
            if len(short) == 1:
                left += short
            else:
                self.short_runs.append(ShortRun(short, rows_min))
        return sorted(left, key=lambda segment: segment.start)


class CurrentPass:
    """What the layers of one base model share during a pass. One per base model; used by one thread."""

    def __init__(self) -> None:
        self.rows_min = ROWS_MIN
        """Matmuls with fewer rows are padded to this many; below it, the bits of a row depend on the others."""
        self.can_batch = True
        """Whether segments in one batch have the bits that each has solo; see `Numerics`."""
        self.fuse: Fuse | None = None
        """`grouped.group_segments` where the device has such a kernel."""
        self.routing = Routing((), self.rows_min)
        self.attend: Any = None
        self.num_base_matmuls = 0
        """Products of activations with frozen weights so far, forward only."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require a gradient although neither the embeddings nor the frozen weights do."""

    def use(self, numerics: Numerics, fuse: Fuse | None) -> None:
        """Compute segments this way from now on."""
        self.rows_min = numerics.rows_min or ROWS_MIN
        self.can_batch = numerics.can_batch
        self.fuse = fuse

    def begin(self, segments: Sequence[Segment], attend: Any) -> None:
        """Set the segments and the attention of the next forward, and of its backward."""
        self.routing = self.route(segments, needs_grad=torch.is_grad_enabled())
        self.attend = attend

    def reset(self) -> None:
        """Drop the last pass and the count of products."""
        self.routing, self.attend, self.num_base_matmuls = self.route(()), None, 0

    def route(self, segments: Sequence[Segment], *, needs_grad: bool = True) -> Routing:
        """How these segments are computed; there are more ways without a gradient."""
        return Routing(
            segments, self.rows_min, can_batch=self.can_batch, can_batch_short=not needs_grad, fuse=self.fuse
        )


@dataclass(slots=True, eq=False)
class Saved:
    """What a group's backward needs of one run: the adapters' views and the scaled x A^T."""

    run: Run
    views: GroupViews
    xa: Tensor
    """(N, G * R), or (S, N, G * R)."""


@dataclass(slots=True, eq=False)
class FusedSaved:
    """What a group's backward needs of one fused run."""

    run: FusedRun
    xa: Tensor


class LinearGroup:
    """The frozen weights of a group, and the packed forward and backward of all its linears at once."""

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
            self.products = BlockProducts(self.weights, self.biases, numerics.block_rows)
        elif numerics.is_packed:
            self.products = PackedProducts(self.weights, self.biases)
        else:
            self.products = PlainProducts(self.weights, self.biases)

    def output(self, x: Tensor, position: int) -> Tensor:
        """The output of linear `position` for x (..., D). The first call of a group computes its siblings' too."""
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

    def forget(self) -> None:
        """Drop outputs that nobody asked for."""
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
        """x (T, D) -> outputs (T, F) per linear, into `outs` if given, and what the backward needs."""
        ys = self.products.forward(x, outs or [None] * len(self.weights))
        self.current.num_base_matmuls += len(ys)
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
        """One segment with few rows, padded so that its matmuls have the bits of a longer one, on any threads."""
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
        """Add dA and dB of every segment to its adapter's gradient; returns dx (T, D) if it is needed.

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
        """As `_forward_short`."""
        num_rows = x.shape[0]
        padding = (0, 0, 0, self.current.rows_min - num_rows)
        longer = None if dx is None else F.pad(dx, padding)
        dys = [F.pad(dy, padding) for dy in dys]
        gradients = backward_segments(F.pad(x, padding), dys, longer, F.pad(xa, padding), views, scaling)
        if dx is not None and longer is not None:
            dx.copy_(longer[:num_rows])
        return gradients


def forward_segments(x: Tensor, ys: Sequence[Tensor], views: GroupViews, scaling: float) -> Tensor:
    """ys[i] (N, F) += scaling x A_i^T B_i^T in place; returns the scaled x A^T (N, G * R).

    Or the same for S segments, with S as the first dimension of everything.
    """
    num_linears = len(ys)
    xa = x.new_empty(*x.shape[:-1], views.A.shape[-2])
    _multiply(xa, x, views.A.transpose(-2, -1), scaling)
    parts = (xa,) if num_linears == 1 else xa.chunk(num_linears, dim=-1)  # (N, R) each
    for y, part, B in zip(ys, parts, views.Bs, strict=True):
        _add_product(y, part, B)
    return xa


def backward_segments(
    x: Tensor, dys: Sequence[Tensor], dx: Tensor | None, xa: Tensor, views: GroupViews, scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """Returns dA (G * R, D) and per linear dB^T (R, F), and adds to dx (N, D) if given. Else as `forward_segments`.

    With y = s x A^T B^T:  dB^T = (s x A^T)^T dy,  dA = (s dy B)^T x,  dx = (s dy B) A.
    """
    rank = views.Bs[0].shape[-2]
    parts = (xa,) if len(dys) == 1 else xa.split(rank, dim=-1)  # (N, R) each
    dparts, dBs = [], []
    for dy, part, B in zip(dys, parts, views.Bs, strict=True):
        dpart = dy.new_empty(part.shape)
        _multiply(dpart, dy, B.transpose(-2, -1), scaling)
        dparts.append(dpart)
        dBs.append(part.transpose(-2, -1) @ dy)
    dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=-1)  # (N, G * R)
    dA = dxa.transpose(-2, -1) @ x
    if dx is not None:
        _add_product(dx, dxa, views.A)
    return dA, dBs


def _multiply(out: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
    """out = scaling left right, of matrices or batches of them; their bits are the same (see the self-test)."""
    multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
    multiply(out, left, right, beta=0, alpha=scaling, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left right, of matrices or batches of them."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


class _GroupFunction(torch.autograd.Function):
    """Autograd sees a group as one operation of its input; the adapters' gradients are a side effect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, group: LinearGroup) -> tuple[Tensor, ...]:
        del anchor
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
