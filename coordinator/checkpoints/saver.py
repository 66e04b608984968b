"""Makes states from workers durable, and the rows that name them: checkpoints, samplers, snapshots.

Main invariant: a folder is durable (synced and renamed) before a row names it, and a replaced folder is removed only
after the row of its replacement is durable. A user's row is stored in the transaction of the cycle's commit. Weights
for sampling are the exception: their row is committed first, and until their file exists the log can rematerialize them
(`publishing`). Does not depend on workers, or on the order of operations.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from coordinator.base.errors import Code, ServiceError, not_found, sampler_exists
from coordinator.base.failure import Failure
from coordinator.base.time import Time
from coordinator.checkpoints.folders import StateFolders
from coordinator.checkpoints.publishing import Publishing, named, unnamed, version_of
from coordinator.checkpoints.staging import StagedStates
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Operation, Usage
from coordinator.operations.outcomes import decided_row, save_path, save_request, service_error
from coordinator.operations.sessions import SessionTable
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.database import ConflictError, StorageError, StoreBrokenError
from coordinator.storage.folders import Saved, StateFiles
from coordinator.storage.rows import CheckpointRow, SamplerRow, SnapshotRow
from coordinator.storage.store import Store
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract.messages import AdapterState, ItemResult

logger = logging.getLogger(__name__)


class Saver:
    """The state folders of a data directory and their rows."""

    def __init__(
        self,
        folders: StateFolders,
        store: Store,
        fleet: Fleet,
        sessions: SessionTable,
        time: Time,
        failure: Failure,
    ) -> None:
        self.folders = folders
        self.publishing = Publishing(folders, store, fleet, failure)
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._time = time

    # ---- saves and loads of a cycle

    async def save(
        self,
        staged: StagedStates,
        cycle_id: int,
        log: AdapterLog,
        operation: Operation,
        usage: Usage,
        result: ItemResult,
    ) -> None:
        """Write a user's checkpoint, or publish weights, and decide the operation. Raises ServiceError."""
        request, state = save_request(operation), result.state
        assert state is not None
        if not request.name:
            assert isinstance(request, checkpoints_pb2.SaveWeightsForSamplerRequest)
            sampler = await self._publish(log, operation, request, state)
            staged.add_sampler(sampler)
            operation.succeed(cycle_id, usage).save_weights_for_sampler.sampler_id = sampler.sampler_id
            return
        path = save_path(operation, request.name)
        if not (isinstance(request, checkpoints_pb2.SaveStateRequest) and request.overwrite):
            self._check_free(staged, str(path))
        row = self._checkpoint_row(path, log, operation, state)
        if path.kind == names.SAMPLER and self.publishing.can_hold(log.base_model, state):
            self.publishing.hold(named(row, log.spec, state))
        else:
            saved = await self._write(self.folders.checkpoints, log, state)
            row = replace(row, folder=saved.folder, sha256=saved.sha256, size_bytes=saved.size_bytes)
        staged.add_checkpoint(row, self._store.checkpoints.by_path(str(path)))  # only now is there a replacement
        outcome = operation.succeed(cycle_id, usage)
        if isinstance(request, checkpoints_pb2.SaveStateRequest):
            outcome.save_state.path = str(path)
        else:
            outcome.save_weights_for_sampler.path = str(path)

    def _checkpoint_row(
        self, path: names.CheckpointPath, log: AdapterLog, operation: Operation, state: AdapterState
    ) -> CheckpointRow:
        request, now = save_request(operation), self._time.wall()
        ttl_s = request.ttl_seconds
        return CheckpointRow(
            path=str(path),
            tenant_id=log.tenant_id,
            adapter_id=log.adapter_id,
            kind=path.kind,
            size_bytes=len(state.weights),
            seq=operation.seq,
            base_model=log.base_model,
            rank=log.spec.rank,
            fingerprint=state.fingerprint,
            user_metadata=json.dumps(dict(request.user_metadata)),
            created_at=now,
            expires_at=now + ttl_s if ttl_s else None,
            expires_service_s=self._store.service_time() + ttl_s if ttl_s else None,
        )

    async def _publish(
        self,
        log: AdapterLog,
        operation: Operation,
        request: checkpoints_pb2.SaveWeightsForSamplerRequest,
        state: AdapterState,
    ) -> SamplerRow:
        """Return the row of an unnamed sampler: it can be sampled from once the cycle commits; its file may follow."""
        wanted = request.sampler_index if request.HasField("sampler_index") else None
        index = self._sessions.take_sampler_index(log.session_id, operation.name, wanted)
        row = SamplerRow(
            sampler_id=names.sampler_id(log.session_id, index),
            tenant_id=log.tenant_id,
            session_id=log.session_id,
            base_model=log.base_model,
            adapter_id=log.adapter_id,
            version=operation.name,
            created_at=self._time.wall(),
            is_inflight=request.is_inflight,
        )
        if self.publishing.can_hold(log.base_model, state):
            self.publishing.hold(unnamed(row, log.spec, state))
            return row
        saved = await self._write(self.folders.samplers, log, state)
        return replace(row, folder=saved.folder, sha256=saved.sha256)

    async def save_loaded(self, staged: StagedStates, log: AdapterLog, result: ItemResult) -> None:
        """Stage a loaded state as its adapter's snapshot, for the same commit. Raises ServiceError."""
        assert result.state is not None
        replaced = self._store.snapshots.get(log.adapter_id)
        start = await self.write_start(log, result.state)
        staged.add_snapshot(replace(start, seq=result.state.applied_seq), replaced)

    async def persist(self, commit: CycleCommit, staged: StagedStates, finished: Sequence[Operation]) -> frozenset[str]:
        """Store a commit with staged states and outcomes; return the adapters that it had to leave out.

        A save whose sampler id is taken by another row is failed, and the outcomes of all others are committed. Raises
        StorageError.
        """
        while True:
            whole = replace(
                commit,
                finished=[decided_row(operation) for operation in finished],
                checkpoints=staged.checkpoints,
                samplers=staged.samplers,
                snapshots=staged.snapshots,
                replaced_checkpoints=staged.replaced_checkpoints,
                replaced_snapshots=staged.replaced_snapshots,
            )
            try:
                return await self._store.persist(whole)
            except ConflictError:
                if not self._refuse_taken(staged, finished):
                    raise

    def committed(self, staged: StagedStates, lost: Collection[str]) -> None:
        """Remove the folders that a durable commit replaced, and write the weights that it published.

        Nothing of the adapters `lost` was stored: drop their weights and new folders.
        """
        for row in staged.samplers:
            if row.adapter_id in lost:
                self._discard(row)
            else:
                self.publishing.committed(row.version)
        for checkpoint in staged.checkpoints:
            if checkpoint.adapter_id not in lost:
                self.publishing.committed(version_of(checkpoint))
            elif checkpoint.folder:
                self.folders.checkpoints.remove(checkpoint.folder)
            else:
                self.publishing.drop(version_of(checkpoint))
        for adapter_id, folder in staged.replaced_checkpoints:
            if adapter_id not in lost:
                self.folders.checkpoints.remove(folder)
        for adapter_id, folder in staged.replaced_snapshots:
            if adapter_id not in lost:
                self.folders.snapshots.remove(folder)

    # ---- snapshots

    async def write_snapshot(self, log: AdapterLog, state: AdapterState, window_error: bytes) -> str | None:
        """Make a snapshot durable and cut the log there, once no published version needs the log.

        Returns the folder that it replaces, empty if none; None if the adapter was deleted meanwhile. Raises OSError
        and StorageError.
        """
        await self.publishing.until_written(log.adapter_id, state.applied_seq)
        model = self._fleet.models[log.base_model]
        saved = await asyncio.to_thread(self.folders.snapshots.write, log.spec, model, state)
        row = SnapshotRow(
            adapter_id=log.adapter_id,
            seq=state.applied_seq,
            folder=saved.folder,
            sha256=saved.sha256,
            window_error=window_error,
        )
        try:
            replaced = await self._store.snapshots.commit(row)
        except StoreBrokenError:
            raise  # the row may be durable: the next start removes the folder if it is an orphan
        except StorageError:
            self.folders.snapshots.remove(saved.folder)
            raise
        if replaced is None:
            self.folders.snapshots.remove(saved.folder)
        return replaced

    async def write_start(self, log: AdapterLog, state: AdapterState) -> SnapshotRow:
        """Write the state that a new adapter starts from, if that is not its seed. Raises ServiceError."""
        saved = await self._write(self.folders.snapshots, log, state)
        return SnapshotRow(adapter_id=log.adapter_id, seq=0, folder=saved.folder, sha256=saved.sha256)

    # ---- checkpoints

    async def read_checkpoint(self, row: CheckpointRow) -> AdapterState:
        """Return a checkpoint's state, from memory if its file is not written yet.

        Raises ServiceError if the state is damaged, cannot be read now, or was deleted since its row was read.
        """
        if not row.folder:
            if (state := self.publishing.held(version_of(row))) is not None:
                return state
            row = self._again(row)
        return await asyncio.to_thread(self.folders.checkpoints.read, row.folder, row.sha256)

    async def with_file(self, row: CheckpointRow) -> CheckpointRow:
        """Return a checkpoint's row once its file exists.

        Raises ServiceError as `read_checkpoint`, and StorageError if its file cannot be written.
        """
        if row.folder:
            return row
        await self.publishing.until_file(version_of(row))
        return self._again(row)

    async def delete_checkpoint(self, row: CheckpointRow) -> None:
        """Delete a checkpoint: the row first, so that a crash leaves an orphaned folder and not a broken checkpoint.

        Raises StorageError.
        """
        folder = await self._store.checkpoints.delete(row.path, row.seq)
        self.publishing.deleted(version_of(row))
        if folder:
            await asyncio.to_thread(self.folders.checkpoints.remove, folder)

    async def remove_expired(self) -> None:
        """Delete checkpoints past their time to live. Raises StorageError."""
        for row in self._store.checkpoints.expired():
            await self.delete_checkpoint(row)

    async def remove_samplers(self, session_id: str) -> None:
        """Remove the weights of the unnamed samplers of a session that has ended."""
        self.publishing.end_session(session_id)
        for folder in self._store.samplers.folders_of_session(session_id):
            await asyncio.to_thread(self.folders.samplers.remove, folder)

    def remove_orphans(self) -> None:
        """Delete folders that a crash left without a row."""
        self.folders.checkpoints.remove_orphans(self._store.checkpoints.folders())
        self.folders.snapshots.remove_orphans(self._store.snapshots.folders())
        self.folders.samplers.remove_orphans(self._store.samplers.folders())

    def _refuse_taken(self, staged: StagedStates, finished: Iterable[Operation]) -> bool:
        """Fail the saves whose sampler ids are taken; return whether there are any."""
        taken = {row.version: row for row in staged.samplers if self._store.samplers.get(row.sampler_id) is not None}
        for operation in finished:
            if (row := taken.get(operation.name)) is not None:
                logger.error("%s: the sampler %s exists already", operation.name, row.sampler_id)
                assert operation.outcome is not None
                outcome = operation.outcome
                operation.undecide()
                usage = Usage(outcome.num_tokens, outcome.engine_seconds)
                operation.fail(service_error(sampler_exists(row.sampler_id)), usage, cycle_id=outcome.cycle_id)
                self._discard(row)
        staged.drop_samplers(taken)
        return bool(taken)

    def _discard(self, row: SamplerRow) -> None:
        """Drop the weights of an unnamed sampler whose row was not stored."""
        self.publishing.drop(row.version)
        if row.folder:
            self.folders.samplers.remove(row.folder)

    def _again(self, row: CheckpointRow) -> CheckpointRow:
        """Return a checkpoint's row as it is now, with its folder. Raises ServiceError if it was deleted."""
        if (found := self._store.checkpoints.of_save(row.path, row.seq)) is None:
            raise not_found("checkpoint", row.path)
        assert found.folder, f"{row.path} is neither in a file nor in memory"
        return found

    def _check_free(self, staged: StagedStates, path: str) -> None:
        """Raise ServiceError if a checkpoint has this path."""
        if staged.has_path(path) or self._store.checkpoints.by_path(path) is not None:
            raise ServiceError(
                Code.ALREADY_EXISTS,
                "CHECKPOINT_EXISTS",
                f"{path} exists already: choose another name, delete it first, or set overwrite",
            )

    async def _write(self, files: StateFiles, log: AdapterLog, state: AdapterState) -> Saved:
        try:
            return await asyncio.to_thread(files.write, log.spec, self._fleet.models[log.base_model], state)
        except OSError as error:
            logger.exception("cannot write the state of %s", log.adapter_id)
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "DISK",
                f"the server cannot write the state to disk ({error.strerror}): nothing was saved; try again later",
            ) from None
