"""Expires idle sessions, operations behind a seq that never arrived, old results and checkpoints; deletes rows that
nothing needs any more; merges old sums of usage.

Does not depend on cycles. Main invariant: every expiry is decided in service time, in which downtime and steps of the
wall clock do not count.
"""

from __future__ import annotations

import logging
from itertools import count

from coordinator.base.config import CoordinatorConfig
from coordinator.base.time import Time
from coordinator.checkpoints.states import States
from coordinator.operations.adapter_log import AdapterLog, seq_lost
from coordinator.operations.epoch import Registers
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store
from coordinator.storage.usage import ADAPTER_ROWS_MAX, DAYS_KEPT
from coordinator.tenants.accounts import Accounts

logger = logging.getLogger(__name__)

SLICES_MAX = 25
"""Slices of rows that one sweep deletes from a table, so that its transactions leave room for those of cycles."""


class Housekeeping:
    """Expiry of everything that a coordinator keeps."""

    def __init__(
        self,
        config: CoordinatorConfig,
        time: Time,
        store: Store,
        registers: Registers,
        states: States,
        samples: SampleScheduler,
        accounts: Accounts,
    ) -> None:
        self._config = config
        self._time = time
        self._store = store
        self._registry = registers.registry
        self._sessions = registers.sessions
        self._admission = registers.admission
        self._finished_samples = registers.finished_samples
        self._states = states
        self._samples = samples
        self._accounts = accounts

    async def run(self) -> None:
        """Expire everything that is due, every `sweep_interval_s`."""
        while True:
            await self._time.sleep(self._config.sweep_interval_s)
            for log in self._registry.logs.values():
                self._expire_gap(log)
            try:
                await self._store.database.regain_room()
                timeout_s = self._config.session_timeout_s
                for session in self._sessions.expired(timeout_s, max(timeout_s, self._config.fetched_retention_s)):
                    if self._accounts.is_held(session.tenant_id):
                        continue  # its heartbeats are refused
                    logger.info("session %s expired", session.session_id)
                    await self.end_session(session.session_id)
                await self._states.remove_expired()
                now = self._store.service_time()
                await self._store.operations.drop_results(
                    fetched_before=now - self._config.fetched_retention_s,
                    finished_before=now - self._config.result_retention_s,
                )
                await self._store.records.drop_unused(now - self._config.record_retention_s)
                await self._store.usage.merge(DAYS_KEPT, ADAPTER_ROWS_MAX)
                await self._store.history.drop(now - self._config.history_days * 86400, self._config.history_rows)
                await self._delete_leftovers(now - self._config.ended_retention_s)
            except StorageError as error:
                logger.warning("the database refuses writes: %s; retrying later", error)

    async def end_session(self, session_id: str) -> None:
        """End a session with its samplers, queued samples and uploads. Its adapters stay.

        Raises StorageError; the session stays live then.
        """
        with self._sessions.ending(session_id):
            await self._store.sessions.end(session_id, self._time.wall())
        sampler_ids = frozenset(self._store.samplers.ids_of_session(session_id))
        for sampler_id in sampler_ids:
            self._admission.end_sampler(sampler_id)
        self._samples.end_samplers(sampler_ids)
        self._finished_samples.forget(sampler_ids)
        await self._states.end_session(session_id)
        await self._store.records.drop_session(session_id)

    async def _delete_leftovers(self, before: float) -> None:
        """Delete rows that nothing has needed since `before`: of samplers, then adapters, then sessions.

        Each sweep examines a slice of each table, and goes on while it finds rows to delete. Raises StorageError.
        """
        for table in (self._store.samplers, self._store.adapters, self._store.sessions):
            for number in count(1):
                found = await table.leftovers.delete_some(before)
                if not found.deleted or found.is_last or number == SLICES_MAX:
                    break

    def _expire_gap(self, log: AdapterLog) -> None:
        """Fail the operations behind a seq that does not arrive; once that is stored, record the missing seqs, too.

        In this order, because a crash may come in between: what waited behind a lost seq never runs.
        """
        if log.is_deleted or self._accounts.is_held(log.tenant_id) or self._store.database.lack_of_room():
            log.note_gap(None)  # its missing operation would be refused now: the wait begins again afterwards
            return
        if lost := log.lost_seqs():
            logger.info("%s: %d operations from %d on did not arrive", log.adapter_id, len(lost), lost[0])
            self._admission.record_lost(log, lost)
        missing, now = log.missing_seq(), self._time.monotonic()
        if missing is None or log.gap_since is None:
            log.note_gap(now if missing is not None else None)
            return
        if now - log.gap_since > self._config.gap_timeout_s:
            log.fail_behind(missing, seq_lost(log.adapter_id, missing))
            log.note_gap(None)
            self._registry.group_of(log).mark_dirty(log)
