"""Computes losses from blocks of logits on a GPU by four kernels of our own a block, for any number of requests.

Implements `block_scores.PassScores`. The log-probabilities of a whole block never exist: `sum_logits` reads the logits
once and keeps two numbers of each row and part of the vocabulary, from which `score_targets` has those of the row. With
these, `differentiate_logits` reads the logits again and writes the gradient in their place. Targets, log-probabilities
and slopes of all rows of a pass are one vector each, row after row, so that a launch takes rows of any requests, with
any numbers of targets.

Depends on adapters of the unembedding that are not in the logits; not on the unembedding.

Main invariants: as in `block_scores`; and all sums have an order that depends on the vocabulary, or on a row's or a
piece's number of targets, alone.

Dimensions: as in `block_scores`; L values of a launch, one for each target of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from workers.host.uploads import all_on_device
from workers.model.fused_runs import PendingAdapters
from workers.model.gpu_operations import blocks_of, define
from workers.training.block_scores import Block, PassResults
from workers.training.logits import Part
from workers.training.losses import RequestLoss, Terms

SUM = (
    "sum_logits(Tensor(a!) parts, Tensor(b!) logprobs, Tensor logits, Tensor? xa, Tensor? addresses, Tensor? tiles, "
    "Tensor? ranks, Tensor targets, Tensor places, Tensor scales, int first, bool has_one_target)"
)
"""Set parts (P, B, 2), fp32, of logits (B, V), and logprobs (L,) to the logits of targets.

Of each part of the vocabulary, for every row: the highest logit, and the sum of exp((logit - highest) scale).

`xa` (1, B, R), `addresses`, `tiles` and `ranks` as in `gpu_operations.EXPAND`, of adapters of the unembedding. They are
added to the logits here and in `DIFFERENTIATE`, in fp32. All rows are in tiles, of `TRAINING_TILE_ROWS`. None: the
logits have them, or there are none. `targets` (L,) int32: of all rows, one after another. `places` (B + 1,) int32:
where each row's begin, and where the last row's end, counted from `first`. `scales` (B,) fp32: 1 / temperature.
`has_one_target`: whether each row has one.
"""
SCORE = "score_targets(Tensor(a!) logprobs, Tensor(b!) norms, Tensor parts, Tensor places, Tensor scales, int first)"
"""Set norms (B, 2) from parts, the second one its logarithm; and logprobs from logits to log-probabilities.

The others as in `SUM`.
"""
ADD = "add_losses(Tensor(a!) sums, Tensor(b!) slopes, Tensor losses, Tensor ends, int first)"
"""Add losses (L,) to sums (S, 3), float64, of requests. If not all are finite, set the third and slopes (L,) to 0.

`ends` (S + 1,) int32: where each request's values begin, and where the last one's end, counted from `first`. Values
that are not among the L are left out.
"""
DIFFERENTIATE = (
    "differentiate_logits(Tensor(a!) logits, Tensor(b!)? dxa, Tensor(c!)? summed, Tensor(d!)? arrivals, Tensor? xa, "
    "Tensor? addresses, Tensor? tiles, Tensor? ranks, Tensor? scalings, Tensor norms, Tensor targets, Tensor slopes, "
    "Tensor places, Tensor scales, int first, bool has_one_target)"
)
"""Set logits (B, V) to d(loss)/d(logits) by the slopes (L,); with adapters also dxa (P, B, R), `summed` and `arrivals`
as `gpu_operations.SHRINK_OUTPUTS` does from the gradient. The others as above.
"""
define("workers.training.loss_kernels", SUM, SCORE, ADD, DIFFERENTIATE)

PART_COLUMNS = 4096
"""Logits of a row that a program takes, one block of them after another."""
LOGITS_AT_ONCE = 32
"""Of a row, in such a block: with more, a program takes so many registers that fewer of them share a processor."""
TARGETS_AT_ONCE = 32
"""Targets of a row that a program reads at a time."""


def num_parts_of(vocab_size: int) -> int:
    """Return P, the parts of a vocabulary."""
    return blocks_of(vocab_size, PART_COLUMNS)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Adjacent requests whose terms are one function, or one request."""

    parts: list[Part]
    """In row order, without gaps."""
    loss: RequestLoss
    """Of all their tokens: it has the inputs of all of them, on the device."""

    @property
    def first_row(self) -> int:
        """Return the first row of them in the pass."""
        return self.parts[0].start

    def loss_of(self, part: Part) -> RequestLoss:
        """Return the loss of one of them, with its inputs on the device."""
        rows = slice(part.start - self.first_row, part.stop - self.first_row)
        return replace(part.loss, inputs={name: values[rows] for name, values in self.loss.inputs.items()})


