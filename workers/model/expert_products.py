"""The products of a layer of experts: rows sorted by expert, one product with the frozen weights for all tenants' rows,
and the adapters of each segment on the rows that its tokens send to an expert.

With w_j the weight of the j-th of k experts that a row x chooses, and e its number:

    g, u = x W_gu[e]^T + s (x A13^T) (B1[e]^T, B3[e]^T)
    h_j  = act(g) u
    y    = sum_j w_j h_j Wd[e]^T + s (sum_j w_j h_j A2[e]^T) B2^T

With biases, g, u and h_j Wd[e]^T have those of their expert on top. All experts of a layer share A13 (A of gate and
up) and B2; B1, B3 and A2 are each expert's own (*shared-outer* LoRA). The backward is written by hand, like that of a
linear: d(loss)/d(w_j) = h_j . d(loss)/d(w_j h_j) needs no output; the bias of Wd adds its product with d(loss)/dy.

Does not depend on whole models, on the bank, or on how rows choose experts.

Main invariants: a row's results depend on that row, its choices and its adapter. An expert's rows are padded to at
least `Numerics.expert_rows`, from which a product keeps a row's bits (`selftest.expert_invariance` finds it). Rows that
one segment sends to one expert are a *share*; gradients add up over a share, padded by its own number of rows, so they
do not depend on other shares. A gradient that two segments of an adapter add to is added to in their order.

Dimensions: T rows of the pass, k experts of a row, P rows of all experts with their padding, D hidden size, F inner
size, E experts, R padded rank, N shares of a batch, L rows of a padded share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device
from workers.model.segments import Routing, Run, Segment
from workers.rows import GroupViews

ROWS_MULTIPLE = 4
"""Rows of an expert are padded to a multiple of this, so that elementwise kernels work on whole vectors."""
SHARE_ROWS = 16
"""Shares are padded to a multiple of so many rows."""
SHARES_PER_DOUBLING = 4
"""Longer shares are padded to one of so many numbers between two powers of two: few, so that many shares are one batch,
and at most a quarter of padding."""
STRETCH_SHARES = 4
"""Shares for each stretch, from which on the stretches' matrices are multiplied in place: a call takes a while, too."""
WIDTH_MIN = 16
"""Columns of the narrowest buffer: rows are whole cache lines apart, or products depended on where a segment is."""
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


class Sharing(Protocol):
    """Shares whose adapters are in one slab, and their products. Their rows have one form: (..., F)."""

    @property
    def part(self) -> int:
        """Which of the segments' parts they are of."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shares' rows of (P, F)."""

    def of_pass(self, tensor: Tensor) -> Tensor:
        """Return the shares' rows of (T, F)."""

    def times(self, values: Tensor, slab_matrices: Tensor, num_experts: int, *, is_transposed: bool = False) -> Tensor:
        """Return rows times their adapter's and expert's matrix (R, F), of a slab (S, E R, F)."""

    def add_products(self, slab_gradients: Tensor, num_experts: int, left: Tensor, right: Tensor) -> None:
        """Add left^T right (R, F) of each share to the gradients (S, E R, F) of a slab."""

    def add_rows(self, target: Tensor, values: Tensor) -> None:
        """Add the shares' rows to those of (P, F)."""


class Stretch(NamedTuple):
    """Shares of a batch whose matrices are adjacent in a slab: those of consecutive experts of one adapter."""

    shares: slice
    slot: int
    experts: slice


@dataclass(slots=True)
class Shares:
    """Implements `Sharing`: shares of equal padded length, one batch; each pair of adapter and expert at most once.

    They are ordered by adapter, then by expert.
    """

    part: int
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
        """See `Sharing`: (N, L, F)."""
        return tensor.index_select(0, self.rows).view(len(self.slots), -1, tensor.shape[-1])

    def of_pass(self, tensor: Tensor) -> Tensor:
        """See `Sharing`: (N, L, F)."""
        return tensor.index_select(0, self.rows_of_pass).view(len(self.slots), -1, tensor.shape[-1])

    def times(self, values: Tensor, slab_matrices: Tensor, num_experts: int, *, is_transposed: bool = False) -> Tensor:
        """See `Sharing`."""
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
        """See `Sharing`: no pair of adapter and expert is in a batch twice."""
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
        """See `Sharing`. A row is in one share: copying sums back is faster than adding to rows with gaps."""
        sums = target.index_select(0, self.own_rows).add_(values.flatten(0, 1).index_select(0, self.own))
        target.index_copy_(0, self.own_rows, sums)


