"""Drawing: a token from logits, by sampling parameters and a random number.

Computes in double precision on the CPU, so that equal logits give equal tokens on every machine. Does not depend on
models, caches or requests.

Main invariant: a draw is a function of one row of logits, the request's parameters, and (seed, stream, position). It is
the same in every batch, on every worker, and after a restart.

Dimensions: N rows, V vocabulary, k kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.contract.messages import SamplingParams

WORD = (1 << 64) - 1
ALTERNATIVES = 1 << 63
"""The first stream for alternatives to a prompt's tokens; the stream of a sequence is its index."""
BLOCK_VALUES = 1 << 18
"""Values of many rows that are computed at once: two MiB, which fit a core's cache."""
PIECE_VALUES = 64
"""A running sum is taken over sums of so many values, then within one such piece: over all values it would double the
time of a draw."""
RAW_WORDS = 4
"""Words of one Philox-4x64 counter; the first is used."""


def uniforms(seed: int, stream: int, position: int, count: int) -> NDArray[np.float64]:
    """Return the numbers (count,) of `position` and the positions after it: in [0, 1), with 53 random bits.

    Philox-4x64 is keyed by seed and stream; the position is its counter. So a number does not depend on `count`.
    """
    # An array, because NumPy converts a list with words beyond an int64 through floating point.
    key = np.array([seed & WORD, stream], np.uint64)
    generator = np.random.Philox(key=key, counter=[position, 0, 0, 0])
    words = generator.random_raw(RAW_WORDS * count)[::RAW_WORDS]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Distribution:
    """The distribution of finite logits (V,): temperature, then top-k, then top-p of the rest.

    At temperature 0 it is the likeliest token, the lowest id among equals. Otherwise a draw is the inverse of the
    cumulative distribution over the kept tokens, in the order of their ids.
    """

    def __init__(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Use temperature, top-k and top-p of `params`."""
        self._greedy: int | None = None
        if params.temperature == 0:
            self._greedy = int(logits.argmax())
            return
        self._kept, self._weights = _weights(logits, params)
        self._ends = _ends(self._weights)

    def pick(self, number: float) -> int:
        """Return the token that a number in [0, 1) picks."""
        if self._greedy is not None:
            return self._greedy
        index = _pick(self._weights, self._ends, number)
        return index if self._kept is None else int(self._kept[index])


class Drawn(NamedTuple):
    """Tokens drawn from rows of logits, row by row."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tokens."""
    is_finite: list[bool]
    """By row; tokens of a row that is not finite mean nothing."""


class NonFiniteLogitsError(Exception):
    """Logits are infinite or not a number, so they have no distribution."""

    def __init__(self) -> None:
        super().__init__("the model's logits are infinite or not a number; the adapter may have diverged")


def check_finite(logits: NDArray[np.float32]) -> None:
    """Raise NonFiniteLogitsError for logits of any shape that are not all finite."""
    if not np.isfinite(logits).all():
        raise NonFiniteLogitsError


def draw(logits: NDArray[np.float32], params: SamplingParams, number: float) -> int:
    """Return the token that a number in [0, 1) picks from logits (V,); see `Distribution`."""
    return Distribution(logits, params).pick(number)


def draw_rows(
    logits: NDArray[np.float32], params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]
) -> list[int]:
    """Return a token for each number, row by row of logits (N, V), which have their own parameters and numbers.

    Equal to `draw` of each row and number.
    """
    tokens: list[list[int]] = [[] for _ in numbers]
    by_temperature: dict[float, list[int]] = {}
    for place, (own, of_row) in enumerate(zip(params, numbers, strict=True)):
        is_filtered = own.temperature and (0 < own.top_k < logits.shape[1] or own.top_p < 1)
        if len(of_row) == 1 and not is_filtered:
            by_temperature.setdefault(own.temperature, []).append(place)
        elif of_row:
            distribution = Distribution(logits[place], own)
            tokens[place] = [distribution.pick(number) for number in of_row]
    num_rows = max(1, BLOCK_VALUES // logits.shape[1])
    for temperature, places in by_temperature.items():
        for start in range(0, len(places), num_rows):
            block = places[start : start + num_rows]
            for place, token in zip(
                block, _drawn(logits[block], temperature, [numbers[p][0] for p in block]), strict=True
            ):
                tokens[place] = [token]
    return list(chain.from_iterable(tokens))


def _drawn(logits: NDArray[np.float32], temperature: float, numbers: Sequence[float]) -> list[int]:
    """Return a token for each row of logits (N, V), without top-k and top-p."""
    if temperature == 0:
        greedy: list[int] = logits.argmax(axis=1).tolist()
        return greedy
    weights = _all_weights(logits, temperature)
    return [_pick(*of_row) for of_row in zip(weights, _ends(weights), numbers, strict=True)]


def likeliest(logprobs: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Return the ids of the k largest log-probabilities (V,): likeliest first, lowest id first among equals."""
    kept = top_k(logprobs, k) if k < len(logprobs) else np.arange(len(logprobs))
    return kept[np.argsort(-logprobs[kept], kind="stable")]


def _ends(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of weights (..., V) up to the end of each piece: (..., pieces)."""
    starts = np.arange(0, weights.shape[-1], PIECE_VALUES)
    return np.add.reduceat(weights, starts, axis=-1).cumsum(axis=-1)


def _pick(weights: NDArray[np.float64], ends: NDArray[np.float64], number: float) -> int:
    """Return the index that a number in [0, 1) picks from weights (V,) with the sums `ends`; its weight is not zero."""
    target = number * ends[-1]
    piece = _first_above(ends, target)
    inside = weights[piece * PIECE_VALUES : (piece + 1) * PIECE_VALUES].cumsum()
    return piece * PIECE_VALUES + _first_above(inside, target - ends[piece - 1] if piece else target)


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """Return the index of the first of rising sums above a target; if rounding left none, of the first largest one."""
    return min(int(sums.searchsorted(target, side="right")), int(sums.searchsorted(sums[-1])))


def _all_weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Return the unnormalised probabilities of logits (..., V) at a temperature, row by row."""
    weights = logits.astype(np.float64)
    weights /= temperature
    weights -= weights.max(axis=-1, keepdims=True)
    return np.exp(weights, out=weights)


def _weights(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """Return the kept token ids, ascending (None: all), and their unnormalised probabilities."""
    weights = _all_weights(logits, params.temperature)
    kept = None
    if 0 < params.top_k < len(weights):
        kept = top_k(weights, params.top_k)
        weights = weights[kept]
    if params.top_p < 1:
        nucleus = top_p(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    return kept, weights


def top_k(weights: NDArray[np.floating], k: int) -> NDArray[np.intp]:
    """Return the indices, ascending, of the k largest weights; the lowest indices among equals."""
    threshold = np.partition(weights, len(weights) - k)[len(weights) - k]
    above, equal = np.flatnonzero(weights > threshold), np.flatnonzero(weights == threshold)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def top_p(weights: NDArray[np.float64], p: float) -> NDArray[np.intp]:
    """Return the indices, ascending, of the fewest largest weights whose sum is at least p of the total; at least one.

    The lowest indices among equals.
    """
    total = weights.sum()
    # Weights below this threshold are never kept: their sum is less than 1 - p of the total.
    candidates = np.flatnonzero(weights >= total * max(0.0, 1 - p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    cumulative = weights[order].cumsum()
    count = int(np.searchsorted(cumulative, p * total, side="left")) + 1
    return np.sort(order[:count])
