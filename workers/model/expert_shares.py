"""What adapters add to a layer of experts, by the library's products: rows that one segment sends to one expert are a
*share*, and shares of equal length a batch.

Does not depend on whole models, on the bank, or on how rows choose experts.

Main invariants: gradients add up over a share, padded by its own number of rows, so they do not depend on other shares.
A gradient that two segments of an adapter add to is added to in their order.

Dimensions: T rows of the pass, k experts of a row, P rows of all experts with their padding, D hidden size, F inner
size, E experts, R padded rank, N shares of a batch, L rows of a padded share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.host.uploads import on_device
from workers.model.expert_products import Dispatch, ExpertLayer, Ints
from workers.model.segments import Routing, Run, Segment
from workers.rows import GroupViews

SHARE_ROWS = 16
"""Shares are padded to a multiple of so many rows."""
SHARES_PER_DOUBLING = 4
"""Longer shares are padded to one of so many numbers between two powers of two: few, so that many shares are one batch,
and at most a quarter of padding."""
STRETCH_SHARES = 4
"""Shares for each stretch, from which on the stretches' matrices are multiplied in place: a call takes a while, too."""
WIDTH_MIN = 16
"""Columns of the narrowest buffer: rows are whole cache lines apart, or products depended on where a segment is."""


class Stretch(NamedTuple):
    """Shares of a batch whose matrices are adjacent in a slab: those of consecutive experts of one adapter."""

    shares: slice
    slot: int
    experts: slice


@dataclass(slots=True)
class Shares:
    """Shares of equal padded length, one batch, whose adapters are in one slab, ordered by adapter, then by expert.

    Each pair of adapter and expert is there at most once.
    """

    part: int
    """Which of the pass's parts they are of."""
    stretches: Sequence[Stretch] | None
    """All of them; None: they are many, and matrices are copied."""
    slots: Tensor
    """(N,) of the adapters in the slab."""
    experts: Tensor
    """(N,)."""
    rows: Tensor
    """(N L,) the rows among the experts' P; padding repeats the last of the share."""
    rows_of_pass: Tensor
    """(N L,) the rows of the pass."""
    own: Tensor
    """The rows of the batch that are no padding, as indices of `rows`."""
    own_rows: Tensor
    """The same among the experts' P."""
    padding: Tensor
    """(N, L, 1) true where a row is padding."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows (N, L, F) of (P, F)."""
        return tensor.index_select(0, self.rows).view(len(self.slots), -1, tensor.shape[-1])

    def of_pass(self, tensor: Tensor) -> Tensor:
        """Return the rows (N, L, F) of (T, F)."""
        return tensor.index_select(0, self.rows_of_pass).view(len(self.slots), -1, tensor.shape[-1])

    def times(self, values: Tensor, slab_matrices: Tensor, num_experts: int, *, is_transposed: bool = False) -> Tensor:
        """Return rows (N, L, ..) times their adapter's and expert's matrix (R, F), of a slab (S, E R, F)."""
        by_expert: Tensor = slab_matrices.unflatten(1, (num_experts, -1))  # (S, E, R, F)
        if is_transposed:
            by_expert = by_expert.transpose(2, 3)
        if self.stretches is None:
            return values @ by_expert[self.slots, self.experts]
        products = values.new_empty(*values.shape[:2], by_expert.shape[3])
        for shares, slot, experts in self.stretches:
            torch.bmm(values[shares], by_expert[slot, experts], out=products[shares])
        return products

    def add_products(self, slab_gradients: Tensor, num_experts: int, left: Tensor, right: Tensor) -> None:
        """Add left^T right (R, F) of each share to the gradients (S, E R, F) of a slab.

        No pair of adapter and expert is in a batch twice.
        """
        left = left.masked_fill(self.padding, 0).transpose(1, 2).to(slab_gradients.dtype)
        right = right.to(slab_gradients.dtype)
        by_expert: Tensor = slab_gradients.unflatten(1, (num_experts, -1))
        if self.stretches is None:
            gradients = by_expert[self.slots, self.experts]
            by_expert[self.slots, self.experts] = gradients.baddbmm_(left, right)
            return
        for shares, slot, experts in self.stretches:
            by_expert[slot, experts].baddbmm_(left[shares], right[shares])

    def add_rows(self, target: Tensor, values: Tensor) -> None:
        """Add the shares' rows (N, L, F) to those of (P, F).

        A row is in one share: copying sums back is faster than adding to rows with gaps.
        """
        sums = target.index_select(0, self.own_rows).add_(values.flatten(0, 1).index_select(0, self.own))
        target.index_copy_(0, self.own_rows, sums)


@dataclass(frozen=True, slots=True)
class Part:
    """The segments of a pass whose adapters are in one slab."""

    segments: list[Segment]
    runs: list[Run]
    rank: int


