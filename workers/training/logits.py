"""Computes losses and their gradient from hidden states, a block of rows at a time: no (tokens, vocabulary) tensor.

Depends on the unembedding, the losses and the rows of each request; not on lower layers. Within the forward pass a
block of logits is computed, turned into log-probabilities and, in place, into d(loss)/d(logits), sent back through the
unembedding and its adapters, and dropped.

Main invariant: a request's rows are cut into pieces of at most `block_rows`, counted from its own first row. Reductions
over rows and transcendental functions of vectors stay within one piece; operations on several pieces of a block (the
base matmul, softmax over the vocabulary) work row by row.

Dimensions: T rows of the pass, B rows of a block, N rows of a piece, D hidden size, V vocabulary, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.linears import Kept, LinearGroup
from workers.model.segments import Segment
from workers.rows import AdapterViews
from workers.training.losses import RequestLoss

BLOCK_VALUES = 1 << 21
"""Logits of a block, about: 8 MiB in fp32."""
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 64, 256
ROW_ALIGNMENT = 16
"""In values. Rows of logits begin at whole cache lines, or a product's bits would depend on a piece's place."""


def block_rows_of(vocab_size: int) -> int:
    """Return the rows of a block, a power of two: a constant of the base model, for it decides how sums are grouped."""
    fitting = max(1, BLOCK_VALUES // vocab_size)
    return min(BLOCK_ROWS_MAX, max(BLOCK_ROWS_MIN, 1 << (fitting.bit_length() - 1)))


@dataclass(slots=True, kw_only=True)
class Part:
    """One request's rows in the pass, and their results."""

    start: int
    stop: int
    adapter: AdapterViews
    loss: RequestLoss
    is_set: bool = False
    """See `Segment`."""
    logprobs: Tensor = field(init=False)
    """(N, K), filled piece by piece."""
    slopes: Tensor | None = None
    """(N, K) for a loss over whole sequences; other losses compute them piece by piece."""
    loss_sum: float = 0.0
    num_clipped: int | None = None
    is_finite: bool = True
    """Whether all losses and slopes are finite. If not, this request's gradient is meaningless; no other's is."""

    def __post_init__(self) -> None:
        self.logprobs = torch.empty(self.loss.targets.shape)

    def add(self, loss: Tensor, is_clipped: Tensor | None) -> None:
        """Add a piece's losses (N, K) to the sum, in double precision; in two steps, which threads cannot split."""
        self.loss_sum += float(loss.sum(-1, dtype=torch.float64).sum())
        if is_clipped is not None:
            self.num_clipped = (self.num_clipped or 0) + int(is_clipped.sum())


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a part, counted from the part's first row."""

    part: Part
    start: int
    stop: int

    @property
    def first_row(self) -> int:
        """Return the index of the first row in the pass."""
        return self.part.start + self.start

    @property
    def end_row(self) -> int:
        """Return the index in the pass of the row after the last."""
        return self.part.start + self.stop


def blocks_of(parts: Sequence[Part], block_rows: int) -> Iterator[list[Piece]]:
    """Yield blocks: pieces of consecutive rows, as many as fit. `parts` are in row order."""
    block: list[Piece] = []
    for part in parts:
        for start in range(0, part.stop - part.start, block_rows):
            piece = Piece(part, start, min(start + block_rows, part.stop - part.start))
            is_next = bool(block) and block[-1].end_row == piece.first_row
            if block and not (is_next and piece.end_row - block[0].first_row <= block_rows):
                yield block
                block = []
            block.append(piece)
    if block:
        yield block


def divide_by_temperatures(values: Tensor, block: Sequence[tuple[Piece, RequestLoss]]) -> None:
    """Divide, in place, the rows of a block (B, V) by the temperatures of their tokens: logits, and by the chain rule
    d(loss)/d(logits). Rows of a loss without temperatures stay as they are."""
    first = block[0][0].first_row
    for piece, loss in block:
        if loss.temperatures is not None:
            values[piece.first_row - first : piece.end_row - first].div_(loss.temperatures[piece.start : piece.stop])


class PassLoss(Protocol):
    """The losses of a pass from its last hidden states: `ChunkedLoss` or `device_logits.DeviceLoss`."""

    def run(self, hidden: Tensor, parts: Sequence[Part], *, backward: bool) -> Tensor | None:
        """See `ChunkedLoss.run`; parts may have their results only after `settle`."""

    def settle(self) -> None:
        """Fill in the missing results of the last `run`'s parts. Called when the rest of the pass is enqueued."""


