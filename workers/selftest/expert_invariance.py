"""Trial of experts: to how many rows each expert's must be padded, so that a tenant keeps its bits among any others.

Runs a layer of experts with its weights, forward and backward, for several adapters together and for each of them solo:
their rows choose experts that overlap, and one adapter has two segments.

Main invariant: no result is assumed; see `row_invariance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.base_model import BaseModel
from workers.model.expert_products import Dispatch, ExpertLayer
from workers.model.expert_shares import ExpertSegments
from workers.model.experts import Experts
from workers.model.numerics import EXPERT_ROWS
from workers.model.segments import Routing, Segment
from workers.rows import AdapterViews, GroupViews, RowLayout

CANDIDATES = (4, 8, 16, 32)
RANK = 8
SEGMENTS = ((0, 37), (1, 4), (None, 20), (2, 1), (0, 5), (1, 70))
"""Adapter and rows of each segment; None: rows of the base model alone."""


@torch.no_grad()
def find_expert_rows(base_model: BaseModel) -> int | None:
    """Return the least number with which rows keep their bits; None: with no candidate.

    Without experts, and on a device where nothing is promised, that which is taken without a trial.
    """
    if not base_model.expert_layers:
        return EXPERT_ROWS
    trial = _Trial(base_model.expert_layers[0])
    return next((rows_min for rows_min in CANDIDATES if trial.keeps(rows_min)), None)


class _Trial:
    def __init__(self, experts: Experts) -> None:
        self._num_experts = experts.num_experts
        self._shapes = tuple(experts.shapes)
        self._layer = ExpertLayer(experts.weights, 0, 1)
        weight = experts.weights.down
        generator = torch.Generator().manual_seed(self._num_experts)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(weight.device, weight.dtype)

        num_rows = sum(length for _, length in SEGMENTS)
        self._x, self._dout = draw(num_rows, weight.shape[1]), draw(num_rows, weight.shape[1])
        scores = draw(num_rows, self._num_experts).float()
        self._weights, choices = scores.softmax(-1).topk(experts.num_choices, -1)
        self._choices = choices.cpu().numpy()
        layout = RowLayout(self._shapes, RANK, ("mlp",))
        num_adapters = 1 + max(slot for slot, _ in SEGMENTS if slot is not None)
        self._values = draw(num_adapters, layout.num_values)
        self._layout = layout

    def keeps(self, rows_min: int) -> bool:
        """Return whether each adapter's rows and gradient have the bits that they have solo."""
        together = self._compute(range(len(SEGMENTS)), rows_min)
        for adapter in {slot for slot, _ in SEGMENTS}:
            own = [number for number, (slot, _) in enumerate(SEGMENTS) if slot == adapter]
            solo = self._compute(own, rows_min)
            rows = self._rows(own)
            if not all(torch.equal(whole[rows], part) for whole, part in zip(together[:3], solo[:3], strict=True)):
                return False
            if adapter is not None and not torch.equal(together[3][adapter], solo[3][adapter]):
                return False
        return all(self._segment_keeps(number, together[0], rows_min) for number in range(len(SEGMENTS)))

    def _segment_keeps(self, number: int, together: Tensor, rows_min: int) -> bool:
        """Return whether a segment's rows do not depend on other rows of its adapter: a sampler's passes have some."""
        return torch.equal(together[self._rows([number])], self._compute([number], rows_min)[0])

    def _rows(self, segments: Sequence[int]) -> Tensor:
        starts = [sum(length for _, length in SEGMENTS[:number]) for number in segments]
        return torch.cat(
            [torch.arange(start, start + SEGMENTS[number][1]) for start, number in zip(starts, segments, strict=True)]
        )

    def _compute(self, segments: Sequence[int], rows_min: int) -> list[Tensor]:
        """Return the outputs of these segments' rows, the gradients of inputs and weights, and of all adapters."""
        grad = torch.zeros_like(self._values)
        slab = self._layout.views(self._values, grad)
        placed, start = [], 0
        for number in segments:
            slot, length = SEGMENTS[number]
            if slot is not None:
                groups: list[GroupViews | None] = [None if views is None else views.row(slot) for views in slab]
                placed.append(Segment(start, start + length, AdapterViews(slab, groups, slot, 2.0)))
            start += length
        rows = self._rows(segments)
        x, weights, dout = (tensor[rows] for tensor in (self._x, self._weights, self._dout))
        dispatch = Dispatch(self._choices[rows.numpy()], self._num_experts, rows_min, x.device)
        of_pass = ExpertSegments(Routing(placed, EXPERT_ROWS), start, 0, 1)
        out, kept = self._layer.forward(x, weights, dispatch, of_pass)
        return [out, *self._layer.backward(x, weights, kept, dout), grad]
