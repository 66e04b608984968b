"""Applies workers' results: decides operations, confirms replays, reinstalls copies that are out of order.

Depends on adapter logs and the saver; not on how items were sent. Main invariant: a result counts only for
the generation of the copy that it was computed on; the others are dropped, and their operations run again.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from coordinator.base.errors import Code, ServiceError
from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Cycle
from coordinator.cycle.items import Entry
from coordinator.fleet.fleet import Incarnation
from coordinator.observe.metrics import REPLAYS
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import (
    CLASS_METRIC,
    CYCLE_METRIC,
    Kind,
    Operation,
    Usage,
    item_error,
    service_error,
)
from coordinator.operations.windows import window_closed
from coordinator.scheduling.worker_losses import replay_differs
from tinkerpool.convert import to_tensor
from tinkerpool.metrics import merge_metrics
from tinkerpool.v1 import training_pb2
from workers.contract.logs import about
from workers.contract.messages import ErrorCode, ItemResult, LoadItem, PassItem

logger = logging.getLogger(__name__)

REINSTALLS_MAX = 5
"""How often in a row one chunk may find its adapter's copy out of order before the adapter is aborted."""
TRANSIENT = {ErrorCode.OUT_OF_MEMORY, ErrorCode.INTERNAL}
"""Failures of a replay that do not show that the replayed operation differs: it is retried."""


class Results:
    """Applies the results for the adapters of one base model."""

    def __init__(self, saver: Saver, snapshots: Snapshots) -> None:
        self._saver = saver
        self._snapshots = snapshots

    async def apply(self, cycle: Cycle, entry: Entry, worker: Incarnation, result: ItemResult) -> None:
        """Apply one item's result."""
        log, operation, item = entry.log, entry.operation, entry.item
        if not entry.is_current or (operation is not None and operation.is_failed):
            return  # of a lost copy; or a later chunk of an operation that just failed
        if result.error is not None and result.error.code is ErrorCode.OUT_OF_ORDER:
            self._reinstall(entry, result)
            return
        shown = cycle.count(log, worker.info.worker_id, result)
        log.charge_replay(result.engine_s)
        if operation is None:
            self._snapshots.take(log, result)
            return
        is_last = not isinstance(item, PassItem) or log.copy.num_chunks_done(operation) == item.num_chunks - 1
        if operation.is_final:
            self._apply_replay(entry, operation, worker, result, is_last=is_last)
        else:
            log.copy.add_result(operation, entry.chunk, result)
            window, role = log.copy.window, operation.kind.window_role
            if window.forbids(role, operation.seq):
                operation.fail(window_closed(window, role), log.copy.usage(operation), cycle_id=cycle.cycle_id)
            elif result.error is not None:
                operation.fail(item_error(result.error), log.copy.usage(operation), cycle_id=cycle.cycle_id)
            elif is_last and not isinstance(item, LoadItem):  # a load is decided by the snapshot behind it
                await self._succeed(cycle, entry, worker, result)
            else:
                log.copy.pause(operation)
                return
            if entry.is_current:
                log.applied(operation)
            cycle.finish((operation,))
            shown.num_operations += 1
            shown.is_step |= operation.kind is Kind.OPTIM_STEP and not operation.is_failed

    def refuse_copy(self, log: AdapterLog, error: ServiceError) -> None:
        """Drop the copy of an adapter that cannot be rebuilt now, or abort the adapter if a retry cannot succeed.

        It is not read again before the error's delay is over.
        """
        if error.retry_delay_s is not None:
            logger.warning("%s: %s", log.adapter_id, error.message, extra=about(adapter=log.adapter_id))
            log.lose_copy()
            self._snapshots.postpone_read(log.adapter_id, error.retry_delay_s)
            return
        logger.error("%s: %s", log.adapter_id, error.message, extra=about(adapter=log.adapter_id))
        log.abort(service_error(error))
        self._saver.states.publishing.fail(log.adapter_id, error)

    def _apply_replay(
        self, entry: Entry, operation: Operation, worker: Incarnation, result: ItemResult, *, is_last: bool
    ) -> None:
        log = entry.log
        log.copy.replayed_chunk(operation, is_last=is_last)
        if result.error is not None and result.error.code in TRANSIENT:
            self._reinstall(entry, result)
        elif result.error is not None:
            self.refuse_copy(log, replay_differs(log, operation.name, str(result.error)))
        elif is_last:
            REPLAYS.inc()
            operation.drop_payload()
            log.applied(operation)
            if operation.must_rematerialize:
                assert result.state is not None
                operation.rematerialized()
                worker.hold(operation.name, result.state.num_bytes)
                self._saver.states.publishing.rematerialized(operation.name, result.state)

    async def _succeed(self, cycle: Cycle, entry: Entry, worker: Incarnation, result: ItemResult) -> None:
        log, operation = entry.log, entry.operation
        assert operation is not None
        usage = log.copy.usage(operation)
        match operation.kind:
            case Kind.FORWARD | Kind.FORWARD_BACKWARD:
                _fill_pass(operation, log, usage, cycle.cycle_id)
            case Kind.OPTIM_STEP:
                _fill_step(operation, log, result, usage, cycle.cycle_id)
            case Kind.LOAD_STATE:
                operation.begin_deciding()
                try:
                    await self._saver.save_loaded(cycle.staged, log, result)
                    _fill_load(operation, usage, cycle.cycle_id)
                except ServiceError as error:
                    operation.fail(service_error(error), usage, cycle_id=cycle.cycle_id)
                    if entry.is_current:
                        log.lose_copy()  # it has loaded a state that could not be loaded again
            case Kind.SAVE_STATE | Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                operation.begin_deciding()
                try:
                    await self._saver.save(cycle.staged, cycle.cycle_id, log, operation, usage, result)
                except ServiceError as error:
                    operation.fail(service_error(error), usage, cycle_id=cycle.cycle_id)
                if operation.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                    num_bytes = result.state.num_bytes if result.state is not None else 0
                    cycle.published.append((worker.info.worker_id, worker.name, operation, num_bytes))
            case _:
                raise AssertionError(f"{operation.kind} is not an operation on an adapter")

    def _reinstall(self, entry: Entry, result: ItemResult) -> None:
        """Drop a copy that is out of order or cannot be replayed now, so that it is installed again.

        After `REINSTALLS_MAX` times at the same chunk of an operation the adapter is aborted: an adapter that cannot be
        rebuilt fails at the same one each time, but a reply can be lost at any. The worker's reason is logged.
        """
        log = entry.log
        ids = about(adapter=log.adapter_id, operation=result.op_id)
        logger.warning("%s: %s", log.adapter_id, result.error, extra=ids)
        log.lose_copy()
        if log.copy.count_reinstall(result.op_id, entry.chunk) > REINSTALLS_MAX:
            error = ServiceError(Code.INTERNAL, "STATE_LOST", "the adapter's state cannot be rebuilt on any worker")
            self.refuse_copy(log, error)


