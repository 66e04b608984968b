"""Draws a token from logits, with random numbers that depend on nothing but what they are for.

Knows distributions; not models, caches or requests. In double precision on the CPU, so that equal logits give equal
tokens everywhere.

Main invariant: a draw is a function of one row of logits, the request's parameters, and (seed, stream, position);
neighbours, batches, restarts and the worker do not enter.

Dimensions: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.contract.messages import SamplingParams

WORD = (1 << 64) - 1
ALTERNATIVES = 1 << 63
"""Streams from here on are of alternatives to a prompt's tokens; a sample's stream is its index."""
BLOCK_VALUES = 1 << 18
"""Values that are computed at once when many rows are drawn from: two MiB, which stay near a core."""
PIECE_VALUES = 64
"""Sums over so many values are cumulated, and then those of one piece: cumulating all takes as long as all the rest."""
RAW_WORDS = 4
"""A Philox-4x64 counter gives so many words; the first is used."""


def uniforms(seed: int, stream: int, position: int, count: int) -> NDArray[np.float64]:
    """Numbers (count,) in [0, 1) with 53 random bits: Philox-4x64 keyed by seed and stream, the position its counter.

    They are those of `position` and the positions behind it, whichever are asked for together.
    """
    # As an array, for NumPy takes a list with words beyond an int64 through floating point.
    key = np.array([seed & WORD, stream], np.uint64)
    generator = np.random.Philox(key=key, counter=[position, 0, 0, 0])
    words = generator.random_raw(RAW_WORDS * count)[::RAW_WORDS]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number that decides a sample's token at a position."""
    return float(uniforms(seed, sample_index, position, 1)[0])


class Distribution:
    """What tokens are drawn from: finite logits (V,), tempered, top-k, then top-p of the rest.

    Greedy at temperature 0, the lowest id among equals. Otherwise the inverse of the distribution function, over the
    kept tokens in the order of their ids.
    """

    def __init__(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Uses of `params` temperature, top-k and top-p."""
        self._greedy: int | None = None
        if params.temperature == 0:
            self._greedy = int(logits.argmax())
            return
        self._kept, self._weights = _weights(logits, params)
        self._ends = _ends(self._weights)

    def pick(self, number: float) -> int:
        """The token that a number in [0, 1) picks."""
        if self._greedy is not None:
            return self._greedy
        index = _pick(self._weights, self._ends, number)
        return index if self._kept is None else int(self._kept[index])


class NonFiniteLogitsError(Exception):
    """Logits are infinite or not a number: nothing can be drawn from them, or said of them."""


def check_finite(logits: NDArray[np.float32]) -> None:
    """Raise NonFiniteLogitsError for logits of any shape that are not all finite."""
    if not np.isfinite(logits).all():
        raise NonFiniteLogitsError("the model's logits are infinite or not a number; the adapter may have diverged")


def draw(logits: NDArray[np.float32], params: SamplingParams, number: float) -> int:
    """The token that a number in [0, 1) picks from logits (V,); see `Distribution`."""
    return Distribution(logits, params).pick(number)


def draw_rows(logits: NDArray[np.float32], params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """A token from each row of logits (N, V) by its own parameters and number; as `draw` gives, many rows at a time."""
    tokens = [0] * len(logits)
    by_temperature: dict[float, list[int]] = {}
    for place, own in enumerate(params):
        if own.temperature and (0 < own.top_k < logits.shape[1] or own.top_p < 1):
            tokens[place] = draw(logits[place], own, numbers[place])
        else:
            by_temperature.setdefault(own.temperature, []).append(place)
    num_rows = max(1, BLOCK_VALUES // logits.shape[1])
    for temperature, places in by_temperature.items():
        for start in range(0, len(places), num_rows):
            block = places[start : start + num_rows]
            for place, token in zip(
                block, _drawn(logits[block], temperature, [numbers[p] for p in block]), strict=True
            ):
                tokens[place] = token
    return tokens


def _drawn(logits: NDArray[np.float32], temperature: float, numbers: Sequence[float]) -> list[int]:
    """A token from each row of logits (n, V), with nothing cut off."""
    if temperature == 0:
        greedy: list[int] = logits.argmax(axis=1).tolist()
        return greedy
    weights = _all_weights(logits, temperature)
    return [_pick(*of_row) for of_row in zip(weights, _ends(weights), numbers, strict=True)]


def likeliest(logprobs: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """The k largest of log-probabilities (V,), or all: the likeliest first, the lowest id first among equals."""
    kept = top_k(logprobs, k) if k < len(logprobs) else np.arange(len(logprobs))
    return kept[np.argsort(-logprobs[kept], kind="stable")]


def _ends(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of weights (..., V) up to the end of each piece: (..., pieces)."""
    starts = np.arange(0, weights.shape[-1], PIECE_VALUES)
    return np.add.reduceat(weights, starts, axis=-1).cumsum(axis=-1)


def _pick(weights: NDArray[np.float64], ends: NDArray[np.float64], number: float) -> int:
    """Where a number in [0, 1) falls among weights (V,) with the sums `ends`; never at a weight of zero."""
    target = number * ends[-1]
    piece = _first_above(ends, target)
    inside = weights[piece * PIECE_VALUES : (piece + 1) * PIECE_VALUES].cumsum()
    return piece * PIECE_VALUES + _first_above(inside, target - ends[piece - 1] if piece else target)


def _first_above(sums: NDArray[np.float64], target: float) -> int:
    """The first of rising sums above a target; where rounding has left none, the first that reaches the last."""
    return min(int(sums.searchsorted(target, side="right")), int(sums.searchsorted(sums[-1])))


def _all_weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Unnormalised probabilities of tempered logits (..., V), row by row."""
    weights = logits.astype(np.float64)
    weights /= temperature
    weights -= weights.max(axis=-1, keepdims=True)
    return np.exp(weights, out=weights)


def _weights(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """The kept token ids, ascending (None: all), and their unnormalised probabilities."""
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
    """Indices, ascending, of the k largest weights, the lowest indices among equals."""
    threshold = np.partition(weights, len(weights) - k)[len(weights) - k]
    above, equal = np.flatnonzero(weights > threshold), np.flatnonzero(weights == threshold)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def top_p(weights: NDArray[np.float64], p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the fewest largest weights that have at least the share p of the sum; at least one.

    The lowest indices among equals.
    """
    total = weights.sum()
    # Those below this cannot belong: together they have less than the share 1 - p.
    candidates = np.flatnonzero(weights >= total * max(0.0, 1 - p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    cumulative = weights[order].cumsum()
    count = int(np.searchsorted(cumulative, p * total, side="left")) + 1
    return np.sort(order[:count])