@dataclass(frozen=True, slots=True)
class Part:
    """The segments of a pass whose adapters are in one slab."""

    segments: list[Segment]
    runs: list[Run]
    rank: int


def parts_of(routing: Routing, segments: Sequence[Segment], gate_up: int, down: int) -> list[Part]:
    """Return the segments whose adapters adapt the experts, by slab; their runs are those of a routing.

    Of the groups of a layer, which stand for all layers.
    """
    by_slab: dict[int, list[Segment]] = {}
    for segment in segments:
        if segment.adapter.groups[gate_up] is not None:
            by_slab.setdefault(id(segment.adapter.slab), []).append(segment)
    return [
        Part(own, routing.plain_runs(own), own[0].adapter.groups[down].Bs[0].shape[-2])  # type: ignore[union-attr]
        for own in by_slab.values()
    ]


class SegmentsOfExperts(Protocol):
    """The segments of a pass whose adapters adapt the experts, and what they send there."""

    @property
    def parts(self) -> Sequence[Part]:
        """The segments by slab."""

    def shares(self, dispatch: Any) -> Sequence[Sharing]:
        """Return what the segments send to the experts, in the order in which gradients are added."""


class ExpertSegments:
    """Implements `SegmentsOfExperts` from choices on the host."""

    def __init__(self, routing: Routing, num_rows: int, gate_up: int, down: int) -> None:
        """Take the segments of a pass of so many rows, and the groups of a layer, which stand for all layers."""
        self.parts = parts_of(routing, routing.segments, gate_up, down)
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

    def shares(self, dispatch: Dispatch) -> list[Shares]:
        """See `SegmentsOfExperts`."""
        if not self.parts:
            return []
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


@dataclass(slots=True)
class Kept:
    """What a forward keeps for the backward, besides the input."""

    dispatch: Dispatching
    segments: SegmentsOfExperts
    shares: Sequence[Sharing]
    gates: Tensor
    """(P, 2 F) before the activation, adapters included."""
    shrunk: list[Tensor]
    """s x A13^T (T, 2 R) of each part."""
    summed: list[Tensor]
    """s times the sum of w_j h_j A2^T (T, R) of each part."""


