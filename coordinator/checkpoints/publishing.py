"""Versions of weights that may be sampled from before their file is there.

A version is committed with its cycle, without a folder: the row of an unnamed sampler, or of a checkpoint for sampling.
Its weights are held here, handed to any worker that lacks them, and written beside the cycles; then its row gets the
folder. A crash before that loses the memory, not the version: the next life runs the log again up to the save, and
saves there (`Operation.is_underived`). So the log is not cut at or behind a save whose version has no file: whoever
cuts it waits for `until_written`, and a trigger of the schema refuses whoever does not.

Knows files and rows; neither queues nor workers. Main invariant: a version whose row is committed, and which its
session's end or its deletion has not ended, is in a file, or here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.database import StorageError, StoreBrokenError
from coordinator.storage.folders import Saved, StateFiles
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.store import Store
from tinkerpool import names
from workers.contract.messages import AdapterSpec, AdapterState, ModelInfo

logger = logging.getLogger(__name__)

HELD_BYTES_MAX = 1 << 30
"""Weights that wait for their files; what comes beyond that is written before it is committed."""
WRITERS = 2
"""Files that are written at a time."""
RETRY_S, RETRY_S_MAX = 1.0, 30.0
"""How long a file is left alone that could not be written; twice as long each time, and the most."""


@dataclass(slots=True, eq=False)
class Version:
    """Weights that were saved, and the row that stands for them; made by `unnamed` and `named`."""

    name: str
    """Of the operation that saved it."""
    label: str
    """What its users call it: the id of a sampler, or the path of a checkpoint."""
    session_id: str
    """With whose end it ends; empty: with none."""
    base_model: str
    """Whose adapter it is of."""
    spec: AdapterSpec
    state: AdapterState | None
    """None: the log has not been run again so far."""
    error: ServiceError | None = None
    """Why it can never be made again."""
    writing: asyncio.Task[None] | None = None
    """From the commit on, or since the log has been run again."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def is_named(self) -> bool:
        """Whether it is a checkpoint, and not an unnamed sampler."""
        return not self.session_id

    @property
    def seq(self) -> int:
        """The place of its save in the adapter's order."""
        return int(self.name.rpartition(":")[2])

    @property
    def num_bytes(self) -> int:
        """What it takes of memory."""
        return len(self.state.weights) if self.state is not None else 0

    def tell(self, error: StorageError | None) -> None:
        """Who waits for its file learns how the attempt went."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


def unnamed(row: SamplerRow, spec: AdapterSpec, state: AdapterState | None = None) -> Version:
    """The version of an unnamed sampler's row."""
    return Version(row.version, row.sampler_id, row.session_id, row.base_model, spec, state)


def named(row: CheckpointRow, spec: AdapterSpec, state: AdapterState | None = None) -> Version:
    """The version of a checkpoint's row."""
    return Version(version_of(row), row.path, "", row.base_model, spec, state)


def version_of(checkpoint: CheckpointRow) -> str:
    """What the weights of a checkpoint are called: as the operation that saved them."""
    return names.operation_name(checkpoint.adapter_id, checkpoint.seq)


