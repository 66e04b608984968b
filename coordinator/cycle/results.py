"""What workers' answers mean: operations decided, replays that went as before, copies that are not where they should
be.

Knows queues, outcomes and the saver; neither workers nor time. Main invariant: an answer counts only for a copy that is
still believed in. What a lost or refuted copy has answered is dropped, and its operations run again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from coordinator.base.errors import Code, ServiceError
from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.phase import Entry, Running
from coordinator.operations.adapter_log import NOBODY, AdapterQueue, window_closed
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.outcomes import fill_load, fill_pass, fill_step, item_error, service_error, worker_died
from coordinator.scheduling.quarantine import DEATHS_ALONE_MAX
from workers.contract.messages import ErrorCode, ItemResult, LoadItem, PassItem

logger = logging.getLogger(__name__)

REINSTALLS_MAX = 5
"""How often in a row an adapter's copy may be found out of order at one operation before its operations are failed."""


MAY_PASS = {ErrorCode.OUT_OF_MEMORY, ErrorCode.INTERNAL}
"""Failures of a replay that say nothing about what is replayed."""


class Answers:
    """Takes in the answers for the adapters of one base model."""

    def __init__(self, saver: Saver, snapshots: Snapshots, published: Callable[[str, str], None]) -> None:
        """`published` learns that a worker holds a version of weights from now on."""
        self._saver = saver
        self._snapshots = snapshots
        self._published = published
        self._reinstalls: dict[str, Counter[str]] = {}
        """By adapter, since it last ran something new: how often each operation found its copy out of order."""

    async def take_in(self, cycle: Running, entry: Entry, result: ItemResult) -> None:
        """One item's answer."""
        adapter, operation, item = entry
        if operation is not None and operation.is_failed:
            return  # a later chunk of what has just failed
        if result.error is not None and result.error.code is ErrorCode.OUT_OF_ORDER:
            self._reinstall(adapter, result)
            return
        if not adapter.worker_id:
            return  # lost, or found out of order earlier in this batch
        shown = cycle.entry(adapter)
        shown.num_tokens += result.num_tokens
        adapter.engine_s_since_snapshot += result.engine_s
        if operation is None:
            self._snapshots.take(adapter, result)
            return
        is_last = not isinstance(item, PassItem) or item.chunk_index == item.num_chunks - 1
        if operation.is_final:
            self._take_in_replay(adapter, operation, result, is_last=is_last)
        else:
            self._reinstalls.pop(adapter.adapter_id, None)
            operation.parts.append(result)
            operation.next_chunk += 1
            if operation.kind.needs_open_window and adapter.window_error is not None:
                operation.fail(window_closed(adapter.window_error), cycle_id=cycle.cycle_id)
            elif result.error is not None:
                operation.fail(item_error(result.error), cycle_id=cycle.cycle_id)
            elif is_last and not isinstance(item, LoadItem):  # a load is decided by the snapshot behind it
                await self._succeed(cycle, adapter, operation, result)
            else:
                operation.is_running = False
                return
            if adapter.worker_id:
                adapter.ran(operation)
            cycle.finished.append(operation)
            shown.num_operations += 1
            shown.is_step |= operation.kind is Kind.OPTIM_STEP and not operation.is_failed
        adapter.settle()

    def convict(self, adapter: AdapterQueue, operation: Operation) -> None:
        """Its worker died whenever it ran, also alone: fail it."""
        logger.error("%s has ended its worker %d times while it ran alone", operation.name, DEATHS_ALONE_MAX)
        adapter.suspected = NOBODY
        if operation.is_final:
            self.give_up(adapter, _replay_differs(adapter, operation, "its worker died"))
        else:
            operation.fail(worker_died(operation))
            adapter.decided.append(operation)

    def give_up(self, adapter: AdapterQueue, error: ServiceError) -> None:
        """No copy of it can be made: not now if the error may pass, and otherwise never."""
        if error.retry_delay_s is not None:
            logger.warning("%s: %s", adapter.adapter_id, error.message)
            adapter.lose_copy()
            return
        logger.error("%s: %s", adapter.adapter_id, error.message)
        self.forget(adapter.adapter_id)
        adapter.give_up(service_error(error))
        self._saver.publishing.fail(adapter.adapter_id, error)

    def forget(self, adapter_id: str) -> None:
        """The adapter is gone, or will be rebuilt no more."""
        self._reinstalls.pop(adapter_id, None)

    def _take_in_replay(
        self, adapter: AdapterQueue, operation: Operation, result: ItemResult, *, is_last: bool
    ) -> None:
        operation.next_chunk = 0 if is_last else operation.next_chunk + 1
        if result.error is not None and result.error.code in MAY_PASS:
            self._reinstall(adapter, result)
        elif result.error is not None:
            self.give_up(adapter, _replay_differs(adapter, operation, str(result.error)))
        elif is_last:
            operation.drop_body()
            adapter.ran(operation)
            if operation.is_underived:
                assert result.state is not None
                operation.is_underived = False
                self._published(adapter.worker_id, operation.name)
                self._saver.publishing.derived(operation.name, result.state)

    async def _succeed(self, cycle: Running, adapter: AdapterQueue, operation: Operation, result: ItemResult) -> None:
        operation.is_running = False
        operation.is_deciding = True
        match operation.kind:
            case Kind.FORWARD | Kind.FORWARD_BACKWARD:
                fill_pass(operation, cycle.cycle_id)
            case Kind.OPTIM_STEP:
                fill_step(operation, result, cycle.cycle_id)
            case Kind.LOAD_STATE:
                try:
                    await self._saver.save_loaded(cycle.commit, adapter, result)
                    fill_load(operation, cycle.cycle_id)
                except ServiceError as error:
                    operation.fail(service_error(error), cycle_id=cycle.cycle_id)
                    adapter.lose_copy()  # it has loaded what nobody could load again
            case Kind.SAVE_STATE | Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                try:
                    await self._saver.save(cycle.commit, cycle.cycle_id, adapter, operation, result)
                except ServiceError as error:
                    operation.fail(service_error(error), cycle_id=cycle.cycle_id)
                if operation.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                    cycle.published.append((adapter.worker_id, operation))
            case _:
                raise AssertionError(f"{operation.kind} is not an operation on an adapter")

    def _reinstall(self, adapter: AdapterQueue, result: ItemResult) -> None:
        """The copy is not where we believe, or cannot be brought there now. Install it anew, unless that never helps.

        What can never be rebuilt fails at the same operation each time; answers that went astray, at any. What the
        worker says of it is in the log.
        """
        if not adapter.worker_id:
            return
        logger.warning("%s: %s", adapter.adapter_id, result.error)
        adapter.lose_copy()
        counts = self._reinstalls.setdefault(adapter.adapter_id, Counter())
        counts[result.op_id] += 1
        if counts[result.op_id] > REINSTALLS_MAX:
            error = ServiceError(Code.INTERNAL, "STATE_LOST", "the adapter's state cannot be rebuilt on any worker")
            self.give_up(adapter, error)


def _replay_differs(adapter: AdapterQueue, operation: Operation, reason: str) -> ServiceError:
    logger.error("replay of %s failed: %s", operation.name, reason)
    return ServiceError(
        Code.DATA_LOSS,
        "REPLAY_DIFFERS",
        f"{adapter.adapter_id} could not be rebuilt: {operation.name} had succeeded, but failed when run again",
    )
