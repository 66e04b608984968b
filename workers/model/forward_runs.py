"""All adapters of a pass without a backward as one run: two kernels of our own for each group of linears, on a GPU.

Does not depend on models or the bank.

Main invariants: an adapter's results depend only on its rows and its matrices. Addresses are those of slabs at the
beginning of the pass, so slabs must not move while it runs.

Dimensions: T rows of the pass, N rows of a segment, L tiles, S adapters, D inputs, F outputs, R padded rank, G linears
in a group, P parts of a sum over D.
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
from workers.model.gpu_operations import TILE_ROWS, can_launch, has_triton
from workers.model.segments import Segment, SegmentRun
from workers.rows import AdapterViews, GroupViews

NUM_PARTS = 4
"""Parts of a sum over D: so many times more programs, where few rows would keep few processors busy."""


def can_run_forward(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels run on this device for a model in this dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16 and has_triton() and can_launch(device)


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
    def of(segments: Sequence[Segment], num_groups: int) -> AdapterTables[NDArray[Any]]:
        """Return the tables of segments of a pass, of a model with so many groups of linears."""
        adapters = list({id(segment.adapter): segment.adapter for segment in segments}.values())
        number_of = {id(adapter): number for number, adapter in enumerate(adapters)}
        tiles = [
            (start, min(TILE_ROWS, segment.stop - start), number_of[id(segment.adapter)])
            for segment in segments
            for start in range(segment.start, segment.stop, TILE_ROWS)
        ]
        addresses, ranks = _addresses(adapters, num_groups)
        return AdapterTables(
            addresses,
            np.array(tiles, np.int32).reshape(-1, 3),
            np.array(ranks, np.int32),
            np.array([adapter.scaling for adapter in adapters], np.float32),
            max(ranks, default=0),
        )


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
        made, device = AdapterTables.of(segments, len(adapter.slab)), adapter.device
        tables = AdapterTables(
            on_device(made.addresses, device),
            on_device(made.tiles, device),
            on_device(made.ranks, device),
            on_device(made.scalings, device),
            made.rank_max,
        )
        return cls(tables, [bool(own.any()) for own in made.addresses])

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """Add scaling x A_i^T B_i^T to ys[i] (T, F), from x (T, D); the columns of x and ys are adjacent."""
        if not self._is_adapted[group]:
            return
        tables = self._tables
        adapters = tables.addresses[group], tables.tiles, tables.ranks
        xa = x.new_empty(NUM_PARTS, len(x), len(ys) * tables.rank_max, dtype=torch.float32)
        torch.ops.tinkerpool.shrink(xa, x, *adapters, tables.scalings, len(ys))
        torch.ops.tinkerpool.expand(*[*ys, None, None][:3], xa, *adapters)

    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Never called: `forward` keeps nothing."""
        raise NotImplementedError


def forward_runs(segments: Sequence[Segment]) -> Sequence[SegmentRun]:
    """Return one run of all segments; none without segments. Implements `segments.Fuse`."""
    return [ForwardRun.of(segments)] if segments else []


def _addresses(adapters: Sequence[AdapterViews], num_groups: int) -> tuple[NDArray[np.int64], list[int]]:
    """Return the addresses (groups, S, 4) of each adapter's A and B^Ts, 0 where there is none, and its padded rank."""
    of_slab: dict[int, tuple[NDArray[np.int64], int, int]] = {}
    columns, ranks = list[NDArray[np.int64]](), list[int]()
    for adapter in adapters:
        if id(adapter.slab) not in of_slab:
            views = [views for views in adapter.slab if views is not None]
            row_bytes = views[0].A.stride(0) * views[0].A.element_size()
            rank = min(own.Bs[0].shape[1] for own in views)  # a group of experts may have a B^T of each, joined
            of_slab[id(adapter.slab)] = _first_addresses(adapter.slab), row_bytes, rank
        first, row_bytes, rank = of_slab[id(adapter.slab)]
        columns.append(np.where(first, first + adapter.slot * row_bytes, 0))
        ranks.append(rank)
    return np.stack([np.zeros((num_groups, 4), np.int64), *columns], axis=1)[:, 1:], ranks


def _first_addresses(slab: Sequence[GroupViews | None]) -> NDArray[np.int64]:
    """Return the addresses (groups, 4) of A and B^Ts in the first row of a slab."""
    found = np.zeros((len(slab), 4), np.int64)
    for addresses, views in zip(found, slab, strict=True):
        if views is not None:
            addresses[0] = views.A.data_ptr()
            addresses[1 : 1 + len(views.Bs)] = [B.data_ptr() for B in views.Bs]
    return found
