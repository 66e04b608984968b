"""Draws a token from logits, with random numbers that depend on nothing but what they are for.

Knows distributions; not models, caches or requests. In double precision on the CPU, so that equal logits give equal
tokens everywhere.

Main invariant: a draw is a function of one row of logits, the request's parameters, and (seed, sample index, position);
neighbours, batches, restarts and the worker do not enter.

Dimensions: V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.messages import SamplingParams

WORD = (1 << 64) - 1


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox-4x64 keyed by seed and sample, at the position as its counter."""
    # As an array, for NumPy takes a list with words beyond an int64 through floating point.
    key = np.array([seed & WORD, sample_index], np.uint64)
    generator = np.random.Philox(key=key, counter=[position, 0, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def draw(logits: NDArray[np.float32], params: SamplingParams, number: float) -> int:
    """The token that a number in [0, 1) picks from finite logits (V,): tempered, top-k, then top-p of the rest.

    Greedy at temperature 0, the lowest id among equals. Otherwise the inverse of the distribution function, over the
    kept tokens in the order of their ids.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    kept, weights = _weights(logits, params)
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    index = min(index, len(weights) - 1)  # the product may round up to the last sum
    return index if kept is None else int(kept[index])


def _weights(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """The kept token ids, ascending (None: all), and their unnormalised probabilities."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    kept = None
    if 0 < params.top_k < len(weights):
        kept = top_k(weights, params.top_k)
        weights = weights[kept]
    if params.top_p < 1:
        nucleus = top_p(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    return kept, weights


def top_k(weights: NDArray[np.float64], k: int) -> NDArray[np.intp]:
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
