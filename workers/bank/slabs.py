"""The slabs of a bank: how many rows they have, and which of them are replaced by larger, smaller or fewer ones.

Memory that a CPU has not written costs nothing, so without a limit in bytes a slab has all its rows at once. A GPU
gives memory at once. There the bank has a limit, and a slab has one row at first. `tidy` merges the slabs of one kind
(a layout, trained or not) into a larger one with some free rows, and replaces a sparse slab by a smaller one. Rows are
copied on the device.

Does not depend on which keys are evicted when: `bank` decides that.

Main invariant: with a limit, tidy slabs hold at most twice the rows that are used. Rows move in `tidy` alone, which is
called when no pass uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from workers.bank.entries import Entry, Kind, Row, Slab
from workers.contract.adapted_modules import COPY_PARAM_BYTES
from workers.host.allocator import is_out_of_memory
from workers.rows import RowLayout

SLAB_ROWS = 32
"""Most rows of a slab."""
SLAB_FRACTION = 1 / 2
"""The part of the limit that a slab may have, unless it is a single row."""


class Slabs:
    """All slabs of one bank."""

    def __init__(self, num_slots: int, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.bytes_max: int | None = None
        """Most bytes of all slabs, unless a single key needs more; None: no limit, and no row is moved."""
        self.is_untidy = False
        """Whether `tidy` may find something to do; never without a limit."""
        self._num_slots = num_slots
        self._device = device
        self._compute_dtype = compute_dtype
        self._compute_bytes = 0 if compute_dtype == torch.float32 else compute_dtype.itemsize
        """Of a value in the copy in that dtype."""
        self._slabs: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, used or not."""
        return sum(slab.num_rows * self.row_bytes(slab.kind) for slab in self._slabs)

    def row_bytes(self, kind: Kind) -> int:
        """Return the bytes of a row."""
        return kind.layout.num_values * ((COPY_PARAM_BYTES if kind.is_trained else 4) + self._compute_bytes)

    @property
    def copy_bytes_max(self) -> int | None:
        """Most bytes of a copy, `COPY_PARAM_BYTES` for each value, whose row is within the limit; None: no limit."""
        if self.bytes_max is None:
            return None
        return self.bytes_max // (COPY_PARAM_BYTES + self._compute_bytes) * COPY_PARAM_BYTES

    def can_hold(self, kinds: Iterable[Kind]) -> bool:
        """Return whether rows of these kinds are within the limit together; a single row always is."""
        if self.bytes_max is None:
            return True
        sizes = [self.row_bytes(kind) for kind in kinds]
        return len(sizes) <= 1 or sum(sizes) <= self.bytes_max

    def can_hold_largest(self, layouts: Iterable[RowLayout], num_rows: int) -> bool:
        """Return whether so many rows are within the limit together, each of any of these layouts.

        It takes as long for many rows as for one: a batch asks for all of its adapters, one after another.
        """
        largest = max((self.row_bytes(Kind(layout, is_trained=True)) for layout in layouts), default=0)
        return self.bytes_max is None or num_rows * largest <= self.bytes_max

    def has_room(self, kind: Kind, *, can_move: bool) -> bool:
        """Return whether one more row is within the limit; with `can_move`, after `tidy(is_tight=True)`."""
        if self.bytes_max is None:
            return True
        unused = sum(slab.num_free * self.row_bytes(slab.kind) for slab in self._slabs) if can_move else 0
        return self.num_bytes - unused + self.row_bytes(kind) <= self.bytes_max

    def growth_bytes(self, kinds: Iterable[Kind]) -> int:
        """Return by how much the rows may grow until rows of these kinds are added.

        Free rows may be of other kinds, and `tidy` may double the used ones.
        """
        assert self.bytes_max is not None
        sizes = [self.row_bytes(kind) for kind in kinds]
        if not sizes:
            return 0
        used_bytes = sum(slab.num_used * self.row_bytes(slab.kind) for slab in self._slabs)
        growth_bytes = max(sum(sizes), 2 * (used_bytes + sum(sizes)) - self.num_bytes)
        return max(0, min(growth_bytes, max(self.bytes_max, *sizes) - self.num_bytes))

    def take(self, kind: Kind) -> Row | None:
        """Return the first free row of a kind; None if there is none."""
        return next((slab.take() for slab in self._slabs if slab.kind == kind and slab.num_free), None)

    def give_back(self, row: Row) -> None:
        """Make a row free."""
        row.slab.free(row)
        self.is_untidy = self.bytes_max is not None
        self._close_surplus()

    def grow(self, kind: Kind) -> None:
        """Add a free row of a kind that has none. Raises an error for which `is_out_of_memory` is true."""
        if self.bytes_max is None:
            self._close_surplus(but=self._add(kind, self._rows_max(kind)))
        else:
            self._add(kind, 1)
            self.is_untidy = True

    def tidy(self, residents: Collection[Entry], *, is_tight: bool = False) -> None:
        """Merge the slabs of each kind, and replace sparse ones by smaller ones; `is_tight`: leave no row unused.

        `residents` are the entries that have rows. Slabs stay as they are if there is no memory to move their rows.
        """
        assert self.bytes_max is not None
        self.is_untidy = False
        for kind in dict.fromkeys(slab.kind for slab in self._slabs):
            while self._tidy_once(kind, residents, is_tight=is_tight):
                pass  # what is left may fill a further slab

    def close_unused(self) -> bool:
        """Free the memory of slabs without used rows; return whether there were any."""
        unused = [slab for slab in self._slabs if not slab.num_used]
        for slab in unused:
            self._close(slab)
        return bool(unused)

    def _close_surplus(self, but: Slab | None = None) -> None:
        """Free slabs without used rows, as long as there are more rows than slots; keep `but`."""
        for slab in [slab for slab in self._slabs if not slab.num_used and slab is not but]:
            if sum(other.num_rows for other in self._slabs) > self._num_slots:
                self._close(slab)

    def _close(self, slab: Slab) -> None:
        self._slabs.remove(slab)
        slab.close()

    def _mergeable(self, kind: Kind) -> list[Slab]:
        """Return slabs of a kind, but no full ones of the largest size, whose used rows fit into one slab."""
        rows_max, num_used = self._rows_max(kind), 0
        chosen = []
        for slab in sorted((slab for slab in self._slabs if slab.kind == kind), key=lambda slab: slab.num_used):
            if slab.num_used < rows_max and num_used + slab.num_used <= rows_max:
                chosen.append(slab)
                num_used += slab.num_used
        return chosen

    def _tidy_once(self, kind: Kind, residents: Collection[Entry], *, is_tight: bool) -> bool:
        """Replace as many slabs of a kind as one can hold; return whether there were some, and memory to move them."""
        assert self.bytes_max is not None
        slabs = self._mergeable(kind)
        num_used, num_held = (sum(slab.num_used for slab in slabs), sum(slab.num_rows for slab in slabs))
        num_fitting = num_held + (self.bytes_max - self.num_bytes) // self.row_bytes(kind)
        num_rows = min(_doubled(num_used), self._rows_max(kind), max(num_used, num_fitting))
        is_sparse = num_used < num_held if is_tight else 2 * num_used < num_held
        if len(slabs) < 2 and not is_sparse:
            return False
        return self._replace(slabs, kind, num_used if is_tight else num_rows, residents)

    def _replace(self, slabs: Collection[Slab], kind: Kind, num_rows: int, residents: Collection[Entry]) -> bool:
        """Move the used rows of slabs to one new slab if there is memory for it, and free the old ones."""
        try:
            target = self._add(kind, num_rows) if num_rows else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        for entry in residents:
            if target is not None and entry.row is not None and entry.row.slab in slabs:
                entry.move(target)
        for slab in slabs:
            self._close(slab)
        return True

    def _add(self, kind: Kind, num_rows: int) -> Slab:
        slab = Slab(kind, num_rows, self._device, compute_dtype=self._compute_dtype)
        self._slabs.append(slab)
        return slab

    def _rows_max(self, kind: Kind) -> int:
        num_rows = min(SLAB_ROWS, self._num_slots)
        if self.bytes_max is None:
            return num_rows
        return max(1, min(num_rows, int(self.bytes_max * SLAB_FRACTION) // self.row_bytes(kind)))


def _doubled(num_rows: int) -> int:
    """Return the smallest power of two that is at least `num_rows`; 0 for 0."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0
