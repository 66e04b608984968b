"""All adapters of a pass as one run, on a GPU: two kernels of our own for each group of linears in the forward, three
in the backward.

Does not depend on models or the bank.

Main invariants: an adapter's results depend only on its rows and its matrices, and a segment's part of its gradients on
that segment. Addresses are those of slabs at the beginning of the pass, so slabs must not move while it runs.

Dimensions: T rows of the pass, N segments, L tiles, S adapters, D inputs, F outputs, R padded rank, G linears in a
group, M the largest G * R, P parts of a sum over D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.host.uploads import on_device
from workers.model.gpu_operations import TILE_ROWS, TRAINING_TILE_ROWS, has_kernels
from workers.model.segments import Segment, SegmentRun
from workers.rows import AdapterViews, GroupViews

NUM_PARTS = 4
"""Parts of a sum over D: so many times more programs, where few rows would keep few processors busy."""


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels run on this device for a model in this dtype."""
    return dtype == torch.bfloat16 and has_kernels(device)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterTables(Generic[T]):
    """Where the adapters of a pass are, as arrays of the host or tensors of the device."""

    addresses: T
    """(groups, S, 4) int64: of A and of each B^T; 0: there is none."""
    tiles: T
    """(L, 3) int32: first row, number of rows, adapter."""
    ranks: T
    """(S,) int32: padded."""
    scalings: T
    """(S,) fp32."""
    rank_max: int
    """0 without adapters."""

    @staticmethod
    def of(segments: Sequence[Segment], num_groups: int, tile_rows: int = TILE_ROWS) -> AdapterTables[NDArray[Any]]:
        """Return the tables of segments of a pass, of a model with so many groups of linears."""
        adapters = _adapters(segments)
        number_of = {id(adapter): number for number, adapter in enumerate(adapters)}
        tiles = [
            (start, min(tile_rows, segment.stop - start), number_of[id(segment.adapter)])
            for segment in segments
            for start in range(segment.start, segment.stop, tile_rows)
        ]
        addresses, ranks = _addresses(adapters, num_groups)
        return AdapterTables(
            addresses,
            np.array(tiles, np.int32).reshape(-1, 3),
            np.array(ranks, np.int32),
            np.array([adapter.scaling for adapter in adapters], np.float32),
            max(ranks, default=0),
        )

    def on(self: AdapterTables[NDArray[Any]], device: torch.device) -> AdapterTables[Tensor]:
        """Return the tables on a device."""
        arrays = self.addresses, self.tiles, self.ranks, self.scalings
        addresses, tiles, ranks, scalings = (on_device(array, device) for array in arrays)
        return AdapterTables(addresses, tiles, ranks, scalings, self.rank_max)


def padded(tables: AdapterTables[NDArray[Any]], num_adapters: int, num_tiles: int) -> AdapterTables[NDArray[Any]]:
    """Return tables with further adapters that adapt nothing, and further tiles without rows."""
    missing, no_tiles = num_adapters - len(tables.ranks), num_tiles - len(tables.tiles)
    return AdapterTables(
        np.pad(tables.addresses, ((0, 0), (0, missing), (0, 0))),
        np.pad(tables.tiles, ((0, no_tiles), (0, 0))),
        np.pad(tables.ranks, (0, missing)),
        np.pad(tables.scalings, (0, missing)),
        tables.rank_max,
    )


