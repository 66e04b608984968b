"""Writes, reads and deletes the states of adapters: checkpoints, snapshots and published weights.

Main invariant: a folder is durable (synced and renamed) before a row names it. Depends on files, rows and the facts of
base models; not on the saves of a cycle (`saver`), on workers, or on the order of operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from coordinator.base.errors import Code, Failure, ServiceError, not_found
from coordinator.checkpoints.published_weights import Publishing, version_of
from coordinator.checkpoints.uploads import Uploads
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import Holdings
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.windows import Window, window_bytes
from coordinator.storage.folders import Saved, StateFiles, StateFolders
from coordinator.storage.rows import CheckpointRow, SnapshotRow
from coordinator.storage.sqlite import StorageError, StoreBrokenError
from coordinator.storage.store import Store
from workers.contract.logs import about
from workers.contract.messages import AdapterState

logger = logging.getLogger(__name__)

SNAPSHOT_WRITERS = 3
"""Snapshots of all base models that are written at a time: cycles, saves and published weights need asyncio's threads,
of which there are as few as five."""


class States:
    """The state folders of a data directory, and what has none yet: published weights, and uploads."""

    def __init__(
        self,
        folders: StateFolders,
        store: Store,
        fleet: Fleet,
        failure: Failure,
        holdings: Holdings,
        in_flight: InFlightTable,
    ) -> None:
        self.folders = folders
        self.publishing = Publishing(folders, store, fleet, failure, holdings)
        self.uploads = Uploads(folders.snapshots, holdings)
        self.holdings = holdings
        self._store = store
        self._fleet = fleet
        self._in_flight = in_flight
        self._snapshot_writers = asyncio.Semaphore(SNAPSHOT_WRITERS)
        self._removing: set[asyncio.Task[None]] = set()
        self._remover = asyncio.Semaphore()
        """One folder at a time: cycles, saves and loads need asyncio's threads."""

    # ---- writing

    async def write(
        self, files: StateFiles, log: AdapterLog, state: AdapterState, recipients: Sequence[str] = ()
    ) -> Saved:
        """Write a state below one of the roots, encrypted if it has recipients. Raises ServiceError."""
        try:
            return await asyncio.to_thread(files.write, log.spec, self._fleet.models[log.base_model], state, recipients)
        except OSError as error:
            logger.exception("cannot write the state of %s", log.adapter_id, extra=about(adapter=log.adapter_id))
            raise cannot_write("the state", error) from None

    async def write_snapshot(self, log: AdapterLog, state: AdapterState, window: Window) -> str | None:
        """Make a snapshot durable and cut the log there, once no published version needs the log.

        Returns the folder that it replaces, empty if none; None if the adapter was deleted meanwhile. Raises OSError
        and StorageError.
        """
        await self.publishing.until_written(log.adapter_id, state.applied_seq)
        model = self._fleet.models[log.base_model]
        async with self._snapshot_writers:
            saved = await asyncio.to_thread(self.folders.snapshots.write, log.spec, model, state)
        row = SnapshotRow(
            adapter_id=log.adapter_id,
            seq=state.applied_seq,
            folder=saved.folder,
            sha256=saved.sha256,
            window=window_bytes(window),
        )
        try:
            replaced = await self._store.snapshots.commit(row)
        except StoreBrokenError:
            raise  # the row may be durable: the next start moves the folder aside if it is an orphan
        except StorageError:
            self.remove_soon(self.folders.snapshots, saved.folder)
            raise
        if replaced is None:
            self.remove_soon(self.folders.snapshots, saved.folder)
        return replaced

    async def write_start(self, log: AdapterLog, state: AdapterState) -> SnapshotRow:
        """Write the state that a new adapter starts from, if that is not its seed. Raises ServiceError."""
        saved = await self.write(self.folders.snapshots, log, state)
        return SnapshotRow(adapter_id=log.adapter_id, seq=0, folder=saved.folder, sha256=saved.sha256)

    # ---- removing

    def remove_soon(self, files: StateFiles, folder: str) -> None:
        """Begin to remove a folder that no row names any more, on a thread: a file system takes 0.8 s for a GiB."""
        removing = asyncio.get_running_loop().create_task(self._remove(files, folder))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def until_removed(self) -> None:
        """Wait until the folders of all calls of `remove_soon` are removed."""
        while self._removing:
            await asyncio.gather(*self._removing)

    async def _remove(self, files: StateFiles, folder: str) -> None:
        async with self._remover:
            await asyncio.to_thread(files.remove, folder)

    # ---- checkpoints

    async def read_checkpoint(self, row: CheckpointRow) -> AdapterState:
        """Return a checkpoint's state, from memory if its file is not written yet.

        Raises ServiceError if the state is damaged or encrypted, cannot be read now, or was deleted since its row was
        read.
        """
        if not row.folder:
            if (state := self.publishing.held(version_of(row))) is not None:
                return state
            row = self._again(row)
        try:
            return await asyncio.to_thread(self.folders.checkpoints.read, row.folder, row.sha256)
        except ServiceError as error:
            if error.code is Code.DATA_LOSS:
                self._again(row)  # rows are deleted before folders: a folder that is gone was not lost
            raise

    async def with_file(self, row: CheckpointRow) -> CheckpointRow:
        """Return a checkpoint's row once its file exists.

        Raises ServiceError as `read_checkpoint`, and StorageError if its file cannot be written.
        """
        if row.folder:
            return row
        await self.publishing.until_file(version_of(row))
        return self._again(row)

    async def delete_checkpoint(self, row: CheckpointRow, *, is_expiry: bool = False) -> None:
        """Delete a checkpoint: the row first, so that a crash leaves an orphaned folder and not a broken checkpoint.

        `is_expiry`: only if its time to live has passed. Raises StorageError.
        """
        deleted = await self._store.checkpoints.delete(row.path, row.seq, is_expiry=is_expiry)
        if deleted is not None:
            self.publishing.deleted(version_of(row))
            self.holdings.remove(deleted)
            self._in_flight.deleted(deleted)
            if deleted.folder:
                await asyncio.to_thread(self.folders.checkpoints.remove, deleted.folder)

    async def remove_expired(self) -> None:
        """Delete checkpoints past their time to live, and old orphans. Raises StorageError."""
        for row in self._store.checkpoints.expired():
            await self.delete_checkpoint(row, is_expiry=True)
        try:
            await asyncio.to_thread(self.folders.quarantined.remove_expired, self._store.service_time())
        except OSError as error:
            logger.warning("the quarantine cannot be emptied: %s; retrying later", error)

    async def end_session(self, session_id: str) -> None:
        """Remove the weights of the unnamed samplers of a session that has ended, and its uploads."""
        await self.uploads.end_session(session_id)
        self.publishing.end_session(session_id)
        for folder in self._store.samplers.folders_of_session(session_id):
            await asyncio.to_thread(self.folders.samplers.remove, folder)

    def set_orphans_aside(self) -> None:
        """Move folders that a crash left without a row into quarantine. Raises OSError."""
        quarantine, service_s = self.folders.quarantined, self._store.service_time()
        for files, rows in (
            (self.folders.checkpoints, self._store.checkpoints),
            (self.folders.snapshots, self._store.snapshots),
            (self.folders.samplers, self._store.samplers),
        ):
            files.set_orphans_aside(rows.folders(), quarantine, service_s)

    def _again(self, row: CheckpointRow) -> CheckpointRow:
        """Return a checkpoint's row as it is now, with its folder. Raises ServiceError if it was deleted."""
        if (found := self._store.checkpoints.of_save(row.path, row.seq)) is None:
            raise not_found("checkpoint", row.path)
        assert found.folder, f"{row.path} is neither in a file nor in memory"
        return found


def cannot_write(what: str, error: OSError) -> ServiceError:
    """Return the refusal of a call whose bytes the disk does not take."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "DISK",
        f"the server cannot write {what} to disk ({error.strerror}): nothing was saved; try again later",
    )
