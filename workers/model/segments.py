"""The segments of a pass, each with one adapter: which of them are one batch, padded or fused, and their products.

For a row x of segment s:  y += scaling_s (x A_s^T) B_s^T.

Does not depend on the bank, on models or on losses.

Main invariants: without fused runs, the products of a segment depend only on that segment's rows, their number and its
adapter; it has the same bits as a matrix of its own or as one of a batch, which `selftest.row_invariance` tries. The
adapters of a run are rows of one slab at rising slots, and an adapter is in a run once. So an adapter's gradient is
added in the order of its segments.

Dimensions: T rows of the pass, N rows of a segment, S segments of a run, D inputs, F outputs, R padded rank, G linears
in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device
from workers.model.numerics import SUM_MAX
from workers.rows import AdapterViews, GroupViews


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of the pass belong to one adapter."""

    start: int
    stop: int
    adapter: AdapterViews
    is_set: bool = False
    """Whether the pass sets its adapter's gradients, whose memory may hold anything, instead of adding to them."""


class SegmentRun(Protocol):
    """Segments whose products are computed together: `Run`, `ShortRun`, `fused_runs.TrainingRun` or `ForwardRun`."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Any:
        """Add the adapters' part to ys (T, F), from x (T, D); return what `backward` needs.

        None: the group is not adapted, or the run has no backward.
        """

    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; `kept` is the result of `forward`."""


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive segments of equal length whose adapters are in one slab, at rising slots: one batch."""

    start: int
    length: int
    adapters: list[AdapterViews]
    num_padding: int = 0
    """Rows of zeros added to each segment of few rows, or its bits would depend on company and on threads."""
    in_parts: frozenset[int] = frozenset()
    """Groups whose sums are added up in parts; see `Numerics`."""

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

    def sum_max(self, group: int) -> int | None:
        """Return how many values products of a group's adapters add up at once; None: all."""
        return SUM_MAX if group in self.in_parts else None

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

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> tuple[GroupViews, Tensor] | None:
        """See `SegmentRun`; returns the adapters' views, and the scaled x A^T (N, G * R) or (S, N, G * R)."""
        views = self.views(group)
        if views is None:
            return None
        rows, outs, scaling = self.rows(x), [self.rows(y) for y in ys], self.adapters[0].scaling
        sum_max = self.sum_max(group)
        if not self.num_padding:
            return views, forward_segments(rows, outs, views, scaling, sum_max)
        padded = [self._padded(out) for out in outs]
        xa = forward_segments(self._padded(rows), padded, views, scaling, sum_max)
        for out, longer in zip(outs, padded, strict=True):
            out.copy_(self._own(longer))
        return views, self._own(xa)

    def backward(
        self, group: int, kept: tuple[GroupViews, Tensor], x: Tensor, dys: Sequence[Tensor], dx: Tensor | None
    ) -> None:
        """See `SegmentRun`."""
        views, xa = kept
        rows, douts, scaling = self.rows(x), [self.rows(dy) for dy in dys], self.adapters[0].scaling
        dx_rows, sum_max = None if dx is None else self.rows(dx), self.sum_max(group)
        if not self.num_padding:
            dA, dBs = backward_segments(rows, douts, dx_rows, xa, views, scaling, sum_max)
        else:
            longer = None if dx_rows is None else self._padded(dx_rows)
            douts = [self._padded(dout) for dout in douts]
            padded_rows, padded_xa = self._padded(rows), self._padded(xa)
            dA, dBs = backward_segments(padded_rows, douts, longer, padded_xa, views, scaling, sum_max)
            if dx_rows is not None and longer is not None:
                dx_rows.copy_(self._own(longer))
        self.add_gradients(group, dA, dBs)

    def set_product(self, left: Tensor, right: Tensor, scaling: float, out: Tensor) -> None:
        """Set this run's rows of out (T, F) to scaling left right; left (T, D), right (D, F) of each adapter.

        No trial tries these products, so sums are in parts if those of any group are.
        """
        rows, target, sum_max = self.rows(left), self.rows(out), SUM_MAX if self.in_parts else None
        if not self.num_padding:
            _multiply(target, rows, right, scaling, sum_max)
        else:
            longer = out.new_empty(*rows.shape[:-2], self.length + self.num_padding, out.shape[1])
            _multiply(longer, self._padded(rows), right, scaling, sum_max)
            target.copy_(self._own(longer))

    def add_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Add left right to this run's rows of out (T, F); left (T, D), right (D, F) of each adapter."""
        rows, target = self.rows(left), self.rows(out)
        if not self.num_padding:
            _add_product(target, rows, right)
        else:
            longer = self._padded(target)
            _add_product(longer, self._padded(rows), right)
            target.copy_(self._own(longer))

    def sum_over_rows(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left^T right (D, F) of each adapter; left (T, D), right (T, F)."""
        parts = [self._padded(rows) if self.num_padding else rows for rows in (self.rows(left), self.rows(right))]
        return parts[0].transpose(-2, -1) @ parts[1]

    def _padded(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, 0, self.num_padding))

    def _own(self, padded: Tensor) -> Tensor:
        """Return the rows that are no padding: a view."""
        return padded[..., : self.length, :]

    def add_gradients(self, group: int, dA: Tensor | None, dBs: Sequence[Tensor] | None) -> None:
        """Add to the adapters' gradients; shapes as in `views`. None: those are added elsewhere."""
        is_single = len(self.adapters) == 1
        views = (self.adapters[0].groups if is_single else self.adapters[0].slab)[group]
        assert views is not None
        assert views.A_grad is not None, "a row of a sampler version has no gradient"
        gradients = [] if dA is None else [(views.A_grad, dA)]
        gradients += [] if dBs is None else zip(views.B_grads, dBs, strict=True)
        rows = None if is_single else self._slab_rows()
        for gradient, value in gradients:
            if rows is None:
                gradient.add_(value)
            elif isinstance(rows, slice):
                gradient[rows].add_(value)
            else:
                gradient.index_add_(0, rows, value.to(gradient.dtype))

    def _slab_rows(self) -> slice | Tensor:
        """Return the adapters' rows of their slab: a slice if they are consecutive, else indices (S,)."""
        first, last = self.adapters[0].slot, self.adapters[-1].slot + 1
        if last - first == len(self.adapters):
            return slice(first, last)
        return on_device([adapter.slot for adapter in self.adapters], self.adapters[0].device)


class ShortRun:
    """Segments of few rows, anywhere in the pass, whose adapters are in one slab at rising slots: one batch.

    Each segment is padded to `rows_min` rows. Has no backward.
    """

    def __init__(self, segments: Sequence[Segment], rows_min: int, in_parts: frozenset[int]) -> None:
        self._run = Run(0, rows_min, [segment.adapter for segment in segments], in_parts=in_parts)
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
        device = segments[0].adapter.device
        self._gathered = on_device(gathered, device)
        """(S * rows_min,) rows of the pass, padding included."""
        self._positions, self._rows = on_device(positions, device), on_device(rows, device)
        """The rows that are no padding: positions in the batch, and rows of the pass."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """See `SegmentRun`."""
        views = self._run.views(group)
        if views is None:
            return
        scaling = self._run.adapters[0].scaling
        parts = [self._padded(y) for y in ys]
        forward_segments(self._padded(x), parts, views, scaling, self._run.sum_max(group))
        for y, part in zip(ys, parts, strict=True):
            if self._adjacent is not None:
                y[self._adjacent].view(len(part), self._length, -1).copy_(part[:, : self._length])
            else:
                y[self._rows] = part.flatten(0, 1)[self._positions]

    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Never called: `forward` keeps nothing."""
        raise NotImplementedError

    def _padded(self, tensor: Tensor) -> Tensor:
        """Return a copy of the segments' rows of (T, F), padded: (S, rows_min, F)."""
        if self._adjacent is None:
            return self._run.rows(tensor[self._gathered])
        rows = tensor[self._adjacent].view(-1, self._length, tensor.shape[1])
        return F.pad(rows, (0, 0, 0, self._rows_min - self._length))


class Fuse(Protocol):
    """Makes fused runs of a pass's segments."""

    def __call__(self, segments: Sequence[Segment], group: int | None = None) -> Sequence[SegmentRun]:
        """Return the runs; with `group`, they may be of use for that group alone."""


class Routing:
    """The segments of one pass, and their runs. Rows in no segment see only the base model.

    In a fused pass with a backward they hold anything, unless its tables have them (`AdapterTables.of`).
    Segments must not overlap and must be in row order. Those with fewer rows than `rows_min` are padded.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        rows_min: int,
        *,
        can_batch: bool = True,
        can_batch_short: bool = False,
        in_parts: frozenset[int] = frozenset(),
        fuse: Fuse | None = None,
        group: int | None = None,
    ) -> None:
        """Make runs; with `fuse`, it makes all, for `group` alone if given.

        `can_batch_short` is for passes without a backward.
        """
        self.segments = segments
        self.runs: list[SegmentRun] = []
        self._rows_min, self._can_batch, self._in_parts = rows_min, can_batch, in_parts
        if fuse is not None:
            self.runs += fuse(segments, group)
            return
        if can_batch and can_batch_short:
            segments = self._batch_short(segments, rows_min)
        self.runs += self.plain_runs(segments)

    @cached_property
    def single_runs(self) -> list[Run]:
        """A run for each segment, for linears whose batched products have other bits."""
        return [self._run(segment) for segment in self.segments]

    def plain_runs(self, segments: Sequence[Segment]) -> list[Run]:
        """Return the runs of segments of this pass, in row order, none of them fused."""
        runs: list[Run] = []
        end = 0
        for segment in segments:
            assert end <= segment.start < segment.stop, "segments overlap or are empty"
            end = segment.stop
            if not (self._can_batch and runs and runs[-1].try_add(segment)):
                runs.append(self._run(segment))
        return runs

    def _run(self, segment: Segment) -> Run:
        length = segment.stop - segment.start
        return Run(segment.start, length, [segment.adapter], max(0, self._rows_min - length), self._in_parts)

    def _batch_short(self, segments: Sequence[Segment], rows_min: int) -> list[Segment]:
        """Make runs of segments of few rows if several can be one batch; return the other segments."""
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
                self.runs.append(ShortRun(batch, rows_min, self._in_parts))
        return sorted(left, key=lambda segment: segment.start)


def forward_segments(
    x: Tensor, ys: Sequence[Tensor], views: GroupViews, scaling: float, sum_max: int | None = None
) -> Tensor:
    """Add scaling x A_i^T B_i^T to ys[i] (N, F) in place; return the scaled x A^T (N, G * R).

    Or the same for S segments, with S as the first dimension of everything. Products with A^T, and those with B in the
    backward, add up at most `sum_max` values at once, parts of longer sums in order; None: whole sums.
    """
    num_linears = len(ys)
    xa = x.new_empty(*x.shape[:-1], views.A.shape[-2])
    _multiply(xa, x, views.A.transpose(-2, -1), scaling, sum_max)
    parts = (xa,) if num_linears == 1 else xa.chunk(num_linears, dim=-1)  # (N, R) each
    for y, part, B in zip(ys, parts, views.Bs, strict=True):
        _add_product(y, part, B)
    return xa


def backward_segments(
    x: Tensor,
    dys: Sequence[Tensor],
    dx: Tensor | None,
    xa: Tensor,
    views: GroupViews,
    scaling: float,
    sum_max: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return dA (G * R, D) and per linear dB^T (R, F), and add to dx (N, D) if given; shapes as `forward_segments`.

    With y = s x A^T B^T:  dB^T = (s x A^T)^T dy,  dA = (s dy B)^T x,  dx = (s dy B) A.
    """
    rank = views.Bs[0].shape[-2]
    parts = (xa,) if len(dys) == 1 else xa.split(rank, dim=-1)  # (N, R) each
    dparts, dBs = [], []
    for dy, part, B in zip(dys, parts, views.Bs, strict=True):
        dpart = dy.new_empty(part.shape)  # (N, R)
        _multiply(dpart, dy, B.transpose(-2, -1), scaling, sum_max)
        dparts.append(dpart)
        dBs.append(part.transpose(-2, -1) @ dy)
    dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=-1)  # (N, G * R)
    dA = dxa.transpose(-2, -1) @ x
    if dx is not None:
        _add_product(dx, dxa, views.A)
    return dA, dBs


def _multiply(out: Tensor, left: Tensor, right: Tensor, scaling: float, sum_max: int | None) -> None:
    """Set out = scaling left right, of matrices or batches of them, adding at most `sum_max` values at once."""
    multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
    length = left.shape[-1]
    if sum_max is None or length <= sum_max:  # views of parts take as long as a small product
        multiply(out, left, right, beta=0.0, alpha=scaling, out=out)
        return
    for start in range(0, length, sum_max):
        part = slice(start, start + sum_max)
        multiply(out, left[..., part], right[..., part, :], beta=float(start > 0), alpha=scaling, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set out += left right, of matrices or batches of them."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)
