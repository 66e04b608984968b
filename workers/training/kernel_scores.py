"""Computes losses from blocks of logits on a GPU by three kernels of our own a block, for any number of requests.

Implements `block_scores.PassScores`. The log-probabilities of a whole block never exist: `score_targets` reads the
logits once and keeps two numbers of each row. With these, `differentiate_logits` reads them again and writes the
gradient in their place. Targets, log-probabilities and slopes of all rows of a pass are one vector each, row after row,
so that a launch takes rows of any requests, with any numbers of targets.

Does not depend on the unembedding.

Main invariants: as in `block_scores`; and all sums have an order that depends on the vocabulary, or on a row's or a
piece's number of targets, alone.

Dimensions: as in `block_scores`; L values of a launch, one for each target of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.host.uploads import on_device
from workers.model.gpu_operations import define, has_kernels
from workers.training.block_scores import Block, PassResults, count_clipped
from workers.training.logits import Part
from workers.training.losses import Terms

SCORE = (
    "score_targets(Tensor(a!) logprobs, Tensor(b!) norms, Tensor logits, Tensor targets, Tensor places, Tensor scales, "
    "int first)"
)
"""Set logprobs (L,) of targets and norms (B, 2) of rows, fp32, from logits (B, V).

Norms are the highest logit, and the logarithm of the sum of exp((logit - highest) scale).

`targets` (L,) int32: of all rows, one after another. `places` (B + 1,) int32: where each row's begin, and where the
last row's end, counted from `first`. `scales` (B,) fp32: 1 / temperature.
"""
ADD = "add_losses(Tensor(a!) sums, Tensor(b!) slopes, Tensor losses, Tensor ends, int first)"
"""Add losses (L,) to sums (S, 3), float64, of requests. If not all are finite, set the third and slopes (L,) to 0.

`ends` (S + 1,) int32: where each request's values begin, and where the last one's end, counted from `first`. Values
that are not among the L are left out.
"""
DIFFERENTIATE = (
    "differentiate_logits(Tensor(a!) logits, Tensor norms, Tensor targets, Tensor logprobs, Tensor slopes, "
    "Tensor places, Tensor scales, int first)"
)
"""Set logits (B, V) to d(loss)/d(logits) by the slopes (L,); the others as in `SCORE`."""
define("workers.training.loss_kernels", SCORE, ADD, DIFFERENTIATE)

TARGETS_AT_ONCE = 32
"""Targets of a row that a program holds at a time; it compares as many with as many."""


def can_score(device: torch.device) -> bool:
    """Return whether the kernels run on this device."""
    return has_kernels(device)


class KernelScores:
    """Implements `PassScores`."""

    def __init__(self, parts: Sequence[Part], num_rows: int, device: torch.device) -> None:
        """Begin a pass of `num_rows` rows; parts are in row order."""
        self.results = PassResults(parts, [part.loss.inputs_to(device) for part in parts], device)
        counts = np.zeros(num_rows + 1, np.int64)
        scales = np.ones(num_rows, np.float32)
        for part in parts:
            counts[part.start + 1 : part.stop + 1] = part.loss.targets.shape[1]
            if part.loss.temperatures is not None:
                scales[part.start : part.stop] = 1 / part.loss.temperatures[:, 0].numpy()
        self._places = np.cumsum(counts)  # on the host
        firsts = [own.first_value for own in self.results.parts]
        ends = np.array([*firsts, self._places[-1]])
        targets = [part.loss.targets.numpy().ravel() for part in parts]
        numbers = on_device(np.concatenate([self._places, ends, *targets]).astype(np.int32), device)
        self._row_places, self._ends, self._targets = numbers.split([len(self._places), len(ends), int(ends[-1])])
        self._scales = on_device(scales, device)

    def score(self, logits: Tensor, block: Block) -> Tensor:
        """See `PassScores`; returns norms (B, 2)."""
        norms = logits.new_empty(len(logits), 2, dtype=torch.float32)
        rows, values = self._rows(block), self._values(block)
        torch.ops.tinkerpool.score_targets(
            self.results.logprobs[values], norms, logits, self._targets[values], *self._of_rows(rows), values.start
        )
        return norms

    def add(self, block: Block, terms: Sequence[Terms]) -> None:
        """See `PassScores`."""
        for (_, own), term in zip(block, terms, strict=True):
            count_clipped(own, term)
        values = self._values(block)
        slopes = self.results.slopes[values]
        torch.cat([term.slope.flatten() for term in terms], out=slopes)
        losses = torch.cat([term.loss.flatten() for term in terms])
        first, end = block[0][1].index, block[-1][1].index + 1
        torch.ops.tinkerpool.add_losses(
            self.results.sums[first:end], slopes, losses, self._ends[first : end + 1], values.start
        )

    def differentiate(self, logits: Tensor, scores: Tensor, block: Block) -> None:
        """See `PassScores`."""
        rows, values = self._rows(block), self._values(block)
        torch.ops.tinkerpool.differentiate_logits(
            logits,
            scores,
            self._targets[values],
            self.results.logprobs[values],
            self.results.slopes[values],
            *self._of_rows(rows),
            values.start,
        )

    def _rows(self, block: Block) -> slice:
        return slice(block[0][0].first_row, block[-1][0].end_row)

    def _values(self, block: Block) -> slice:
        """Return the places of a block's values among those of the pass."""
        rows = self._rows(block)
        return slice(int(self._places[rows.start]), int(self._places[rows.stop]))

    def _of_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return places and scales of rows."""
        return self._row_places[rows.start : rows.stop + 1], self._scales[rows]