class ExpertLayer:
    """The forward and the backward of a layer's experts."""

    def __init__(self, weights: ExpertWeights, gate_up: int, down: int) -> None:
        """Take the weights, and the indices of the groups of gate and up, and of down."""
        self._weights = weights
        self._gate_up, self._down = gate_up, down
        self._num_experts = len(weights.gate_up)

    def forward(
        self, x: Tensor, weights: Tensor, dispatch: Dispatching, segments: SegmentsOfExperts
    ) -> tuple[Tensor, Kept]:
        """Return the output (T, D) of x (T, D), whose choices have these weights (T, k)."""
        own, num_experts = self._weights, self._num_experts
        shares = segments.shares(dispatch)
        gates = grouped(x.index_select(0, dispatch.rows), own.gate_up.transpose(1, 2), dispatch, own.gate_up_bias)
        shrunk = [self._shrunk(part, x) for part in segments.parts]
        for share in shares:
            for values, half, Bs in zip(
                share.of_pass(shrunk[share.part]).chunk(2, -1),
                own.halves(gates),
                self._slab(segments, share, self._gate_up).Bs,
                strict=True,
            ):
                share.add_rows(half, share.times(values, Bs, num_experts))
        hidden = own.apply_gate(gates)
        out = dispatch.sum_choices(grouped(hidden, own.down.transpose(1, 2), dispatch, own.down_bias), weights)
        out = out.to(x.dtype)
        summed = []
        for number, part in enumerate(segments.parts):
            inner = _buffer(hidden, part.rank).zero_()
            for share in shares:
                if share.part == number:
                    A = self._slab(segments, share, self._down).A
                    share.add_rows(inner, share.times(share.of(hidden), A, num_experts, is_transposed=True))
            total = _wide(dispatch.sum_choices(inner, weights).to(x.dtype))
            for run in part.runs:
                views = run.views(self._down)
                assert views is not None
                run.rows(total).mul_(run.adapters[0].scaling)
                run.add_product(total, views.Bs[0], out)
            summed.append(total)
        return out, Kept(dispatch, segments, shares, gates, shrunk, summed)

    def backward(self, x: Tensor, weights: Tensor, kept: Kept, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (T, D) and of the weights (T, k); add those of the adapters to theirs."""
        own, num_experts, dispatch, segments = self._weights, self._num_experts, kept.dispatch, kept.segments
        inner = [self._backward_outer(part, kept.summed[number], dout) for number, part in enumerate(segments.parts)]
        with torch.enable_grad():
            gates = kept.gates.detach().requires_grad_()
            hidden = own.apply_gate(gates)
        values = hidden.detach()
        # The gradient of w_j h_j, from which follow those of w_j and h_j.
        dout_rows = dout.index_select(0, dispatch.rows)  # (P, D)
        dweighted = grouped(dout_rows, own.down, dispatch)
        row_weights = weights.reshape(-1).index_select(0, dispatch.sources)[:, None].to(x.dtype)  # (P, 1)
        for share in kept.shares:
            views = self._slab(segments, share, self._down)
            dinner = share.of_pass(inner[share.part])  # (N, L, R)
            share.add_rows(dweighted, share.times(dinner, views.A, num_experts))
            assert views.A_grad is not None, "a row of a sampler version has no gradient"
            share.add_products(views.A_grad, num_experts, dinner * share.of(row_weights), share.of(values))
        dweights = (values * dweighted).sum(1)  # (P,)
        if own.down_bias is not None:
            dweights += (dout_rows * own.down_bias.index_select(0, dispatch.row_experts)).sum(1)
        del dout_rows
        (dgates,) = torch.autograd.grad(hidden, gates, dweighted * row_weights)
        dx = dispatch.sum_choices(grouped(dgates, own.gate_up, dispatch))
        for number, part in enumerate(segments.parts):
            dshrunk = _buffer(dgates, 2 * part.rank).zero_()
            for share in kept.shares:
                if share.part == number:
                    self._backward_own(segments, share, kept, dgates, dshrunk)
            total = _wide(dispatch.sum_choices(dshrunk))
            for run in part.runs:
                run.rows(total).mul_(run.adapters[0].scaling)
            self._backward_shared(part, x, total, dx)
        return dx, dweights[dispatch.places].to(weights.dtype)

    def _shrunk(self, part: Part, x: Tensor) -> Tensor:
        """Return s x A13^T (T, 2 R); rows in no segment of the part are undefined."""
        shrunk = _buffer(x, 2 * part.rank)
        for run in part.runs:
            views = run.views(self._gate_up)
            assert views is not None
            run.set_product(x, views.A.transpose(-2, -1), run.adapters[0].scaling, shrunk)
        return shrunk

    def _backward_outer(self, part: Part, summed: Tensor, dout: Tensor) -> Tensor:
        """Return the gradient (T, R) of the sum of w_j h_j A2^T; add that of B2."""
        dinner = _buffer(dout, part.rank)
        for run in part.runs:
            views = run.views(self._down)
            assert views is not None
            run.set_product(dout, views.Bs[0].transpose(-2, -1), run.adapters[0].scaling, dinner)
            run.add_gradients(self._down, None, [run.sum_over_rows(summed, dout)])
        return dinner

    def _backward_own(
        self, segments: SegmentsOfExperts, share: Sharing, kept: Kept, dgates: Tensor, dshrunk: Tensor
    ) -> None:
        """Add the gradients of B1 and B3 of a batch of shares, and set those (P, 2 R) of s x A13^T."""
        views = self._slab(segments, share, self._gate_up)
        shrunk = share.of_pass(kept.shrunk[share.part])
        halves = zip(
            shrunk.chunk(2, -1),
            self._weights.halves(share.of(dgates)),
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
            views = run.views(self._gate_up)
            assert views is not None
            run.add_gradients(self._gate_up, run.sum_over_rows(dshrunk, x), None)
            run.add_product(dshrunk, views.A, dx)

    @staticmethod
    def _slab(segments: SegmentsOfExperts, share: Sharing, group: int) -> GroupViews:
        """Return the views of all rows of the slab that the adapters of a batch are in."""
        views = segments.parts[share.part].segments[0].adapter.slab[group]
        assert views is not None
        return views


def _buffer(like: Tensor, width: int) -> Tensor:
    """Return an undefined (rows of `like`, width), whose rows are whole cache lines apart."""
    return like.new_empty(len(like), max(width, WIDTH_MIN))[:, :width]


def _wide(tensor: Tensor) -> Tensor:
    """Return (T, R) with rows that are whole cache lines apart."""
    return tensor if tensor.shape[1] >= WIDTH_MIN else _buffer(tensor, tensor.shape[1]).copy_(tensor)


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
        segments: SegmentsOfExperts,
    ) -> Tensor:
        """Return (T, D)."""
        del anchor  # see `CurrentPass.anchor`
        out, ctx.kept = layer.forward(x, weights, dispatch, segments)
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