class ExpertSegments:
    """Implements `expert_products.AdaptersOfPass` from choices on the host."""

    def __init__(self, routing: Routing, num_rows: int, gate_up: int, down: int) -> None:
        """Take the segments of a pass of so many rows, and the groups of a layer, which stand for all layers."""
        self.parts = _parts(routing, gate_up, down)
        self._owners: Ints = np.full(num_rows, -1)
        """(T,) the number of the segment that a row is in, counted over all parts; -1: in none."""
        self._of_segment: list[tuple[int, int, int]] = []
        """Part, slot, and how many segments of the same adapter come before, of each segment."""
        for number, part in enumerate(self.parts):
            seen: dict[int, int] = {}
            for segment in part.segments:
                slot = segment.adapter.slot
                self._owners[segment.start : segment.stop] = len(self._of_segment)
                self._of_segment.append((number, slot, seen.get(slot, 0)))
                seen[slot] = seen.get(slot, 0) + 1

    def of_layer(self, layer: ExpertLayer, dispatch: Dispatch) -> SharesOfLayer | None:
        """See `expert_products.AdaptersOfPass`."""
        return SharesOfLayer(layer, dispatch, self.parts, self._shares(dispatch)) if self.parts else None

    def _shares(self, dispatch: Dispatch) -> list[Shares]:
        """Return what the segments send to the experts, in the order in which gradients are added."""
        owners = self._owners[dispatch.rows_of_pass]
        keys = dispatch.experts * (len(self._of_segment) + 1) + owners  # those of a share are equal and adjacent
        begins = np.flatnonzero(np.diff(keys, prepend=-2))
        lengths = np.diff(begins, append=len(keys))
        batches: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            if (owner := int(owners[begin])) < 0:
                continue
            part, slot, occurrence = self._of_segment[owner]
            share = slot, int(dispatch.experts[begin]), int(dispatch.sorted_places[begin]), length
            batches.setdefault((occurrence, part, share_rows(length)), []).append(share)
        return [
            _batch(part, num_rows, np.array(sorted(shares)), dispatch)
            for (_, part, num_rows), shares in sorted(batches.items())
        ]


def _parts(routing: Routing, gate_up: int, down: int) -> list[Part]:
    """Return the segments whose adapters adapt the experts, by slab."""
    by_slab: dict[int, list[Segment]] = {}
    for segment in routing.segments:
        if segment.adapter.groups[gate_up] is not None:
            by_slab.setdefault(id(segment.adapter.slab), []).append(segment)
    return [
        Part(own, routing.plain_runs(own), own[0].adapter.groups[down].Bs[0].shape[-2])  # type: ignore[union-attr]
        for own in by_slab.values()
    ]