class ChunkedLoss:
    """Implements `PassLoss` for a device that computes synchronously.

    Runs the unembedding of one base model and the losses on it. Keeps a block of probabilities between passes.
    """

    def __init__(self, unembedding: LinearGroup, vocab_size: int) -> None:
        self.unembedding = unembedding
        self.block_rows = block_rows_of(vocab_size)
        weight = unembedding.weights[0]
        num_rows, num_columns = max(self.block_rows, unembedding.current.rows_min), weight.shape[0]
        aligned = -(-num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._probabilities = weight.new_empty(num_rows, aligned)[:, :num_columns]
        self._logits = None if num_columns == aligned else torch.empty_like(self._probabilities)
        """Buffer for logits whose rows would otherwise not be aligned."""

    @torch.no_grad()
    def run(self, hidden: Tensor, parts: Sequence[Part], *, backward: bool) -> Tensor | None:
        """Fill the parts' results from hidden states (T, D); with `backward` return d(loss)/d(hidden) (T, D).

        `backward` also adds the gradients of adapters of the unembedding. If a part's `is_finite` is False, its rows of
        the result and its adapter's gradient are meaningless and must be dropped; other parts are not affected.
        """
        parts = sorted(parts, key=lambda part: part.start)
        for part in parts:
            if not part.loss.loss.is_local:
                self._find_slopes(hidden, part)
        dhidden = torch.zeros_like(hidden) if backward else None
        for block in blocks_of(parts, self.block_rows):
            self._run_block(hidden, dhidden, block)
        return dhidden

    def settle(self) -> None:
        """Do nothing: every part has its results when `run` returns."""

    def _find_slopes(self, hidden: Tensor, part: Part) -> None:
        """Compute the slopes of a loss over whole sequences, from all log-probabilities. The logits are not kept."""
        for block in blocks_of([part], self.block_rows):
            _, logits, _ = self._logits_of(hidden, block)
            self._logprobs_of(logits, block)
        terms = part.loss.sequence_terms(part.logprobs)
        part.slopes = terms.slope
        part.add(terms.loss, terms.is_clipped)

    def _run_block(self, hidden: Tensor, dhidden: Tensor | None, block: list[Piece]) -> None:
        rows, logits, kept = self._logits_of(hidden, block)
        self._logprobs_of(logits, block)
        slopes = [self._slopes_of(piece) for piece in block]  # (N, K) each
        if dhidden is None:
            return
        num_rows = sum(len(slope) for slope in slopes)
        dlogits = self._probabilities[: len(rows)]
        # d(logits) = slope * (onehot(target) - probabilities), summed over targets
        total = torch.cat([slope if slope.shape[1] == 1 else slope.sum(1, keepdim=True) for slope in slopes])  # (B, 1)
        dlogits[:num_rows].mul_(total.neg_())
        dlogits[num_rows:].zero_()
        dpieces = dlogits[:num_rows].split([len(slope) for slope in slopes])
        for piece, slope, dpiece in zip(block, slopes, dpieces, strict=True):
            dpiece.scatter_add_(1, piece.part.loss.targets[piece.start : piece.stop], slope)
            if not piece.part.is_finite:
                dpiece.zero_()
        divide_by_temperatures(dlogits, [(piece, piece.part.loss) for piece in block])
        first = block[0].first_row
        dblock = self.unembedding.backward(rows, kept, [dlogits])
        assert dblock is not None
        dhidden[first : first + num_rows] = dblock[:num_rows]

    def _logits_of(self, hidden: Tensor, block: list[Piece]) -> tuple[Tensor, Tensor, Kept]:
        """Return the block's rows of `hidden` (B, D), padded if few, its logits (B, V), and values for the backward."""
        first = block[0].first_row
        segments = [Segment(piece.first_row - first, piece.end_row - first, piece.part.adapter) for piece in block]
        rows = hidden[first : block[-1].end_row]
        current = self.unembedding.current
        if len(rows) < current.rows_min:
            rows = F.pad(rows, (0, 0, 0, current.rows_min - len(rows)))
        outs = None if self._logits is None else [self._logits[: len(rows)]]
        (logits,), kept = self.unembedding.forward(rows, current.route(segments), outs)
        divide_by_temperatures(logits, [(piece, piece.part.loss) for piece in block])
        return rows, logits, kept

    def _logprobs_of(self, logits: Tensor, block: list[Piece]) -> None:
        """Fill the targets' log-probabilities, and the block's probabilities.

        With m the largest logit and P the probabilities, max(P) = 1 / sum(exp(logit - m)), hence
        log-probability = logit - m + log(max(P)), to rounding and without a further pass over the logits.
        """
        num_rows = sum(piece.stop - piece.start for piece in block)
        logits, probabilities = logits[:num_rows], self._probabilities[:num_rows]
        if probabilities.is_contiguous():
            torch.softmax(logits, -1, out=probabilities)
        else:
            probabilities.copy_(torch.softmax(logits, -1))
        highest = logits.amax(-1, keepdim=True)  # (B, 1)
        likeliest = probabilities.amax(-1, keepdim=True)  # (B, 1)
        row = 0
        for piece in block:
            rows = slice(row, row + piece.stop - piece.start)
            target_logits = logits[rows].gather(1, piece.part.loss.targets[piece.start : piece.stop])  # (N, K)
            logprobs = target_logits.sub_(highest[rows]).add_(likeliest[rows].clone().log_())
            piece.part.logprobs[piece.start : piece.stop] = logprobs
            row = rows.stop

    def _slopes_of(self, piece: Piece) -> Tensor:
        """Return d(loss)/d(log-probability) (N, K) of a piece, zero if it is not finite; add to the part's sums."""
        part = piece.part
        if part.slopes is not None:
            slope = part.slopes[piece.start : piece.stop]
        else:
            logprobs = part.logprobs[piece.start : piece.stop]
            terms = part.loss.terms(logprobs, piece.start, piece.stop)
            slope = terms.slope
            part.add(terms.loss, terms.is_clipped)
        if not (math.isfinite(part.loss_sum) and math.isfinite(float(slope.sum()))):
            part.is_finite = False
            slope = torch.zeros_like(slope)
        return slope
