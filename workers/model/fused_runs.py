"""All adapters of a pass as one run, on a GPU: two kernels of our own for each group of linears in the forward, three
in the backward. One of them each way applies the gate, too, where an MLP has one. With few rows the first kernel is
the product with frozen weights (`few_rows`). Kernels that read logits do a part for the unembedding's adapters
(`PendingAdapters`).

Does not depend on models or the bank.

Main invariants: an adapter's results depend only on its rows and its matrices, and a segment's part of its gradients on
that segment. Addresses are those of slabs at the beginning of the pass, so slabs must not move while it runs.

Dimensions: T rows of the pass, N pieces of segments, L tiles, S adapters, D inputs, F outputs, R padded rank, G linears
in a group, M the largest G * R.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.host.input_block import Shape
from workers.host.uploads import all_on_device
from workers.model.gpu_operations import (
    GRADIENT_DEPTH,
    TILE_ROWS,
    TRAINING_TILE_ROWS,
    dense,
    has_kernels,
    num_arrivals,
    parts_of,
)
from workers.model.segments import Segment, SegmentRun
from workers.rows import AdapterViews

NUM_PARTS = 4
"""Parts of a sum over D without a backward: so many times more programs, where few rows would keep few processors
busy."""


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
    """(L, 3) int32; see `gpu_operations.SHRINK`."""
    ranks: T
    """(S,) int32: padded."""
    scalings: T
    """(S,) fp32."""
    rank_max: int
    """0 without adapters."""

    @staticmethod
    def of(
        segments: Sequence[Segment], num_groups: int, tile_rows: int = TILE_ROWS, num_rows: int = 0
    ) -> AdapterTables[NDArray[Any]]:
        """Return the tables of a pass's segments, which are in row order, of a model with so many groups of linears.

        Of the first `num_rows` rows, those without an adapter have tiles, too: some kernels do something with all rows.
        """
        adapters = adapters_of(segments)
        number_of = {id(adapter): number for number, adapter in enumerate(adapters)}
        tiles = [
            (start, min(tile_rows, segment.stop - start), number_of[id(segment.adapter)])
            for segment in segments
            for start in range(segment.start, segment.stop, tile_rows)
        ]
        tiles += [
            (start, -min(tile_rows, gap.stop - start), 0)
            for gap in _gaps(segments, num_rows)
            for start in gap[::tile_rows]
        ]
        ranks = [adapter.padded_rank for adapter in adapters]
        return AdapterTables(
            _addresses([adapter.addresses for adapter in adapters], num_groups),
            np.array(tiles, np.int32).reshape(-1, 3),
            np.array(ranks, np.int32),
            np.array([adapter.scaling for adapter in adapters], np.float32),
            max(ranks, default=0),
        )

    def on(self: AdapterTables[NDArray[Any]], device: torch.device) -> AdapterTables[Tensor]:
        """Return the tables on a device."""
        arrays = [self.addresses, self.tiles, self.ranks, self.scalings]
        addresses, tiles, ranks, scalings = all_on_device(arrays, device)
        return AdapterTables(addresses, tiles, ranks, scalings, self.rank_max)

    @staticmethod
    def shapes(num_groups: int, num_adapters: int, num_tiles: int) -> list[Shape]:
        """Return types and shapes of addresses, tiles, ranks and scalings, for an `InputBlock`."""
        return [
            (np.int64, (num_groups, num_adapters, 4)),
            (np.int32, (num_tiles, 3)),
            (np.int32, (num_adapters,)),
            (np.float32, (num_adapters,)),
        ]

    def write(self: AdapterTables[NDArray[Any]], targets: Sequence[NDArray[Any]]) -> None:
        """Write to zeros of `shapes`: further adapters adapt nothing, and further tiles have no rows."""
        addresses, tiles, ranks, scalings = targets
        num_adapters = len(self.ranks)
        addresses[:, :num_adapters] = self.addresses
        tiles[: len(self.tiles)] = self.tiles
        ranks[:num_adapters], scalings[:num_adapters] = self.ranks, self.scalings


@dataclass(frozen=True, slots=True)
class GradientTables(Generic[T]):
    """Where the gradients of a pass's adapters are, as arrays of the host or tensors of the device."""

    addresses: T
    """(groups, S, 4) int64: of those of A and of each B^T; 0: there is none."""
    pieces: T
    """(N, 3) int32; see `gpu_operations.ADD_GRADIENTS`."""
    firsts: T
    """(S + 1,) int32: the first piece of each adapter, and their number."""
    are_set: T
    """(S,) int32: 1 for adapters whose gradients the pass sets instead of adding to them."""
    arrivals: T
    """Zeros, int32; see `gpu_operations.SHRINK`."""
    num_set: int = 0
    """Of `are_set`."""

    @staticmethod
    def of(segments: Sequence[Segment], tables: AdapterTables[NDArray[Any]]) -> GradientTables[NDArray[Any]]:
        """Return the tables of segments of a pass, whose other tables are given; an adapter's are in row order."""
        adapters = adapters_of(segments)
        of_adapter: dict[int, list[tuple[int, int, bool]]] = {id(adapter): [] for adapter in adapters}
        for segment in segments:
            of_adapter[id(segment.adapter)].extend(_pieces(segment))
        addresses = _addresses([adapter.gradient_addresses for adapter in adapters], len(tables.addresses))
        pieces = np.array([piece for own in of_adapter.values() for piece in own], np.int32).reshape(-1, 3)
        firsts = np.cumsum([0, *map(len, of_adapter.values())], dtype=np.int32)
        set_adapters = {id(segment.adapter) for segment in segments if segment.is_set}
        are_set = np.array([id(adapter) in set_adapters for adapter in adapters], np.int32)
        arrivals = np.zeros(num_arrivals(len(tables.tiles), tables.rank_max), np.int32)
        return GradientTables(addresses, pieces, firsts, are_set, arrivals, len(set_adapters))

    @staticmethod
    def shapes(num_groups: int, num_adapters: int, num_pieces: int) -> list[Shape]:
        """Return types and shapes of addresses, pieces, firsts and `are_set`, for an `InputBlock`."""
        return [
            (np.int64, (num_groups, num_adapters, 4)),
            (np.int32, (num_pieces, 3)),
            (np.int32, (num_adapters + 1,)),
            (np.int32, (num_adapters,)),
        ]

    def write(self: GradientTables[NDArray[Any]], targets: Sequence[NDArray[Any]]) -> None:
        """Write to zeros of `shapes`: further adapters have no pieces, and further pieces are no adapter's."""
        addresses, pieces, firsts, are_set = targets
        num_adapters = self.addresses.shape[1]
        addresses[:, :num_adapters] = self.addresses
        pieces[: len(self.pieces)] = self.pieces
        firsts[:num_adapters], firsts[num_adapters:] = self.firsts[:-1], self.firsts[-1]
        are_set[:num_adapters] = self.are_set


class FusedRun(ABC):
    """Implements `segments.SegmentRun`: segments anywhere in the pass, of any adapters."""

    tile_rows: ClassVar[int]
    """See `gpu_operations.SHRINK`."""

    def __init__(self, tables: AdapterTables[Tensor], is_adapted: Sequence[bool], first_group: int = 0) -> None:
        """Take tables on the device, of groups from `first_group` on; `is_adapted`: whether any adapter adapts each."""
        self.tables = tables
        self._is_adapted = is_adapted
        self._first_group = first_group

    def is_adapted(self, group: int) -> bool:
        """Return whether any adapter adapts a group."""
        return self._is_adapted[group - self._first_group]

    @abstractmethod
    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Any:
        """See `SegmentRun`; the columns of x and ys are adjacent."""

    @abstractmethod
    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """See `SegmentRun`."""

    @abstractmethod
    def shrunk(self, group: int, x: Tensor, num_linears: int) -> Tensor:
        """Return scaling x A^T (parts, T, M), fp32, from x (T, D)."""

    def expand(self, group: int, xa: Tensor, ys: Sequence[Tensor]) -> None:
        """Add the sum of the parts of xa times B_i^T to ys[i] (T, F)."""
        torch.ops.tinkerpool.expand(*_three(ys), xa, *self.of_group(group), self.tile_rows)

    def expand_gate(self, group: int, xa: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """Do as `expand`, in one part, with gate and up of gate_up (T, 2 F); set out (T, F) to silu(gate) * up.

        In one kernel. Rows of no tile are not written.
        """
        torch.ops.tinkerpool.expand_gate(out, gate_up, xa, *self.of_group(group), self.tile_rows)

    def of_group(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the addresses of a group, with tiles and ranks."""
        return self.tables.addresses[group - self._first_group], self.tables.tiles, self.tables.ranks


class ForwardRun(FusedRun):
    """A run without a backward."""

    tile_rows = TILE_ROWS

    def __init__(
        self, tables: AdapterTables[Tensor], is_adapted: Sequence[bool], *, has_all_rows: bool = False
    ) -> None:
        """See `FusedRun`; `has_all_rows`: whether rows without an adapter have tiles, too."""
        super().__init__(tables, is_adapted)
        self.has_all_rows = has_all_rows

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> ForwardRun:
        """Make the tables of segments, and send them to the adapters' device."""
        adapter = segments[0].adapter
        made = AdapterTables.of(segments, len(adapter.slab))
        return cls(made.on(adapter.device), [bool(own.any()) for own in made.addresses])

    @classmethod
    def of_nothing(cls, num_rows: int, num_groups: int, device: torch.device) -> ForwardRun:
        """Return the run of an adapter that adapts nothing, for trials: all kernels run, and change nothing."""
        rank = 8
        own_rows = [(start, min(TILE_ROWS, num_rows - start), 0) for start in range(0, num_rows, TILE_ROWS)]
        arrays: list[NDArray[Any]] = [np.zeros((num_groups, 1, 4), np.int64), np.array(own_rows, np.int32)]
        arrays += [np.full(1, rank, np.int32), np.ones(1, np.float32)]
        addresses, tiles, ranks, scalings = all_on_device(arrays, device)
        tables = AdapterTables(addresses, tiles, ranks, scalings, rank)
        return cls(tables, [True] * num_groups, has_all_rows=True)

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> None:
        """See `FusedRun`."""
        if self.is_adapted(group):
            self.expand(group, self.shrunk(group, x, len(ys)), ys)

    def shrunk(self, group: int, x: Tensor, num_linears: int) -> Tensor:
        """See `FusedRun`; in several parts."""
        addresses, tables = self.of_group(group), self.tables
        xa = x.new_empty(NUM_PARTS, len(x), num_linears * tables.rank_max, dtype=torch.float32)
        torch.ops.tinkerpool.shrink(xa, None, None, x, *addresses, tables.scalings, num_linears, self.tile_rows)
        return xa

    def backward(self, group: int, kept: Any, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Never called: `forward` keeps nothing."""
        raise NotImplementedError


class TrainingRun(FusedRun):
    """A run with a backward; the segments of an adapter are in row order."""

    tile_rows = TRAINING_TILE_ROWS

    def __init__(
        self,
        tables: AdapterTables[Tensor],
        gradients: GradientTables[Tensor],
        is_adapted: Sequence[bool],
        first_group: int = 0,
    ) -> None:
        """See `FusedRun`."""
        super().__init__(tables, is_adapted, first_group)
        self.gradients = gradients
        self._begun: set[int] = set()
        """Groups whose gradients have been set or added to."""

    @classmethod
    def of(cls, segments: Sequence[Segment], group: int | None = None) -> TrainingRun:
        """Make the tables of segments, of one group or of all, and send them to the adapters' device together."""
        adapter = segments[0].adapter
        made = AdapterTables.of(segments, len(adapter.slab), cls.tile_rows)
        gradients = GradientTables.of(segments, made)
        groups = slice(None) if group is None else slice(group, group + 1)
        is_adapted = [bool(own.any()) for own in made.addresses[groups]]
        arrays = [made.addresses[groups], made.tiles, made.ranks, made.scalings]
        arrays += [gradients.addresses[groups], gradients.pieces, gradients.firsts]
        arrays += [gradients.are_set, gradients.arrivals]
        addresses, tiles, ranks, scalings, *of_gradients = all_on_device(arrays, adapter.device)
        tables = AdapterTables(addresses, tiles, ranks, scalings, made.rank_max)
        slots, pieces, firsts, are_set, arrivals = of_gradients
        own = GradientTables(slots, pieces, firsts, are_set, arrivals, gradients.num_set)
        return cls(tables, own, is_adapted, group or 0)

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """See `FusedRun`; returns the scaled x A^T (1, T, M), fp32."""
        if not self.is_adapted(group):
            return None
        xa = self.shrunk(group, x, len(ys))
        self.expand(group, xa, ys)
        return xa

    def backward(self, group: int, kept: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """See `SegmentRun`."""
        dxa = self._backward_to_ranks(group, kept, x, dys)
        if dx is not None:
            self.expand_inputs(group, dx, dxa, len(dys))

    def pending(self, group: int, x: Tensor) -> PendingAdapters | None:
        """Return the adapters of a group of one linear, which reads x (T, D); None: no adapter adapts it."""
        return PendingAdapters(self, group, self.shrunk(group, x, 1)) if self.is_adapted(group) else None

    def forward_gate(self, group: int, x: Tensor, gate_up: Tensor, out: Tensor) -> Tensor:
        """Do as `forward` with gate and up of gate_up (T, 2 F), and set out (T, F) to silu(gate) * up, in one kernel.

        Rows of no tile are not written.
        """
        xa = self.shrunk(group, x, 2)
        self.expand_gate(group, xa, gate_up, out)
        return xa

    def backward_gate(
        self, group: int, kept: Tensor, x: Tensor, dy: Tensor, dx: Tensor, gate_up: Tensor, dgate_up: Tensor
    ) -> None:
        """Do as `backward` with the linear that reads the gate's output, and set dgate_up (T, 2 F), in one kernel.

        `dx` (T, F) is not written, nor are rows of no tile.
        """
        dxa = self._backward_to_ranks(group, kept, x, [dy])
        torch.ops.tinkerpool.expand_gate_backward(dgate_up, dx, gate_up, dxa, *self.of_group(group), self.tile_rows)

    def _backward_to_ranks(self, group: int, kept: Tensor, x: Tensor, dys: Sequence[Tensor]) -> Tensor:
        """Add to the adapters' gradients; return scaling dy_i B_i (T, M), fp32."""
        dys = [dense(dy) for dy in dys]
        dxa = self.shrunk_outputs(group, dys)
        self.add_gradients(group, x, dys, kept, dxa)
        return dxa

    def shrunk(self, group: int, x: Tensor, num_linears: int) -> Tensor:
        """See `FusedRun`; in one part."""
        xa, *summed = self._parts(x, parts_of(x.shape[1]), num_linears)
        tables = self.of_group(group)
        torch.ops.tinkerpool.shrink(xa, *summed, x, *tables, self.tables.scalings, num_linears, self.tile_rows)
        return xa if summed[0] is None else summed[0]

    def shrunk_outputs(self, group: int, dys: Sequence[Tensor]) -> Tensor:
        """Return scaling dy_i B_i (T, M), fp32, from dys[i] (T, F)."""
        dxa, *summed = self._parts(dys[0], parts_of(max(dy.shape[1] for dy in dys)), len(dys))
        tables = self.of_group(group)
        torch.ops.tinkerpool.shrink_outputs(dxa, *summed, *_three(dys), *tables, self.tables.scalings, self.tile_rows)
        return (dxa if summed[0] is None else summed[0])[0]

    def _parts(self, rows: Tensor, num_parts: int, num_linears: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return memory for the parts of a sum and, if there are several, for their total, and the counters."""
        shape = len(rows), num_linears * self.tables.rank_max
        parts = rows.new_empty(num_parts, *shape, dtype=torch.float32)
        return parts, *((None, None) if num_parts == 1 else (parts.new_empty(1, *shape), self.gradients.arrivals))

    def add_gradients(self, group: int, x: Tensor, dys: Sequence[Tensor], xa: Tensor, dxa: Tensor) -> None:
        """Add dxa^T x to the gradients of A, and xa_i^T dys[i] to those of B_i^T; nothing where F or D is 0.

        The first call of a group sets those that the pass is to set.
        """
        own, can_set = self.gradients, group not in self._begun
        self._begun.add(group)
        torch.ops.tinkerpool.add_gradients(
            x,
            *_three(dys),
            xa,
            dxa,
            own.addresses[group - self._first_group],
            own.pieces,
            own.firsts,
            self.tables.ranks,
            own.are_set if can_set else None,
            own.num_set if can_set else 0,
        )

    def begin(self, num_set: int) -> None:
        """Begin another pass, whose tables have been written over the last ones, with so many adapters to set."""
        self.gradients = replace(self.gradients, num_set=num_set)
        self._begun.clear()

    def check_set(self) -> None:
        """Raise an AssertionError if the pass, which has ended, has left memory that it was to set as it was."""
        layers = [group for group, is_adapted in enumerate(self._is_adapted[:-1]) if is_adapted]
        assert not self.gradients.num_set or self._begun.issuperset(layers), "gradients of some layers were not set"

    def expand_inputs(self, group: int, dx: Tensor, dxa: Tensor, num_linears: int) -> None:
        """Add dxa A to dx (T, D)."""
        torch.ops.tinkerpool.expand_inputs(dx, dxa, *self.of_group(group), num_linears, self.tile_rows)


@dataclass(frozen=True, slots=True)
class PendingAdapters:
    """Adapters of one linear which are not in its outputs: the kernels that read these add them."""

    run: TrainingRun
    group: int
    xa: Tensor
    """Scaling x A^T (1, T, R), fp32."""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """xa, addresses, tiles and ranks, as `gpu_operations.EXPAND` takes them."""
        return self.xa, *self.run.of_group(self.group)

    def sums(self, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for scaling dy B (1, T, R) in so many parts, for their sum, and counters of parts."""
        _, num_rows, rank = self.xa.shape
        return self.xa.new_empty(num_parts, num_rows, rank), torch.empty_like(self.xa), self.run.gradients.arrivals

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor, dxa: Tensor) -> None:
        """Add to the adapters' gradients and to dx (T, D), from dy (T, F) and scaling dy B (1, T, R)."""
        self.run.add_gradients(self.group, x, [dy], self.xa, dxa[0])
        self.run.expand_inputs(self.group, dx, dxa[0], 1)


def forward_runs(segments: Sequence[Segment], group: int | None = None) -> Sequence[SegmentRun]:
    """Return one run of all segments; none without segments. Implements `segments.Fuse`, without a backward."""
    del group
    return [ForwardRun.of(segments)] if segments else []


def training_runs(segments: Sequence[Segment], group: int | None = None) -> Sequence[SegmentRun]:
    """Return one run of all segments; none without segments. Implements `segments.Fuse`."""
    return [TrainingRun.of(segments, group)] if segments else []


def _three(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [*tensors, None, None][:3]


def _gaps(segments: Sequence[Segment], num_rows: int) -> Iterator[range]:
    """Yield the rows before, between and behind segments, which are in row order, up to so many."""
    end = 0
    for segment in segments:
        assert end <= segment.start, "segments overlap"
        yield range(end, min(segment.start, num_rows))
        end = segment.stop
    yield range(end, num_rows)


def adapters_of(segments: Sequence[Segment]) -> list[AdapterViews]:
    """Return the adapters of segments, in the order in which they appear."""
    return list({id(segment.adapter): segment.adapter for segment in segments}.values())


def _pieces(segment: Segment) -> list[tuple[int, int, bool]]:
    """Return the first row of each piece of a segment, its number of rows, and whether it is the last."""
    return [
        (start, min(GRADIENT_DEPTH, segment.stop - start), start + GRADIENT_DEPTH >= segment.stop)
        for start in range(segment.start, segment.stop, GRADIENT_DEPTH)
    ]


def _addresses(columns: Sequence[NDArray[np.int64]], num_groups: int) -> NDArray[np.int64]:
    """Return the addresses (groups, S, 4) of adapters, from those (groups, 4) of each."""
    return np.stack(columns, axis=1) if columns else np.zeros((num_groups, 0, 4), np.int64)
