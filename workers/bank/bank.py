"""The adapter bank: every adapter's weights, moments and gradient as rows of flat buffers, evicted to host memory.

Knows rows and keys; not what an adapter's seq is, nor arithmetic on it. A key is an adapter being trained, or a sampler
version: an immutable copy of weights. Beside a base model of another dtype, rows also have a copy of their weights in
that dtype, which the layers use; whoever writes weights refreshes it.

Main invariant: a key's bits are the same wherever they are. `num_slots` keys are resident at most; acquiring others
evicts the least recently used, with everything they hold, so a full bank is never an error. A row that is being copied
is waited for before anything uses it (`transfers`).

Dimensions: P values of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.bank.transfers import Transfer, Transfers, transfers_for
from workers.contract.messages import AdapterSpec
from workers.host.allocator import is_out_of_memory
from workers.rows import AdapterViews, GroupShape, ModuleKind, RowLayout, rank_class, trained_kinds

SLAB_ROWS = 32
"""Rows that are reserved at once, of one layout. On a CPU memory is taken as rows are used."""
SLAB_FRACTION = 1 / 8
"""On a GPU, where memory is taken at once, the part of it that one slab may have, unless it is a single row."""


@dataclass(slots=True)
class Row:
    """A slot: contiguous vectors (P,), fp32, and the views of them that the layers use."""

    slab: Slab
    weights: Tensor
    exp_avg: Tensor | None
    """First moment; None, as the next two, in rows for sampler versions."""
    exp_avg_sq: Tensor | None
    grad: Tensor | None
    groups: AdapterViews
    """Views for the layers: what `Segment` takes."""
    compute: Tensor | None = None
    """The weights (P,) in the base model's dtype, if that is another."""
    transfer: Transfer | None = None
    """The last copy to or from the row, until it was waited for."""

    def refresh(self) -> None:
        """Bring `compute` up to the weights; whoever has written weights calls it."""
        if self.compute is not None:
            self.compute.copy_(self.weights)

    def settle(self) -> None:
        """Let the computation wait for the last copy to or from the row."""
        if self.transfer is not None:
            self.transfer.wait_on_device()
            self.transfer = None


@dataclass(slots=True)
class HostRow:
    """An entry that is not resident: vectors (P,), fp32, in host memory, replaced but never written in place."""

    weights: Tensor | None = None
    """None: fresh, to be drawn from the seed."""
    exp_avg: Tensor | None = None
    """None, as the next two: zeros."""
    exp_avg_sq: Tensor | None = None
    grad: Tensor | None = None
    transfer: Transfer | None = field(default=None, kw_only=True)
    """What fills the vectors, to be waited for before the host reads them."""


@dataclass(slots=True, weakref_slot=True)
class Entry:
    """What the bank holds under one key: either `row` or `host` is set. Other weights under the key are another one."""

    key: str
    spec: AdapterSpec
    layout: RowLayout
    is_trained: bool
    """False: a sampler version, weights alone."""
    row: Row | None = None
    host: HostRow | None = None
    has_moments: bool = False
    """Whether the moments may be other than zero; set by whoever writes them."""
    has_grad: bool = False
    """Whether the gradient may be other than zero; set by whoever adds to it."""
    num_holders: int = 0
    is_removed: bool = False
    """Removed while held: goes with the last holder."""