def share_rows(length: int) -> int:
    """Return the rows to which a share is padded: they depend on its own number alone."""
    step = max(SHARE_ROWS, (1 << (length - 1).bit_length()) // 2 // SHARES_PER_DOUBLING)
    return -(-length // step) * step


def _batch(part: int, num_rows: int, shares: Ints, dispatch: Dispatch) -> Shares:
    device = dispatch.places.device
    slots, experts, begins, lengths = shares.T
    steps = np.arange(num_rows)
    is_own = steps < lengths[:, None]  # (N, L)
    rows = begins[:, None] + np.minimum(steps, lengths[:, None] - 1)
    rows_on_device = on_device(rows.reshape(-1), device)
    return Shares(
        part=part,
        stretches=_stretches(slots, experts),
        slots=on_device(slots, device),
        experts=on_device(experts, device),
        rows=rows_on_device,
        rows_of_pass=dispatch.rows.index_select(0, rows_on_device),
        own=on_device(np.flatnonzero(is_own), device),
        own_rows=on_device(rows[is_own], device),
        padding=on_device(~is_own[..., None], device),
    )


def _stretches(slots: Ints, experts: Ints) -> list[Stretch] | None:
    """Return the stretches of shares in their order; None: they are many."""
    begins = np.flatnonzero((np.diff(slots, prepend=-1) != 0) | (np.diff(experts, prepend=-2) != 1))
    if len(begins) * STRETCH_SHARES > len(slots):
        return None
    ends = [*begins[1:].tolist(), len(slots)]
    return [
        Stretch(slice(begin, end), int(slots[begin]), slice(int(experts[begin]), int(experts[end - 1]) + 1))
        for begin, end in zip(begins.tolist(), ends, strict=True)
    ]


class SharesOfLayer:
    """Implements `expert_products.AdaptersOfLayer`."""

    def __init__(self, layer: ExpertLayer, dispatch: Dispatch, parts: Sequence[Part], shares: Sequence[Shares]) -> None:
        self._layer, self._dispatch, self._parts, self._shares = layer, dispatch, parts, shares
        self._num_experts = len(layer.weights.gate_up)
        self._shrunk: list[Tensor] = []
        """s x A13^T (T, 2 R) of each part."""
        self._summed: list[Tensor] = []
        """s times the sum of w_j h_j A2^T (T, R) of each part."""

    def add_to_gates(self, x: Tensor, gates: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        self._shrunk = [self._shrunk_of(part, x) for part in self._parts]
        for share in self._shares:
            for values, half, Bs in zip(
                share.of_pass(self._shrunk[share.part]).chunk(2, -1),
                self._layer.weights.halves(gates),
                self._slab(share, self._layer.gate_up).Bs,
                strict=True,
            ):
                share.add_rows(half, share.times(values, Bs, self._num_experts))

    def add_to_output(self, hidden: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        for number, part in enumerate(self._parts):
            inner = _buffer(hidden, part.rank).zero_()
            for share in self._shares:
                if share.part == number:
                    A = self._slab(share, self._layer.down).A
                    share.add_rows(inner, share.times(share.of(hidden), A, self._num_experts, is_transposed=True))
            total = _wide(self._dispatch.sum_choices(inner, weights).to(out.dtype))
            for run in part.runs:
                views = run.views(self._layer.down)
                assert views is not None
                run.rows(total).mul_(run.adapters[0].scaling)
                run.add_product(total, views.Bs[0], out)
            self._summed.append(total)

    def backward_output(self, dout: Tensor, hidden: Tensor, row_weights: Tensor, dweighted: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        inner = [
            self._backward_outer(part, summed, dout) for part, summed in zip(self._parts, self._summed, strict=True)
        ]
        for share in self._shares:
            views = self._slab(share, self._layer.down)
            dinner = share.of_pass(inner[share.part])  # (N, L, R)
            share.add_rows(dweighted, share.times(dinner, views.A, self._num_experts))
            assert views.A_grad is not None, "a row of a sampler version has no gradient"
            share.add_products(views.A_grad, self._num_experts, dinner * share.of(row_weights), share.of(hidden))

    def backward_gates(self, x: Tensor, dgates: Tensor, dx: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        for number, part in enumerate(self._parts):
            dshrunk = _buffer(dgates, 2 * part.rank).zero_()
            for share in self._shares:
                if share.part == number:
                    self._backward_own(share, dgates, dshrunk)
            total = _wide(self._dispatch.sum_choices(dshrunk))
            for run in part.runs:
                run.rows(total).mul_(run.adapters[0].scaling)
            self._backward_shared(part, x, total, dx)

    def _shrunk_of(self, part: Part, x: Tensor) -> Tensor:
        """Return s x A13^T (T, 2 R); rows in no segment of the part are undefined."""
        shrunk = _buffer(x, 2 * part.rank)
        for run in part.runs:
            views = run.views(self._layer.gate_up)
            assert views is not None
            run.set_product(x, views.A.transpose(-2, -1), run.adapters[0].scaling, shrunk)
        return shrunk

    def _backward_outer(self, part: Part, summed: Tensor, dout: Tensor) -> Tensor:
        """Return the gradient (T, R) of the sum of w_j h_j A2^T; add that of B2."""
        dinner = _buffer(dout, part.rank)
        for run in part.runs:
            views = run.views(self._layer.down)
            assert views is not None
            run.set_product(dout, views.Bs[0].transpose(-2, -1), run.adapters[0].scaling, dinner)
            run.add_gradients(self._layer.down, None, [run.sum_over_rows(summed, dout)])
        return dinner

    def _backward_own(self, share: Shares, dgates: Tensor, dshrunk: Tensor) -> None:
        """Add the gradients of B1 and B3 of a batch of shares, and set those (P, 2 R) of s x A13^T."""
        views = self._slab(share, self._layer.gate_up)
        halves = zip(
            share.of_pass(self._shrunk[share.part]).chunk(2, -1),
            self._layer.weights.halves(share.of(dgates)),
            dshrunk.chunk(2, 1),
            views.Bs,
            views.B_grads,
            strict=True,
        )
        for values, dvalues, target, B, B_grad in halves:
            share.add_products(B_grad, self._num_experts, values, dvalues)
            share.add_rows(target, share.times(dvalues, B, self._num_experts, is_transposed=True))

    def _backward_shared(self, part: Part, x: Tensor, dshrunk: Tensor, dx: Tensor) -> None:
        """Add to the gradients of A13, and of x."""
        for run in part.runs:
            views = run.views(self._layer.gate_up)
            assert views is not None
            run.add_gradients(self._layer.gate_up, run.sum_over_rows(dshrunk, x), None)
            run.add_product(dshrunk, views.A, dx)

    def _slab(self, share: Shares, group: int) -> GroupViews:
        """Return the views of all rows of the slab that the adapters of a batch are in."""
        views = self._parts[share.part].segments[0].adapter.slab[group]
        assert views is not None
        return views


def _buffer(like: Tensor, width: int) -> Tensor:
    """Return an undefined (rows of `like`, width), whose rows are whole cache lines apart."""
    return like.new_empty(len(like), max(width, WIDTH_MIN))[:, :width]


def _wide(tensor: Tensor) -> Tensor:
    """Return (T, R) with rows that are whole cache lines apart."""
    return tensor if tensor.shape[1] >= WIDTH_MIN else _buffer(tensor, tensor.shape[1]).copy_(tensor)
