"""Drawing on the device: tokens from logits that stay there.

Gives what `drawing` gives on a CPU, from the same parameters and random numbers, but for sums that a device rounds in
another order. The device gets four numbers a row, and only tokens and their log-probabilities come back, in one copy.
Nothing before that copy waits for the device. Does not depend on models, caches or requests.

Dimensions: N rows, V vocabulary.
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
    logits: Tensor, logprobs: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return a token for each row of logits (N, V), by its own parameters and number, and its log-probability.

    Raises NonFiniteLogitsError if a row is not finite.
    """
    settings = np.array([_settings(*of_row) for of_row in zip(params, numbers, strict=True)])  # (N, 4)
    temperatures, top_k, top_p, at = on_device(settings, logits.device).unbind(1)
    tokens = logits.argmax(1)
    if any(own.temperature for own in params):
        weights = _weights(logits, temperatures)
        if any(own.temperature and (0 < own.top_k < logits.shape[1] or own.top_p < 1) for own in params):
            weights *= _is_kept(logits, weights, top_k, top_p)
        tokens = torch.where(temperatures > 0, _picked(weights, at), tokens)
    found = torch.stack(
        (tokens.double(), logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).double(), logits.isfinite().all(1))
    ).cpu()  # (3, N)
    if not found[2].all():
        raise NonFiniteLogitsError
    return found[0].long().tolist(), found[1].tolist()


def _settings(own: SamplingParams, number: float) -> tuple[float, float, float, float]:
    """Return temperature, top-k, top-p and random number; infinite where a filter keeps everything."""
    top_k, top_p = (own.top_k if own.top_k > 0 else math.inf), (own.top_p if own.top_p < 1 else math.inf)
    return own.temperature, top_k, top_p, number


def _weights(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the unnormalised probabilities (N, V) of logits at temperatures (N,), in double precision.

    Rows of temperature 0 are computed at 1.
    """
    weights = logits.double()
    weights /= torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)
    weights -= weights.amax(1, keepdim=True)
    return weights.exp_()


def _is_kept(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which weights (N, V) are among the top-k, and among the top-p of these; the lowest ids among equals.

    The logits are sorted: they have half the bits of their weights. Of different logits that have equal weights the
    order may not be that of their ids, so only the number of kept weights and the least of them come from there.
    """
    ordered = weights.gather(1, logits.argsort(dim=1, descending=True))
    is_first = torch.arange(ordered.shape[1], device=ordered.device) < top_k.unsqueeze(1)
    sums = (ordered * is_first).cumsum(1)
    before = F.pad(sums[:, :-1], (1, 0))  # the sum of all larger ones
    is_first &= before < top_p.unsqueeze(1) * sums[:, -1:]
    num_kept = is_first.sum(1, keepdim=True).clamp_(min=1)  # (N, 1)
    least = ordered.gather(1, num_kept - 1)
    is_above, is_least = weights > least, weights == least
    num_least = num_kept - is_above.sum(1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(1) <= num_least))


def _picked(weights: Tensor, at: Tensor) -> Tensor:
    """Return the token (N,) that a number in [0, 1) picks from each row of weights (N, V); its weight is not zero.

    The first of the running sums above the number's part of the whole; if rounding left none, the first largest sum.
    """
    sums = weights.cumsum(1)
    ends = sums[:, -1:].contiguous()
    first_above = torch.searchsorted(sums, at.unsqueeze(1) * ends, right=True)
    first_largest = torch.searchsorted(sums, ends)
    picked = torch.minimum(first_above, first_largest).squeeze(1)
    return picked.clamp_(max=weights.shape[1] - 1)  # not finite: nothing is above
