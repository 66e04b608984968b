"""Runs optimizer steps: one after another on a CPU, together on a device that computes behind the host.

Does not depend on AdamW's arithmetic (`optim`) or on the copies' order (`copies`).

Main invariant: the outcome of a step depends on its own copy alone; a step that fails has changed no weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from workers.contract.messages import ItemError, ItemResult, OptimStepItem
from workers.training.copies import AdapterCopies
from workers.training.failures import item_error
from workers.training.optim import Step, StepNorms, adamw_step, adamw_steps, check_params

logger = logging.getLogger(__name__)


class StepRunner:
    """Runs steps of one engine. One thread only."""

    def __init__(self, copies: AdapterCopies, *, is_deferred: bool) -> None:
        """`is_deferred`: the device computes behind the host, so wait for it once for many steps."""
        self._copies = copies
        self._is_deferred = is_deferred

    def run(self, items: Sequence[OptimStepItem]) -> list[ItemResult]:
        """Run steps of different adapters, at most `num_slots`; return their results in order."""
        return self._run_together(items) if self._is_deferred else [self._run_one(item) for item in items]

    def _run_one(self, item: OptimStepItem) -> ItemResult:
        begin_s = time.perf_counter()
        outcome: StepNorms | ItemError | None = self._checked(item)
        if outcome is None:
            try:
                [row] = self._copies.rows([item.adapter_id])
                outcome = adamw_step(row, item.params, self._copies.next_step(item.adapter_id))
            except Exception as error:  # noqa: BLE001 (becomes the item's error)
                outcome = self._failed(item, error)
        return self._result(item, outcome, time.perf_counter() - begin_s)

    def _run_together(self, items: Sequence[OptimStepItem]) -> list[ItemResult]:
        """Run steps with one wait for the device. Engine time is shared equally."""
        begin_s = time.perf_counter()
        outcomes: dict[str, StepNorms | ItemError | None] = {item.adapter_id: self._checked(item) for item in items}
        admitted = [item for item in items if outcomes[item.adapter_id] is None]
        for item, norms in zip(admitted, self._take(admitted), strict=True):
            outcomes[item.adapter_id] = norms if isinstance(norms, StepNorms) else self._failed(item, norms)
        engine_s = (time.perf_counter() - begin_s) / len(items)
        return [self._result(item, outcomes[item.adapter_id], engine_s) for item in items]

    def _checked(self, item: OptimStepItem) -> ItemError | None:
        """Admit a step; return the error if it cannot run."""
        refusal = self._copies.admit(item)
        if refusal is not None:
            return refusal
        try:
            check_params(item.params)
        except ValueError as invalid:
            return self._failed(item, invalid)
        return None

    def _failed(self, item: OptimStepItem, error: Exception) -> ItemError:
        failure = item_error(error)
        self._copies.fail(item, failure)
        return failure

    def _take(self, items: Sequence[OptimStepItem]) -> list[StepNorms | Exception]:
        """Take steps that were admitted. If memory runs out, none of them has been taken."""
        try:
            rows = self._copies.rows([item.adapter_id for item in items])
        except Exception as error:
            logger.warning("the adapters of %d steps cannot be loaded", len(items), exc_info=error)
            return [error] * len(items)
        return adamw_steps(
            [
                Step(row=row, params=item.params, num_steps=self._copies.next_step(item.adapter_id))
                for row, item in zip(rows, items, strict=True)
            ]
        )

    def _result(self, item: OptimStepItem, outcome: StepNorms | ItemError | None, engine_s: float) -> ItemResult:
        """Record a step that was taken, and make its result."""
        if isinstance(outcome, ItemError):
            return ItemResult(op_id=item.op_id, error=outcome, engine_s=engine_s)
        assert outcome is not None, "every step has an outcome"
        metrics = {
            "grad_norm:last": outcome.gradient,
            "update_norm:last": outcome.update,
            "adapter_norm:last": outcome.adapter,
            "num_datums:sum": float(self._copies.stepped(item.adapter_id)),
        }
        return ItemResult(op_id=item.op_id, metrics=metrics, engine_s=engine_s)
