"""The adapter bank: every adapter of a worker, in one of `num_slots` bank slots or evicted to host memory.

A key is an adapter being trained, or a sampler version: an immutable copy of weights. If the base model's dtype is not
fp32, a slot also has a copy of the weights in that dtype, which the layers use.

Does not depend on sequence numbers or on arithmetic with the values.

Main invariant: a key's bits are the same wherever they are. At most `num_slots` keys are resident, and on a GPU at most
as many as its memory holds. Acquiring others evicts the least recently used, so a full bank is never an error; only a
key whose row does not fit alone is one. A row that is being copied is waited for before anything uses it (`transfers`).

Dimensions: P values of a row.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.bank.entries import VECTORS, Entry, HostRow, Kind, Row
from workers.bank.slabs import Slabs
from workers.bank.transfers import Transfer, Transfers, transfers_for
from workers.contract.adapted_modules import ModuleKind, rank_class
from workers.contract.messages import AdapterSpec
from workers.contract.settings import num_cores
from workers.host.allocator import is_out_of_memory
from workers.rows import GroupShape, RowLayout, trained_kinds

logger = logging.getLogger(__name__)


class RowMemoryError(MemoryError):
    """No other key is left to evict, and there is still no memory for one more row; the message is for the user."""


@dataclass(slots=True)
class BankStats:
    """Counts since the bank was made."""

    num_evictions: int = 0
    num_loads: int = 0
    num_prefetches: int = 0
    """Loads that began before the key was needed; counted in `num_loads` too."""


class Bank:
    """All adapters and sampler versions of one base model on one device.

    Used by one thread only, but for `layout`, `entry` and `host_zeros`.
    """

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        compute_dtype: torch.dtype = torch.float32,
        transfers: Transfers | None = None,
    ) -> None:
        """Begin empty; `compute_dtype` is the base model's, `transfers` None: the fastest for the device."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; the bank needs at least one slot")
        self.num_slots = num_slots
        self.stats = BankStats()
        self._shapes = tuple(shapes)
        self._device = torch.device(device)
        self._compute_dtype = compute_dtype
        self._transfers = transfers_for(self._device) if transfers is None else transfers
        is_concurrent = self._transfers.is_concurrent
        self._drawers = ThreadPoolExecutor(num_cores(), "initial-weights") if is_concurrent else None
        """Threads that draw the weights of fresh adapters while the device computes; None: drawn when needed."""
        self._layouts: dict[tuple[int, tuple[ModuleKind, ...]], RowLayout] = {}
        self._laying_out = threading.Lock()
        self._slabs = Slabs(num_slots, self._device, compute_dtype)
        self._entries: dict[str, Entry] = {}
        self._resident: dict[str, Entry] = {}
        """In order of use, the least recently used first."""
        self._host_bytes: int | None = 0
        """None: keys have come, gone or moved since they were counted."""

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that all keys take; counted again after keys have come, gone or moved."""
        if self._host_bytes is None:
            self._host_bytes = sum(entry.host_bytes for entry in self._entries.values())
        return self._host_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots that have memory, used or not."""
        return self._slabs.num_bytes

    @property
    def copy_bytes_max(self) -> int | None:
        """Most bytes of a copy whose row is within the limit; None: no limit."""
        return self._slabs.copy_bytes_max

    @property
    def num_resident(self) -> int:
        """Keys that are in a slot now."""
        return len(self._resident)

    def limit(self, num_bytes: int) -> None:
        """Take at most so many bytes from now on, for a device that gives memory when it is allocated.

        A key whose row alone needs more is resident without any others.
        """
        self._slabs.bytes_max = num_bytes

    def fits(self, keys: Collection[str]) -> bool:
        """Return whether different keys can be resident together. Unknown ones take a slot and no memory."""
        if len(keys) > self.num_slots or self._slabs.bytes_max is None:
            return len(keys) <= self.num_slots
        if self._slabs.can_hold_largest(list(self._layouts.values()), len(keys)):
            return True
        entries = (self._entries.get(key) for key in keys)
        return self._slabs.can_hold(entry.kind for entry in entries if entry)

    def growth_bytes(self, keys: Collection[str]) -> int:
        """Return by how much the memory of all slots may grow until each of these keys has been resident.

        Unknown keys are ignored. Without a limit, memory is taken when it is written: 0.
        """
        if self._slabs.bytes_max is None:
            return 0
        entries = (self._entries.get(key) for key in set(keys))
        return self._slabs.growth_bytes(entry.kind for entry in entries if entry and entry.row is None)

    def layout(self, spec: AdapterSpec) -> RowLayout:
        """Return the layout of an adapter's row. Raises ValueError for a rank or flags that no row can hold."""
        key = rank_class(spec.rank), trained_kinds(spec)
        with self._laying_out:  # one layout for all rows of a kind
            if key not in self._layouts:
                self._layouts[key] = RowLayout(self._shapes, *key)
            return self._layouts[key]

    def host_zeros(self, num_values: int) -> Tensor:
        """Return zeros (P,) for vectors that will be loaded; see `Transfers.host_zeros`."""
        return self._transfers.host_zeros(num_values)

    def add(self, key: str, spec: AdapterSpec, host: HostRow | None = None, *, is_trained: bool = True) -> Entry:
        """Add an adapter or version under a new key; fresh if `host` is None. It takes no slot until acquired."""
        assert key not in self._entries, f"{key} is in the bank already"
        entry = Entry(key=key, spec=spec, layout=self.layout(spec), is_trained=is_trained)
        if host is None:
            drawing = None if self._drawers is None else self._drawers.submit(entry.layout.initial_weights, spec)
            host = HostRow(drawing=drawing)
        entry.replace(host)
        self._entries[key] = entry
        self._host_bytes = None
        return entry

    def entry(self, key: str) -> Entry:
        """Return the entry of a key. Raises KeyError."""
        return self._entries[key]

    def remove(self, key: str) -> None:
        """Drop a key, wherever its values are, as soon as it has no pins. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None and entry.remove():
            self._drop(entry)

    def pin(self, key: str) -> None:
        """Keep a key from being removed until `unpin`; it may still be evicted. Raises KeyError."""
        self._entries[key].pin()

    def unpin(self, key: str) -> None:
        """Undo one `pin`; ignored for keys that `clear` dropped."""
        entry = self._entries.get(key)
        if entry is not None and entry.unpin():
            self._drop(entry)

    def clear(self) -> None:
        """Drop all keys, pinned or not, and free all memory."""
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._slabs.close_unused()

    def publish(self, key: str, version: str) -> None:
        """Add a copy of an adapter's weights under a version key, for sampling. Copies one row at most.

        A version that exists already gets the new weights, keeps its pins, and is not removed any more.
        """
        source, replaced = self._entries[key], self._entries.get(version)
        if replaced is not None:
            self._drop(replaced)
        if source.row is None:
            assert source.host is not None
            # Vectors in host memory are never written in place, so both entries can have the same ones.
            host = replace(source.host, exp_avg=None, exp_avg_sq=None, grad=None)
            entry = self.add(version, source.spec, host, is_trained=False)
        else:
            row = self._row_beside(source)
            if row is None:
                (weights,), transfer = self._transfers.to_host([source.row.weights], source.row.transfer)
                source.row.begin_transfer(transfer)
                entry = self.add(version, source.spec, HostRow(weights=weights, transfer=transfer), is_trained=False)
            else:
                row.settle()
                source.row.settle()
                row.weights.copy_(source.row.weights)
                row.refresh()
                entry = self.add(version, source.spec, is_trained=False)
                self._occupy(entry, row)
        for _ in range(0 if replaced is None else replaced.num_pins):
            entry.pin()

    def acquire(self, keys: Sequence[str]) -> list[Row]:
        """Load these keys and return their rows, valid until the next `acquire`, `publish` or `remove`.

        Of more keys than `fits` allows, a caller runs several passes.
        Raises KeyError for an unknown key, RowMemoryError if there is no memory for all of them.
        """
        wanted = set(keys)
        assert self.fits(wanted), f"{len(wanted)} keys at once, {self.num_slots} slots"
        for key in keys:
            entry = self._entries[key]
            if entry.row is None:
                self._load(entry, keep=wanted, can_move=True)
            else:
                self._resident[key] = self._resident.pop(key)
        if self._slabs.is_untidy:
            self._slabs.tidy(self._resident.values())
        rows = []
        for key in keys:
            row = self._entries[key].row
            assert row is not None
            row.settle()
            rows.append(row)
        return rows

    def prefetch(self, keys: Sequence[str], keep: Collection[str]) -> None:
        """Begin to load keys that are expected next, most urgent first, concurrently with the computation.

        Keys in `keep`, resident or not, keep their slots. Unknown keys are ignored, and so are fresh adapters whose
        weights are still being drawn, and all keys if copies do not run concurrently with the computation.
        """
        if not self._transfers.is_concurrent:
            return
        kept = {key for key in keep if key in self._entries}
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or key in kept or not (entry.host is None or entry.host.is_ready):
                continue
            if len(kept) >= self.num_slots:
                break
            if entry.row is not None:
                self._resident[key] = self._resident.pop(key)
            else:
                try:
                    self._load(entry, keep=kept, can_move=False)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    return  # a prefetch is only a hint
                self.stats.num_prefetches += 1
            kept.add(key)

    def evict(self, key: str) -> None:
        """Move a key to host memory, bits unchanged. Does nothing if it is there already."""
        entry = self._entries[key]
        if entry.row is None:
            return
        self._vacate(entry, self._copied(entry.row, entry.held_vectors))
        self.stats.num_evictions += 1

    def host_copy(self, key: str, names: Collection[str]) -> HostRow:
        """Return vectors of a key in host memory, where nothing changes them; the copy may still be under way.

        `names` are some of `VECTORS`. Vectors that are zero may be None, others that were not asked for, too.
        """
        entry = self._entries[key]
        if entry.row is None:
            assert entry.host is not None
            return replace(entry.host, weights=entry.host_weights(), drawing=None)
        return self._copied(entry.row, {name: each for name, each in entry.held_vectors.items() if name in names})

    def _copied(self, row: Row, vectors: dict[str, Tensor]) -> HostRow:
        """Begin to copy some of a row's vectors, by their names in `VECTORS`."""
        copies, transfer = self._transfers.to_host(list(vectors.values()), row.transfer)
        row.begin_transfer(transfer)
        held = dict(zip(vectors, copies, strict=True))
        return HostRow(*map(held.get, VECTORS), transfer=transfer)

    def leave_only(self, keys: Collection[str]) -> bool:
        """Evict all other keys from a device with a limit, for a pass that has run out of memory.

        Returns whether that has freed any memory. A key for which the host has none stays.
        """
        if self._slabs.bytes_max is None:
            return False
        before = self.device_bytes
        for key in [key for key in self._resident if key not in keys]:
            try:
                self.evict(key)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning("%s stays on the device: %s", key, error)
        self._slabs.close_unused()
        self._slabs.tidy(self._resident.values(), is_tight=True)
        return self.device_bytes < before

    def replace(self, key: str, host: HostRow) -> None:
        """Replace a key's weights, moments and gradient; None as in `HostRow`."""
        entry = self._entries[key]
        if entry.row is not None:
            self._vacate(entry, None)
        entry.replace(host)
        self._host_bytes = None

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._host_bytes = None
        if entry.row is not None:
            self._vacate(entry, None)

    def _load(self, entry: Entry, keep: set[str], *, can_move: bool) -> None:
        host = entry.host
        assert host is not None
        row = self._free_row(entry.kind, keep=keep, can_move=can_move)
        try:
            row.begin_transfer(self._fill(row, entry, host))
        except Exception:
            self._slabs.give_back(row)
            raise
        self._occupy(entry, row)
        self.stats.num_loads += 1

    def _fill(self, row: Row, entry: Entry, host: HostRow) -> Transfer:
        """Begin to copy host memory to a row, which may hold anything before: to all but a gradient that is zero."""
        copies: list[tuple[Tensor, Tensor | None]] = [(row.weights, entry.host_weights())]
        copies += [
            (vector, value)
            for vector, value in (
                (row.exp_avg, host.exp_avg),
                (row.exp_avg_sq, host.exp_avg_sq),
            )
            if vector is not None
        ]
        if row.grad is not None and host.grad is not None:
            copies.append((row.grad, host.grad))
        if row.compute is not None:
            copies.append((row.compute, row.weights))
        return self._transfers.to_device(copies, filling=host.transfer, emptying=row.transfer)

    def _occupy(self, entry: Entry, row: Row) -> None:
        entry.occupy(row)
        self._resident[entry.key] = entry
        self._host_bytes = None

    def _vacate(self, entry: Entry, host: HostRow | None) -> None:
        """Free an entry's slot; its values are in `host` from now on."""
        row = entry.vacate(host)
        del self._resident[entry.key]
        self._host_bytes = None
        self._slabs.give_back(row)

    def _row_beside(self, source: Entry) -> Row | None:
        """Return a free row for a version of a resident adapter; None if only one of them can be resident."""
        kind = Kind(source.layout, is_trained=False)
        if self.num_slots == 1 or not self._slabs.can_hold([source.kind, kind]):
            return None
        try:
            return self._free_row(kind, keep={source.key}, can_move=True)
        except RowMemoryError:
            return None

    def _free_row(self, kind: Kind, *, keep: Collection[str], can_move: bool) -> Row:
        """Return a free row; evict the least recently used keys that are not in `keep` until there is one.

        Without `can_move`, a pass uses rows: none is moved, and if memory is short, only a row of this kind is of use.
        Raises RowMemoryError.
        """
        if len(self._resident) >= self.num_slots:
            self.evict(next(key for key in self._resident if key not in keep))
        while (row := self._slabs.take(kind)) is None:
            leaving = next(
                (key for key, entry in self._resident.items() if key not in keep and (can_move or entry.kind == kind)),
                None,
            )
            refusal: str | None = "the limit is reached"
            if self._slabs.has_room(kind, can_move=can_move) or (can_move and leaving is None):
                refusal = self._grow(kind, can_move=can_move)
            if refusal is None:
                continue
            if leaving is not None:
                self.evict(leaving)
            elif not self._slabs.close_unused():
                raise self._row_memory_error(kind, refusal)
        return row

    def _grow(self, kind: Kind, *, can_move: bool) -> str | None:
        """Add a free row; return the device's message if it has no memory for one."""
        if can_move and not self._slabs.has_room(kind, can_move=False):
            self._slabs.tidy(self._resident.values(), is_tight=True)
        try:
            self._slabs.grow(kind)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return str(error)  # the error itself would keep what was allocated of the slab
        return None

    def _row_memory_error(self, kind: Kind, refusal: str) -> RowMemoryError:
        logger.info("a row of the bank cannot be allocated: %s", refusal)
        bytes_max = self._slabs.bytes_max
        limit = "" if bytes_max is None else f" of at most {_megabytes(bytes_max)}"
        return RowMemoryError(
            f"the adapter takes {_megabytes(self._slabs.row_bytes(kind))} on the worker's device, and there is no "
            f"memory for it; all adapters there have {_megabytes(self.device_bytes)}{limit}. Use a lower rank, or "
            "adapt fewer kinds of modules"
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
