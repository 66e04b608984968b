"""How the segments of a pass are computed: which of them are one batch, which are padded, which are fused.

Does not depend on the bank, on models or on losses.

Main invariant: without fused runs, the products of a segment depend only on that segment's rows, their number and its
adapter. With them, that holds to rounding.

Dimensions: T rows of the pass, D inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.model.attention import Attend
from workers.model.lora.segments import Run, Segment, ShortRun
from workers.model.numerics import ROWS_MIN, Numerics


class FusedRun(Protocol):
    """Segments whose products are one kernel each; implemented by `grouped.GroupedRun`."""

    def forward(self, group: int, x: Tensor, ys: Sequence[Tensor]) -> Tensor | None:
        """Add the adapters' part to ys (T, F), from x (T, D); return an intermediate result for the backward.

        None: the group is not adapted.
        """

    def backward(self, group: int, xa: Tensor, x: Tensor, dys: Sequence[Tensor], dx: Tensor | None) -> None:
        """Add to the adapters' gradients, and to dx (T, D) if given; `xa` is the result of `forward`."""


Fuse = Callable[[Sequence[Segment]], Sequence[FusedRun]]
"""Makes fused runs of a pass's segments."""


class Routing:
    """The runs of one pass. Rows in no segment see only the base model.

    Segments must not overlap and must be in row order. Those with fewer rows than `rows_min` are padded.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        rows_min: int,
        *,
        can_batch: bool = True,
        can_batch_short: bool = False,
        fuse: Fuse | None = None,
    ) -> None:
        """Make runs; with `fuse`, all segments are in `fused`. `can_batch_short` is for passes without a backward."""
        self.runs: list[Run] = []
        self.short_runs: list[ShortRun] = []
        self.fused: Sequence[FusedRun] = () if fuse is None else fuse(segments)
        if fuse is not None:
            return
        end = 0
        if can_batch and can_batch_short:
            segments = self._without_short(segments, rows_min)
        for segment in segments:
            assert end <= segment.start < segment.stop, "segments overlap or are empty"
            end = segment.stop
            length = segment.stop - segment.start
            if not (can_batch and length >= rows_min and self.runs and self.runs[-1].try_add(segment)):
                self.runs.append(Run(segment.start, length, [segment.adapter]))

    def _without_short(self, segments: Sequence[Segment], rows_min: int) -> list[Segment]:
        """Move segments of few rows to `short_runs` if several can be one batch; return the others."""
        left: list[Segment] = []
        batches: list[list[Segment]] = []
        for segment in segments:
            if segment.stop - segment.start >= rows_min:
                left.append(segment)
                continue
            if batches and segment.adapter.can_follow(batches[-1][-1].adapter):
                batches[-1].append(segment)
            else:
                batches.append([segment])
        for batch in batches:
            if len(batch) == 1:
                left += batch
            else:
                self.short_runs.append(ShortRun(batch, rows_min))
        return sorted(left, key=lambda segment: segment.start)


class CurrentPass:
    """The state of a pass that all layers of one base model share. One per base model; used by one thread."""

    def __init__(self) -> None:
        self.rows_min = ROWS_MIN
        """Products with fewer rows are padded to this many; below it, a row's bits depend on the others."""
        self.can_batch = True
        """Whether segments in one batch have the bits that each has solo; see `Numerics`."""
        self.fuse: Fuse | None = None
        """`grouped.group_segments` if the device has such a kernel."""
        self.routing = Routing((), self.rows_min)
        self.attend: Attend | None = None
        self.num_base_matmuls = 0
        """Products of activations with frozen weights so far, forward only."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require a gradient although neither the embeddings nor the frozen weights do."""

    def use(self, numerics: Numerics, fuse: Fuse | None) -> None:
        """Compute segments this way from now on."""
        self.rows_min = numerics.rows_min or ROWS_MIN
        self.can_batch = numerics.can_batch
        self.fuse = fuse

    def begin(self, segments: Sequence[Segment], attend: Attend) -> None:
        """Set the segments and the attention of the next forward, and of its backward."""
        self.routing = self.route(segments, needs_grad=torch.is_grad_enabled())
        self.attend = attend

    def reset(self) -> None:
        """Drop the last pass and the count of products."""
        self.routing, self.attend, self.num_base_matmuls = self.route(()), None, 0

    def count_matmuls(self, number: int) -> None:
        """Count products of activations with frozen weights."""
        self.num_base_matmuls += number

    def route(self, segments: Sequence[Segment], *, needs_grad: bool = True) -> Routing:
        """Return how these segments are computed; without a gradient there are more ways."""
        return Routing(
            segments, self.rows_min, can_batch=self.can_batch, can_batch_short=not needs_grad, fuse=self.fuse
        )
