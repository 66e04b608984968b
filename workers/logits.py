"""From hidden states to losses and back, a block of rows at a time: no (tokens, vocabulary) tensor is ever held.

Knows the unembedding, the losses and which rows are whose; not layers below the last. A block of logits is made, turned
into log-probabilities and, in place, into d(loss)/d(logits), sent back through the unembedding and its adapters, and
forgotten, all within the forward pass.

Main invariant: a request's rows are cut into pieces of at most `block_rows`, counted from its own first row. What
reduces over rows or calls transcendental functions of vectors does so within one piece; what a block does for several
pieces at once (the base matmul, softmax over the vocabulary) is row by row.

Dimensions: T rows of the pass, B rows of a block, N rows of a piece, D hidden size, V vocabulary, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.lora import GroupAdapter, LinearGroup, add_lora, backward_segment, project
from workers.losses import RequestLoss

BLOCK_VALUES = 1 << 21
"""Logits per block aimed at: 8 MiB in fp32."""
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 64, 256


def block_rows_of(vocab_size: int) -> int:
    """Rows of a block, a power of two: a constant of the base model, for the grouping of sums depends on it."""
    fitting = max(1, BLOCK_VALUES // vocab_size)
    return min(BLOCK_ROWS_MAX, max(BLOCK_ROWS_MIN, 1 << (fitting.bit_length() - 1)))


@dataclass(slots=True, kw_only=True)
class Part:
    """One request's rows in the pass, and what becomes of them."""

    start: int
    stop: int
    adapter: GroupAdapter | None
    """Its part in the unembedding; None if it does not adapt it."""
    loss: RequestLoss
    logprobs: Tensor = field(init=False)
    """(N, K), filled piece by piece."""
    slopes: Tensor | None = None
    """(N, K) if they had to be known before; otherwise found piece by piece."""
    loss_sum: float = 0.0
    num_clipped: int | None = None
    is_finite: bool = True
    """Whether all losses and slopes are; if not, its gradient is worthless, and its alone."""

    def __post_init__(self) -> None:
        self.logprobs = torch.empty(self.loss.targets.shape)

    def add(self, loss: Tensor, num_clipped: Tensor | None) -> None:
        """Add a piece's losses to the sum, in double precision."""
        self.loss_sum += float(loss.sum(dtype=torch.float64))
        if num_clipped is not None:
            self.num_clipped = (self.num_clipped or 0) + int(num_clipped)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a part, counted from the part's first row."""

    part: Part
    start: int
    stop: int


