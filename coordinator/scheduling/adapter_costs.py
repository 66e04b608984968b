"""What operations on an adapter take besides the tokens of their passes, in tokens of a large pass.

A worker measures the costs of its base model when it loads it (`workers.contract.messages.AdapterCosts`); this module
multiplies them by the bytes of an adapter's copy. Does not depend on operations, tenants or where a copy is.
"""

from __future__ import annotations

from typing import NamedTuple

from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog


class AdapterCost(NamedTuple):
    """The costs of one adapter, in tokens."""

    item: float = 0.0
    """Of a chunk in a pass, besides its tokens."""
    step: float = 0.0
    """Of an optimizer step."""
    move: float = 0.0
    """Of its way into a slot of the worker, with another adapter's way out of it."""


class Costs:
    """The costs of one base model's adapters."""

    def __init__(self, base_model: str, fleet: Fleet) -> None:
        self._base_model = base_model
        self._fleet = fleet
        self._known: dict[str, AdapterCost] = {}
        """By adapter: this is read for every adapter of every plan."""

    def of(self, log: AdapterLog) -> AdapterCost:
        """Return the costs of an adapter."""
        if (known := self._known.get(log.adapter_id)) is None:
            num_bytes = self._fleet.copy_bytes(self._base_model, log.spec)
            costs = self._fleet.models[self._base_model].costs
            step = costs.byte_tokens * num_bytes
            known = AdapterCost(costs.item_tokens + step, step, costs.move_byte_tokens * num_bytes)
            self._known[log.adapter_id] = known
        return known

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self._known.pop(adapter_id, None)
