"""From a block of logits to log-probabilities and to the gradient, in Triton; the operations are in `kernel_scores`.

Imported by the first launch alone (`workers.model.gpu_operations`): a CPU has no Triton.

Main invariants: a program reads and writes one row of logits, or the values of one request. Values are computed in
fp32 and rounded once. Sums have a fixed order: nothing is added atomically.

Dimensions: B rows of a block, V vocabulary, K targets of a row, S requests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.training.kernel_scores import TARGETS_AT_ONCE

COLUMNS = 4096
"""Logits of a row that a program holds at a time."""
VALUES = 1024
"""Losses of a request that a program holds at a time."""
NUM_WARPS = 8
LOWEST = tl.constexpr(-1e30)
"""Below every finite logit of a model. Not -inf, whose differences are not numbers."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _score_targets(
    logprobs, norms, logits, targets, places, scales, first_value, vocab_size, row_stride,
    COLUMNS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Set the norms of a row, and the log-probabilities of its targets. Grid: rows."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * row_stride
    scale = tl.load(scales + row)
    highest, total = LOWEST, 0.0
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(own + column, mask=column < vocab_size, other=-INFINITY).to(tl.float32)
        before = highest
        highest = tl.maximum(before, tl.max(x, 0))
        total = total * tl.exp((before - highest) * scale) + tl.sum(tl.exp((x - highest) * scale), 0)
    log_total = tl.log(total)
    tl.store(norms + 2 * row, highest)
    tl.store(norms + 2 * row + 1, log_total)
    begin, end = tl.load(places + row) - first_value, tl.load(places + row + 1) - first_value
    for start in range(begin, end, TARGETS):
        value = start + tl.arange(0, TARGETS)
        is_value = value < end
        target = tl.load(targets + value, mask=is_value, other=0)
        x = tl.load(own + target, mask=is_value, other=0.0).to(tl.float32)
        tl.store(logprobs + value, (x - highest) * scale - log_total, mask=is_value)


@triton.jit
def _add_losses(sums, slopes, losses, ends, first_value, num_values, VALUES: tl.constexpr):
    """Add the losses of a request to its sums; make its slopes zeros if not all are finite. Grid: requests."""
    request = tl.program_id(0)
    begin = tl.maximum(tl.load(ends + request) - first_value, 0)
    end = tl.minimum(tl.load(ends + request + 1) - first_value, num_values)
    losses_sum, slopes_sum = tl.zeros((VALUES,), tl.float64), tl.zeros((VALUES,), tl.float32)
    for start in range(begin, end, VALUES):
        value = start + tl.arange(0, VALUES)
        losses_sum += tl.load(losses + value, mask=value < end, other=0.0).to(tl.float64)
        slopes_sum += tl.load(slopes + value, mask=value < end, other=0.0)
    total = tl.load(sums + 3 * request) + tl.sum(losses_sum, 0)
    is_finite = (tl.abs(total) < INFINITY) & (tl.abs(tl.sum(slopes_sum, 0)) < INFINITY)
    is_finite = is_finite & (tl.load(sums + 3 * request + 2) > 0)
    tl.store(sums + 3 * request, total)
    tl.store(sums + 3 * request + 2, is_finite.to(tl.float64))
    if is_finite == 0:
        for start in range(begin, end, VALUES):
            value = start + tl.arange(0, VALUES)
            tl.store(slopes + value, tl.zeros((VALUES,), tl.float32), mask=value < end)


@triton.jit
def _differentiate_logits(
    logits, norms, targets, logprobs, slopes, places, scales, first_value, vocab_size, row_stride,
    COLUMNS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Set a row to (the sum of slopes x onehot(target) - the slopes' sum x probabilities) x its scale. Grid: rows.

    Targets' columns are written again, from their log-probabilities. Without slopes the logits are not read, so that
    values that are not finite stay behind.
    """
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * row_stride
    scale, highest, log_total = tl.load(scales + row), tl.load(norms + 2 * row), tl.load(norms + 2 * row + 1)
    begin, end = tl.load(places + row) - first_value, tl.load(places + row + 1) - first_value
    slopes_sum = tl.zeros((TARGETS,), tl.float32)
    for start in range(begin, end, TARGETS):
        value = start + tl.arange(0, TARGETS)
        slopes_sum += tl.load(slopes + value, mask=value < end, other=0.0)
    total = tl.sum(slopes_sum, 0)
    num_read = tl.where(total != 0, vocab_size, 0)
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(own + column, mask=column < num_read, other=0.0).to(tl.float32)
        probability = tl.exp((x - highest) * scale - log_total)
        gradient = tl.where(column < num_read, -total * probability * scale, 0.0)
        tl.store(own + column, gradient.to(logits.dtype.element_ty), mask=column < vocab_size)
    tl.debug_barrier()  # other threads of the program write the same columns again
    for start in range(begin, end, TARGETS):
        value = start + tl.arange(0, TARGETS)
        is_value = value < end
        target = tl.load(targets + value, mask=is_value, other=-1)
        slope = tl.zeros((TARGETS,), tl.float32)  # of all values with this target
        for other_start in range(begin, end, TARGETS):
            other_value = other_start + tl.arange(0, TARGETS)
            other = tl.load(targets + other_value, mask=other_value < end, other=-1)
            other_slope = tl.load(slopes + other_value, mask=other_value < end, other=0.0)
            slope += tl.sum(tl.where(target[:, None] == other[None, :], other_slope[None, :], 0.0), 1)
        probability = tl.exp(tl.load(logprobs + value, mask=is_value, other=0.0))
        gradient = (slope - tl.where(num_read > 0, total * probability, 0.0)) * scale
        tl.store(own + target, gradient.to(logits.dtype.element_ty), mask=is_value)


def score_targets(
    logprobs: Tensor, norms: Tensor, logits: Tensor, targets: Tensor, places: Tensor, scales: Tensor, first: int
) -> None:
    """See `kernel_scores.SCORE`."""
    _score_targets[len(logits),](
        logprobs, norms, logits, targets, places, scales, first, logits.shape[1], logits.stride(0),
        COLUMNS=COLUMNS, TARGETS=TARGETS_AT_ONCE, num_warps=NUM_WARPS,
    )  # fmt: skip


def add_losses(sums: Tensor, slopes: Tensor, losses: Tensor, ends: Tensor, first: int) -> None:
    """See `kernel_scores.ADD`."""
    _add_losses[len(sums),](sums, slopes, losses, ends, first, len(losses), VALUES=VALUES)


def differentiate_logits(
    logits: Tensor,
    norms: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    slopes: Tensor,
    places: Tensor,
    scales: Tensor,
    first: int,
) -> None:
    """See `kernel_scores.DIFFERENTIATE`."""
    _differentiate_logits[len(logits),](
        logits, norms, targets, logprobs, slopes, places, scales, first, logits.shape[1], logits.stride(0),
        COLUMNS=COLUMNS, TARGETS=TARGETS_AT_ONCE, num_warps=NUM_WARPS,
    )  # fmt: skip