class ForwardRun:
    """Implements `segments.SegmentRun`, without a backward: segments anywhere in the pass, of any adapters."""

    def __init__(self, tables: AdapterTables[Tensor], is_adapted: Sequence[bool]) -> None:
        """Take tables on the device; `is_adapted`: whether any adapter adapts each group."""
        self._tables = tables
        self._is_adapted = is_adapted

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> ForwardRun:
        """Make the tables of segments, and send them to the adapters' device."""
        adapter = segments[0].adapter
        made = AdapterTables.of(segments, len(adapter.slab))
        return cls(made.on(adapter.device), [bool(own.any()) for own in made.addresses])

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """Add scaling x A_i^T B_i^T to ys[i] (T, F), from x (T, D); the columns of x and ys are adjacent."""
        if not self._is_adapted[group]:
            return
        tables = self._tables
        adapters = tables.addresses[group], tables.tiles, tables.ranks
        xa = x.new_empty(NUM_PARTS, len(x), len(ys) * tables.rank_max, dtype=torch.float32)
        torch.ops.tinkerpool.shrink(xa, x, *adapters, tables.scalings, len(ys), TILE_ROWS)
        torch.ops.tinkerpool.expand(*_three(ys), xa, *adapters, TILE_ROWS)

    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Never called: `forward` keeps nothing."""
        raise NotImplementedError


class TrainingRun:
    """Implements `segments.SegmentRun`: segments anywhere in the pass, of any adapters; those of one in row order."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Make the tables of segments, and send them to the adapters' device."""
        adapters, device = _adapters(segments), segments[0].adapter.device
        num_groups = len(adapters[0].slab)
        made = AdapterTables.of(segments, num_groups, TRAINING_TILE_ROWS)
        of_adapter: dict[int, list[tuple[int, int]]] = {id(adapter): [] for adapter in adapters}
        for segment in segments:
            of_adapter[id(segment.adapter)].append((segment.start, segment.stop - segment.start))
        firsts = np.cumsum([0, *map(len, of_adapter.values())])
        gradients, _ = _addresses(adapters, num_groups, of_gradients=True)
        self._tables = made.on(device)
        self._is_adapted = [bool(own.any()) for own in made.addresses]
        self._gradients = on_device(gradients, device)
        """(groups, S, 4) int64: addresses of the gradients."""
        rows = np.array([rows for own in of_adapter.values() for rows in own], np.int32)
        self._segments = on_device(rows, device)
        """(N, 2): first row and number of rows, by adapter."""
        self._firsts = on_device(firsts, device, torch.int32)
        """(S + 1,): the first segment of each adapter."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """See `SegmentRun`; returns the scaled x A^T (1, T, M), fp32. The columns of x and ys are adjacent."""
        if not self._is_adapted[group]:
            return None
        adapters, scalings = self._of(group)
        xa = x.new_empty(1, len(x), len(ys) * self._tables.rank_max, dtype=torch.float32)
        torch.ops.tinkerpool.shrink(xa, x, *adapters, scalings, len(ys), TRAINING_TILE_ROWS)
        torch.ops.tinkerpool.expand(*_three(ys), xa, *adapters, TRAINING_TILE_ROWS)
        return xa

    def backward(self, group: int, kept: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """See `SegmentRun`."""
        adapters, scalings = self._of(group)
        dys = [dy if dy.stride(1) == 1 else dy.contiguous() for dy in dys]
        dxa = torch.empty_like(kept[0])
        torch.ops.tinkerpool.shrink_outputs(dxa, *_three(dys), *adapters, scalings, TRAINING_TILE_ROWS)
        torch.ops.tinkerpool.add_gradients(
            x, *_three(dys), kept, dxa, self._gradients[group], self._segments, self._firsts, self._tables.ranks
        )
        if dx is not None:
            torch.ops.tinkerpool.expand_inputs(dx, dxa, *adapters, len(dys), TRAINING_TILE_ROWS)

    def _of(self, group: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the addresses of a group with tiles and ranks, and the scalings."""
        tables = self._tables
        return (tables.addresses[group], tables.tiles, tables.ranks), tables.scalings


def forward_runs(segments: Sequence[Segment]) -> Sequence[SegmentRun]:
    """Return one run of all segments; none without segments. Implements `segments.Fuse`, without a backward."""
    return [ForwardRun.of(segments)] if segments else []


def training_runs(segments: Sequence[Segment]) -> Sequence[SegmentRun]:
    """Return one run of all segments; none without segments. Implements `segments.Fuse`."""
    return [TrainingRun(segments)] if segments else []


def _three(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [*tensors, None, None][:3]


def _adapters(segments: Sequence[Segment]) -> list[AdapterViews]:
    """Return the adapters of segments, in the order in which they appear."""
    return list({id(segment.adapter): segment.adapter for segment in segments}.values())


def _addresses(
    adapters: Sequence[AdapterViews], num_groups: int, *, of_gradients: bool = False
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the addresses (groups, S, 4) of each adapter's A and B^Ts, 0 where there is none, and its padded rank.

    `of_gradients`: those of their gradients.
    """
    of_slab: dict[int, tuple[NDArray[np.int64], int, int]] = {}
    columns, ranks = list[NDArray[np.int64]](), list[int]()
    for adapter in adapters:
        if id(adapter.slab) not in of_slab:
            views = [views for views in adapter.slab if views is not None]
            matrix = views[0].A_grad if of_gradients else views[0].A
            assert matrix is not None, "a row of a sampler version has no gradient"
            row_bytes = matrix.stride(0) * matrix.element_size()
            rank = min(own.Bs[0].shape[1] for own in views)  # a group of experts may have a B^T of each, joined
            of_slab[id(adapter.slab)] = _first_addresses(adapter.slab, of_gradients=of_gradients), row_bytes, rank
        first, row_bytes, rank = of_slab[id(adapter.slab)]
        columns.append(np.where(first, first + adapter.slot * row_bytes, 0))
        ranks.append(rank)
    return np.stack([np.zeros((num_groups, 4), np.int64), *columns], axis=1)[:, 1:], ranks


def _first_addresses(slab: Sequence[GroupViews | None], *, of_gradients: bool) -> NDArray[np.int64]:
    """Return the addresses (groups, 4) of A and B^Ts, or of their gradients, in the first row of a slab."""
    found = np.zeros((len(slab), 4), np.int64)
    for addresses, views in zip(found, slab, strict=True):
        if views is not None:
            matrices = [views.A_grad, *views.B_grads] if of_gradients else [views.A, *views.Bs]
            addresses[: len(matrices)] = [matrix.data_ptr() for matrix in matrices if matrix is not None]
    return found
