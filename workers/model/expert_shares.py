"""What adapters add to a layer of experts, by the library's products: rows that one segment sends to one expert are a
*share*, and shares of equal length a batch.

Does not depend on whole models, on the bank, or on how rows choose experts.

Main invariants: gradients add up over a share, padded by its own number of rows, so they do not depend on other shares.
A gradient that two segments of an adapter add to is added to in their order.

Dimensions: T rows of the pass, k experts of a row, P rows of all experts with their padding, D hidden size, F inner
size, E experts, R padded rank, S slots of a slab, N shares of a batch, L rows of a padded share, M rows of all shares
of a slab with their padding, J without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class Share(NamedTuple):
    """The rows that a segment sends to an expert."""

    slot: int
    expert: int
    begin: int
    """The first one among the experts' P."""
    length: int


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
    padding: Tensor
    """(N, L, 1) true where a row is padding."""
    place: slice
    """Of these rows among those of all batches of the part."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows (N, L, F) of (P, F)."""
        return tensor.index_select(0, self.rows).view(len(self.slots), -1, tensor.shape[-1])

    def of_pass(self, tensor: Tensor) -> Tensor:
        """Return the rows (N, L, F) of (T, F)."""
        return tensor.index_select(0, self.rows_of_pass).view(len(self.slots), -1, tensor.shape[-1])

    def multiply(self, out: Tensor, values: Tensor, slab_matrices: Tensor, *, is_transposed: bool = False) -> None:
        """Set the batch's rows of `out` (M, ..) to rows (N, L, ..) times their adapter's and expert's matrix (R, F), of
        a slab (S, E, R, F)."""
        matrices = slab_matrices.transpose(2, 3) if is_transposed else slab_matrices
        products = out[self.place].view(*values.shape[:2], -1)
        if self.stretches is None:
            torch.bmm(values, matrices[self.slots, self.experts], out=products)
            return
        for shares, slot, experts in self.stretches:
            torch.bmm(values[shares], matrices[slot, experts], out=products[shares])

    def add_products(self, slab_gradients: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left^T right (R, F) of each share to the gradients (S, E, R, F) of a slab.

        No pair of adapter and expert is in a batch twice.
        """
        left = left.masked_fill(self.padding, 0).transpose(1, 2).to(slab_gradients.dtype)
        right = right.to(slab_gradients.dtype)
        if self.stretches is None:
            gradients = slab_gradients[self.slots, self.experts]
            slab_gradients[self.slots, self.experts] = gradients.baddbmm_(left, right)
            return
        for shares, slot, experts in self.stretches:
            slab_gradients[slot, experts].baddbmm_(left[shares], right[shares])


@dataclass(slots=True)
class SharesOfPart:
    """The shares of the adapters in one slab: M rows in all, padding included."""

    batches: Sequence[Shares]
    """In the order in which gradients are added."""
    own: Tensor
    """(J,) which of the M are no padding."""
    own_rows: Tensor
    """(J,) the same among the experts' P."""
    places: Tensor | None
    """(P,) each row's among the M; None: some rows are in no share."""

    def buffer(self, like: Tensor, width: int) -> Tensor:
        """Return an undefined (M, width)."""
        return like.new_empty(self.batches[-1].place.stop, width)

    def add_rows(self, target: Tensor, products: Tensor) -> None:
        """Add the products (M, F) of the shares' rows to those of (P, F)."""
        if self.places is not None:
            target.add_(products.index_select(0, self.places))
            return
        # A row is in one share: copying sums back is faster than adding to rows with gaps.
        sums = target.index_select(0, self.own_rows).add_(products.index_select(0, self.own))
        target.index_copy_(0, self.own_rows, sums)

    def set_rows(self, target: Tensor, products: Tensor) -> None:
        """Set the shares' rows of (P, R) to the products (M, R); no row in a segment reads the others."""
        if self.places is not None:
            torch.index_select(products, 0, self.places, out=target)
            return
        target.index_copy_(0, self.own_rows, products.index_select(0, self.own))


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

    def _shares(self, dispatch: Dispatch) -> list[SharesOfPart]:
        """Return what the segments of each part send to the experts."""
        owners = self._owners[dispatch.rows_of_pass]
        keys = dispatch.experts * (len(self._of_segment) + 1) + owners  # those of a share are equal and adjacent
        begins = np.flatnonzero(np.diff(keys, prepend=-2))
        lengths = np.diff(begins, append=len(keys))
        batches: list[dict[tuple[int, int], list[Share]]] = [{} for _ in self.parts]
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            if (owner := int(owners[begin])) < 0:
                continue
            part, slot, occurrence = self._of_segment[owner]
            share = Share(slot, int(dispatch.experts[begin]), int(dispatch.sorted_places[begin]), length)
            batches[part].setdefault((occurrence, share_rows(length)), []).append(share)
        return [_shares_of_part(of_part, dispatch) for of_part in batches]


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


def _shares_of_part(shares: Mapping[tuple[int, int], list[Share]], dispatch: Dispatch) -> SharesOfPart:
    """Take the shares by the number of earlier segments of their adapter, and by padded length."""
    device = dispatch.places.device
    batches, own, own_rows, num_before = [], [], [], 0
    for (_, num_rows), of_batch in sorted(shares.items()):
        slots, experts, begins, lengths = np.array(sorted(of_batch)).T
        steps = np.arange(num_rows)
        is_own = steps < lengths[:, None]  # (N, L)
        rows = begins[:, None] + np.minimum(steps, lengths[:, None] - 1)
        rows_on_device = on_device(rows.reshape(-1), device)
        batch = Shares(
            stretches=_stretches(slots, experts),
            slots=on_device(slots, device),
            experts=on_device(experts, device),
            rows=rows_on_device,
            rows_of_pass=dispatch.rows.index_select(0, rows_on_device),
            padding=on_device(~is_own[..., None], device),
            place=slice(num_before, num_before + rows.size),
        )
        batches.append(batch)
        own.append(num_before + np.flatnonzero(is_own))
        own_rows.append(rows[is_own])
        num_before += rows.size
    positions, targets, places = np.concatenate(own), np.concatenate(own_rows), None
    if len(targets) == len(dispatch.experts):
        places = np.zeros(len(dispatch.rows), np.int64)  # nothing reads what the experts' padding gets
        places[targets] = positions
    return SharesOfPart(
        batches=batches,
        own=on_device(positions, device),
        own_rows=on_device(targets, device),
        places=None if places is None else on_device(places, device),
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

    def __init__(
        self, layer: ExpertLayer, dispatch: Dispatch, parts: Sequence[Part], shares: Sequence[SharesOfPart]
    ) -> None:
        self._layer, self._dispatch, self._parts, self._shares = layer, dispatch, parts, shares
        self._num_experts = len(layer.weights.gate_up)
        self._shrunk: list[Tensor] = []
        """s x A13^T (T, 2 R) of each part."""
        self._summed: list[Tensor] = []
        """s times the sum of w_j h_j A2^T (T, R) of each part."""

    def add_to_gates(self, x: Tensor, gates: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        halves = self._layer.weights.halves(gates)
        for part, shares in zip(self._parts, self._shares, strict=True):
            shrunk = self._shrunk_of(part, x)
            self._shrunk.append(shrunk)
            views = self._slab(part, self._layer.gate_up)
            values = [batch.of_pass(shrunk) for batch in shares.batches]
            for number, (half, B) in enumerate(zip(halves, views.Bs, strict=True)):
                products = shares.buffer(gates, half.shape[1])
                for batch, own in zip(shares.batches, values, strict=True):
                    batch.multiply(products, own.chunk(2, -1)[number], self._by_expert(B))
                shares.add_rows(half, products)

    def add_to_output(self, hidden: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        for part, shares in zip(self._parts, self._shares, strict=True):
            A = self._by_expert(self._slab(part, self._layer.down).A)
            products = shares.buffer(hidden, part.rank)
            for batch in shares.batches:
                batch.multiply(products, batch.of(hidden), A, is_transposed=True)
            inner = _buffer(hidden, len(hidden), part.rank)
            shares.set_rows(inner, products)
            total = _wide(self._dispatch.sum_choices(inner, weights).to(out.dtype))
            for run in part.runs:
                views = run.views(self._layer.down)
                assert views is not None
                run.rows(total).mul_(run.adapters[0].scaling)
                run.add_product(total, views.Bs[0], out)
            self._summed.append(total)

    def backward_output(self, dout: Tensor, hidden: Tensor, row_weights: Tensor, dweighted: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        for part, shares, summed in zip(self._parts, self._shares, self._summed, strict=True):
            inner = self._backward_outer(part, summed, dout)
            views = self._slab(part, self._layer.down)
            assert views.A_grad is not None, "a row of a sampler version has no gradient"
            A, A_grad = self._by_expert(views.A), self._by_expert(views.A_grad)
            products = shares.buffer(dweighted, dweighted.shape[1])
            for batch in shares.batches:
                dinner = batch.of_pass(inner)  # (N, L, R)
                batch.multiply(products, dinner, A)
                batch.add_products(A_grad, dinner * batch.of(row_weights), batch.of(hidden))
            shares.add_rows(dweighted, products)

    def backward_gates(self, x: Tensor, dgates: Tensor, dx: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        for part, shares, shrunk in zip(self._parts, self._shares, self._shrunk, strict=True):
            dshrunk = self._backward_own(part, shares, shrunk, dgates)
            total = _wide(self._dispatch.sum_choices(dshrunk))
            for run in part.runs:
                run.rows(total).mul_(run.adapters[0].scaling)
            self._backward_shared(part, x, total, dx)

    def _shrunk_of(self, part: Part, x: Tensor) -> Tensor:
        """Return s x A13^T (T, 2 R); rows in no segment of the part are undefined."""
        shrunk = _buffer(x, len(x), 2 * part.rank)
        for run in part.runs:
            views = run.views(self._layer.gate_up)
            assert views is not None
            run.set_product(x, views.A.transpose(-2, -1), run.adapters[0].scaling, shrunk)
        return shrunk

    def _backward_outer(self, part: Part, summed: Tensor, dout: Tensor) -> Tensor:
        """Return the gradient (T, R) of the sum of w_j h_j A2^T; add that of B2."""
        dinner = _buffer(dout, len(dout), part.rank)
        for run in part.runs:
            views = run.views(self._layer.down)
            assert views is not None
            run.set_product(dout, views.Bs[0].transpose(-2, -1), run.adapters[0].scaling, dinner)
            run.add_gradients(self._layer.down, None, [run.sum_over_rows(summed, dout)])
        return dinner

    def _backward_own(self, part: Part, shares: SharesOfPart, shrunk: Tensor, dgates: Tensor) -> Tensor:
        """Add the gradients of B1 and B3; return those (P, 2 R) of s x A13^T."""
        views = self._slab(part, self._layer.gate_up)
        dshrunk = _buffer(dgates, len(dgates), 2 * part.rank)
        taken = [(batch.of_pass(shrunk), batch.of(dgates)) for batch in shares.batches]
        for number, (B, B_grad) in enumerate(zip(views.Bs, views.B_grads, strict=True)):
            products = shares.buffer(dgates, part.rank)
            for batch, (values, dvalues) in zip(shares.batches, taken, strict=True):
                value, dvalue = values.chunk(2, -1)[number], self._layer.weights.halves(dvalues)[number]
                batch.add_products(self._by_expert(B_grad), value, dvalue)
                batch.multiply(products, dvalue, self._by_expert(B), is_transposed=True)
            shares.set_rows(dshrunk.chunk(2, 1)[number], products)
        return dshrunk

    def _backward_shared(self, part: Part, x: Tensor, dshrunk: Tensor, dx: Tensor) -> None:
        """Add to the gradients of A13, and of x."""
        for run in part.runs:
            views = run.views(self._layer.gate_up)
            assert views is not None
            run.add_gradients(self._layer.gate_up, run.sum_over_rows(dshrunk, x), None)
            run.add_product(dshrunk, views.A, dx)

    def _slab(self, part: Part, group: int) -> GroupViews:
        """Return the views of all rows of the slab that the adapters of a part are in."""
        views = part.segments[0].adapter.slab[group]
        assert views is not None
        return views

    def _by_expert(self, slab_matrices: Tensor) -> Tensor:
        """Return the view (S, E, R, F) of (S, E R, F)."""
        by_expert: Tensor = slab_matrices.unflatten(1, (self._num_experts, -1))
        return by_expert


def _buffer(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Return an undefined (num_rows, width), whose rows are whole cache lines apart."""
    return like.new_empty(num_rows, max(width, WIDTH_MIN))[:, :width]


def _wide(tensor: Tensor) -> Tensor:
    """Return (T, R) with rows that are whole cache lines apart."""
    return tensor if tensor.shape[1] >= WIDTH_MIN else _buffer(tensor, *tensor.shape).copy_(tensor)
