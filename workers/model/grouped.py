"""The small products of many adapters in one kernel each: grouped matmul, for GPUs that have it.

Knows segments and views of adapters, as `lora` does, and the library's grouped matmul; not models or the bank.

Main invariant: a group is the rows of one adapter, and a sum over rows never leaves it. Nothing is masked by
multiplying with zero. How a kernel divides its work may depend on all groups together: the bits are not those of each
adapter alone, which is why exact mode does without.

Dimensions: T rows of the pass, N rows of a run, S adapters of a run, L rows of a slab between its first and last, D
inputs, F outputs, R padded rank, G linears in a group of the base model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from workers.model.lora import Segment
from workers.rows import AdapterViews, GroupShape, GroupViews

VALUES_MULTIPLE = 8
"""Rows must be whole multiples of 16 bytes apart, in bf16."""
MAJOR_CAPABILITIES = (9, 10)
"""Of the GPUs whose grouped matmul is one kernel. On others the library loops and waits for the device."""


def can_group(device: torch.device, dtype: torch.dtype, shapes: Iterable[GroupShape]) -> bool:
    """Whether a model's segments can be computed by grouped matmul, in one kernel."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    is_supported = torch.cuda.get_device_capability(device)[0] in MAJOR_CAPABILITIES
    return is_supported and all(
        width % VALUES_MULTIPLE == 0 for shape in shapes for width in (shape.d_in, *shape.d_outs)
    )


class GroupedRun:
    """Consecutive segments whose adapters lie in one slab, at rising slots: each product of all is one kernel.

    Segments of one adapter that stand one behind the other are one group.
    """

    def __init__(self, segment: Segment) -> None:
        self.start = segment.start
        self.adapters: list[AdapterViews] = [segment.adapter]
        self._ends = [segment.stop - segment.start]
        """Per adapter the row after its last, counted from `start`."""
        self._tensors: tuple[Tensor, Tensor, Tensor | None] | None = None

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self._ends[-1]

    def take(self, segment: Segment) -> bool:
        """Let a segment that comes next join, if it can; returns whether it did."""
        last, new = self.adapters[-1], segment.adapter
        if segment.start != self.stop or new.slab is not last.slab or new.scaling != last.scaling:
            return False
        if new.slot < last.slot:
            return False
        end = segment.stop - self.start
        if new.slot == last.slot:
            self._ends[-1] = end
        else:
            self.adapters.append(new)
            self._ends.append(end)
        return True

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """ys[i] (T, F) += scaling x A_i^T B_i^T in this run's rows; returns x A^T (N, G * R), unscaled.

        x (T, D). None, and nothing done, where the group is not adapted.
        """
        views = self._views(group)
        if views is None:
            return None
        ends, _, _ = self._on(x.device)
        xa = grouped_mm(x[self.start : self.stop], views.A.transpose(1, 2), offs=ends)
        rank = views.Bs[0].shape[1]
        for y, part, B in zip(ys, xa.split(rank, dim=1), views.Bs, strict=True):
            y[self.start : self.stop].add_(grouped_mm(part, B, offs=ends), alpha=self.adapters[0].scaling)
        return xa

    def backward(self, group: int, xa: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; formulas as `lora.backward_segments`.

        xa (N, G * R) as `forward` gave it, x (T, D), dys (T, F) per linear.
        """
        slab, views = self.adapters[0].slab[group], self._views(group)
        assert slab is not None
        assert views is not None
        assert slab.A_grad is not None, "a row that is only sampled from has no gradient"
        ends, own_ends, rows = self._on(x.device)
        scaling = self.adapters[0].scaling
        x = x[self.start : self.stop]
        dys = [_aligned(dy[self.start : self.stop]) for dy in dys]
        parts = xa.split(views.Bs[0].shape[1], dim=1)  # (N, R) each
        dparts = [grouped_mm(dy, B.transpose(1, 2), offs=ends) for dy, B in zip(dys, views.Bs, strict=True)]
        dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=1)  # (N, G * R)
        dA = grouped_mm(dxa.t(), x, offs=own_ends)  # (S, G * R, D)
        dBs = [grouped_mm(part.t(), dy, offs=own_ends) for part, dy in zip(parts, dys, strict=True)]  # (S, R, F)
        for gradient, value in zip((slab.A_grad, *slab.B_grads), (dA, *dBs), strict=True):
            if rows is None:
                first = self.adapters[0].slot
                gradient[first : first + len(value)].add_(value, alpha=scaling)
            else:
                gradient.index_add_(0, rows, value.to(gradient.dtype), alpha=scaling)
        if dx is not None:
            dx[self.start : self.stop].add_(grouped_mm(dxa, views.A, offs=ends), alpha=scaling)

    def _views(self, group: int) -> GroupViews | None:
        """A (L, G * R, D) and Bs (L, R, F) from the first adapter's row of the slab to the last's."""
        slab = self.adapters[0].slab[group]
        if slab is None:
            return None
        rows = slice(self.adapters[0].slot, self.adapters[-1].slot + 1)
        return GroupViews(A=slab.A[rows], Bs=tuple(B[rows] for B in slab.Bs), A_grad=None, B_grads=())

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ends of groups (L,), with empty ones for rows of the slab that are not in the run; those of the adapters
        alone (S,); and the adapters' rows (S,), None if they are consecutive."""
        if self._tensors is None:
            slots = [adapter.slot for adapter in self.adapters]
            ends = dict(zip(slots, self._ends, strict=True))
            filled: list[int] = []
            for slot in range(slots[0], slots[-1] + 1):
                filled.append(ends[slot] if slot in ends else filled[-1])
            own = _copied(self._ends, torch.int32, device)
            if len(filled) == len(slots):
                self._tensors = own, own, None
            else:
                self._tensors = _copied(filled, torch.int32, device), own, _copied(slots, torch.int64, device)
        return self._tensors


def group_segments(segments: Sequence[Segment]) -> list[GroupedRun]:
    """Runs of segments that stand in row order, as few as there can be without moving rows."""
    runs: list[GroupedRun] = []
    for segment in segments:
        if not (runs and runs[-1].take(segment)):
            runs.append(GroupedRun(segment))
    return runs


def _copied(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, without waiting for what it is doing, as `torch.tensor(..., device=...)` would."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _aligned(rows: Tensor) -> Tensor:
    """Rows as the kernel takes them: values of a row side by side, rows whole multiples of 16 bytes apart."""
    is_fine = rows.stride(1) == 1 and rows.stride(0) % VALUES_MULTIPLE == 0 and rows.stride(0) >= rows.shape[1]
    return rows if is_fine else rows.contiguous()
