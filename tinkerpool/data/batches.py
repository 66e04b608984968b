"""Batches in an order that a seed and the epoch decide.

Main invariant: a batch is a function of data, batch size, seed and step. So the position of a run is its step, and a
run that continues at a step gets the batches that it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Batches(Generic[T]):
    """Endless batches. Every epoch has each item once, in a new order; a batch may span two epochs."""

    def __init__(self, data: Sequence[T], batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises ValueError without data, or for a batch size below 1 or a negative seed."""
        if not data:
            raise ValueError("data is empty: there is nothing to make batches of")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def at(self, step: int) -> list[T]:
        """Return the batch of step `step`, counted from 0. Raises ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        items = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [self.data[self._order(item // len(self.data))[item % len(self.data)]] for item in items]

    def num_steps(self, epochs: float) -> int:
        """Return the number of steps that have every item `epochs` times; the last one may begin another epoch.

        Raises ValueError unless `epochs` is above 0 and finite.
        """
        if not 0 < epochs < math.inf:
            raise ValueError(f"epochs must be above 0 and finite, got {epochs}")
        return max(1, math.ceil(epochs * len(self.data) / self.batch_size))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch's items, which stays the same in all versions of numpy."""
        if self._last is None or self._last[0] != epoch:
            # Of numpy, the raw numbers of a bit generator are stable; a Generator's `permutation` is not.
            keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.data))
            order = np.argsort(keys, kind="stable") if self.shuffle else np.arange(len(self.data))
            self._last = epoch, order
        return self._last[1]
