"""Random adapters in slabs, with gradients, rows for them, and their products one by one in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.contract.adapted_modules import ModuleKind
from workers.model.gpu_operations import PART_DEPTH
from workers.model.segments import Segment, backward_segments, forward_segments
from workers.rows import AdapterViews, GroupShape, GroupViews, RowLayout

NUM_ROWS, D_IN = 60, 2 * PART_DEPTH + 40
SHAPES = (
    GroupShape(index=0, kind="attn", names=("q", "k", "v"), d_in=D_IN, d_outs=(PART_DEPTH + 64, 24, 24)),
    GroupShape(index=1, kind="mlp", names=("down",), d_in=D_IN, d_outs=(130,)),
)
"""Sums over D are in three parts, over F in two for one group and in one for the other."""
FEATURES, HIDDEN = 130, 40
MLP_SHAPES = (
    GroupShape(index=0, kind="mlp", names=("gate", "up"), d_in=HIDDEN, d_outs=(FEATURES, FEATURES)),
    GroupShape(index=1, kind="mlp", names=("down",), d_in=FEATURES, d_outs=(HIDDEN,)),
    GroupShape(index=2, kind="attn", names=("o",), d_in=HIDDEN, d_outs=(HIDDEN,)),
)
"""Of a layer whose gate has two blocks of columns."""


@dataclass(frozen=True)
class Slab:
    """Rows of random adapters of one padded rank, as the bank has them."""

    rows: list[AdapterViews]

    @classmethod
    def of(
        cls,
        rank: int,
        kinds: tuple[ModuleKind, ...],
        num_rows: int,
        dtype: torch.dtype,
        device: str = "cpu",
        shapes: Sequence[GroupShape] = SHAPES,
    ) -> Slab:
        """Return adapters of all modules of these kinds; their scalings differ."""
        layout = RowLayout(shapes, rank, kinds)
        generator = torch.Generator().manual_seed(rank)
        flat = torch.randn(num_rows, layout.num_values, generator=generator).to(device, dtype)
        slab = layout.views(flat, torch.zeros(flat.shape, device=device))
        return cls(
            [
                AdapterViews(slab, tuple(view and view.row(slot) for view in slab), slot, 0.5 + slot)
                for slot in range(num_rows)
            ]
        )


def segments_of(dtype: torch.dtype, device: str = "cpu", shapes: Sequence[GroupShape] = SHAPES) -> list[Segment]:
    """Return segments of one row and of many, of three ranks in three slabs, with rows of no adapter between."""
    small, large = (Slab.of(rank, ("attn", "mlp"), number, dtype, device, shapes) for rank, number in ((8, 3), (32, 2)))
    attention = Slab.of(16, ("attn",), 1, dtype, device, shapes)
    adapters = [small.rows[2], small.rows[0], attention.rows[0], large.rows[1], small.rows[2]]
    starts = [(0, 1), (1, 8), (8, 9), (12, 12 + 33), (50, 58)]
    return [Segment(*rows, adapter) for rows, adapter in zip(starts, adapters, strict=True)]


def operands(group: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    """Return x (T, D), and ys (T, F), columns of one tensor."""
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(NUM_ROWS, D_IN, generator=generator).to(device, dtype)
    d_outs = SHAPES[group].d_outs
    return x, list(torch.randn(NUM_ROWS, sum(d_outs), generator=generator).to(device, dtype).split(d_outs, 1))


def one_by_one(segments: Sequence[Segment], group: int, x: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs in fp32, segment by segment."""
    outs = [y.float().clone() for y in ys]
    for segment in segments:
        views, rows = segment.adapter.groups[group], slice(segment.start, segment.stop)
        if views is not None:
            forward_segments(x[rows].float(), [out[rows] for out in outs], _wide(views), segment.adapter.scaling)
    return outs


def gradients_one_by_one(
    segments: Sequence[Segment], group: int, x: Tensor, dys: Sequence[Tensor], dx: Tensor
) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Return dx with what adapters add to it, and by `id` of each adapter the gradients of A and of every B^T.

    In fp32, segment by segment.
    """
    total, of_adapter = dx.float().clone(), dict[int, list[Tensor]]()
    for segment in segments:
        views, rows = segment.adapter.groups[group], slice(segment.start, segment.stop)
        if views is not None:
            wide, scaling = _wide(views), segment.adapter.scaling
            own, douts = x[rows].float(), [dy[rows].float() for dy in dys]
            xa = forward_segments(own, [torch.zeros_like(dout) for dout in douts], wide, scaling)
            dA, dBs = backward_segments(own, douts, total[rows], xa, wide, scaling)
            sums = of_adapter.setdefault(id(segment.adapter), [torch.zeros_like(each) for each in (dA, *dBs)])
            for sum_of_one, added in zip(sums, (dA, *dBs), strict=True):
                sum_of_one.add_(added)
    return total, of_adapter


def _wide(views: GroupViews) -> GroupViews:
    return GroupViews(A=views.A.float(), Bs=tuple(B.float() for B in views.Bs), A_grad=None, B_grads=())
