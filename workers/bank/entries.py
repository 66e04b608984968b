"""The adapters and sampler versions of a bank, and the two places for their values: bank slots and host memory.

Bank slots are rows of flat buffers in device memory, allocated many at a time.

Does not depend on eviction: `bank` moves entries.

Main invariants: an entry has its values in exactly one place, and they are the same bits in both. Rows of one slab have
the same layout and are adjacent in memory, so the layers can compute several of them in one batch.

Dimensions: P values of a row.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from workers.bank.transfers import Transfer
from workers.contract.messages import AdapterSpec
from workers.rows import AdapterViews, RowLayout

MOMENTS = ("exp_avg", "exp_avg_sq")
VECTORS = ("weights", *MOMENTS, "grad")
"""Of a row, and of `HostRow`, in its order."""


class Kind(NamedTuple):
    """What the rows of a slab have in common."""

    layout: RowLayout
    is_trained: bool
    """Whether they have moments and gradients; False: rows of sampler versions."""


class RowNorms(NamedTuple):
    """Euclidean norms of a row's values."""

    weights: float
    exp_avg: float
    """Of the first moment; infinite if nothing is known of it."""


@dataclass(slots=True)
class Row:
    """A bank slot: contiguous vectors (P,), fp32, and the views of them that the layers use."""

    slab: Slab
    weights: Tensor
    exp_avg: Tensor | None
    """First moment; None, like the next two, in rows for sampler versions."""
    exp_avg_sq: Tensor | None
    grad: Tensor | None
    groups: AdapterViews
    """Views for the layers, as a `Segment` takes them."""
    compute: Tensor | None = None
    """The weights (P,) in the base model's dtype, if that is not fp32."""
    norms: RowNorms | None = None
    """As an optimizer step has left them; None: something else has written weights or moments since."""
    _transfer: Transfer | None = None

    def refresh(self) -> None:
        """Copy the weights to `compute`; every writer of weights or moments calls this afterwards."""
        self.norms = None
        if self.compute is not None:
            self.compute.copy_(self.weights)

    def copy_from(self, other: Row) -> None:
        """Take the values of another row of the same layout and device."""
        for row in (self, other):
            row.settle()
        for vector, source in zip(self._vectors, other._vectors, strict=True):
            if vector is not None and source is not None:
                vector.copy_(source)

    @property
    def _vectors(self) -> tuple[Tensor | None, ...]:
        return self.weights, self.exp_avg, self.exp_avg_sq, self.grad, self.compute

    def begin_transfer(self, transfer: Transfer | None) -> None:
        """Note a copy from or to the row that may still be under way."""
        self._transfer = transfer

    @property
    def transfer(self) -> Transfer | None:
        """The last copy from or to the row, if it may still be under way."""
        return self._transfer

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes: none on another device."""
        if self.weights.device.type != "cpu":
            return 0
        copy_bytes = 0 if self.compute is None else self.compute.nbytes
        return self.weights.nbytes * (4 if self.slab.kind.is_trained else 1) + copy_bytes

    def settle(self) -> None:
        """Let the computation wait for the last copy from or to the row."""
        if self._transfer is not None:
            self._transfer.wait_on_device()
            self._transfer = None


class Slab:
    """Rows of one kind in one allocation per buffer, row after row."""

    _numbers = itertools.count()

    def __init__(
        self, kind: Kind, num_rows: int, device: torch.device, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocate rows."""
        layout, is_trained = kind

        def buffer(dtype: torch.dtype = torch.float32) -> Tensor:
            # Uninitialised: pages that no row has used take no memory. A load writes all of a row.
            return torch.empty(num_rows, layout.num_values, dtype=dtype, device=device)  # (rows, P)

        self.number = next(self._numbers)
        """Later slabs of the process have higher ones: passes order rows by it, so equal runs have equal orders."""
        self.kind = kind
        self.num_rows = num_rows
        self.weights = buffer()
        self.moments = (buffer(), buffer()) if is_trained else None
        self.grad = buffer() if is_trained else None
        self.compute = None if compute_dtype == torch.float32 else buffer(compute_dtype)
        self.views = layout.views(self.weights if self.compute is None else self.compute, self.grad)
        self._num_unused = num_rows
        self._free: list[Row] = []

    @property
    def num_free(self) -> int:
        """Rows that hold nothing."""
        return self._num_unused + len(self._free)

    def take(self) -> Row | None:
        """Return the lowest free row, so that used rows are adjacent; None if there is none."""
        if self._free:
            self._free.sort(key=lambda row: -row.groups.slot)
            return self._free.pop()
        if not self._num_unused:
            return None
        self._num_unused -= 1
        return self._row(self.num_rows - self._num_unused - 1)

    def free(self, row: Row) -> None:
        """Make a row free."""
        self._free.append(row)

    @property
    def num_used(self) -> int:
        """Rows that hold an entry."""
        return self.num_rows - self.num_free

    def close(self) -> None:
        """Free the memory; no row is used. Views of it that the last pass has left must not be read any more."""
        for row in self._free:
            row.settle()
        self._free.clear()  # they refer back to the slab
        for buffer in (self.weights, *(self.moments or ()), self.grad, self.compute):
            if buffer is not None and buffer.untyped_storage().resizable():  # not if NumPy has seen it, on a CPU
                buffer.untyped_storage().resize_(0)

    def _row(self, slot: int) -> Row:
        grad = None if self.grad is None else self.grad[slot]
        exp_avg, exp_avg_sq = (None, None) if self.moments is None else (moment[slot] for moment in self.moments)
        groups = tuple(None if views is None else views.row(slot) for views in self.views)
        adapter = AdapterViews(self.views, groups, slot)
        compute = None if self.compute is None else self.compute[slot]
        return Row(self, self.weights[slot], exp_avg, exp_avg_sq, grad, adapter, compute)