class Slab:
    """Rows of one layout in one allocation per buffer, slot-major."""

    def __init__(
        self,
        layout: RowLayout,
        num_rows: int,
        device: torch.device,
        *,
        is_trained: bool,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        def buffer(dtype: torch.dtype = torch.float32) -> Tensor:
            # Not written here: pages that no row has used take no memory. `Bank._load` writes all of a row.
            return torch.empty(num_rows, layout.num_values, dtype=dtype, device=device)  # (rows, P)

        self.layout = layout
        self.is_trained = is_trained
        self.num_rows = num_rows
        self.weights = buffer()
        self.moments = (buffer(), buffer()) if is_trained else None
        self.grad = buffer() if is_trained else None
        self.compute = None if compute_dtype == torch.float32 else buffer(compute_dtype)
        self.views = layout.views(self.weights if self.compute is None else self.compute, self.grad)
        self._unused = num_rows
        self._free: list[Row] = []

    @property
    def num_free(self) -> int:
        """Rows that nothing is in."""
        return self._unused + len(self._free)

    def take(self) -> Row | None:
        """A free row, the lowest first, for rows beside each other are computed in one batch."""
        if self._free:
            self._free.sort(key=lambda row: -row.groups.slot)
            return self._free.pop()
        if not self._unused:
            return None
        self._unused -= 1
        return self._row(self.num_rows - self._unused - 1)

    def give(self, row: Row) -> None:
        """Take a row back."""
        self._free.append(row)

    def close(self) -> None:
        """Let go of the rows, which point back here, so that the memory is free at once."""
        for row in self._free:
            row.settle()
        self._free.clear()

    def _row(self, slot: int) -> Row:
        grad = None if self.grad is None else self.grad[slot]
        exp_avg, exp_avg_sq = (None, None) if self.moments is None else (moment[slot] for moment in self.moments)
        groups = tuple(None if views is None else views.row(slot) for views in self.views)
        adapter = AdapterViews(self.views, groups, slot)
        compute = None if self.compute is None else self.compute[slot]
        return Row(self, self.weights[slot], exp_avg, exp_avg_sq, grad, adapter, compute)


@dataclass(slots=True)
class BankStats:
    """Counts since the bank was made."""

    num_evictions: int = 0
    num_loads: int = 0
    num_prefetches: int = 0
    """Of the loads, those that began before the key was needed."""


class Bank:
    """All adapters and sampler versions of one base model on one device. One thread only."""

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        compute_dtype: torch.dtype = torch.float32,
        transfers: Transfers | None = None,
    ) -> None:
        """`compute_dtype` is the base model's; `transfers` None: the best for the device."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; the bank needs at least one slot")
        self.num_slots = num_slots
        self.stats = BankStats()
        self._shapes = tuple(shapes)
        self._device = torch.device(device)
        self._compute_dtype = compute_dtype
        self._transfers = transfers_for(self._device) if transfers is None else transfers
        self._layouts: dict[tuple[int, tuple[ModuleKind, ...]], RowLayout] = {}
        self._slabs: list[Slab] = []
        self._entries: dict[str, Entry] = {}
        self._resident: dict[str, Entry] = {}
        """In order of use, the least recently used first."""

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_resident(self) -> int:
        """Keys that are in a slot now."""
        return len(self._resident)

    def layout(self, spec: AdapterSpec) -> RowLayout:
        """The layout of an adapter's row. Raises ValueError for a rank or flags that no row can hold."""
        key = rank_class(spec.rank), trained_kinds(spec)
        if key not in self._layouts:
            self._layouts[key] = RowLayout(self._shapes, *key)
        return self._layouts[key]

    # ------------------------------------------------------------------ keys

    def add(self, key: str, spec: AdapterSpec, host: HostRow | None = None, *, is_trained: bool = True) -> Entry:
        """Hold an adapter or version under a new key; fresh if `host` is None. It takes no slot until acquired."""
        assert key not in self._entries, f"{key} is in the bank already"
        host = HostRow() if host is None else host
        entry = Entry(
            key=key,
            spec=spec,
            layout=self.layout(spec),
            is_trained=is_trained,
            host=host,
            has_moments=host.exp_avg is not None,
            has_grad=host.grad is not None,
        )
        self._entries[key] = entry
        return entry

    def entry(self, key: str) -> Entry:
        """What is held under a key. Raises KeyError."""
        return self._entries[key]

    def remove(self, key: str) -> None:
        """Forget a key, wherever it is, once nobody holds it. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.num_holders:
            entry.is_removed = True
        else:
            self._forget(entry)

    def hold(self, key: str) -> None:
        """Keep a key from being removed until `unhold`; it may still be evicted. Raises KeyError."""
        self._entries[key].num_holders += 1

    def unhold(self, key: str) -> None:
        """Undo one `hold`; ignored for keys that `clear` took away."""
        entry = self._entries.get(key)
        if entry is None or not entry.num_holders:
            return
        entry.num_holders -= 1
        if entry.is_removed and not entry.num_holders:
            self._forget(entry)

    def clear(self) -> None:
        """Forget everything, held or not, and give all memory up."""
        for entry in list(self._entries.values()):
            self._forget(entry)
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()

    def publish(self, key: str, version: str) -> None:
        """Hold a copy of an adapter's weights under a version key, for sampling. One row copied.

        Again: replaced, its removal withdrawn; whoever holds the key goes on holding it.
        """
        source, replaced = self._entries[key], self._entries.get(version)
        if replaced is not None:
            self._forget(replaced)
        entry = self.add(version, source.spec, is_trained=False)
        entry.num_holders = 0 if replaced is None else replaced.num_holders
        if source.row is None:
            assert source.host is not None
            entry.host = HostRow(weights=source.host.weights, transfer=source.host.transfer)  # never written in place
        elif self.num_slots == 1:
            (weights,), transfer = self._transfers.to_host([source.row.weights])
            entry.host, source.row.transfer = HostRow(weights=weights, transfer=transfer), transfer
        else:
            row = self._free_row(entry, keep={key})
            row.settle()
            source.row.settle()
            row.weights.copy_(source.row.weights)
            row.refresh()
            self._occupy(entry, row)

    # ------------------------------------------------------------------ slots

    def acquire(self, keys: Sequence[str]) -> list[Row]:
        """Rows of all these keys, resident together. Valid until the next `acquire`, `publish` or `remove`.

        At most `num_slots` different keys: whoever has more runs several passes. Raises KeyError for an unknown key.
        """
        wanted = set(keys)
        assert len(wanted) <= self.num_slots, f"{len(wanted)} keys at once, {self.num_slots} slots"
        rows = []
        for key in keys:
            entry = self._entries[key]
            if entry.row is None:
                self._load(entry, keep=wanted)
            else:
                self._resident[key] = self._resident.pop(key)
            assert entry.row is not None
            rows.append(entry.row)
        for row in rows:
            row.settle()
        return rows

    def prefetch(self, keys: Sequence[str], keep: Collection[str]) -> None:
        """Begin to load keys that are expected next, most urgent first, beside what is computed with those in `keep`.

        Those in `keep`, resident or not, are left their slots. Keys that the bank does not have are ignored, and all of
        them where copies do not run beside the computation.
        """
        if not self._transfers.is_concurrent:
            return
        kept = {key for key in keep if key in self._entries}
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or key in kept:
                continue
            if len(kept) >= self.num_slots:
                break
            if entry.row is not None:
                self._resident[key] = self._resident.pop(key)
            else:
                try:
                    self._load(entry, keep=kept)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    return  # it was a hint
                self.stats.num_prefetches += 1
            kept.add(key)

    def evict(self, key: str) -> None:
        """Move a key to host memory, bits unchanged. Does nothing if it is there already."""
        entry = self._entries[key]
        row = entry.row
        if row is None:
            return
        held = {"weights": row.weights}
        if entry.has_moments:
            assert row.exp_avg is not None
            assert row.exp_avg_sq is not None
            held |= {"exp_avg": row.exp_avg, "exp_avg_sq": row.exp_avg_sq}
        if entry.has_grad:
            assert row.grad is not None
            held["grad"] = row.grad
        copies, transfer = self._transfers.to_host(list(held.values()))
        entry.host = HostRow(**dict(zip(held, copies, strict=True)), transfer=transfer)
        row.transfer = transfer
        self._release(entry)
        self.stats.num_evictions += 1

    def drop_grad(self, key: str) -> None:
        """Make a pending gradient zero."""
        entry = self._entries[key]
        if entry.has_grad:
            if entry.row is not None:
                assert entry.row.grad is not None
                entry.row.settle()
                entry.row.grad.zero_()
            else:
                assert entry.host is not None
                entry.host.grad = None
            entry.has_grad = False

    def restore_grad(self, key: str, gradient: Tensor | None) -> None:
        """Put a pending gradient (P,) back as it was, wherever the key is now; None: there was none."""
        self.drop_grad(key)
        if gradient is None:
            return
        entry = self._entries[key]
        if entry.row is not None:
            assert entry.row.grad is not None
            entry.row.grad.copy_(gradient)
        else:
            assert entry.host is not None
            entry.host.grad = gradient.cpu()
        entry.has_grad = True

    def read(self, key: str) -> HostRow:
        """Weights and moments as they are, without making the key resident. Do not keep: views of the row."""
        entry = self._entries[key]
        row = entry.row
        if row is None:
            assert entry.host is not None
            if entry.host.weights is None:
                entry.host.weights = entry.layout.initial_weights(entry.spec)
            if entry.host.transfer is not None:
                entry.host.transfer.wait_on_host()
                entry.host.transfer = None
            return entry.host
        row.settle()
        moments = (row.exp_avg, row.exp_avg_sq) if entry.has_moments else (None, None)
        return HostRow(row.weights, *moments, row.grad if entry.has_grad else None)

    def replace(self, key: str, host: HostRow) -> None:
        """Put other contents in place of a key's: weights, moments and gradient, None as in `HostRow`."""
        entry = self._entries[key]
        if entry.row is not None:
            self._release(entry)
        entry.host = host
        entry.has_moments = host.exp_avg is not None
        entry.has_grad = host.grad is not None

    # ------------------------------------------------------------------ inside

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if entry.row is not None:
            self._release(entry)

    def _load(self, entry: Entry, keep: set[str]) -> None:
        host = entry.host
        assert host is not None
        row = self._free_row(entry, keep)
        try:
            row.transfer = self._fill(row, entry, host)
        except Exception:
            row.slab.give(row)
            raise
        self._occupy(entry, row)
        self.stats.num_loads += 1

    def _fill(self, row: Row, entry: Entry, host: HostRow) -> Transfer | None:
        weights = entry.layout.initial_weights(entry.spec) if host.weights is None else host.weights
        copies: list[tuple[Tensor, Tensor | None]] = [(row.weights, weights)]
        copies += [
            (vector, value)
            for vector, value in (
                (row.exp_avg, host.exp_avg),
                (row.exp_avg_sq, host.exp_avg_sq),
                (row.grad, host.grad),
            )
            if vector is not None
        ]
        if row.compute is not None:
            copies.append((row.compute, row.weights))
        return self._transfers.to_device(copies)

    def _occupy(self, entry: Entry, row: Row) -> None:
        row.groups.occupy(entry.spec)
        entry.row, entry.host = row, None
        self._resident[entry.key] = entry

    def _release(self, entry: Entry) -> None:
        """Give an entry's slot back."""
        row = entry.row
        assert row is not None
        entry.row = None
        del self._resident[entry.key]
        row.slab.give(row)
        self._free_slabs()

    def _free_slabs(self) -> None:
        """Give up slabs in which nothing is, as long as there are more rows than slots."""
        for slab in [slab for slab in self._slabs if slab.num_free == slab.num_rows]:
            if sum(other.num_rows for other in self._slabs) > self.num_slots:
                self._slabs.remove(slab)
                slab.close()

    def _free_row(self, entry: Entry, keep: set[str]) -> Row:
        """A free row for an entry, after evicting the least recently used if all slots are taken."""
        if len(self._resident) >= self.num_slots:
            self.evict(next(key for key in self._resident if key not in keep))
        for slab in self._slabs:
            if slab.num_free and slab.layout is entry.layout and slab.is_trained == entry.is_trained:
                row = slab.take()
                assert row is not None
                return row
        slab = Slab(
            entry.layout,
            self._slab_rows(entry),
            self._device,
            is_trained=entry.is_trained,
            compute_dtype=self._compute_dtype,
        )
        row = slab.take()
        self._slabs.append(slab)
        self._free_slabs()
        assert row is not None
        return row

    def _slab_rows(self, entry: Entry) -> int:
        num_rows = min(SLAB_ROWS, self.num_slots)
        if self._device.type != "cuda":
            return num_rows
        value_bytes = 4 * (4 if entry.is_trained else 1) + self._compute_dtype.itemsize
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        return max(1, min(num_rows, int(total_bytes * SLAB_FRACTION / (value_bytes * entry.layout.num_values))))