class Publishing:
    """The versions that have no file yet."""

    def __init__(
        self,
        samplers: StateFiles,
        checkpoints: StateFiles,
        store: Store,
        models: Callable[[str], ModelInfo],
        *,
        on_settled: Callable[[str], None],
        on_derived: Callable[[str], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`on_settled` gets the base model of a version that needs the log no more, `on_derived` the name of one that
        the log has been run again for, or never will be; `fatal` what nobody expected.
        """
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._store = store
        self._models = models
        self._on_settled = on_settled
        self._on_derived = on_derived
        self._fatal = fatal
        self._versions: dict[str, Version] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._writers = asyncio.Semaphore(WRITERS)
        self._gives_up = asyncio.Event()

    # ---- a version's way

    def can_hold(self, base_model: str, state: AdapterState) -> bool:
        """Whether this version may be committed before its file is there: the log can make it again, bit for bit, and
        there is room for it until then."""
        num_bytes = sum(version.num_bytes for version in self._versions.values())
        return self._models(base_model).is_exact and num_bytes + len(state.weights) <= HELD_BYTES_MAX

    def hold(self, version: Version) -> None:
        """A version whose row is about to be committed."""
        assert version.name not in self._versions
        self._versions[version.name] = version

    def drop(self, name: str) -> None:
        """Its row was not committed."""
        self._versions.pop(name, None)

    def committed(self, name: str) -> None:
        """Its row is durable: write its file. (Its session may have ended meanwhile.)"""
        if (version := self._versions.get(name)) is not None:
            self._begin_writing(version)

    def expect(self, version: Version, *, is_in_log: bool) -> None:
        """After a crash: a row without a file. Replay brings its version again, if its save is in the log."""
        version.error = None if is_in_log else _lost(version.label)
        self._versions[version.name] = version

    def derived(self, name: str, state: AdapterState) -> None:
        """The log has been run again up to its save. (Its session may have ended meanwhile.)"""
        if (version := self._versions.get(name)) is not None:
            version.state = state
            self._begin_writing(version)
            self._on_derived(name)

    def fail(self, adapter_id: str, error: ServiceError) -> None:
        """The adapter cannot be rebuilt in this life, and so no version of it whose file was not there."""
        for version in self._of(adapter_id):
            if version.state is None:
                version.error = error
                self._on_derived(version.name)

    def end_session(self, session_id: str) -> None:
        """The session's end is durable: nobody samples from its unnamed versions any more."""
        for version in [each for each in self._versions.values() if each.session_id == session_id]:
            self._end(version)

    def deleted(self, name: str) -> None:
        """The deletion of this version's checkpoint is durable."""
        if (version := self._versions.get(name)) is not None:
            self._end(version)

    def give_up(self) -> None:
        """The coordinator stops: what could not be written is tried once more, and then left to the log."""
        self._gives_up.set()

    async def finish(self) -> None:
        """Wait until everything is written, or given up."""
        while self._writing:
            await asyncio.wait(self._writing)

    # ---- questions

    def is_awaited(self, name: str) -> bool:
        """Nobody can have this version before the log has been run again."""
        version = self._versions.get(name)
        return version is not None and version.state is None and version.error is None

    def check_derived(self, adapter_id: str) -> None:
        """Raises ServiceError while the adapter's log has to be run again for a version, and so must not go."""
        if any(self.is_awaited(version.name) for version in self._of(adapter_id)):
            raise ServiceError(
                Code.UNAVAILABLE,
                "ADAPTER_CHANGING",
                f"{adapter_id} is being rebuilt after a crash, with samplers of its weights: try again later",
                retry_delay_s=1.0,
            )

    def is_unwritten(self, adapter_id: str) -> bool:
        """Whether a file of this adapter's is being written."""
        return any(version.state is not None for version in self._of(adapter_id))

    async def until_written(self, adapter_id: str, seq: float = math.inf) -> None:
        """Return when the adapter's log up to `seq` is needed for no version any more.

        Raises StorageError if that will take long: a file could not be written.
        """
        for version in self._of(adapter_id):
            if version.state is None or version.seq > seq or self._versions.get(version.name) is not version:
                continue
            await self._written_once(version)

    def held(self, name: str) -> AdapterState | None:
        """The weights of this version, as long as no file has them.

        Raises ServiceError if the log has to be run again for them first, or they could not be made again.
        """
        version = self._versions.get(name)
        if version is None:
            return None
        if version.error is not None:
            raise version.error
        if version.state is None:
            raise _not_made_again(version.label)
        return version.state

    async def until_file(self, name: str) -> None:
        """Return when no file of this version is awaited.

        Raises StorageError if it could not be written, and ServiceError as `held`.
        """
        while (version := self._versions.get(name)) is not None:
            self.held(name)
            await self._written_once(version)

    async def state(self, sampler_id: str) -> AdapterState:
        """The weights of an unnamed sampler that nobody waits for (`is_awaited`).

        Raises ServiceError if they are damaged, could not be made again, or have gone with their session.
        """
        row = self._store.samplers.get(sampler_id)
        assert row is not None
        if (state := self.held(row.version)) is not None:
            return state
        if not row.folder:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SESSION_ENDED",
                f"the session of {sampler_id} has ended, and its weights with it: save them under a name to keep them",
            )
        return await asyncio.to_thread(self._samplers.read, row.folder, row.sha256)

    # ---- writing

    def _of(self, adapter_id: str) -> list[Version]:
        return [version for version in self._versions.values() if version.spec.adapter_id == adapter_id]

    async def _written_once(self, version: Version) -> None:
        """Return when its file is there, or nobody needs it. Raises StorageError if it could not be written."""
        if version.writing is None or version.writing.done():
            raise StorageError(f"the weights that {version.name} has saved were not written")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        version.waiters.append(waiter)
        await waiter

    def _end(self, version: Version) -> None:
        """Nobody may have it any more."""
        self._settle(version)
        if version.state is None:
            self._on_derived(version.name)

    def _settle(self, version: Version) -> None:
        """It needs the log no more."""
        if self._versions.pop(version.name, None) is not None:
            version.tell(None)
            self._on_settled(version.base_model)

    def _begin_writing(self, version: Version) -> None:
        assert version.writing is None
        version.writing = asyncio.get_running_loop().create_task(self._write(version))
        self._writing.add(version.writing)
        version.writing.add_done_callback(functools.partial(self._written, version))

    def _written(self, version: Version, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and (error := writing.exception()) is not None:
            version.tell(StorageError(f"the weights that {version.name} has saved were not written: {error!r}"))
            self._fatal(error)

    async def _write(self, version: Version) -> None:
        pause_s = RETRY_S
        while version.name in self._versions:
            try:
                async with self._writers:
                    await self._write_once(version)
            except (OSError, StorageError) as error:
                logger.warning("%s has no file yet: %s", version.name, error)
                reason = error.strerror if isinstance(error, OSError) else error
                version.tell(StorageError(f"the weights that {version.name} has saved cannot be written: {reason}"))
                if self._gives_up.is_set() or isinstance(error, StoreBrokenError):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gives_up.wait(), pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                self._settle(version)

    async def _write_once(self, version: Version) -> None:
        """Raises OSError and StorageError; nothing is durable then, or the log is not known to be needed no more."""
        if version.name not in self._versions:
            return
        assert version.state is not None
        files = self._checkpoints if version.is_named else self._samplers
        model = self._models(version.base_model)
        saved = await asyncio.to_thread(files.write, version.spec, model, version.state)
        try:
            num_rows = await self._commit(version, saved)
        except StoreBrokenError:
            raise  # the row may be durable: the next start sees what is an orphan
        except StorageError:
            files.remove(saved.folder)
            raise
        if not num_rows or version.name not in self._versions:  # its session has ended meanwhile, or it was deleted
            files.remove(saved.folder)

    def _commit(self, version: Version, saved: Saved) -> asyncio.Future[int]:
        """Give its row the folder; the future has how many rows that were."""
        if version.is_named:
            assert version.state is not None
            return self._store.checkpoints.commit_file(
                version.label, version.seq, saved.folder, saved.sha256, saved.size_bytes, version.state.fingerprint
            )
        return self._store.samplers.commit_file(version.label, saved.folder, saved.sha256)


def _not_made_again(label: str) -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE,
        "ADAPTER_CHANGING",
        f"the weights of {label} are being made again after a crash: try again later",
        retry_delay_s=1.0,
    )


def _lost(label: str) -> ServiceError:
    return ServiceError(
        Code.DATA_LOSS,
        "VERSION_LOST",
        f"the weights of {label} were not on disk when the service died, and their adapter is gone: train again",
    )