class ChunkedLoss:
    """Runs the unembedding of one base model and the losses on it. Keeps two blocks of logits between passes."""

    def __init__(self, unembedding: LinearGroup, vocab_size: int) -> None:
        self.unembedding = unembedding
        self.block_rows = block_rows_of(vocab_size)
        weight = unembedding.weights[0]
        self._weight, self._weight_t, self._bias = weight, unembedding.weights_t[0], unembedding.biases[0]
        rows_max = max(self.block_rows, unembedding.current.rows_min)
        self._logits = weight.new_empty(rows_max, weight.shape[0])  # (B, V)
        self._probabilities = torch.empty_like(self._logits)  # (B, V)

    @torch.no_grad()
    def run(self, hidden: Tensor, parts: Sequence[Part], *, backward: bool) -> Tensor | None:
        """Fill the parts' results from hidden states (T, D); with `backward` return d(loss)/d(hidden) (T, D).

        Parts stand in row order. With `backward` the gradients of adapters of the unembedding are added on the way. A
        part that is not finite gets `is_finite` False; its rows of the result, and its adapter's gradient, are then
        meaningless and must be dropped, the others' are not touched by it.
        """
        for part in parts:
            if not part.loss.loss.is_local:
                self._find_slopes(hidden, part)
        dhidden = torch.zeros_like(hidden) if backward else None
        for block in self._blocks(parts):
            self._run_block(hidden, dhidden, block)
        return dhidden

    def _blocks(self, parts: Sequence[Part]) -> Iterator[list[Piece]]:
        """Pieces of consecutive rows, as many as fit in a block."""
        block: list[Piece] = []
        for part in parts:
            for start in range(0, part.stop - part.start, self.block_rows):
                piece = Piece(part, start, min(start + self.block_rows, part.stop - part.start))
                first = block[0].part.start + block[0].start if block else 0
                is_next = bool(block) and block[-1].part.start + block[-1].stop == part.start + start
                if block and not (is_next and part.start + piece.stop - first <= self.block_rows):
                    yield block
                    block = []
                block.append(piece)
        if block:
            yield block

    def _find_slopes(self, hidden: Tensor, part: Part) -> None:
        """For a loss over whole sequences: all log-probabilities first; the logits are made again afterwards."""
        for block in self._blocks([part]):
            self._logits_of(hidden, block)
            self._logprobs_of(block)
        terms = part.loss.sequence_terms(part.logprobs)
        part.slopes = terms.slope
        part.add(terms.loss, terms.num_clipped)

    def _run_block(self, hidden: Tensor, dhidden: Tensor | None, block: list[Piece]) -> None:
        rows, xas = self._logits_of(hidden, block)
        self._logprobs_of(block)
        slopes = [self._slopes_of(piece) for piece in block]  # (N, K) each
        if dhidden is None:
            return
        num_rows = sum(len(slope) for slope in slopes)
        dlogits = self._probabilities[: len(rows)]
        # d(logits) = slope * (onehot(target) - probabilities), summed over targets
        total = torch.cat([slope if slope.shape[1] == 1 else slope.sum(1, keepdim=True) for slope in slopes])  # (B, 1)
        dlogits[:num_rows].mul_(total.neg_())
        dlogits[num_rows:].zero_()
        sizes = [piece.stop - piece.start for piece in block]
        dlogits_of = dlogits[:num_rows].split(sizes)
        for piece, slope, dpiece in zip(block, slopes, dlogits_of, strict=True):
            dpiece.scatter_add_(1, piece.part.loss.targets[piece.start : piece.stop], slope)
            if not piece.part.is_finite:
                dpiece.zero_()
        first = block[0].part.start + block[0].start
        dblock = dhidden[first : first + num_rows]
        if len(rows) == num_rows:
            torch.mm(dlogits, self._weight, out=dblock)
        else:
            dblock.copy_((dlogits @ self._weight)[:num_rows])
        pieces = zip(block, rows[:num_rows].split(sizes), xas, dlogits_of, dblock.split(sizes), strict=True)
        for piece, x, xa, dpiece, dx in pieces:
            if piece.part.adapter is not None:
                assert xa is not None
                dx.addmm_(backward_segment(x, xa, [dpiece], piece.part.adapter), piece.part.adapter.A)

    def _logits_of(self, hidden: Tensor, block: list[Piece]) -> tuple[Tensor, list[Tensor | None]]:
        """Fill the block's logits. Returns its rows of `hidden`, padded if few, and x A^T per piece."""
        first = block[0].part.start + block[0].start
        sizes = [piece.stop - piece.start for piece in block]
        num_rows = sum(sizes)
        rows = hidden[first : first + num_rows]
        rows_min = self.unembedding.current.rows_min
        if num_rows < rows_min:
            rows = F.pad(rows, (0, 0, 0, rows_min - num_rows))
        logits = self._logits[: len(rows)]
        if self._bias is None:
            torch.mm(rows, self._weight_t, out=logits)
        else:
            torch.addmm(self._bias, rows, self._weight_t, out=logits)
        self.unembedding.current.num_base_matmuls += 1
        xas: list[Tensor | None] = []
        for piece, x, y in zip(block, rows[:num_rows].split(sizes), logits[:num_rows].split(sizes), strict=True):
            adapter = piece.part.adapter
            xas.append(None if adapter is None else project(x, adapter))
            if adapter is not None and xas[-1] is not None:
                add_lora(y, adapter, 0, xas[-1])
        return rows, xas

    def _logprobs_of(self, block: list[Piece]) -> None:
        """Fill the targets' log-probabilities, and the block's probabilities.

        With m the largest logit and P the probabilities, max(P) = 1 / sum(exp(logit - m)), hence
        log-probability = logit - m + log(max(P)), to rounding and without a further pass over the logits.
        """
        num_rows = sum(piece.stop - piece.start for piece in block)
        logits, probabilities = self._logits[:num_rows], self._probabilities[:num_rows]
        torch.softmax(logits, -1, out=probabilities)
        highest = logits.amax(-1, keepdim=True)  # (B, 1)
        likeliest = probabilities.amax(-1, keepdim=True)  # (B, 1)
        row = 0
        for piece in block:
            rows = slice(row, row + piece.stop - piece.start)
            target_logits = logits[rows].gather(1, piece.part.loss.targets[piece.start : piece.stop])  # (N, K)
            logprobs = target_logits.sub_(highest[rows]).add_(likeliest[rows].log())
            piece.part.logprobs[piece.start : piece.stop] = logprobs
            row = rows.stop

    def _slopes_of(self, piece: Piece) -> Tensor:
        """d(loss)/d(log-probability) (N, K) of a piece, zero if it is not finite; adds to the part's sums."""
        part = piece.part
        if part.slopes is not None:
            slope = part.slopes[piece.start : piece.stop]
        else:
            logprobs = part.logprobs[piece.start : piece.stop]
            terms = part.loss.terms(logprobs, piece.start, piece.stop)
            slope = terms.slope
            part.add(terms.loss, terms.num_clipped)
        if not (math.isfinite(part.loss_sum) and math.isfinite(float(slope.sum()))):
            part.is_finite = False
            slope = torch.zeros_like(slope)
        return slope