@dataclass(slots=True)
class HostRow:
    """An entry's values in host memory: vectors (P,), fp32, which are replaced but never written in place."""

    weights: Tensor | None = None
    """None: a fresh adapter, whose weights are drawn from its seed."""
    exp_avg: Tensor | None = None
    """First moment; None, like the next two: zeros."""
    exp_avg_sq: Tensor | None = None
    grad: Tensor | None = None
    drawing: Future[Tensor] | None = field(default=None, kw_only=True)
    """Draws the weights of a fresh adapter in another thread; None: they are drawn when they are needed."""
    transfer: Transfer | None = field(default=None, kw_only=True)
    """The copy that fills the vectors; the host must wait for it before it reads them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its vectors."""
        vectors = (self.weights, self.exp_avg, self.exp_avg_sq, self.grad)
        return sum(vector.nbytes for vector in vectors if vector is not None)

    @property
    def is_ready(self) -> bool:
        """Whether the vectors are there, but for transfers."""
        return self.weights is not None or self.drawing is None or self.drawing.done()

    def wait(self) -> None:
        """Wait until the vectors can be read."""
        if self.transfer is not None:
            self.transfer.wait_on_host()
            self.transfer = None


@dataclass(slots=True, weakref_slot=True)
class Entry:
    """One adapter or sampler version. When a key gets other weights by `publish`, it gets another entry."""

    key: str
    spec: AdapterSpec
    layout: RowLayout
    is_trained: bool
    """False: a sampler version, which has only weights."""
    row: Row | None = None
    """Its bank slot; None: its values are in `host`."""
    host: HostRow | None = None
    has_moments: bool = False
    """Whether the moments may be other than zero."""
    has_grad: bool = False
    """Whether there is a gradient; otherwise it is zero, and the row's vector of it holds anything."""
    num_pins: int = 0
    """Users that keep the entry from being removed."""
    is_removed: bool = False
    """Removed while pinned: it goes with its last pin."""

    @property
    def kind(self) -> Kind:
        """The kind of rows that the entry can have."""
        return Kind(self.layout, self.is_trained)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that its values take."""
        if self.row is not None:
            return self.row.host_bytes
        return self.host.num_bytes if self.host is not None else 0

    def begin_gradient(self, *, can_set: bool = False) -> bool:
        """Let the row's vector be the gradient from now on, zeros if there was none; the row is settled.

        With `can_set`, a pass is about to set gradients that begin, instead of adding to zeros. Returns whether it is
        to set this one, whose vector holds anything until then.
        """
        if self.has_grad:
            return False
        self.has_grad = True
        if can_set and not self.layout.has_gaps:  # no kernel writes the values between matrices
            return True
        assert self.row is not None
        assert self.row.grad is not None
        self.row.grad.zero_()
        return False

    def note_step(self) -> None:
        """Record an optimizer step on the row, which has written the moments and used the gradient up.

        At once: an entry that leaves its row takes along what is recorded.
        """
        assert self.row is not None, "the row has been evicted as it was before its step"
        self.drop_grad()
        self.has_moments = True

    def drop_grad(self) -> None:
        """Make the gradient zero."""
        if self.host is not None:
            self.host.grad = None
        self.has_grad = False

    def restore_grad(self, gradient: Tensor | None) -> None:
        """Replace the gradient by an earlier one (P,); None: zeros."""
        self.drop_grad()
        if gradient is None:
            return
        if self.row is not None:
            assert self.row.grad is not None
            self.row.settle()
            self.row.grad.copy_(gradient)
        else:
            assert self.host is not None
            self.host.grad = gradient.cpu()
        self.has_grad = True

    def read(self) -> HostRow:
        """Return the values without moving them. In a slot they are views of the row: do not keep them."""
        row = self.row
        if row is None:
            assert self.host is not None
            self.host.weights = self.host_weights()
            self.host.wait()
            return self.host
        row.settle()
        moments = (row.exp_avg, row.exp_avg_sq) if self.has_moments else (None, None)
        return HostRow(row.weights, *moments, row.grad if self.has_grad else None)

    def host_weights(self) -> Tensor:
        """Return the weights in host memory (P,); those of a fresh adapter are drawn, if they have not been."""
        host = self.host
        assert host is not None
        if host.weights is not None:
            return host.weights
        return self.layout.initial_weights(self.spec) if host.drawing is None else host.drawing.result()

    @property
    def held_vectors(self) -> dict[str, Tensor]:
        """The vectors of the row that may be other than zero, by their names in `HostRow`."""
        row = self.row
        assert row is not None
        vectors = {"weights": row.weights}
        if self.has_moments:
            assert row.exp_avg is not None
            assert row.exp_avg_sq is not None
            vectors |= {"exp_avg": row.exp_avg, "exp_avg_sq": row.exp_avg_sq}
        if self.has_grad:
            assert row.grad is not None
            vectors["grad"] = row.grad
        return vectors

    def occupy(self, row: Row) -> None:
        """Take a row that holds the entry's values from now on, and were written into it before."""
        row.groups.occupy(self.spec)
        row.norms = None
        self.row, self.host = row, None

    def move(self, slab: Slab) -> None:
        """Take a free row of another slab of the same layout, with the values; the row before becomes free."""
        before, row = self.row, slab.take()
        assert before is not None
        assert row is not None
        row.copy_from(before)
        self.occupy(row)
        before.slab.free(before)

    def vacate(self, host: HostRow | None) -> Row:
        """Return the row; the values are in `host` from now on, None if the entry is going."""
        row = self.row
        assert row is not None
        self.row, self.host = None, host
        return row

    def replace(self, host: HostRow) -> None:
        """Take other values; the entry has no row."""
        assert self.row is None
        self.host = host
        self.has_moments = host.exp_avg is not None
        self.has_grad = host.grad is not None

    def pin(self) -> None:
        """Keep the entry from being removed."""
        self.num_pins += 1

    def unpin(self) -> bool:
        """Undo one `pin`; return whether the entry was removed meanwhile and can go now."""
        if not self.num_pins:
            return False
        self.num_pins -= 1
        return self.is_removed and not self.num_pins

    def remove(self) -> bool:
        """Mark the entry as removed; return whether it can go now, because it has no pin."""
        self.is_removed = True
        return not self.num_pins
