"""Computes losses from hidden states on a device that runs behind the host: it reads no result before the pass ends.

The same as `logits.ChunkedLoss`, block by block, for base models in bf16 and for GPUs: logits are in the model's dtype,
everything from them to d(loss)/d(logits) in fp32, by `block_scores` or `kernel_scores`, which adds adapters of the
unembedding itself; sums, counts and log-probabilities stay on the device until `settle` fetches those of all requests
together.

Depends on the unembedding, the losses and the rows of each request; not on lower layers.

Main invariant: the results of a request's rows depend on its own rows alone, and no step waits for the device. On a CPU
their last bits may depend on their place in the pass: rows of logits are as long as the vocabulary, so not all begin at
whole cache lines, and products of few columns depend on that. The fingerprint promises no bits there. If a request's
loss is not finite, its slopes become zero; its own rows may stay infinite, but no product mixes rows of two
requests, so its neighbours' are not affected.

Dimensions: T rows of the pass, B rows of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from workers.model.fused_runs import PendingAdapters, TrainingRun
from workers.model.linears import Kept, LinearGroup
from workers.model.segments import Segment
from workers.training.block_scores import Block, DevicePart, PassResults, PassScores, TorchScores
from workers.training.kernel_scores import KernelScores
from workers.training.logits import Part, Piece, blocks_of

BLOCK_VALUES, KERNEL_BLOCK_VALUES = 1 << 27, 1 << 28
"""Logits of a block, about. 256 MiB in bf16, and 512 MiB for their log-probabilities; by kernels, which need none,
512 MiB: each block reads the unembedding twice, so larger ones are faster."""
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 256, 4096


def block_rows_of(vocab_size: int, *, has_kernels: bool) -> int:
    """Return the rows of a block, a power of two; `has_kernels`: whether kernels of our own compute losses.

    A constant of the base model and the machine, for it decides how sums are grouped.
    """
    fitting = max(1, (KERNEL_BLOCK_VALUES if has_kernels else BLOCK_VALUES) // vocab_size)
    return min(BLOCK_ROWS_MAX, max(BLOCK_ROWS_MIN, 1 << (fitting.bit_length() - 1)))


class DeviceLoss:
    """Implements `logits.PassLoss`; between `run` and `settle` it keeps the results to fetch."""

    def __init__(self, unembedding: LinearGroup, vocab_size: int, *, has_kernels: bool) -> None:
        """`has_kernels`: whether kernels of our own compute losses from logits."""
        self.unembedding = unembedding
        self.block_rows = block_rows_of(vocab_size, has_kernels=has_kernels)
        self._make_scores: type[KernelScores | TorchScores] = KernelScores if has_kernels else TorchScores
        self._unsettled: PassResults | None = None

    @torch.no_grad()
    def run(self, hidden: Tensor, parts: Sequence[Part], *, backward: bool) -> Tensor | None:
        """Compute the losses of hidden states (T, D); with `backward` return d(loss)/d(hidden) (T, D), in their dtype.

        `backward` also adds the gradients of adapters of the unembedding. `settle` fills the parts.
        """
        ordered = sorted(parts, key=lambda part: part.start)
        scores = self._make_scores(ordered, len(hidden), hidden.device)
        self._unsettled = scores.results
        of_part = {id(own.part): own for own in scores.results.parts}
        for own in scores.results.parts:
            if not own.loss.loss.is_local:
                self._find_slopes(hidden, scores, own)
        dhidden = torch.zeros_like(hidden) if backward else None
        begun: set[int] = set()
        for block in blocks_of(ordered, self.block_rows):
            self._run_block(hidden, dhidden, scores, [(piece, of_part[id(piece.part)]) for piece in block], begun)
        assert begun.issuperset(id(part.adapter) for part in parts if part.is_set), "some gradients were not set"
        return dhidden

    def settle(self) -> None:
        """Fetch the results of the last `run`: the only place where the host waits for the device."""
        results, self._unsettled = self._unsettled, None
        assert results is not None
        results.settle()

    def _find_slopes(self, hidden: Tensor, scores: PassScores, own: DevicePart) -> None:
        """Compute the slopes of a loss over whole sequences, from all log-probabilities. The logits are not kept."""
        for block in blocks_of([own.part], self.block_rows):
            logits, _, pending = self._logits_of(hidden, block, ())
            scores.score(logits, [(piece, own) for piece in block], pending)
        whole = Piece(own.part, 0, own.part.stop - own.part.start)
        scores.add([(whole, own)], [own.loss.sequence_terms(own.logprobs)])

    def _run_block(
        self, hidden: Tensor, dhidden: Tensor | None, scores: PassScores, block: Block, begun: set[int]
    ) -> None:
        """Run a block; `begun` has the `id` of each adapter whose gradient an earlier one has set or added to."""
        pieces = [piece for piece, _ in block]
        logits, kept, pending = self._logits_of(hidden, pieces, begun)
        scored = scores.score(logits, block, pending)
        for is_local, adjacent in groupby(block, key=lambda pair: pair[1].loss.loss.is_local):
            if is_local:
                scores.add_local(list(adjacent))
        if dhidden is None:
            return
        dxa = scores.differentiate(logits, scored, block, pending)
        rows = slice(pieces[0].first_row, pieces[-1].end_row)
        dblock = self.unembedding.backward(hidden[rows], kept, [logits])
        assert dblock is not None
        if pending is not None:
            assert dxa is not None
            pending.backward(hidden[rows], logits, dblock, dxa)
        dhidden[rows] = dblock
        begun.update(id(piece.part.adapter) for piece in pieces)

    def _logits_of(
        self, hidden: Tensor, block: Sequence[Piece], begun: Collection[int]
    ) -> tuple[Tensor, Kept, PendingAdapters | None]:
        """Return the block's logits (B, V) in the model's dtype, values for the backward, and adapters not in them."""
        first = block[0].first_row
        segments = [
            Segment(
                piece.first_row - first,
                piece.end_row - first,
                piece.part.adapter,
                is_set=piece.part.is_set and id(piece.part.adapter) not in begun,
            )
            for piece in block
        ]
        rows, unembedding = hidden[first : block[-1].end_row], self.unembedding
        current, group, pending = unembedding.current, unembedding.shape.index, None
        routing = current.route(segments, group=group)
        if self._make_scores is KernelScores and isinstance(run := routing.runs[0], TrainingRun):  # of all segments
            routing, pending = current.route(()), run.pending(group, rows)
        (logits,), kept = unembedding.forward(rows, routing)
        return logits, kept, pending
