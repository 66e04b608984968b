"""Deletes an adapter's training state, while cycles, snapshots and published weights may still need it.

The order: accept no more operations, leave the ready set, wait until no cycle has the adapter, write its published
weights that have no file (its log is deleted with it), then delete in one transaction with the outcomes of its
unfinished operations. Main invariant: a deletion that fails leaves the adapter as it was. Does not depend on how a
cycle runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from coordinator.base.time import Time
from coordinator.checkpoints.states import States
from coordinator.cycle.loop import CycleLoop
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.epoch import Registers
from coordinator.operations.operation import Operation, decided_row
from coordinator.operations.windows import window_of
from coordinator.scheduling.quarantine import Quarantine
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb


class Deletions:
    """Deletions of adapters."""

    def __init__(
        self,
        store: Store,
        registers: Registers,
        states: States,
        fleet: Fleet,
        loops: Mapping[str, CycleLoop],
        quarantines: Mapping[str, Quarantine],
        time: Time,
    ) -> None:
        self._store = store
        self._registry = registers.registry
        self._in_flight = registers.in_flight
        self._entries = registers.entries
        self._states = states
        self._fleet = fleet
        self._loops = loops
        self._quarantines = quarantines
        self._time = time

    async def delete(self, log: AdapterLog, error: ops_pb.OperationError) -> None:
        """Delete the adapter; its unfinished operations fail with `error`.

        Raises StorageError, and the adapter stays then; ServiceError if it can be deleted only later.
        """
        publishing = self._states.publishing
        publishing.check_rematerialized(log.adapter_id)
        log.begin_deletion()
        self._registry.remove(log)
        await self._leave_cycles(log)
        unfinished = log.unfinished()
        for operation in unfinished:
            if not operation.is_final:
                operation.fail(error, log.copy.usage(operation))
        try:
            await publishing.until_written(log.adapter_id)
            day = self._store.database.day()
            rows = [decided_row(each, day, self._entries.finished(each)) for each in unfinished]
            folder = await self._store.adapters.delete(log.adapter_id, rows, self._time.wall())
        except StorageError:
            self._put_back(log, unfinished)
            raise
        if log.home:
            self._fleet.drop_copy(log.home, log.spec)
            self._registry.group_of(log).changed.notify()  # another adapter may wait for its room
        for operation in unfinished:
            if operation.is_durable:  # if its append failed meanwhile, its caller got that error
                self._in_flight.finish(operation, day)
                self._entries.committed(operation)
                operation.retire()
        if folder is not None:
            self._states.remove_soon(self._states.folders.snapshots, folder)

    async def _leave_cycles(self, log: AdapterLog) -> None:
        """Return when no cycle has the adapter any more."""
        if (loop := self._loops.get(log.base_model)) is None:
            return
        quarantine = self._quarantines[log.base_model]
        quarantine.release(log.adapter_id)
        await loop.until_idle(log.adapter_id)
        quarantine.release(log.adapter_id)  # its worker may have been lost meanwhile
        loop.forget(log.adapter_id)

    def _put_back(self, log: AdapterLog, unfinished: list[Operation]) -> None:
        """Restore an adapter whose deletion failed.

        Meanwhile a cycle or a snapshot may have advanced without updating the adapter log.
        """
        if (row := self._store.snapshots.get(log.adapter_id)) is not None:
            log.cover(row.seq, window_of(row.window), math.inf)
        log.lose_copy()  # its worker may have been lost, too
        log.cancel_deletion(unfinished)
        self._registry.add(log)
        self._registry.group_of(log).mark_dirty(log)
