"""Computes losses from hidden states on a device that runs behind the host: it reads no result before the pass ends.

The same as `logits.ChunkedLoss`, block by block, for base models in bf16 and for GPUs: logits are in the model's dtype,
everything from them to d(loss)/d(logits) in fp32; sums, counts and log-probabilities stay on the device until `settle`
fetches those of all requests together.

Depends on the unembedding, the losses and the rows of each request; not on lower layers.

Main invariant: the results of a request's rows depend on its own rows alone, and no step waits for the device. If a
request's loss is not finite, its slopes become zero; its own rows may stay infinite, but no product mixes rows of two
requests, so its neighbours' are not affected.

Dimensions: T rows of the pass, B rows of a block, N rows of a request or a piece of one, D hidden size, V vocabulary, K
targets of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.linears import Kept, LinearGroup
from workers.model.segments import Segment
from workers.training.logits import Part, Piece, blocks_of, divide_by_temperatures
from workers.training.losses import RequestLoss

BLOCK_VALUES = 1 << 27
"""Logits of a block, about: 256 MiB in bf16, and 512 MiB for their log-probabilities."""
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 256, 4096
SCALED_ROWS = 64
"""Rows that are scaled by temperature at a time."""
MANY_TARGETS = 48
"""From this many targets of a token on, `add_at_once` takes fewer kernels than one a target."""


def block_rows_of(vocab_size: int) -> int:
    """Return the rows of a block, a power of two: a constant of the base model, for it decides how sums are grouped."""
    fitting = max(1, BLOCK_VALUES // vocab_size)
    return min(BLOCK_ROWS_MAX, max(BLOCK_ROWS_MIN, 1 << (fitting.bit_length() - 1)))


class _DevicePart:
    """One request, and its results on the device."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
        self.loss = part.loss.to(device)
        self.logprobs = torch.empty(part.loss.targets.shape, device=device)  # (N, K)
        self.slopes: Tensor | None = None
        """(N, K) for a loss over whole sequences."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_clipped: Tensor | None = None
        self.is_finite = torch.ones((), dtype=torch.bool, device=device)

    def add(self, loss: Tensor, slope: Tensor, num_clipped: Tensor | None) -> Tensor:
        """Add a piece's losses to the sums; return its slopes, or zeros once a value was not finite."""
        self.loss_sum += loss.sum(-1, dtype=torch.float64).sum()
        if num_clipped is not None:
            self.num_clipped = num_clipped if self.num_clipped is None else self.num_clipped + num_clipped
        self.is_finite &= torch.isfinite(self.loss_sum) & torch.isfinite(slope.sum())
        return torch.where(self.is_finite, slope, torch.zeros_like(slope))

    def numbers(self) -> Tensor:
        """Return loss sum, clipped tokens and whether all values are finite: (3,) float64."""
        clipped = self.loss_sum.new_zeros(()) if self.num_clipped is None else self.num_clipped.to(torch.float64)
        return torch.stack((self.loss_sum, clipped, self.is_finite.to(torch.float64)))


