"""Drawing on the device: tokens from logits that stay there.

Gives what `drawing` gives on a CPU, from the same parameters and random numbers, but for sums that a device rounds in
another order. The device gets three settings and the random numbers of each row, and only tokens and their
log-probabilities come back, in one copy. Nothing but `Drawing.read` waits for the device. Does not depend on models,
caches or requests.

Dimensions: N rows, V vocabulary, K numbers of the row that has most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from workers.contract.messages import SamplingParams, TokenLogprobs
from workers.host.downloads import Download
from workers.host.uploads import on_device
from workers.sampling import drawing
from workers.sampling.drawing import Drawn

SIZE_BITS = 0x7FFFFFFF
"""Of a number in fp32, those that are not its sign."""
ID_BITS = 31
"""Enough for any token's id."""
LISTED_ROWS = 32
"""Rows whose likeliest tokens are found at once: their keys take eight bytes a value."""


class Kind(NamedTuple):
    """What a drawing of rows computes."""

    is_sampled: bool
    """Whether any row has a temperature above 0."""
    is_filtered: bool
    """Whether top-k or top-p of any of these rows drops tokens."""


def kind_of(params: Sequence[SamplingParams], vocab_size: int) -> Kind:
    """Return what rows with these parameters need."""
    sampled = [own for own in params if own.temperature]
    return Kind(bool(sampled), any(0 < own.top_k < vocab_size or own.top_p < 1 for own in sampled))


class Drawing:
    """Tokens that the device draws."""

    def __init__(self, values: Tensor, num_drawn: int, num_rows: int, num_used: int | None = None) -> None:
        """Take the results of `draw`, flat: of so many tokens and rows, of which the first `num_used` count.

        None: all.
        """
        self._download = Download(values)
        self._sizes = [num_drawn, num_drawn, num_rows, num_rows]
        self._num_used = num_used

    def read(self) -> Drawn:
        """Return the tokens once they are drawn."""
        tokens, logprobs, least, largest = (
            part[: self._num_used].tolist() for part in self._download.wait().split(self._sizes)
        )
        # The least and the largest of values with one that is not a number are not numbers.
        is_finite = [math.isfinite(low) and math.isfinite(high) for low, high in zip(least, largest, strict=True)]
        return Drawn([int(token) for token in tokens], logprobs, is_finite)


def draw_rows(
    logits: Tensor, logprobs: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]
) -> Drawing:
    """Draw a token for each number, row by row of logits (N, V), with its log-probability, from `logprobs` (N, V).

    Rows have their own parameters and numbers.
    """
    is_drawn = np.arange(max(1, *map(len, numbers))) < np.array([[len(of_row)] for of_row in numbers])  # (N, K)
    at = np.zeros(is_drawn.shape)
    at[is_drawn] = [number for of_row in numbers for number in of_row]
    settings = on_device(np.hstack((settings_of(params), at)), logits.device)
    drawn, extremes = draw(logits, logprobs, settings, kind_of(params, logits.shape[1]))
    drawn = drawn.flatten(1)
    if not is_drawn.all():
        drawn = drawn.index_select(1, on_device(np.flatnonzero(is_drawn), logits.device))
    return Drawing(torch.cat((drawn.flatten(), extremes.flatten())), drawn.shape[1], len(logits))


def draw(logits: Tensor, logprobs: Tensor, settings: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the tokens drawn and their log-probabilities (2, N, K), and the least and largest logits (2, N), in fp64.

    Of logits and their log-probabilities (N, V); `settings` (N, 3 + K), fp64: those of `settings_of`, and numbers.
    """
    temperatures, top_k, top_p = settings[:, :3].split(1, dim=1)  # (N, 1)
    at = settings[:, 3:]
    tokens = logits.argmax(1, keepdim=True).expand(at.shape)
    if kind.is_sampled:
        weights = _weights(logits, temperatures)
        if kind.is_filtered:
            weights *= _is_kept(logits, weights, top_k, top_p)
        tokens = torch.where(temperatures > 0, _picked(weights, at), tokens)
    drawn = torch.stack((tokens.double(), logprobs.gather(1, tokens).double()))
    return drawn, torch.stack(logits.aminmax(dim=1)).double()


def likeliest_of(logprobs: Tensor, k: int) -> TokenLogprobs:
    """Return the k likeliest tokens (N, k) of each row of log-probabilities (N, V): on a CPU by `drawing.likeliest`."""
    if not logprobs.is_cpu:
        return likeliest(logprobs, k)
    rows = logprobs.numpy()
    tokens = np.array([drawing.likeliest(row, k) for row in rows])
    return TokenLogprobs(token_ids=tokens.astype(np.int32), logprobs=np.take_along_axis(rows, tokens, axis=1))


def likeliest(logprobs: Tensor, k: int) -> TokenLogprobs:
    """Return the same, found on the device; they come in one copy."""
    k = min(k, logprobs.shape[1])
    ids = torch.cat([_likeliest_ids(rows, k) for rows in logprobs.split(LISTED_ROWS)])
    found = torch.stack((ids.double(), logprobs.gather(1, ids).double())).cpu().numpy()
    return TokenLogprobs(token_ids=found[0].astype(np.int32), logprobs=found[1].astype(np.float32))


def _likeliest_ids(logprobs: Tensor, k: int) -> Tensor:
    """Return the ids (N, k) of the largest log-probabilities (N, V), fp32: likeliest first, lowest id among equals.

    None is above 0, so that the bits behind the sign rise as it falls. With the id below them keys are different, and
    no order of equals is left to the library.
    """
    keys = (logprobs.view(torch.int32).long() & SIZE_BITS) << ID_BITS
    keys |= torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.topk(k, largest=False).values & (1 << ID_BITS) - 1


def settings_of(params: Sequence[SamplingParams]) -> NDArray[np.float64]:
    """Return temperature, top-k and top-p (N, 3) of rows; infinite where a filter keeps everything."""
    return np.array(list(map(_settings, params)))


def _settings(own: SamplingParams) -> tuple[float, float, float]:
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
