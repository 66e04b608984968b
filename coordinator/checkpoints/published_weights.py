"""Published weights: versions that may be sampled from before their file exists.

A version is committed with its cycle, without a folder: as the row of an unnamed sampler, or of a checkpoint for
sampling. Its weights are held here, sent to any worker that lacks them, and written while later cycles run; then its
row gets the folder. A crash before that loses the memory, not the version: the next epoch replays the log up to the
save, which rematerializes the version. So the log is not cut at or behind a save whose version has no file: every cut
waits for `until_written`, and a trigger of the schema refuses one that does not.

Depends on files and rows; not on adapter logs or workers. Main invariant: a version whose row is committed is in a
file, held here, or in the log, until it is deleted or its session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from dataclasses import dataclass, field

from coordinator.base.errors import Code, Failure, ServiceError, unavailable, unmet
from coordinator.base.time import Signal
from coordinator.fleet.fleet import Fleet
from coordinator.observe.metrics import PUBLISH_SECONDS
from coordinator.operations.holdings import Holdings
from coordinator.storage.folders import Saved, StateFolders
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.sqlite import StorageError, StoreBrokenError
from coordinator.storage.store import Store
from tinkerpool import names
from workers.contract.logs import about
from workers.contract.messages import AdapterSpec, AdapterState

logger = logging.getLogger(__name__)

HELD_BYTES_MAX = 20 << 20
"""Weights held until their files exist, or one version, if it is larger; beyond that the file is written before the
commit."""
WRITERS = 2
"""Files that are written at a time."""
RETRY_S, RETRY_S_MAX = 1.0, 30.0
"""First and longest pause before a failed write of a file is retried; each pause is twice the one before."""


@dataclass(slots=True, eq=False)
class Version:
    """Saved weights and the row that names them; made by `unnamed` and `named`."""

    name: str
    """The name of the operation that saved it."""
    label: str
    """Its name for users: the id of a sampler, or the path of a checkpoint."""
    session_id: str
    """The session whose end ends it; empty: none."""
    base_model: str
    """The base model of its adapter."""
    spec: AdapterSpec
    state: AdapterState | None
    """None: not rematerialized yet."""
    error: ServiceError | None = None
    """Why it cannot be rematerialized."""
    writing: asyncio.Task[None] | None = None
    """Begins with the commit, or when it was rematerialized."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def is_named(self) -> bool:
        """Whether it is a checkpoint, and not an unnamed sampler."""
        return not self.session_id

    @property
    def seq(self) -> int:
        """The sequence number of its save."""
        return int(self.name.rpartition(":")[2])

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return len(self.state.weights) if self.state is not None else 0

    def resolve(self, error: StorageError | None) -> None:
        """End the waits for its file, with success or this error."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


def unnamed(row: SamplerRow, spec: AdapterSpec, state: AdapterState | None = None) -> Version:
    """Return the version of an unnamed sampler's row."""
    return Version(row.version, row.sampler_id, row.session_id, row.base_model, spec, state)


def named(row: CheckpointRow, spec: AdapterSpec, state: AdapterState | None = None) -> Version:
    """Return the version of a checkpoint's row."""
    return Version(version_of(row), row.path, "", row.base_model, spec, state)


def version_of(checkpoint: CheckpointRow) -> str:
    """Return the name of a checkpoint's weights: the operation that saved them."""
    return names.operation_name(checkpoint.adapter_id, checkpoint.seq)


