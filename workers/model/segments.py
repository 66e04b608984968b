"""The segments of a pass, each with one adapter: which of them are one batch, padded or fused, and their products.

For a row x of segment s:  y += scaling_s (x A_s^T) B_s^T.

Does not depend on the bank, on models or on losses.

Main invariants: without fused runs, the products of a segment depend only on that segment's rows, their number and its
adapter; it has the same bits as a matrix of its own or as one of a batch, which `selftest.row_invariance` tries. With
fused runs, that holds to rounding. A run's adapters are rows of one slab at rising slots, and an adapter is in a run
once. So an adapter's gradient is added in the order of its segments.

Dimensions: T rows of the pass, N rows of a segment, S segments of a run, D inputs, F outputs, R padded rank, G linears
in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.numerics import ROWS_MIN, Numerics
from workers.rows import AdapterViews, GroupViews


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of the pass belong to one adapter."""

    start: int
    stop: int
    adapter: AdapterViews


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive segments of equal length whose adapters are in one slab, at rising slots: one batch."""

    start: int
    length: int
    adapters: list[AdapterViews]

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.length * len(self.adapters)

    def try_add(self, segment: Segment) -> bool:
        """Add the segment after the last if it can be in the batch; return whether it can."""
        is_next = segment.start == self.stop and segment.stop - segment.start == self.length
        if not (is_next and segment.adapter.can_follow(self.adapters[-1])):
            return False
        self.adapters.append(segment.adapter)
        return True

    def rows(self, tensor: Tensor) -> Tensor:
        """Return this run's rows of (T, F): a view (N, F) of a single segment, (S, N, F) of several."""
        part = tensor[self.start : self.stop]
        return part if len(self.adapters) == 1 else part.view(len(self.adapters), self.length, -1)

    def views(self, group: int) -> GroupViews | None:
        """Return the adapters' A (G * R, D) and B^T (R, F) in a group; None if the group is not adapted.

        Of several adapters (S, ...), copied if their slots have gaps.
        """
        if len(self.adapters) == 1:
            return self.adapters[0].groups[group]
        slab = self.adapters[0].slab[group]
        if slab is None:
            return None
        rows = self._slab_rows()
        if isinstance(rows, slice):
            return GroupViews(A=slab.A[rows], Bs=tuple(B[rows] for B in slab.Bs), A_grad=None, B_grads=())
        Bs = tuple(B.index_select(0, rows) for B in slab.Bs)
        return GroupViews(A=slab.A.index_select(0, rows), Bs=Bs, A_grad=None, B_grads=())

    def add_gradients(self, group: int, dA: Tensor, dBs: Sequence[Tensor]) -> None:
        """Add to the adapters' gradients; shapes as in `views`."""
        if len(self.adapters) == 1:
            own = self.adapters[0].groups[group]
            assert own is not None
            assert own.A_grad is not None, "a row of a sampler version has no gradient"
            own.A_grad.add_(dA)
            for B_grad, dB in zip(own.B_grads, dBs, strict=True):
                B_grad.add_(dB)
            return
        slab, rows = self.adapters[0].slab[group], self._slab_rows()
        assert slab is not None
        assert slab.A_grad is not None, "a row of a sampler version has no gradient"
        for gradient, value in zip((slab.A_grad, *slab.B_grads), (dA, *dBs), strict=True):
            if isinstance(rows, slice):
                gradient[rows].add_(value)
            else:
                gradient.index_add_(0, rows, value.to(gradient.dtype))

    def _slab_rows(self) -> slice | Tensor:
        """Return the adapters' rows of their slab: a slice if they are consecutive, else indices (S,)."""
        first, last = self.adapters[0].slot, self.adapters[-1].slot + 1
        if last - first == len(self.adapters):
            return slice(first, last)
        device = next(views.A.device for views in self.adapters[0].slab if views is not None)
        return torch.tensor([adapter.slot for adapter in self.adapters]).to(device, non_blocking=True)


