"""Where rows of a pass go among experts, found on a GPU, and what adapters add there, by kernels of our own: nothing is
read back, and no launch is one expert's or one adapter's.

The counterparts of `Dispatch` and `expert_shares` for a device with grouped matmul. A row's place follows from counts:
of all choices in row order, each expert's are numbered. So the rows are in the same order as on a CPU, without padding,
and those that a segment sends to an expert, a *group*, are adjacent: two counts of the expert say where.

Defining the operations imports no Triton (`gpu_operations`). Does not depend on the bank, on models, or on the formulas
of a layer (`expert_products`).

Main invariant: what an adapter adds to a row depends on that row, its expert and the adapter, and a sum over rows never
leaves a group. Grouped matmul may divide its work by all groups together, so an adapter's bits are not those that it
has solo; exact mode does without.

Dimensions: T rows of the pass, k experts of a row, P their T k choices, sorted by expert, D hidden size, F inner size,
E experts, N segments, S adapters, R padded rank, G matrices of an adapter and expert (1 or 2), M the largest G * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from workers.host.uploads import on_device
from workers.model.expert_products import ExpertLayer, summed_choices
from workers.model.fused_runs import FusedRun, TrainingRun, adapters_of
from workers.model.gpu_operations import define
from workers.model.segments import Routing, Segment
from workers.rows import GroupShape

VALUES_MULTIPLE = 8
"""The kernel needs rows that are multiples of 16 bytes apart, which are so many values in bf16."""
MAJOR_CAPABILITIES = (9, 10)
"""Compute capabilities of GPUs on which grouped matmul of bf16 is one kernel. On others the library loops and waits."""
COLUMNS = 64
"""Of a program of `EXPAND_EXPERTS` and of `ADD_EXPERT_GRADIENTS`."""

EXPAND_EXPERTS = (
    "expand_experts(Tensor(a!) y0, Tensor(b!)? y1, Tensor xa, Tensor rows, Tensor addresses, Tensor lasts, "
    "Tensor owners, Tensor ranks, int tile_rows)"
)
"""Add to y_i (P, F) the product of xa's row of the pass with M_i[e] (R, F), of each row's adapter and expert.

xa (parts, T, M), fp32, is summed over its parts. `rows` (P,): of the pass. `addresses` (S, G) int64, rows maybe with
gaps: of each M_i (E R, F) in the dtype of y; 0: not adapted, and nothing is written. `lasts` (E, N, 2) int32: the row
before each group's first, and its last. `owners` (N,) int32: each segment's adapter. `ranks` (S,) int32: R. Strides of
y0 and y1 are equal, of rows and columns.
"""
SHRINK_EXPERTS = (
    "shrink_experts(Tensor(a!) xa, Tensor y0, Tensor? y1, Tensor addresses, Tensor lasts, Tensor owners, Tensor ranks, "
    "Tensor scalings, int tile_rows)"
)
"""Set xa (P, M), fp32, to scaling y_i M_i[e]^T, from y_i (P, F); `scalings` (S,) fp32; the others as in
`EXPAND_EXPERTS`."""
ADD_EXPERT_GRADIENTS = (
    "add_expert_gradients(Tensor dy0, Tensor? dy1, Tensor xa, Tensor rows, Tensor? row_weights, Tensor gradients, "
    "Tensor lasts, Tensor firsts, Tensor ranks)"
)
"""Add the sum of w xa_i^T dy_i over the rows of each adapter and expert to the gradient of M_i[e], fp32.

