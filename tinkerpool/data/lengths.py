"""Datums of a maximum length: cut, or several packed into one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinkerpool.data.tokens import shift, unshift
from tinkerpool.types import Datum


def num_tokens(datum: Datum) -> int:
    """Return the number of tokens that the model reads, which is what limits and cycles count."""
    return datum.model_input.length


def truncate(datum: Datum, max_length: int) -> Datum:
    """Return the datum of the first `max_length` tokens. Raises ValueError if no weight remains."""
    if num_tokens(datum) <= max_length:
        return datum
    tokens, weights = unshift(datum)
    if not weights[: max_length + 1].any():
        raise ValueError(f"the first {max_length} tokens have no weight: nothing to train on would remain")
    return shift(tokens[: max_length + 1], weights[: max_length + 1])


def pack(data: Iterable[Datum], max_length: int) -> list[Datum]:
    """Join datums, in order, into as few as hold at most `max_length` tokens each.

    Each token of a joined datum sees all tokens before it, those of other datums too: meant for pieces of text. A batch
    needs no packing to be fast, because the pool runs sequences of any lengths without padding.

    Raises:
        ValueError: a datum that is longer than `max_length`, or has other loss inputs than targets and weights.
    """
    packed: list[Datum] = []
    tokens, weights = _NO_TOKENS, _NO_WEIGHTS
    for i, datum in enumerate(data):
        more, more_weights = unshift(datum)
        if more.size - 1 > max_length:
            raise ValueError(f"data[{i}] has {more.size - 1} tokens, more than max_length, {max_length}: truncate it")
        if tokens.size + more.size - 1 > max_length:
            packed.append(shift(tokens, weights))
            tokens, weights = _NO_TOKENS, _NO_WEIGHTS
        tokens, weights = np.concatenate([tokens, more]), np.concatenate([weights, more_weights])
    return [*packed, shift(tokens, weights)] if tokens.size else packed


_NO_TOKENS = np.empty(0, np.int64)
_NO_WEIGHTS = np.empty(0, np.float32)
