"""Tokens to a datum and back: the one place where targets are shifted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkerpool.types import Datum, as_tokens


def shift(tokens: Any, weights: Any = None) -> Datum:
    """Return the datum of n tokens: input `tokens[:-1]`, targets `tokens[1:]`, and each target's weight.

    Args:
        tokens: token ids, at least two.
        weights: n weights, of each token as a target; the first token is none. None: 1 for every token.

    Raises:
        ValueError: fewer than two tokens, or another number of weights.
    """
    ids = as_tokens(tokens, "tokens")
    values = np.ones(ids.size, np.float32) if weights is None else np.asarray(weights, np.float32)
    if ids.ndim != 1 or ids.size < 2:
        raise ValueError(f"a datum needs at least two tokens, one to read and one to predict; got {ids.size}")
    if values.shape != ids.shape:
        raise ValueError(f"weights must have one value for each of the {ids.size} tokens, got shape {values.shape}")
    return Datum(ids[:-1], {"target_tokens": ids[1:], "weights": values[1:]})


def unshift(datum: Datum) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the tokens and weights that `shift` was given; the first weight is 0. Raises ValueError for other data."""
    inputs = datum.loss_fn_inputs
    if set(inputs) != {"target_tokens", "weights"}:
        raise ValueError(f"expected a datum with target_tokens and weights, got loss_fn_inputs {sorted(inputs)}")
    tokens = datum.model_input.to_numpy()
    targets = inputs["target_tokens"].data
    if tokens.size == 0 or targets.shape != tokens.shape or not np.array_equal(targets[:-1], tokens[1:]):
        raise ValueError("expected a datum whose targets are its own tokens, shifted by one")
    return np.append(tokens, targets[-1]), np.concatenate([np.zeros(1, np.float32), inputs["weights"].data])


def num_weighted(data: Iterable[Datum]) -> float:
    """Return the sum of all weights: the number of tokens that `loss:sum` adds up, for a loss per token."""
    return float(sum(datum.loss_fn_inputs["weights"].data.sum() for datum in data))