def _fill_pass(operation: Operation, log: AdapterLog, usage: Usage, cycle_id: int) -> None:
    """Decide a forward or forward_backward whose chunks have all succeeded."""
    parts = log.copy.results(operation)
    result = operation.succeed(cycle_id, usage).forward_backward
    for part in parts:
        result.logprobs.extend(to_tensor(logprobs) for logprobs in part.logprobs)
    metrics = merge_metrics([part.metrics for part in parts], [part.num_tokens for part in parts], keep_partial=True)
    for key, value in metrics.items():
        result.metrics[key] = value
    result.metrics["tokens:sum"] = float(operation.num_tokens)
    result.metrics[CYCLE_METRIC] = float(cycle_id)
    _note_class_change(log, result.metrics)


def _fill_step(operation: Operation, log: AdapterLog, result: ItemResult, usage: Usage, cycle_id: int) -> None:
    """Decide an optim_step that has succeeded."""
    metrics = operation.succeed(cycle_id, usage).optim_step.metrics
    for key, value in result.metrics.items():
        metrics[key] = value
    metrics[CYCLE_METRIC] = float(cycle_id)
    _note_class_change(log, metrics)


def _note_class_change(log: AdapterLog, metrics: MutableMapping[str, float]) -> None:
    """Say in the first result in another class that bits may differ from now on."""
    if log.take_class_change():
        metrics[CLASS_METRIC] = 1.0


def _fill_load(operation: Operation, usage: Usage, cycle_id: int) -> None:
    """Decide a load_state that has succeeded."""
    path = training_pb2.LoadStateRequest.FromString(operation.payload).path
    operation.succeed(cycle_id, usage).load_state.path = path
