"""What operations on an adapter take besides the tokens of their passes, in tokens that take as long.

A worker measures it when it loads the model, in a trial of half a second. In cycles an item takes longer: there are
messages, rows of the database, and perhaps clients on the same cores; and another process may have disturbed the trial.
So the cost of an item is multiplied by what cycles with many items, and with few, have shown since.

Depends on facts of models; not on operations, tenants or queues. Main invariant: every cost is a function of the
measurements, in their order, and of nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median_low
from typing import NamedTuple

import numpy as np

from coordinator.fleet.fleet import Fleet
from coordinator.scheduling.cost_model import KEPT, KEPT_MIN, MEMORY, SPAN_WIDE
from workers.contract.messages import AdapterSpec

FACTOR_MAX = 8.0
"""The most times, and the least part, of what the trial has shown that items are taken to cost."""
PART_OF_WAY = 0.1
"""How far the factor goes with each cycle: classes that were measured at different speeds may contradict each other."""
NOTABLE = 0.05
"""Changes of the factor by a smaller fraction change no cost."""
LARGE_PART = 0.25
"""Cycles count that cost at least this part of the largest, in tokens."""


class AdapterCost(NamedTuple):
    """The costs of one adapter, in tokens."""

    item: float = 0.0
    """Of a chunk in a pass, besides its tokens."""
    step: float = 0.0
    """Of an optimizer step."""
    move: float = 0.0
    """Of its way into a slot of the worker, with another adapter's way out of it."""


class Mix(NamedTuple):
    """A cycle's pass and commit, or the medians of several."""

    num_tokens: float
    items: float
    """What its items cost by the trial, in tokens."""
    seconds: float


class Costs:
    """The costs of one base model's adapters, for a copy's bytes."""

    def __init__(self, base_model: str, fleet: Fleet) -> None:
        self._base_model = base_model
        self._fleet = fleet
        self._factor = ItemFactor()
        self._factor_used = 1.0
        self._known: dict[str, AdapterCost] = {}
        """By adapter: this is read for every adapter of every plan."""

    @property
    def token_s(self) -> float:
        """Seconds of a token in cycles, beside what their items cost; 0 while cycles do not show it."""
        return self._factor.token_s

    def of(self, spec: AdapterSpec) -> AdapterCost:
        """Return the costs of an adapter."""
        if (known := self._known.get(spec.adapter_id)) is None:
            num_bytes = self._fleet.copy_bytes(self._base_model, spec)
            costs = self._fleet.models[self._base_model].costs
            step = costs.byte_tokens * num_bytes
            item = self._factor_used * (costs.item_tokens + step)
            known = self._known[spec.adapter_id] = AdapterCost(item, step, costs.move_byte_tokens * num_bytes)
        return known

    def observe(self, specs: Iterable[AdapterSpec], num_tokens: int, seconds: float) -> None:
        """Record a cycle with an item of each of these adapters, its tokens, and its seconds without those of steps."""
        items = sum(self.of(spec).item for spec in specs) / self._factor_used
        if items and num_tokens:
            self._factor.observe(Mix(num_tokens, items, seconds))
        if abs(self._factor.value - self._factor_used) > NOTABLE * self._factor_used:
            self._factor_used = self._factor.value
            self._known.clear()

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self._known.pop(adapter_id, None)


class ItemFactor:
    """How many times as much an item costs in cycles as in the trial, beside a token.

    Cycles are kept in classes by their tokens and by what their items cost in the trial, as passes are in `CycleCosts`.
    Their medians show it as b / a of seconds = a tokens + b items.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """1 until cycles differ enough in what they have more of."""
        self.token_s = 0.0
        """Seconds of a token; 0 while cycles do not show it."""
        self._num_cycles = 0
        self._classes: dict[tuple[int, int], deque[tuple[int, Mix]]] = {}
        """Each cycle with its number."""

    def observe(self, cycle: Mix) -> None:
        """Record a cycle."""
        self._num_cycles += 1
        key = int(cycle.num_tokens).bit_length(), int(cycle.items).bit_length()
        self._classes.setdefault(key, deque(maxlen=KEPT)).append((self._num_cycles, cycle))
        for stale in [k for k, kept in self._classes.items() if kept[-1][0] <= self._num_cycles - MEMORY]:
            del self._classes[stale]
        costs = _costs_of([_typical(kept) for kept in self._classes.values() if len(kept) >= KEPT_MIN])
        if costs is None:
            self.token_s = 0.0
            return
        token_s, value = costs
        self.value += PART_OF_WAY * (min(max(1 / FACTOR_MAX, value), FACTOR_MAX) - self.value)
        self.token_s += (PART_OF_WAY if self.token_s and token_s else 1.0) * (token_s - self.token_s)


def _typical(kept: Iterable[tuple[int, Mix]]) -> Mix:
    return Mix(*map(median_low, zip(*(cycle for _, cycle in kept), strict=True)))


def _costs_of(cycles: list[Mix]) -> tuple[float, float] | None:
    """Return a and b / a of seconds = a tokens + b items, by least squares of relative errors; None: cycles are too
    alike.

    Of cycles of some size: small ones show what a cycle costs without anything in it.
    """
    largest = max((cycle.num_tokens + cycle.items for cycle in cycles), default=0.0)
    cycles = [each for each in cycles if each.seconds > 0 and each.num_tokens + each.items >= LARGE_PART * largest]
    ratios = [cycle.items / cycle.num_tokens for cycle in cycles]
    if not ratios or max(ratios) < SPAN_WIDE * min(ratios):
        return None
    rows = np.array([[cycle.num_tokens / cycle.seconds, cycle.items / cycle.seconds] for cycle in cycles])
    token_s, item_s = (float(each) for each in np.linalg.lstsq(rows, np.ones(len(cycles)))[0])
    return (token_s, item_s / token_s) if token_s > 0 else (0.0, FACTOR_MAX)