class ShortRun:
    """Segments of few rows, anywhere in the pass, whose adapters are in one slab at rising slots: one batch.

    Each segment is padded to `rows_min` rows. Has no backward.
    """

    def __init__(self, segments: Sequence[Segment], rows_min: int) -> None:
        self._run = Run(0, rows_min, [segment.adapter for segment in segments])
        self._rows_min = rows_min
        first, lengths = segments[0].start, {segment.stop - segment.start for segment in segments}
        self._length = min(lengths)
        self._adjacent: slice | None = None
        """All rows, if the segments have equal lengths and are adjacent: no row needs gathering."""
        if len(lengths) == 1 and segments[-1].stop == first + self._length * len(segments):
            self._adjacent = slice(first, segments[-1].stop)
            return
        gathered: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for number, segment in enumerate(segments):
            own = list(range(segment.start, segment.stop))
            gathered += own + own[:1] * (rows_min - len(own))
            positions += range(number * rows_min, number * rows_min + len(own))
            rows += own
        self._gathered = torch.tensor(gathered)
        """(S * rows_min,) rows of the pass, padding included."""
        self._positions, self._rows = torch.tensor(positions), torch.tensor(rows)
        """The rows that are no padding: positions in the batch, and rows of the pass."""

    def add_to(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """Add the adapters' part to ys (T, F), from x (T, D); do nothing if the group is not adapted."""
        views = self._run.views(group)
        if views is None:
            return
        scaling = self._run.adapters[0].scaling
        parts = [self._padded(y) for y in ys]
        forward_segments(self._padded(x), parts, views, scaling)
        for y, part in zip(ys, parts, strict=True):
            if self._adjacent is not None:
                y[self._adjacent].view(len(part), self._length, -1).copy_(part[:, : self._length])
            else:
                y[self._rows] = part.flatten(0, 1)[self._positions]

    def _padded(self, tensor: Tensor) -> Tensor:
        """Return a copy of the segments' rows of (T, F), padded: (S, rows_min, F)."""
        if self._adjacent is None:
            return self._run.rows(tensor[self._gathered])
        rows = tensor[self._adjacent].view(-1, self._length, tensor.shape[1])
        return F.pad(rows, (0, 0, 0, self._rows_min - self._length))


class FusedRun(Protocol):
    """Segments whose products are one kernel each; implemented by `grouped_segments.GroupedRun`."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """Add the adapters' part to ys (T, F), from x (T, D); return an intermediate result for the backward.

        None: the group is not adapted.
        """

    def backward(self, group: int, xa: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; `xa` is the result of `forward`."""


Fuse = Callable[[Sequence[Segment]], Sequence[FusedRun]]
"""Makes fused runs of a pass's segments."""


class Routing:
    """The runs of one pass. Rows in no segment see only the base model.

    Segments must not overlap and must be in row order. Those with fewer rows than `rows_min` are padded.
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
        """Make runs; with `fuse`, all segments are in `fused`. `can_batch_short` is for passes without a backward."""
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
            if not (can_batch and length >= rows_min and self.runs and self.runs[-1].try_add(segment)):
                self.runs.append(Run(segment.start, length, [segment.adapter]))

    def _without_short(self, segments: Sequence[Segment], rows_min: int) -> list[Segment]:
        """Move segments of few rows to `short_runs` if several can be one batch; return the others."""
        left: list[Segment] = []
        batches: list[list[Segment]] = []
        for segment in segments:
            if segment.stop - segment.start >= rows_min:
                left.append(segment)
                continue
            if batches and segment.adapter.can_follow(batches[-1][-1].adapter):
                batches[-1].append(segment)
            else:
                batches.append([segment])
        for batch in batches:
            if len(batch) == 1:
                left += batch
            else:
                self.short_runs.append(ShortRun(batch, rows_min))
        return sorted(left, key=lambda segment: segment.start)


class CurrentPass:
    """The state of a pass that all layers of one base model share. One per base model; used by one thread."""

    def __init__(self) -> None:
        self.rows_min = ROWS_MIN
        """Products with fewer rows are padded to this many; below it, a row's bits depend on the others."""
        self.can_batch = True
        """Whether segments in one batch have the bits that each has solo; see `Numerics`."""
        self.fuse: Fuse | None = None
        """`grouped_segments.group_segments` if the device has such a kernel."""
        self.routing = Routing((), self.rows_min)
        self.num_base_matmuls = 0
        """Products of activations with frozen weights so far, forward only."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require a gradient although neither the embeddings nor the frozen weights do."""

    def use(self, numerics: Numerics, fuse: Fuse | None) -> None:
        """Compute segments this way from now on."""
        self.rows_min = numerics.rows_min or ROWS_MIN
        self.can_batch = numerics.can_batch
        self.fuse = fuse

    def begin(self, segments: Sequence[Segment]) -> None:
        """Set the segments of the next forward, and of its backward."""
        self.routing = self.route(segments, needs_grad=torch.is_grad_enabled())

    def reset(self) -> None:
        """Drop the last pass and the count of products."""
        self.routing, self.num_base_matmuls = self.route(()), 0

    def count_matmuls(self, number: int) -> None:
        """Count products of activations with frozen weights."""
        self.num_base_matmuls += number

    def route(self, segments: Sequence[Segment], *, needs_grad: bool = True) -> Routing:
        """Return how these segments are computed; without a gradient there are more ways."""
        return Routing(
            segments, self.rows_min, can_batch=self.can_batch, can_batch_short=not needs_grad, fuse=self.fuse
        )


def forward_segments(x: Tensor, ys: Sequence[Tensor], views: GroupViews, scaling: float) -> Tensor:
    """Add scaling x A_i^T B_i^T to ys[i] (N, F) in place; return the scaled x A^T (N, G * R).

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
    """Return dA (G * R, D) and per linear dB^T (R, F), and add to dx (N, D) if given; shapes as `forward_segments`.

    With y = s x A^T B^T:  dB^T = (s x A^T)^T dy,  dA = (s dy B)^T x,  dx = (s dy B) A.
    """
    rank = views.Bs[0].shape[-2]
    parts = (xa,) if len(dys) == 1 else xa.split(rank, dim=-1)  # (N, R) each
    dparts, dBs = [], []
    for dy, part, B in zip(dys, parts, views.Bs, strict=True):
        dpart = dy.new_empty(part.shape)  # (N, R)
        _multiply(dpart, dy, B.transpose(-2, -1), scaling)
        dparts.append(dpart)
        dBs.append(part.transpose(-2, -1) @ dy)
    dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=-1)  # (N, G * R)
    dA = dxa.transpose(-2, -1) @ x
    if dx is not None:
        _add_product(dx, dxa, views.A)
    return dA, dBs


def _multiply(out: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
    """Set out = scaling left right, of matrices or batches of them."""
    multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
    multiply(out, left, right, beta=0, alpha=scaling, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set out += left right, of matrices or batches of them."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)
