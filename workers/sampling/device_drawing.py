"""Drawing on the device: tokens from logits that stay there.

Gives what `drawing` gives on a CPU, from the same parameters and random numbers, but for sums that a device rounds in
another order. The device gets three settings and the random numbers of each row, and only tokens and their
log-probabilities come back, in one copy. Nothing before that copy waits for the device. Does not depend on models,
caches or requests.

Dimensions: N rows, V vocabulary, K numbers of the row that has most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.contract.messages import SamplingParams
from workers.host.uploads import on_device
from workers.sampling.drawing import NonFiniteLogitsError


def draw_rows(
    logits: Tensor, logprobs: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]
) -> tuple[list[int], list[float]]:
    """Return a token for each number, row by row of logits (N, V), and its log-probability, from `logprobs` (N, V).

    Rows have their own parameters and numbers. Raises NonFiniteLogitsError if a row is not finite, also one without a
    number.
    """
    is_drawn = np.arange(max(1, *map(len, numbers))) < np.array([[len(of_row)] for of_row in numbers])  # (N, K)
    at = np.zeros(is_drawn.shape)
    at[is_drawn] = [number for of_row in numbers for number in of_row]
    settings = on_device(np.hstack((list(map(_settings, params)), at)), logits.device)  # (N, 3 + K)
    temperatures, top_k, top_p = settings[:, :3].split(1, dim=1)  # (N, 1)
    tokens = logits.argmax(1, keepdim=True).expand(is_drawn.shape)
    if any(own.temperature for own in params):
        weights = _weights(logits, temperatures)
        if any(own.temperature and (0 < own.top_k < logits.shape[1] or own.top_p < 1) for own in params):
            weights *= _is_kept(logits, weights, top_k, top_p)
        tokens = torch.where(temperatures > 0, _picked(weights, settings[:, 3:]), tokens)
    drawn = torch.stack((tokens.double(), logprobs.gather(1, tokens).double())).flatten(1)  # (2, N K)
    if not is_drawn.all():
        drawn = drawn.index_select(1, on_device(np.flatnonzero(is_drawn), logits.device))
    *found, is_finite = torch.cat((drawn.flatten(), logits.isfinite().all().view(1))).cpu().tolist()
    if not is_finite:
        raise NonFiniteLogitsError
    num_drawn = len(found) // 2
    return [int(token) for token in found[:num_drawn]], found[num_drawn:]


def _settings(own: SamplingParams) -> tuple[float, float, float]:
    """Return temperature, top-k and top-p; infinite where a filter keeps everything."""
    top_k, top_p = (own.top_k if own.top_k > 0 else math.inf), (own.top_p if own.top_p < 1 else math.inf)
    return own.temperature, top_k, top_p


def _weights(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the unnormalised probabilities (N, V) of logits at temperatures (N, 1), in double precision.

    Rows of temperature 0 are computed at 1.
    """
    weights = logits.double()
    weights /= torch.where(temperatures > 0, temperatures, 1.0)
    weights -= weights.amax(1, keepdim=True)
    return weights.exp_()


def _is_kept(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which weights (N, V) are among the top-k (N, 1), and among the top-p (N, 1) of these.

    They are the lowest ids among equals.

    The logits are sorted: they have half the bits of their weights. Of different logits that have equal weights the
    order may not be that of their ids, so only the number of kept weights and the least of them come from there.
    """
    ordered = weights.gather(1, logits.argsort(dim=1, descending=True))
    is_first = torch.arange(ordered.shape[1], device=ordered.device) < top_k
    sums = (ordered * is_first).cumsum(1)
    before = F.pad(sums[:, :-1], (1, 0))  # the sum of all larger ones
    is_first &= before < top_p * sums[:, -1:]
    num_kept = is_first.sum(1, keepdim=True).clamp_(min=1)  # (N, 1)
    least = ordered.gather(1, num_kept - 1)
    is_above, is_least = weights > least, weights == least
    num_least = num_kept - is_above.sum(1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(1) <= num_least))


def _picked(weights: Tensor, at: Tensor) -> Tensor:
    """Return the tokens (N, K) that numbers in [0, 1) pick from each row of weights (N, V); no weight of these is zero.

    The first of the running sums above a number's part of the whole; if rounding left none, the first largest sum.
    """
    sums = weights.cumsum(1)
    ends = sums[:, -1:].contiguous()
    first_above = torch.searchsorted(sums, at * ends, right=True)
    first_largest = torch.searchsorted(sums, ends)
    picked = torch.minimum(first_above, first_largest)
    return picked.clamp_(max=weights.shape[1] - 1)  # not finite: nothing is above
