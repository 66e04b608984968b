"""Fused runs: the small products of many adapters in one kernel each, by grouped matmul, on GPUs that have it.

Does not depend on models or the bank.

Main invariant: each group of a grouped matmul is the rows of one adapter, and a sum over rows never leaves it. Nothing
is masked by multiplying with zero. The kernel may divide its work by all groups together, so an adapter's bits are not
those that it has solo; exact mode does without.

Dimensions: T rows of the pass, N rows of a run, S adapters of a run, L rows of a slab from the first adapter's to the
last's, D inputs, F outputs, R padded rank, G linears in a group of the base model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from workers.host.uploads import on_device
from workers.model.segments import Segment
from workers.rows import AdapterViews, GroupShape, GroupViews

VALUES_MULTIPLE = 8
"""The kernel needs rows that are multiples of 16 bytes apart, which are so many values in bf16."""
MAJOR_CAPABILITIES = (9, 10)
"""Compute capabilities of GPUs on which grouped matmul is one kernel. On others the library loops and waits."""


def can_group(device: torch.device, dtype: torch.dtype, shapes: Iterable[GroupShape]) -> bool:
    """Return whether grouped matmul is one kernel for the adapters of a model of these shapes."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    is_supported = torch.cuda.get_device_capability(device)[0] in MAJOR_CAPABILITIES
    return is_supported and all(
        width % VALUES_MULTIPLE == 0
        for shape in shapes
        if shape.kind != "frozen"
        for width in (shape.d_in, *shape.d_outs)
    )


class GroupedRun:
    """Implements `segments.SegmentRun`: consecutive segments whose adapters are in one slab, at rising slots.

    Adjacent segments of one adapter are one group. If all adapters have one scaling, each product is added with it;
    otherwise the rows of x A^T and of dy B, which are R values long, are multiplied by their adapter's first.
    """

    def __init__(self, segment: Segment) -> None:
        self.start = segment.start
        self.adapters: list[AdapterViews] = [segment.adapter]
        self._ends = [segment.stop - segment.start]
        """Per adapter, the row after its last, counted from `start`."""
        self._tensors: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._scalings: float | Tensor | None = None
        """The adapters' one scaling, or the scaling of each row (N, 1), fp32; None: not needed yet."""

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self._ends[-1]

    def try_add(self, segment: Segment) -> bool:
        """Add the segment after the last if it can be in the run; return whether it can."""
        last, new = self.adapters[-1], segment.adapter
        if segment.start != self.stop or new.slab is not last.slab or new.slot < last.slot:
            return False
        end = segment.stop - self.start
        if new.slot == last.slot:
            self._ends[-1] = end
        else:
            self.adapters.append(new)
            self._ends.append(end)
        return True

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """Add scaling x A_i^T B_i^T to ys[i] (T, F) in this run's rows, from x (T, D).

        Return x A^T (N, G * R), scaled if there are several scalings; None if the group is not adapted.
        """
        views = self._views(group)
        if views is None:
            return None
        ends, _, _ = self._on(x.device)
        xa = grouped_mm(x[self.start : self.stop], views.A.transpose(1, 2), offs=ends)
        scaling = self._scale(xa)
        rank = views.Bs[0].shape[1]
        for y, part, B in zip(ys, xa.split(rank, dim=1), views.Bs, strict=True):
            y[self.start : self.stop].add_(grouped_mm(part, B, offs=ends), alpha=scaling)
        return xa

    def backward(self, group: int, kept: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; formulas as in `segments.backward_segments`.

        `kept` (N, G * R) is the result of `forward`; x (T, D), dys (T, F) per linear.
        """
        slab, views = self.adapters[0].slab[group], self._views(group)
        assert slab is not None
        assert views is not None
        assert slab.A_grad is not None, "a row of a sampler version has no gradient"
        ends, own_ends, rows = self._on(x.device)
        x = x[self.start : self.stop]
        dys = [_aligned(dy[self.start : self.stop]) for dy in dys]
        parts = kept.split(views.Bs[0].shape[1], dim=1)  # (N, R) each
        dparts = [grouped_mm(dy, B.transpose(1, 2), offs=ends) for dy, B in zip(dys, views.Bs, strict=True)]
        dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=1)  # (N, G * R)
        scaling = self._scale(dxa)
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

    def _scale(self, rows: Tensor) -> float:
        """Multiply rows (N, G * R) by several scalings, in place; return the factor that is left, if there is one."""
        if self._scalings is None:
            scalings = [adapter.scaling for adapter in self.adapters]
            if len(set(scalings)) == 1:
                self._scalings = scalings[0]
            else:
                counts = np.diff(self._ends, prepend=0)
                self._scalings = on_device(np.repeat(scalings, counts)[:, None], rows.device, torch.float32)
        if isinstance(self._scalings, float):
            return self._scalings
        rows.mul_(self._scalings)
        return 1.0

    def _views(self, group: int) -> GroupViews | None:
        """Return A (L, G * R, D) and Bs (L, R, F), from the first adapter's row of the slab to the last's."""
        slab = self.adapters[0].slab[group]
        if slab is None:
            return None
        rows = slice(self.adapters[0].slot, self.adapters[-1].slot + 1)
        return GroupViews(A=slab.A[rows], Bs=tuple(B[rows] for B in slab.Bs), A_grad=None, B_grads=())

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return, on the device: ends of groups (L,), with empty groups for rows of the slab that are not in the run;
        ends of the adapters' groups alone (S,); the adapters' rows (S,), None if they are consecutive."""
        if self._tensors is None:
            slots = [adapter.slot for adapter in self.adapters]
            ends = dict(zip(slots, self._ends, strict=True))
            filled: list[int] = []
            for slot in range(slots[0], slots[-1] + 1):
                filled.append(ends[slot] if slot in ends else filled[-1])
            own = on_device(self._ends, device, torch.int32)
            if len(filled) == len(slots):
                self._tensors = own, own, None
            else:
                self._tensors = on_device(filled, device, torch.int32), own, on_device(slots, device)
        return self._tensors


def group_segments(segments: Sequence[Segment]) -> list[GroupedRun]:
    """Return the fewest runs of segments in row order."""
    runs: list[GroupedRun] = []
    for segment in segments:
        if not (runs and runs[-1].try_add(segment)):
            runs.append(GroupedRun(segment))
    return runs


def _aligned(rows: Tensor) -> Tensor:
    """Return rows as the kernel takes them: contiguous, and multiples of 16 bytes apart."""
    is_fine = rows.stride(1) == 1 and rows.stride(0) % VALUES_MULTIPLE == 0 and rows.stride(0) >= rows.shape[1]
    return rows if is_fine else rows.contiguous()
