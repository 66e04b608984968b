"""Bank slots: rows of flat buffers in device memory, allocated many at a time.

Does not depend on keys or on what an adapter's values mean.

Main invariant: rows of one slab have the same layout and are adjacent in memory, so the layers can compute several of
them in one batch.

Dimensions: P values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.bank.transfers import Transfer
from workers.rows import AdapterViews, RowLayout


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
    _transfer: Transfer | None = None

    def refresh(self) -> None:
        """Copy the weights to `compute`; every writer of weights calls this afterwards."""
        if self.compute is not None:
            self.compute.copy_(self.weights)

    def begin_transfer(self, transfer: Transfer | None) -> None:
        """Note a copy from or to the row that may still be under way."""
        self._transfer = transfer

    def settle(self) -> None:
        """Let the computation wait for the last copy from or to the row."""
        if self._transfer is not None:
            self._transfer.wait_on_device()
            self._transfer = None


class Slab:
    """Rows of one layout in one allocation per buffer, row after row."""

    def __init__(
        self,
        layout: RowLayout,
        num_rows: int,
        device: torch.device,
        *,
        is_trained: bool,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate rows; with `is_trained` they have moments and gradients."""

        def buffer(dtype: torch.dtype = torch.float32) -> Tensor:
            # Uninitialised: pages that no row has used take no memory. A load writes all of a row.
            return torch.empty(num_rows, layout.num_values, dtype=dtype, device=device)  # (rows, P)

        self.layout = layout
        self.is_trained = is_trained
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

    def close(self) -> None:
        """Drop the free rows, whose references back to the slab would keep its memory."""
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
