"""Makes states that workers hand out durable, and the rows that point at them: checkpoints, samplers, snapshots.

The order is file first (synced and renamed), then row, for a user's state in the transaction of the cycle's commit; a
folder that is replaced is removed only after that. Only weights for sampling are committed first: until their file is
there, the log stands for them (`publishing`), and who needs the file waits for it. Knows nothing of workers or order.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.base.errors import Code, ServiceError, not_found, sampler_exists
from coordinator.checkpoints.publishing import Publishing, named, unnamed, version_of
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.operation import Operation
from coordinator.operations.outcomes import decided_row, save_path, save_request, service_error
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.database import ConflictError, StorageError, StoreBrokenError
from coordinator.storage.disk import Disk
from coordinator.storage.folders import Saved, StateFiles
from coordinator.storage.rows import CheckpointRow, SamplerRow, SnapshotRow
from coordinator.storage.store import Store
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract.messages import AdapterState, ItemResult, ModelInfo

logger = logging.getLogger(__name__)


class Saver:
    """The folders of a data directory and their rows."""

    def __init__(
        self,
        data_dir: Path,
        disk: Disk,
        store: Store,
        models: Callable[[str], ModelInfo],
        wall: Callable[[], float],
        new_sampler_index: Callable[[str, str, int | None], int],
        *,
        on_settled: Callable[[str], None],
        on_derived: Callable[[str], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`new_sampler_index`: see `SessionTable.take_sampler_index`; the others: see `Publishing`."""
        self.checkpoints = StateFiles(data_dir / "checkpoints", "checkpoint", disk)
        self.snapshots = StateFiles(data_dir / "snapshots", "snapshot", disk)
        self.samplers = StateFiles(data_dir / "samplers", "sampler", disk)
        self.publishing = Publishing(
            self.samplers, self.checkpoints, store, models, on_settled=on_settled, on_derived=on_derived, fatal=fatal
        )
        self._store = store
        self._models = models
        self._wall = wall
        self._new_sampler_index = new_sampler_index

    async def save(
        self, commit: CycleCommit, cycle_id: int, adapter: AdapterQueue, operation: Operation, result: ItemResult
    ) -> None:
        """Write a user's checkpoint, or publish weights, and decide its operation.

        Raises ServiceError if it cannot be.
        """
        request = save_request(operation)
        assert result.state is not None
        if not request.name:
            assert isinstance(request, checkpoints_pb2.SaveWeightsForSamplerRequest)
            await self._publish(commit, cycle_id, adapter, operation, request, result.state)
            return
        path = save_path(operation, request.name)
        state = result.state
        if not (isinstance(request, checkpoints_pb2.SaveStateRequest) and request.overwrite):
            self._check_free(commit, str(path))
        row = CheckpointRow(
            path=str(path),
            tenant_id=adapter.tenant_id,
            adapter_id=adapter.adapter_id,
            kind=path.kind,
            size_bytes=len(state.weights),
            seq=operation.seq,
            base_model=adapter.base_model,
            rank=adapter.spec.rank,
            fingerprint=state.fingerprint,
            user_metadata=json.dumps(dict(request.user_metadata)),
            created_at=self._wall(),
            expires_at=self._wall() + request.ttl_seconds if request.ttl_seconds else None,
            expires_service_s=self._store.service_time() + request.ttl_seconds if request.ttl_seconds else None,
        )
        if path.kind == names.SAMPLER and self.publishing.can_hold(adapter.base_model, state):
            self.publishing.hold(named(row, adapter.spec, state))
        else:
            saved = await self._write(self.checkpoints, adapter, state)
            row = replace(row, folder=saved.folder, sha256=saved.sha256, size_bytes=saved.size_bytes)
        self._make_free(commit, adapter.adapter_id, str(path))  # not before there is something in its place
        commit.checkpoints.append(row)
        outcome = operation.succeed(cycle_id)
        if isinstance(request, checkpoints_pb2.SaveStateRequest):
            outcome.save_state.path = str(path)
        else:
            outcome.save_weights_for_sampler.path = str(path)

    async def _publish(
        self,
        commit: CycleCommit,
        cycle_id: int,
        adapter: AdapterQueue,
        operation: Operation,
        request: checkpoints_pb2.SaveWeightsForSamplerRequest,
        state: AdapterState,
    ) -> None:
        """Let the weights be sampled from as soon as the cycle has committed; their file follows."""
        wanted = request.sampler_index if request.HasField("sampler_index") else None
        index = self._new_sampler_index(adapter.session_id, operation.name, wanted)
        row = SamplerRow(
            sampler_id=names.sampler_id(adapter.session_id, index),
            tenant_id=adapter.tenant_id,
            session_id=adapter.session_id,
            base_model=adapter.base_model,
            adapter_id=adapter.adapter_id,
            version=operation.name,
            created_at=self._wall(),
            is_inflight=request.is_inflight,
        )
        if self.publishing.can_hold(adapter.base_model, state):
            self.publishing.hold(unnamed(row, adapter.spec, state))
        else:
            saved = await self._write(self.samplers, adapter, state)
            row = replace(row, folder=saved.folder, sha256=saved.sha256)
        commit.samplers.append(row)
        operation.succeed(cycle_id).save_weights_for_sampler.sampler_id = row.sampler_id

    async def write_snapshot(self, adapter: AdapterQueue, state: AdapterState, window_error: bytes) -> str | None:
        """Make a snapshot durable and cut the log there, once no version needs it any more.

        Returns the folder that it replaces, empty if none; None if the adapter was deleted meanwhile. Raises OSError
        and StorageError.
        """
        await self.publishing.until_written(adapter.adapter_id, state.applied_seq)
        model = self._models(adapter.base_model)
        saved = await asyncio.to_thread(self.snapshots.write, adapter.spec, model, state)
        row = SnapshotRow(
            adapter_id=adapter.adapter_id,
            seq=state.applied_seq,
            folder=saved.folder,
            sha256=saved.sha256,
            window_error=window_error,
        )
        try:
            replaced = await self._store.snapshots.commit(row)
        except StoreBrokenError:
            raise  # the row may be durable: the next start sees what is an orphan
        except StorageError:
            self.snapshots.remove(saved.folder)
            raise
        if replaced is None:
            self.snapshots.remove(saved.folder)
        return replaced

    async def write_start(self, adapter: AdapterQueue, state: AdapterState) -> SnapshotRow:
        """Write what a new adapter starts from, when that is not its seed. Raises ServiceError if it cannot be."""
        saved = await self._write(self.snapshots, adapter, state)
        return SnapshotRow(adapter_id=adapter.adapter_id, seq=0, folder=saved.folder, sha256=saved.sha256)

    async def save_loaded(self, commit: CycleCommit, adapter: AdapterQueue, result: ItemResult) -> None:
        """Make what was just loaded the adapter's snapshot, in the same commit. Raises ServiceError if it cannot be."""
        assert result.state is not None
        old = self._store.snapshots.get(adapter.adapter_id)
        start = await self.write_start(adapter, result.state)
        commit.snapshots.append(replace(start, seq=result.state.applied_seq))
        if old is not None:
            commit.replaced_snapshots.append((adapter.adapter_id, old.folder))

    async def persist(self, commit: CycleCommit, finished: Sequence[Operation]) -> frozenset[str]:
        """`Store.persist`, with the outcomes of `finished`.

        A commit is everybody's: a save whose sampler another row has got to first fails alone. Raises StorageError.
        """
        while True:
            commit.finished = [decided_row(operation) for operation in finished]
            try:
                return await self._store.persist(commit)
            except ConflictError:
                if not self._refuse_taken(commit, finished):
                    raise

    def committed(self, commit: CycleCommit, lost: Collection[str]) -> None:
        """The commit is durable, but for the adapters `lost`: what it overwrites goes, what it publishes is written."""
        for row in commit.samplers:
            if row.adapter_id in lost:
                self._discard(row)
            else:
                self.publishing.committed(row.version)
        for checkpoint in commit.checkpoints:
            if checkpoint.adapter_id not in lost:
                self.publishing.committed(version_of(checkpoint))
            elif checkpoint.folder:
                self.checkpoints.remove(checkpoint.folder)
            else:
                self.publishing.drop(version_of(checkpoint))
        for adapter_id, overwritten in commit.replaced_checkpoints:
            if adapter_id not in lost:
                self.checkpoints.remove(overwritten)
        for adapter_id, covered in commit.replaced_snapshots:
            if adapter_id not in lost:
                self.snapshots.remove(covered)

    async def read_checkpoint(self, row: CheckpointRow) -> AdapterState:
        """What a checkpoint holds, from its file or before that is there.

        Raises ServiceError if it cannot be had, or not now, or was deleted since its row was read.
        """
        if not row.folder:
            if (state := self.publishing.held(version_of(row))) is not None:
                return state
            row = self._again(row)
        return await asyncio.to_thread(self.checkpoints.read, row.folder, row.sha256)

    async def with_file(self, row: CheckpointRow) -> CheckpointRow:
        """A checkpoint's row as it is when its file is there. Raises ServiceError as `read_checkpoint`, StorageError if
        its file cannot be written."""
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
            await asyncio.to_thread(self.checkpoints.remove, folder)

    async def remove_expired(self) -> None:
        """Delete checkpoints past their time to live. Raises StorageError."""
        for row in self._store.checkpoints.expired():
            await self.delete_checkpoint(row)

    def remove_orphans(self) -> None:
        """Delete folders that a crash left without a row."""
        self.checkpoints.remove_orphans(self._store.checkpoints.folders())
        self.snapshots.remove_orphans(self._store.snapshots.folders())
        self.samplers.remove_orphans(self._store.samplers.folders())

    async def remove_samplers(self, session_id: str) -> None:
        """A session has ended, and with it the weights of its unnamed samplers."""
        self.publishing.end_session(session_id)
        for folder in self._store.samplers.folders_of_session(session_id):
            await asyncio.to_thread(self.samplers.remove, folder)

    def _refuse_taken(self, commit: CycleCommit, finished: Iterable[Operation]) -> bool:
        """Fail the saves whose samplers cannot be stored; whether there are any."""
        taken = {row.version: row for row in commit.samplers if self._store.samplers.get(row.sampler_id) is not None}
        for operation in finished:
            if (row := taken.get(operation.name)) is not None:
                logger.error("%s: %s was there before", operation.name, row.sampler_id)
                assert operation.outcome is not None
                cycle_id = operation.outcome.cycle_id
                operation.undecide()
                operation.fail(service_error(sampler_exists(row.sampler_id)), cycle_id=cycle_id)
                self._discard(row)
        commit.samplers = [row for row in commit.samplers if row.version not in taken]
        return bool(taken)

    def _discard(self, row: SamplerRow) -> None:
        """An unnamed sampler's row was not stored."""
        self.publishing.drop(row.version)
        if row.folder:
            self.samplers.remove(row.folder)

    def _again(self, row: CheckpointRow) -> CheckpointRow:
        """A checkpoint's row as it is now, with its folder. Raises ServiceError if it was deleted."""
        if (found := self._store.checkpoints.of_save(row.path, row.seq)) is None:
            raise not_found("checkpoint", row.path)
        assert found.folder, f"{row.path} is neither in a file nor in memory"
        return found

    def _check_free(self, commit: CycleCommit, path: str) -> None:
        """Raises ServiceError if something has this path."""
        is_taken = any(row.path == path for row in commit.checkpoints)
        if is_taken or self._store.checkpoints.by_path(path) is not None:
            raise ServiceError(
                Code.ALREADY_EXISTS,
                "CHECKPOINT_EXISTS",
                f"{path} exists already: choose another name, delete it first, or set overwrite",
            )

    def _make_free(self, commit: CycleCommit, adapter_id: str, path: str) -> None:
        """Let what has this path go when the commit adds another."""
        replaced = [row for row in commit.checkpoints if row.path == path]
        commit.checkpoints = [row for row in commit.checkpoints if row.path != path]
        if (stored := self._store.checkpoints.by_path(path)) is not None:
            replaced.append(stored)
        for row in replaced:
            assert row.folder, "only states are overwritten, and they have their file first"
            commit.replaced_checkpoints.append((adapter_id, row.folder))

    async def _write(self, files: StateFiles, adapter: AdapterQueue, state: AdapterState) -> Saved:
        try:
            return await asyncio.to_thread(files.write, adapter.spec, self._models(adapter.base_model), state)
        except OSError as error:
            logger.exception("cannot write the state of %s", adapter.adapter_id)
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "DISK",
                f"the server cannot write the state to disk ({error.strerror}): nothing was saved; try again later",
            ) from None
