"""Where rows of a pass go among experts, found on a GPU: nothing is read back, and no launch is one expert's.

The counterparts of `Dispatch`, `ExpertSegments` and `Shares` for a device with grouped matmul. A row's place follows
from counts: of all choices in row order, each expert's are numbered. So the rows are in the same order as on a CPU,
without padding. What an adapter adds is one grouped product of its own rows, sorted by expert.

Does not depend on the bank, on models, or on the formulas of a layer (`expert_products`).

Main invariant: a group of a grouped matmul has the rows that one adapter sends to one expert, and a sum over rows never
leaves it. The kernel may divide its work by all groups together, so an adapter's bits are not those that it has solo;
exact mode does without.

Dimensions: T rows of the pass, k experts of a row, E experts, F values of a row, A adapters of a part, N choices of a
part's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device
from workers.model.expert_products import Part, parts_of, summed_choices
from workers.model.segments import Routing, Segment
from workers.rows import GroupShape

VALUES_MULTIPLE = 8
"""The kernel needs rows that are multiples of 16 bytes apart, which are so many values in bf16."""
MAJOR_CAPABILITIES = (9, 10)
"""Compute capabilities of GPUs on which grouped matmul of bf16 is one kernel. On others the library loops and waits."""


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
        self.ranks = counted.gather(0, self.experts.unsqueeze(0)).squeeze(0)
        """(T k,) of each choice among its expert's, from 1."""
        places = self.ranks + (self.ends - counts - 1)[self.experts]
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


@dataclass(frozen=True, slots=True)
class _Group:
    """The choices of one adapter's rows, among those of its part."""

    begin: int
    stop: int
    slot: int
    """Of the adapter in its slab."""


@dataclass(slots=True)
class GroupedShares:
    """Implements `expert_products.Sharing`: the choices of all rows of a part, by adapter, then by expert."""

    part: int
    groups: Sequence[_Group]
    ends: Tensor
    """(A, E) int32: in each adapter's choices the one after the last of each expert."""
    rows: Tensor
    """(N,) where the choices are among all rows of experts."""
    rows_of_pass: Tensor
    """(N,)"""

    def of(self, tensor: Tensor) -> Tensor:
        """See `expert_products.Sharing`."""
        return tensor.index_select(0, self.rows)

    def of_pass(self, tensor: Tensor) -> Tensor:
        """See `expert_products.Sharing`."""
        return tensor.index_select(0, self.rows_of_pass)

    def times(self, values: Tensor, slab_matrices: Tensor, num_experts: int, *, is_transposed: bool = False) -> Tensor:
        """See `expert_products.Sharing`."""
        products, values = [], _adjacent(values)
        for group, ends in zip(self.groups, self.ends, strict=True):
            matrices = slab_matrices[group.slot].unflatten(0, (num_experts, -1))
            matrices = matrices.transpose(1, 2) if is_transposed else matrices
            products.append(F.grouped_mm(values[group.begin : group.stop], matrices, offs=ends))
        return products[0] if len(products) == 1 else torch.cat(products)

    def add_products(self, slab_gradients: Tensor, num_experts: int, left: Tensor, right: Tensor) -> None:
        """See `expert_products.Sharing`."""
        right = _adjacent(right)
        for group, ends in zip(self.groups, self.ends, strict=True):
            own = slice(group.begin, group.stop)
            product = F.grouped_mm(left[own].t(), right[own], offs=ends)
            slab_gradients[group.slot].unflatten(0, (num_experts, -1)).add_(product)

    def add_rows(self, target: Tensor, values: Tensor) -> None:
        """See `expert_products.Sharing`."""
        target.index_add_(0, self.rows, values)


@dataclass(frozen=True, slots=True)
class _Places:
    """The choices of a part's rows, on the device, for all layers."""

    groups: Sequence[_Group]
    choices: Tensor
    """(N,) of the T k choices of the pass, in row order."""
    adapters: Tensor
    """(N,) whose they are."""
    begins: Tensor
    """(A,) int32, the first of each adapter's among the N."""
    edges: Tensor
    """(2, A) the last choice before each adapter's, or any if there is none, and its own last one."""
    is_first: Tensor
    """(A,) whether there is none before."""


class GroupedSegments:
    """The segments of a pass whose adapters adapt the experts."""

    def __init__(self, routing: Routing, num_choices: int, gate_up: int, down: int) -> None:
        """Take the segments of a pass whose rows choose so many experts, and the groups of a layer."""
        merged = _merged(routing.segments)
        self.parts = parts_of(Routing((), 1), merged, gate_up, down)
        self._places = [_places(part, num_choices) for part in self.parts]

    def shares(self, dispatch: GroupedDispatch) -> list[GroupedShares]:
        """Return what the adapters send to the experts, part by part; called once, it drops the dispatch's counts."""
        counted, dispatch.counted = dispatch.counted, None
        assert counted is not None, "the shares of this dispatch were made already"
        return [_shares(number, places, dispatch, counted) for number, places in enumerate(self._places)]


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments in row order, adjacent ones of one adapter as one."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].stop == segment.start and merged[-1].adapter is segment.adapter:
            merged[-1] = Segment(merged[-1].start, segment.stop, segment.adapter)
        else:
            merged.append(segment)
    return merged


def _places(part: Part, num_choices: int) -> _Places:
    starts = np.array([segment.start for segment in part.segments]) * num_choices
    lengths = np.array([segment.stop - segment.start for segment in part.segments]) * num_choices
    begins = np.cumsum(lengths) - lengths
    adapters = np.repeat(np.arange(len(lengths)), lengths)
    choices = np.arange(lengths.sum()) + (starts - begins)[adapters]
    groups = [
        _Group(begin, begin + length, segment.adapter.slot)
        for begin, length, segment in zip(begins.tolist(), lengths.tolist(), part.segments, strict=True)
    ]
    device = part.segments[0].adapter.device
    edges = np.stack([np.maximum(starts - 1, 0), starts + lengths - 1])
    return _Places(
        groups=groups,
        choices=on_device(choices, device),
        adapters=on_device(adapters, device),
        begins=on_device(begins, device, torch.int32),
        edges=on_device(edges, device),
        is_first=on_device(starts == 0, device),
    )


def _shares(part: int, places: _Places, dispatch: GroupedDispatch, counted: Tensor) -> GroupedShares:
    before, upto = counted.index_select(1, places.edges.view(-1)).view(len(counted), 2, -1).unbind(1)  # (E, A)
    before = before.masked_fill(places.is_first, 0)
    counts = (upto - before).t()  # (A, E)
    ends = counts.cumsum(1, dtype=torch.int32)
    # A choice's place: behind its adapter's choices of lower experts, by its rank among the adapter's of its expert.
    shifts = ends - counts - before.t() + (places.begins - 1).unsqueeze(1)
    experts = dispatch.experts.index_select(0, places.choices)
    own = dispatch.ranks.index_select(0, places.choices) + shifts[places.adapters, experts]
    rows = torch.empty_like(own)
    rows[own] = dispatch.places.view(-1).index_select(0, places.choices)
    return GroupedShares(part, places.groups, ends, rows, dispatch.rows.index_select(0, rows))


def _adjacent(rows: Tensor) -> Tensor:
    """Return rows whose columns are adjacent; where gates are interleaved, they are every other column."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
