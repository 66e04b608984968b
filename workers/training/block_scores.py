"""Computes log-probabilities of targets, sums of requests and d(loss)/d(logits) from blocks of logits on a device.

`TorchScores` computes them by torch, on any device; `kernel_scores.KernelScores` by kernels of our own. Logits are in
the model's dtype, everything from them to d(loss)/d(logits) in fp32. Nothing but `PassResults.settle` waits for the
device.

Depends on losses and the rows of each request, and on adapters that are not in the logits; not on the unembedding.

Main invariants: a row's results depend on that row alone. Once a value of a request is not finite, its slopes are
zeros: its own rows may stay infinite, but no product mixes rows of two requests.

Dimensions: T rows of the pass, B rows of a block, N rows of a request or a piece of one, V vocabulary, K targets of a
token, S requests of the pass, M targets of all tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.fused_runs import PendingAdapters
from workers.training.logits import Part, Piece, divide_by_temperatures
from workers.training.losses import RequestLoss, Terms

SCALED_ROWS = 64
"""Rows that are scaled by temperature at a time."""
MANY_TARGETS = 48
"""From this many targets of a token on, `add_at_once` takes fewer kernels than one a target."""


@dataclass(slots=True, kw_only=True)
class DevicePart:
    """One request, and its results on the device: views of those of the pass."""

    index: int
    """In row order."""
    part: Part
    loss: RequestLoss
    """With its inputs on the device."""
    first_value: int
    """Of its values among the M of the pass."""
    logprobs: Tensor
    """(N, K)."""
    slopes: Tensor
    """(N, K): d(loss) / d(log-probability)."""
    sums: Tensor
    """(3,) float64: loss, clipped tokens, and 1 as long as all values are finite."""
    has_clipped: bool = False
    """Whether its loss counts clipped tokens."""


Block = Sequence[tuple[Piece, DevicePart]]
"""Consecutive rows of the pass: at most one piece of each request."""


class PassResults:
    """The results of a pass on the device, with a value for each target; requests are in row order."""

    def __init__(self, parts: Sequence[Part], losses: Sequence[RequestLoss], device: torch.device) -> None:
        """`losses` are those of the parts, with their inputs on the device."""
        shapes = [part.loss.targets.shape for part in parts]
        self._counts = [shape.numel() for shape in shapes]
        sums_shape = torch.Size((len(parts), 3))
        self._fetched = torch.zeros(_first_logprob(sums_shape) + sum(self._counts), device=device)
        """Sums and log-probabilities, for one copy to the host."""
        self.sums, self.logprobs = _sums_and_logprobs(self._fetched, sums_shape)  # (S, 3), (M,)
        self.sums[:, 2] = 1
        self.slopes = torch.empty_like(self.logprobs)  # (M,)
        self.parts: list[DevicePart] = []
        first = 0
        for part, loss, shape, count in zip(parts, losses, shapes, self._counts, strict=True):
            values = slice(first, first + count)
            own = DevicePart(
                index=len(self.parts),
                part=part,
                loss=loss,
                first_value=first,
                logprobs=self.logprobs[values].view(shape),
                slopes=self.slopes[values].view(shape),
                sums=self.sums[len(self.parts)],
            )
            self.parts.append(own)
            first += count

    def settle(self) -> None:
        """Fill in the parts' results: the only place where the host waits for the device."""
        sums, fetched = _sums_and_logprobs(self._fetched.cpu(), self.sums.shape)
        for own, logprobs, (loss_sum, num_clipped, is_finite) in zip(
            self.parts, fetched.split(self._counts), sums.tolist(), strict=True
        ):
            own.part.logprobs = logprobs.view(own.logprobs.shape)
            own.part.loss_sum = loss_sum
            own.part.num_clipped = int(num_clipped) if own.has_clipped else None
            own.part.is_finite = bool(is_finite)