class Publishing:
    """The versions that have no file yet, and the waits for them."""

    def __init__(self, folders: StateFolders, store: Store, fleet: Fleet, failure: Failure, holdings: Holdings) -> None:
        self.changed = Signal()
        """A version does not need the log any more, was rematerialized, or cannot be rematerialized."""
        self._samplers = folders.samplers
        self._checkpoints = folders.checkpoints
        self._store = store
        self._models = fleet.models
        self._failure = failure
        self._holdings = holdings
        self._versions: dict[str, Version] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._writers = asyncio.Semaphore(WRITERS)
        self._is_stopping = asyncio.Event()

    # ---- states of a version

    def can_hold(self, base_model: str, state: AdapterState) -> bool:
        """Return whether this version may be committed before its file exists.

        The log must be able to rematerialize it bit for bit, and there must be memory for it until then.
        """
        num_bytes = sum(version.num_bytes for version in self._versions.values())
        has_room = not num_bytes or num_bytes + len(state.weights) <= HELD_BYTES_MAX
        return self._models[base_model].is_exact and has_room

    def hold(self, version: Version) -> None:
        """Hold a version whose row is about to be committed."""
        assert version.name not in self._versions
        self._versions[version.name] = version

    def drop(self, name: str) -> None:
        """Drop a version whose row was not committed."""
        self._versions.pop(name, None)

    def committed(self, name: str) -> None:
        """Begin to write the version's file: its row is durable. (Its session may have ended meanwhile.)"""
        if (version := self._versions.get(name)) is not None:
            self._begin_writing(version)

    def expect(self, version: Version, *, is_in_log: bool) -> None:
        """Add a version that has no file after a crash: replay rematerializes it, if its save is in the log."""
        version.error = None if is_in_log else _lost(version.label)
        self._versions[version.name] = version

    def rematerialized(self, name: str, state: AdapterState) -> None:
        """Hold the weights of a version whose save was replayed. (Its session may have ended meanwhile.)"""
        if (version := self._versions.get(name)) is not None:
            version.state = state
            self._begin_writing(version)
            self.changed.notify()

    def fail(self, adapter_id: str, error: ServiceError) -> None:
        """Fail the versions of an adapter that must be rematerialized: it cannot be rebuilt in this epoch."""
        for version in self._of(adapter_id):
            if version.state is None:
                version.error = error
                self.changed.notify()

    def end_session(self, session_id: str) -> None:
        """End the unnamed versions of a session whose end is durable."""
        for version in [each for each in self._versions.values() if each.session_id == session_id]:
            self._release(version)

    def deleted(self, name: str) -> None:
        """End a version whose checkpoint's deletion is durable."""
        if (version := self._versions.get(name)) is not None:
            self._release(version)

    def stop_retrying(self) -> None:
        """Retry failed writes once more, then leave these versions to the log: the coordinator stops."""
        self._is_stopping.set()

    async def finish(self) -> None:
        """Wait until every file is written or left to the log."""
        while self._writing:
            await asyncio.wait(self._writing)

    # ---- questions

    def is_awaited(self, name: str) -> bool:
        """Return whether this version must be rematerialized before it can be sampled from."""
        version = self._versions.get(name)
        return version is not None and version.state is None and version.error is None

    def must_rematerialize(self, adapter_id: str) -> bool:
        """Return whether the adapter's log is needed to rematerialize a version."""
        return any(self.is_awaited(version.name) for version in self._of(adapter_id))

    def check_rematerialized(self, adapter_id: str) -> None:
        """Raise ServiceError while the adapter's log is needed to rematerialize a version."""
        if self.must_rematerialize(adapter_id):
            raise unavailable(
                "ADAPTER_CHANGING",
                f"{adapter_id} is being rebuilt after a crash, with samplers of its weights: try again later",
            )

    def is_unwritten(self, adapter_id: str) -> bool:
        """Return whether a file of this adapter's versions is being written."""
        return any(version.state is not None for version in self._of(adapter_id))

    async def until_written(self, adapter_id: str, seq: float = math.inf) -> None:
        """Return when no version needs the adapter's log up to `seq` any more.

        Raises StorageError if a file could not be written.
        """
        for version in self._of(adapter_id):
            if version.state is None or version.seq > seq or self._versions.get(version.name) is not version:
                continue
            await self._written_once(version)

    def held(self, name: str) -> AdapterState | None:
        """Return the weights of this version; None: they are in a file.

        Raises ServiceError if they must be rematerialized first, or cannot be.
        """
        version = self._versions.get(name)
        if version is None:
            return None
        if version.error is not None:
            raise version.error
        if version.state is None:
            raise _not_rematerialized(version.label)
        return version.state

    async def until_file(self, name: str) -> None:
        """Return when this version's file exists.

        Raises StorageError if it could not be written, and ServiceError as `held`.
        """
        while (version := self._versions.get(name)) is not None:
            self.held(name)
            await self._written_once(version)

    async def state(self, sampler_id: str) -> AdapterState:
        """Return the weights of an unnamed sampler for which `is_awaited` is false.

        Raises ServiceError if they are damaged, cannot be rematerialized, or ended with their session.
        """
        row = self._store.samplers.get(sampler_id)
        assert row is not None
        if (state := self.held(row.version)) is not None:
            return state
        if not row.folder:
            raise unmet(
                "SESSION_ENDED",
                f"the session of {sampler_id} has ended, and its weights with it: save them under a name to keep them",
            )
        return await asyncio.to_thread(self._samplers.read, row.folder, row.sha256)

    # ---- writing

    def _of(self, adapter_id: str) -> list[Version]:
        return [version for version in self._versions.values() if version.spec.adapter_id == adapter_id]

    async def _written_once(self, version: Version) -> None:
        """Return when its file exists or is not needed. Raises StorageError if it could not be written."""
        if version.writing is None or version.writing.done():
            raise StorageError(f"the weights that {version.name} has saved were not written")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        version.waiters.append(waiter)
        await waiter

    def _release(self, version: Version) -> None:
        """Drop the held weights of a version that needs neither memory nor the log any more."""
        if self._versions.pop(version.name, None) is not None:
            version.resolve(None)
            self.changed.notify()

    def _begin_writing(self, version: Version) -> None:
        assert version.writing is None
        version.writing = asyncio.get_running_loop().create_task(self._write(version))
        self._writing.add(version.writing)
        version.writing.add_done_callback(functools.partial(self._written, version))

    def _written(self, version: Version, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and (error := writing.exception()) is not None:
            version.resolve(StorageError(f"the weights that {version.name} has saved were not written: {error!r}"))
            self._failure.report(error)

    async def _write(self, version: Version) -> None:
        pause_s = RETRY_S
        while version.name in self._versions:
            try:
                async with self._writers:
                    with PUBLISH_SECONDS.time():
                        await self._write_once(version)
            except (OSError, StorageError) as error:
                logger.warning("%s has no file yet: %s", version.name, error, extra=about(operation=version.name))
                reason = error.strerror if isinstance(error, OSError) else error
                version.resolve(StorageError(f"the weights that {version.name} has saved cannot be written: {reason}"))
                if self._is_stopping.is_set() or isinstance(error, StoreBrokenError):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_stopping.wait(), pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                self._release(version)

    async def _write_once(self, version: Version) -> None:
        """Write the file and give its row the folder. Raises OSError and StorageError; the log is still needed then."""
        if version.name not in self._versions:
            return
        assert version.state is not None
        files = self._checkpoints if version.is_named else self._samplers
        model = self._models[version.base_model]
        saved = await asyncio.to_thread(files.write, version.spec, model, version.state)
        try:
            is_stored = await self._commit(version, saved)
        except StoreBrokenError:
            raise  # the row may be durable: the next start finds out whether the folder is an orphan
        except StorageError:
            await asyncio.to_thread(files.remove, saved.folder)
            raise
        if not is_stored or version.name not in self._versions:  # its session has ended meanwhile, or it was deleted
            await asyncio.to_thread(files.remove, saved.folder)

    async def _commit(self, version: Version, saved: Saved) -> bool:
        """Give the version's row the folder; return whether there is such a row."""
        if not version.is_named:
            return bool(await self._store.samplers.commit_file(version.label, saved.folder, saved.sha256))
        assert version.state is not None
        row = await self._store.checkpoints.commit_file(
            version.label, version.seq, saved.folder, saved.sha256, saved.size_bytes, version.state.fingerprint
        )
        if row is not None:
            self._holdings.resize(row.tenant_id, saved.size_bytes - row.size_bytes)
        return row is not None


def _not_rematerialized(label: str) -> ServiceError:
    return unavailable(
        "ADAPTER_CHANGING", f"the weights of {label} are being rematerialized after a crash: try again later"
    )


def _lost(label: str) -> ServiceError:
    return ServiceError(
        Code.DATA_LOSS,
        "VERSION_LOST",
        f"the weights of {label} were not on disk when the service crashed, and their adapter was deleted: train again",
    )