class DeviceLoss:
    """Implements `logits.PassLoss`; between `run` and `settle` it keeps the results to fetch."""

    def __init__(self, unembedding: LinearGroup, vocab_size: int) -> None:
        self.unembedding = unembedding
        self.block_rows = block_rows_of(vocab_size)
        self._unsettled: list[_DevicePart] = []

    @torch.no_grad()
    def run(self, hidden: Tensor, parts: Sequence[Part], *, backward: bool) -> Tensor | None:
        """Compute the losses of hidden states (T, D); with `backward` return d(loss)/d(hidden) (T, D), in their dtype.

        `backward` also adds the gradients of adapters of the unembedding. `settle` fills the parts.
        """
        ordered = sorted(parts, key=lambda part: part.start)
        of_part = {id(part): _DevicePart(part, hidden.device) for part in ordered}
        self._unsettled = list(of_part.values())
        for device_part in self._unsettled:
            if not device_part.loss.loss.is_local:
                self._find_slopes(hidden, device_part)
        dhidden = torch.zeros_like(hidden) if backward else None
        for block in blocks_of(ordered, self.block_rows):
            self._run_block(hidden, dhidden, [(piece, of_part[id(piece.part)]) for piece in block])
        return dhidden

    def settle(self) -> None:
        """Fetch the results of the last `run`: the only place where the host waits for the device."""
        parts, self._unsettled = self._unsettled, []
        numbers = torch.stack([part.numbers() for part in parts])  # (requests, 3)
        logprobs = torch.cat([part.logprobs.flatten() for part in parts])
        fetched = logprobs.cpu().split([part.logprobs.numel() for part in parts])
        for part, own, (loss_sum, num_clipped, is_finite) in zip(parts, fetched, numbers.tolist(), strict=True):
            part.part.logprobs = own.view(part.logprobs.shape)
            part.part.loss_sum = loss_sum
            part.part.num_clipped = None if part.num_clipped is None else int(num_clipped)
            part.part.is_finite = bool(is_finite)

    def _find_slopes(self, hidden: Tensor, own: _DevicePart) -> None:
        """Compute the slopes of a loss over whole sequences, from all log-probabilities. The logits are not kept."""
        for block in blocks_of([own.part], self.block_rows):
            logits, _ = self._logits_of(hidden, block)
            logprobs = _logprobs(logits, [(piece, own.loss) for piece in block])
            _pick(logprobs, block[0], block[0], own)
        terms = own.loss.sequence_terms(own.logprobs)
        own.slopes = own.add(terms.loss, terms.slope, terms.num_clipped)

    def _run_block(self, hidden: Tensor, dhidden: Tensor | None, block: Sequence[tuple[Piece, _DevicePart]]) -> None:
        pieces = [piece for piece, _ in block]
        rows = slice(pieces[0].first_row, pieces[-1].end_row)
        logits, kept = self._logits_of(hidden, pieces)
        logprobs = _logprobs(logits, [(piece, own.loss) for piece, own in block])  # (B, V)
        slopes = []  # (N, K) each
        for piece, own in block:
            picked = _pick(logprobs, pieces[0], piece, own)
            if own.slopes is not None:
                slopes.append(own.slopes[piece.start : piece.stop])
            else:
                terms = own.loss.terms(picked, piece.start, piece.stop)
                slopes.append(own.add(terms.loss, terms.slope, terms.num_clipped))
        if dhidden is None:
            return
        # d(logits) = slope * (onehot(target) - probabilities), summed over targets
        total = torch.cat([slope if slope.shape[1] == 1 else slope.sum(1, keepdim=True) for slope in slopes])  # (B, 1)
        dlogits = logprobs.exp_().mul_(total.neg_())
        for (piece, own), slope, dpiece in zip(
            block, slopes, dlogits.split([len(slope) for slope in slopes]), strict=True
        ):
            targets = own.loss.targets[piece.start : piece.stop]
            add = add_one_by_one if dpiece.device.type == "cpu" or targets.shape[1] < MANY_TARGETS else add_at_once
            add(dpiece, targets, slope)
        divide_by_temperatures(dlogits, [(piece, own.loss) for piece, own in block])
        logits.copy_(dlogits)
        dblock = self.unembedding.backward(hidden[rows], kept, [logits])
        assert dblock is not None
        dhidden[rows] = dblock

    def _logits_of(self, hidden: Tensor, block: Sequence[Piece]) -> tuple[Tensor, Kept]:
        """Return the block's logits (B, V) in the model's dtype, and values for the backward."""
        first = block[0].first_row
        segments = [Segment(piece.first_row - first, piece.end_row - first, piece.part.adapter) for piece in block]
        rows = hidden[first : block[-1].end_row]
        (logits,), kept = self.unembedding.forward(rows, self.unembedding.current.route(segments))
        return logits, kept


def _logprobs(logits: Tensor, block: Sequence[tuple[Piece, RequestLoss]]) -> Tensor:
    """Return log-probabilities (B, V) in fp32 of logits (B, V), at the temperatures of the rows' tokens.

    Log-probabilities at temperature 1 are logits but for a constant of each row, so they are scaled in place, a few
    rows at a time: a second tensor of the size of the block would not be in the estimate of the memory of the pass.
    """
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    first = block[0][0].first_row
    for piece, loss in block:
        if loss.temperatures is None:
            continue
        for start in range(piece.start, piece.stop, SCALED_ROWS):
            stop = min(start + SCALED_ROWS, piece.stop)
            rows = logprobs[piece.part.start + start - first : piece.part.start + stop - first]
            rows.copy_(rows.div_(loss.temperatures[start:stop]).log_softmax(-1))
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


def _pick(logprobs: Tensor, first: Piece, piece: Piece, own: _DevicePart) -> Tensor:
    """Return a piece's log-probabilities of its targets (N, K), and store them in its part.

    The first row of `logprobs` (B, V) is that of piece `first`.
    """
    start = piece.first_row - first.first_row
    rows = logprobs[start : start + piece.stop - piece.start]
    picked = rows.gather(1, own.loss.targets[piece.start : piece.stop])
    own.logprobs[piece.start : piece.stop] = picked
    return picked