def _sums_and_logprobs(fetched: Tensor, sums_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the views of a pass's results: float64 sums of this shape, and fp32 log-probabilities after them."""
    sums = fetched[: 2 * sums_shape.numel()].view(torch.float64)
    return sums.view(sums_shape), fetched[_first_logprob(sums_shape) :]


def _first_logprob(sums_shape: torch.Size) -> int:
    """Return where log-probabilities begin behind sums, in fp32 values: at a multiple of 16 bytes, as kernels like."""
    return -(-2 * sums_shape.numel() // 4) * 4


class PassScores(Protocol):
    """Computes the results of one pass, block by block."""

    results: PassResults

    def score(self, logits: Tensor, block: Block, pending: PendingAdapters | None = None) -> Tensor:
        """Fill in a block's log-probabilities from its logits (B, V); return what `differentiate` takes of them.

        `pending`: adapters that are not in the logits. Given to kernels of our own alone.
        """

    def add(self, block: Block, terms: Sequence[Terms]) -> None:
        """Add the terms of a block's pieces to the sums, and fill in the slopes: zeros once a value was not finite.

        Or the terms of a whole request, as one piece.
        """

    def add_local(self, block: Block) -> None:
        """The same of pieces whose losses are local, from their log-probabilities."""

    def differentiate(
        self, logits: Tensor, scores: Tensor, block: Block, pending: PendingAdapters | None = None
    ) -> Tensor | None:
        """Turn a block's logits (B, V) into d(loss)/d(logits), by the slopes; `scores` may be overwritten.

        Return scaling d(loss)/d(logits) B (1, B, R) of pending adapters.
        """


class TorchScores:
    """Implements `PassScores`."""

    def __init__(self, parts: Sequence[Part], num_rows: int, device: torch.device) -> None:
        """Begin a pass of `num_rows` rows; parts are in row order."""
        del num_rows
        self.results = PassResults(parts, [part.loss.to(device) for part in parts], device)

    def score(self, logits: Tensor, block: Block, pending: PendingAdapters | None = None) -> Tensor:
        """See `PassScores`; returns log-probabilities (B, V) in fp32."""
        assert pending is None
        logprobs = _logprobs(logits, block)
        first = block[0][0].first_row
        for piece, own in block:
            rows = logprobs[piece.first_row - first : piece.end_row - first]
            own.logprobs[piece.start : piece.stop] = rows.gather(1, own.loss.targets[piece.start : piece.stop])
        return logprobs

    def add(self, block: Block, terms: Sequence[Terms]) -> None:
        """See `PassScores`."""
        for (piece, own), term in zip(block, terms, strict=True):
            own.sums[0].add_(term.loss.sum(-1, dtype=torch.float64).sum())
            _count_clipped(own, term)
            own.sums[2].mul_(torch.isfinite(own.sums[0]) & torch.isfinite(term.slope.sum()))
            own.slopes[piece.start : piece.stop] = torch.where(
                own.sums[2] > 0, term.slope, torch.zeros_like(term.slope)
            )

    def add_local(self, block: Block) -> None:
        """See `PassScores`."""
        self.add(
            block,
            [own.loss.terms(own.logprobs[piece.start : piece.stop], piece.start, piece.stop) for piece, own in block],
        )

    def differentiate(
        self, logits: Tensor, scores: Tensor, block: Block, pending: PendingAdapters | None = None
    ) -> None:
        """See `PassScores`: d(logits) = slope * (onehot(target) - probabilities), summed over targets."""
        slopes = [own.slopes[piece.start : piece.stop] for piece, own in block]  # (N, K) each
        total = torch.cat([slope if slope.shape[1] == 1 else slope.sum(1, keepdim=True) for slope in slopes])  # (B, 1)
        dlogits = scores.exp_().mul_(total.neg_())
        dpieces = dlogits.split([len(slope) for slope in slopes])
        for (piece, own), slope, dpiece in zip(block, slopes, dpieces, strict=True):
            targets = own.loss.targets[piece.start : piece.stop]
            add = add_one_by_one if dpiece.device.type == "cpu" or targets.shape[1] < MANY_TARGETS else add_at_once
            add(dpiece, targets, slope)
        divide_by_temperatures(dlogits, [(piece, own.loss) for piece, own in block])
        logits.copy_(dlogits)


def _count_clipped(own: DevicePart, terms: Terms) -> None:
    """Add a piece's clipped tokens to the sums."""
    if terms.is_clipped is not None:
        own.sums[1].add_(terms.is_clipped.sum())
        own.has_clipped = True


def _logprobs(logits: Tensor, block: Block) -> Tensor:
    """Return log-probabilities (B, V) in fp32 of logits (B, V), at the temperatures of the rows' tokens.

    Log-probabilities at temperature 1 are logits but for a constant of each row, so they are scaled in place, a few
    rows at a time: a second tensor of the size of the block would not be in the estimate of the memory of the pass.
    """
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    first = block[0][0].first_row
    for piece, own in block:
        if own.loss.temperatures is None:
            continue
        for start in range(piece.start, piece.stop, SCALED_ROWS):
            stop = min(start + SCALED_ROWS, piece.stop)
            rows = logprobs[piece.part.start + start - first : piece.part.start + stop - first]
            rows.copy_(rows.div_(own.loss.temperatures[start:stop]).log_softmax(-1))
    return logprobs


def add_one_by_one(dlogits: Tensor, targets: Tensor, slopes: Tensor) -> None:
    """Add slopes (N, K) to dlogits (N, V) at targets (N, K), one target after another: a row may name one twice."""
    for column in range(targets.shape[1]):
        dlogits.scatter_add_(1, targets[:, column : column + 1], slopes[:, column : column + 1])


def add_at_once(dlogits: Tensor, targets: Tensor, slopes: Tensor) -> None:
    """Do the same as `add_one_by_one` in few kernels. The slopes of a target that a row names twice are added first.

    They are summed over sorted targets at distances 1, 2, 4 and so on, to the last of equal ones. All others are made
    zero: a scatter adds in any order.
    """
    num_targets = targets.shape[1]
    targets, order = targets.sort(dim=1, stable=True)
    sums = slopes.gather(1, order)  # (N, K)
    distance = 1
    while distance < num_targets:
        is_same = targets[:, distance:] == targets[:, :-distance]
        before = torch.where(is_same, sums[:, :-distance], 0.0)
        sums = torch.cat((sums[:, :distance], sums[:, distance:] + before), dim=1)
        distance *= 2
    is_last = F.pad(targets[:, 1:] != targets[:, :-1], (0, 1), value=True)
    dlogits.scatter_add_(1, targets, torch.where(is_last, sums, 0.0))