dy_i (P, F), xa (T, M) fp32; w (P, 1) is `row_weights`, or 1. `gradients` as `addresses` in `EXPAND_EXPERTS`. Segments
are sorted by adapter, then by row; `firsts` (S + 1,) int32: the first one of each adapter, and their number.
"""
define("workers.model.expert_kernels", EXPAND_EXPERTS, SHRINK_EXPERTS, ADD_EXPERT_GRADIENTS)


def can_group(device: torch.device, shapes: Sequence[GroupShape]) -> bool:
    """Return whether grouped matmul is one kernel for experts of these shapes in bf16 on a GPU."""
    widths = [width for shape in shapes for width in (shape.d_in, *shape.d_outs)]
    is_supported = torch.cuda.get_device_capability(device)[0] in MAJOR_CAPABILITIES
    return is_supported and all(width % VALUES_MULTIPLE == 0 for width in widths)


class GroupedDispatch:
    """Implements `expert_products.Dispatching` on the device of the choices."""

    def __init__(self, choices: Tensor, num_experts: int) -> None:
        """Take the experts (T, k) that each row has chosen."""
        self.num_choices = choices.shape[1]
        self.experts = choices.reshape(-1)
        """(T k,)"""
        number = torch.arange(max(num_experts, len(self.experts)), dtype=torch.int32, device=choices.device)
        counted = (self.experts == number[:num_experts, None]).cumsum(1, dtype=torch.int32)
        self.counted: Tensor | None = counted
        """(E, T k) how many of the choices up to each one are of each expert; None: dropped, as it is large."""
        counts = counted[:, -1]
        self.ends = counts.cumsum(0, dtype=torch.int32)
        """(E,) the row after the last of each expert."""
        self.befores = self.ends - counts - 1
        """(E,) the row before the first of each expert."""
        ranks = counted.gather(0, self.experts.unsqueeze(0)).squeeze(0)  # from 1
        places = ranks + self.befores[self.experts]
        self.places = places.view(choices.shape)
        """(T, k) where each row's choices are."""
        self.sources = torch.empty_like(places)
        """(T k,) which of the choices a row is."""
        self.sources[places] = number[: len(places)]
        self.rows = self.sources // self.num_choices
        """(T k,) which row of the pass it is."""

    @cached_property
    def row_experts(self) -> Tensor:
        """See `expert_products.Dispatching`."""
        return self.experts.index_select(0, self.sources)

    def sum_choices(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `expert_products.Dispatching`."""
        return summed_choices(self.places, values, weights)


class GroupedSegments:
    """Implements `expert_products.AdaptersOfPass` on a device."""

    def __init__(self, routing: Routing, num_choices: int, gate_up: int) -> None:
        """Take the segments of a pass whose rows choose so many experts, and a group that stands for all experts."""
        self._segments: _Segments | None = None
        for run in routing.runs:  # one, or none without segments
            assert isinstance(run, FusedRun), "kernels of our own compute all segments"
            if run.is_adapted(gate_up):
                self._segments = _segments(run, routing.segments, num_choices)

    def of_layer(self, layer: ExpertLayer, dispatch: GroupedDispatch) -> GroupsOfLayer | None:
        """See `expert_products.AdaptersOfPass`; drops the dispatch's counts."""
        counted, dispatch.counted = dispatch.counted, None
        assert counted is not None, "the groups of this dispatch were found already"
        segments = self._segments
        if segments is None:
            return None
        of_edges = counted.index_select(1, segments.edges)  # (E, 2 N)
        lasts = torch.addcmul(dispatch.befores.unsqueeze(1), of_edges, segments.is_counted)
        return GroupsOfLayer(layer, dispatch, segments, lasts.unflatten(1, (-1, 2)))


@dataclass(frozen=True, slots=True)
class _Segments:
    """The segments of a pass on the device, for all layers: by adapter, then by row, adjacent ones as one."""

    run: FusedRun
    """Of their adapters."""
    edges: Tensor
    """(2 N,) the last choice before each segment's first, or any if there is none, and its last."""
    is_counted: Tensor
    """(2 N,) int32: 0 where there is no choice before a segment's first."""
    owners: Tensor
    """(N,) int32: each segment's adapter."""
    firsts: Tensor
    """(S + 1,) int32: the first segment of each adapter, and their number."""


def _segments(run: FusedRun, segments: Sequence[Segment], num_choices: int) -> _Segments:
    number_of = {id(adapter): number for number, adapter in enumerate(adapters_of(segments))}
    merged = sorted(_merged(segments), key=lambda segment: number_of[id(segment.adapter)])
    starts, stops = (
        num_choices * np.array([getattr(segment, name) for segment in merged]) for name in ("start", "stop")
    )
    owners = np.array([number_of[id(segment.adapter)] for segment in merged])
    edges = np.stack([np.maximum(starts, 1), stops], axis=1) - 1
    is_counted = np.stack([starts > 0, stops > 0], axis=1)
    firsts, device = np.searchsorted(owners, np.arange(len(number_of) + 1)), segments[0].adapter.device
    return _Segments(
        run=run,
        edges=on_device(edges.reshape(-1), device),
        is_counted=on_device(is_counted.reshape(-1), device, torch.int32),
        owners=on_device(owners, device, torch.int32),
        firsts=on_device(firsts, device, torch.int32),
    )


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments in row order, adjacent ones of one adapter as one."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].stop == segment.start and merged[-1].adapter is segment.adapter:
            merged[-1] = Segment(merged[-1].start, segment.stop, segment.adapter)
        else:
            merged.append(segment)
    return merged


class GroupsOfLayer:
    """Implements `expert_products.AdaptersOfLayer`: launches as many kernels whatever the adapters."""

    def __init__(self, layer: ExpertLayer, dispatch: GroupedDispatch, segments: _Segments, lasts: Tensor) -> None:
        """Take `lasts` (E, N, 2): see `EXPAND_EXPERTS`."""
        self._layer, self._dispatch, self._segments, self._lasts = layer, dispatch, segments, lasts
        self._run = segments.run
        self._shrunk: Tensor
        """s x A13^T (parts, T, M), fp32."""
        self._summed: Tensor
        """s times the sum of w_j h_j A2^T (1, T, R), fp32."""

    def add_to_gates(self, x: Tensor, gates: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        self._shrunk = self._run.shrunk(self._layer.gate_up, x, 2)
        self._expand(self._layer.weights.halves(gates), self._shrunk, self._outer_matrices(self._run.tables.addresses))

    def add_to_output(self, hidden: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        inner = self._shrink([hidden], self._inner_matrices(self._run.tables.addresses))
        self._summed = self._dispatch.sum_choices(inner, weights).unsqueeze(0)
        self._run.expand(self._layer.down, self._summed, [out])

    def backward_output(self, dout: Tensor, hidden: Tensor, row_weights: Tensor, dweighted: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        run, down = self._training_run, self._layer.down
        dinner = run.shrunk_outputs(down, [dout])  # (T, R)
        run.add_gradients(down, dout[:, :0], [dout], self._summed, dinner)  # of B2 alone
        self._expand([dweighted], dinner.unsqueeze(0), self._inner_matrices(run.tables.addresses))
        self._add_gradients([hidden], dinner, row_weights, self._inner_matrices(run.gradients.addresses))

    def backward_gates(self, x: Tensor, dgates: Tensor, dx: Tensor) -> None:
        """See `expert_products.AdaptersOfLayer`."""
        run, gate_up, halves = self._training_run, self._layer.gate_up, self._layer.weights.halves(dgates)
        self._add_gradients(halves, self._shrunk[0], None, self._outer_matrices(run.gradients.addresses))
        dshrunk = self._dispatch.sum_choices(self._shrink(halves, self._outer_matrices(run.tables.addresses)))  # (T, M)
        run.add_gradients(gate_up, x, [x[:, :0], x[:, :0]], self._shrunk, dshrunk)  # of A13 alone
        run.expand_inputs(gate_up, dx, dshrunk, 2)

    @property
    def _training_run(self) -> TrainingRun:
        assert isinstance(self._run, TrainingRun), "a pass without a backward"
        return self._run

    def _inner_matrices(self, addresses: Tensor) -> Tensor:
        """Return the addresses (S, 1) of A2, or of its gradients, of (groups, S, 4)."""
        return addresses[self._layer.down, :, :1]

    def _outer_matrices(self, addresses: Tensor) -> Tensor:
        """Return the addresses (S, 2) of B1 and B3, or of their gradients, of (groups, S, 4)."""
        return addresses[self._layer.gate_up, :, 1:3]

    def _expand(self, ys: Sequence[Tensor], xa: Tensor, addresses: Tensor) -> None:
        own, tables = self._segments, self._run.tables
        torch.ops.tinkerpool.expand_experts(
            *_two(ys), xa, self._dispatch.rows, addresses, self._lasts, own.owners, tables.ranks, self._run.tile_rows
        )

    def _shrink(self, ys: Sequence[Tensor], addresses: Tensor) -> Tensor:
        """Return s y_i M_i[e]^T (P, M)."""
        own, tables = self._segments, self._run.tables
        xa = ys[0].new_empty(len(ys[0]), len(ys) * tables.rank_max, dtype=torch.float32)
        torch.ops.tinkerpool.shrink_experts(
            xa, *_two(ys), addresses, self._lasts, own.owners, tables.ranks, tables.scalings, self._run.tile_rows
        )
        return xa

    def _add_gradients(self, dys: Sequence[Tensor], xa: Tensor, row_weights: Tensor | None, gradients: Tensor) -> None:
        ranks = self._run.tables.ranks
        torch.ops.tinkerpool.add_expert_gradients(
            *_two(dys), xa, self._dispatch.rows, row_weights, gradients, self._lasts, self._segments.firsts, ranks
        )


def _two(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [*tensors, None][:2]