class KernelScores:
    """Implements `PassScores`. Adjacent requests with one loss have common terms, so launches do not grow with them."""

    def __init__(self, parts: Sequence[Part], num_rows: int, device: torch.device) -> None:
        """Begin a pass of `num_rows` rows; parts are in row order."""
        counts = np.zeros(num_rows + 1, np.int64)
        scales = np.ones(num_rows, np.float32)
        for part in parts:
            counts[part.start + 1 : part.stop + 1] = part.loss.targets.shape[1]
            if part.loss.temperatures is not None:
                scales[part.start : part.stop] = 1 / part.loss.temperatures[:, 0].numpy()
        self._places = np.cumsum(counts)  # on the host
        groups = _with_common_terms(parts)
        inputs = [
            np.concatenate([part.loss.inputs[name].numpy() for part in group])
            for group in groups
            for name in group[0].loss.inputs
        ]
        self._scales, *uploaded = all_on_device([scales, *inputs], device)
        following = iter(uploaded)
        joined = [
            _Joined(group, replace(group[0].loss, inputs=dict(zip(group[0].loss.inputs, following, strict=False))))
            for group in groups
        ]
        self._joined = [each for each in joined for _ in each.parts]
        """Of each part."""
        losses = [each.loss_of(part) for each in joined for part in each.parts]
        self.results = PassResults(parts, losses, device)
        ends = np.array([*(own.first_value for own in self.results.parts), self._places[-1]])
        targets = np.concatenate([part.loss.targets.numpy().ravel() for part in parts])
        numbers = [array.astype(np.int32) for array in (self._places, ends, targets)]
        self._row_places, self._ends, self._targets = all_on_device(numbers, device)

    def score(self, logits: Tensor, block: Block, pending: PendingAdapters | None = None) -> Tensor:
        """See `PassScores`; returns norms (B, 2)."""
        num_rows, vocab_size = logits.shape
        parts = logits.new_empty(num_parts_of(vocab_size), num_rows, 2, dtype=torch.float32)
        norms = torch.empty_like(parts[0])
        rows, values = self._rows(block), self._values(block)
        places, scales = self._of_rows(rows)
        adapters = [None] * 4 if pending is None else pending.operands
        logprobs, targets = self.results.logprobs[values], self._targets[values]
        torch.ops.tinkerpool.sum_logits(
            parts, logprobs, logits, *adapters, targets, places, scales, values.start, _has_one_target(block)
        )
        torch.ops.tinkerpool.score_targets(logprobs, norms, parts, places, scales, values.start)
        return norms

    def add(self, block: Block, terms: Sequence[Terms]) -> None:
        """See `PassScores`."""
        self._add(block, [([pair], term) for pair, term in zip(block, terms, strict=True)])

    def add_local(self, block: Block) -> None:
        """See `PassScores`."""
        terms: list[tuple[Block, Terms]] = []
        for _, pairs in groupby(block, key=lambda pair: id(self._joined[pair[1].index])):
            common = list(pairs)
            rows, joined = self._rows(common), self._joined[common[0][1].index]
            logprobs = self.results.logprobs[self._values(common)].view(rows.stop - rows.start, -1)
            start, stop = rows.start - joined.first_row, rows.stop - joined.first_row
            terms.append((common, joined.loss.terms(logprobs, start, stop)))
        self._add(block, terms)

    def _add(self, block: Block, terms: Sequence[tuple[Block, Terms]]) -> None:
        """Add the terms of parts of a block."""
        for common, term in terms:
            self._count_clipped(common, term)
        values = self._values(block)
        slopes, losses = self.results.slopes[values], [term.loss.flatten() for _, term in terms]
        torch.cat([term.slope.flatten() for _, term in terms], out=slopes)
        first, end = block[0][1].index, block[-1][1].index + 1
        torch.ops.tinkerpool.add_losses(
            self.results.sums[first:end],
            slopes,
            losses[0] if len(losses) == 1 else torch.cat(losses),
            self._ends[first : end + 1],
            values.start,
        )

    def _count_clipped(self, block: Block, terms: Terms) -> None:
        """Add the clipped tokens of each piece to the sums, by one sum over all of them: it is exact."""
        if terms.is_clipped is None:
            return
        for _, own in block:
            own.has_clipped = True
        values, first, end = self._values(block), block[0][1].index, block[-1][1].index + 1
        totals = terms.is_clipped.flatten().cumsum(0)
        lasts = (self._ends[first + 1 : end + 1] - (values.start + 1)).clamp(max=len(totals) - 1)
        counts, sums = totals.index_select(0, lasts), self.results.sums[first:end, 1]
        sums.add_(counts)
        sums[1:].sub_(counts[:-1])

    def differentiate(
        self, logits: Tensor, scores: Tensor, block: Block, pending: PendingAdapters | None = None
    ) -> Tensor | None:
        """See `PassScores`."""
        rows, values = self._rows(block), self._values(block)
        sums: Sequence[Tensor | None] = [None] * 3
        adapters: Sequence[Tensor | None] = [None] * 5
        if pending is not None:
            sums = pending.sums(num_parts_of(logits.shape[1]))
            adapters = [*pending.operands, pending.run.tables.scalings]
        torch.ops.tinkerpool.differentiate_logits(
            logits,
            *sums,
            *adapters,
            scores,
            self._targets[values],
            self.results.slopes[values],
            *self._of_rows(rows),
            values.start,
            _has_one_target(block),
        )
        return sums[1]

    def _rows(self, block: Block) -> slice:
        return slice(block[0][0].first_row, block[-1][0].end_row)

    def _values(self, block: Block) -> slice:
        """Return the places of a block's values among those of the pass."""
        rows = self._rows(block)
        return slice(int(self._places[rows.start]), int(self._places[rows.stop]))

    def _of_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return places and scales of rows."""
        return self._row_places[rows.start : rows.stop + 1], self._scales[rows]


def _has_one_target(block: Block) -> bool:
    """Return whether each row of a block has one target."""
    return all(own.loss.targets.shape[1] == 1 for _, own in block)


def _with_common_terms(parts: Sequence[Part]) -> list[list[Part]]:
    """Return parts, which are in row order, in groups of adjacent ones whose terms are one function."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and groups[-1][-1].stop == part.start and groups[-1][-1].loss.has_terms_of(part.loss):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups
