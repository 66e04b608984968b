"""Versions of weights that may be sampled from before their file is there.

A version is committed with its cycle, without a folder. Its weights are held here, handed to any worker that lacks
them, and written beside the cycles; then its row gets the folder. A crash before that loses the memory, not the
version: the next life runs the log again up to the save, and saves there (`Operation.is_underived`). So the log is not
cut at or behind a save whose version has no file: whoever cuts it waits for `until_written`, and a trigger of the
schema refuses whoever does not.

Knows files and rows; neither queues nor workers. Main invariant: a version whose row is committed and whose session
lives is in a file, or here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.database import Row, StorageError, StoreBrokenError
from coordinator.errors import Code, ServiceError
from coordinator.files import StateFiles
from coordinator.store import Store
from workers.messages import AdapterSpec, AdapterState, ModelInfo

logger = logging.getLogger(__name__)

HELD_BYTES_MAX = 1 << 30
"""Weights that wait for their files; what comes beyond that is written before it is committed."""
WRITERS = 2
"""Files that are written at a time."""
RETRY_S, RETRY_S_MAX = 1.0, 30.0
"""How long a file is left alone that could not be written; twice as long each time, and the most."""


@dataclass(slots=True, eq=False)
class _Version:
    row: Mapping[str, Any] | Row
    """Of its sampler, as it was committed."""
    spec: AdapterSpec
    state: AdapterState | None
    """None: the log has not been run again so far."""
    error: ServiceError | None = None
    """Why it can never be made again."""
    writing: asyncio.Task[None] | None = None
    """From the commit on, or since the log has been run again."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the operation that saved it."""
        return str(self.row["version"])

    @property
    def base_model(self) -> str:
        """Whose adapter it is of."""
        return str(self.row["base_model"])

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


class Publishing:
    """The versions that have no file yet."""

    def __init__(
        self,
        files: StateFiles,
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
        self._files = files
        self._store = store
        self._models = models
        self._on_settled = on_settled
        self._on_derived = on_derived
        self._fatal = fatal
        self._versions: dict[str, _Version] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._writers = asyncio.Semaphore(WRITERS)
        self._gives_up = asyncio.Event()

    # ---- a version's way

    def can_hold(self, base_model: str, state: AdapterState) -> bool:
        """Whether this version may be committed before its file is there: the log can make it again, bit for bit, and
        there is room for it until then."""
        num_bytes = sum(version.num_bytes for version in self._versions.values())
        return self._models(base_model).is_exact and num_bytes + len(state.weights) <= HELD_BYTES_MAX

    def hold(self, row: Mapping[str, Any], spec: AdapterSpec, state: AdapterState) -> None:
        """A version whose row is about to be committed."""
        assert row["version"] not in self._versions
        self._versions[row["version"]] = _Version(row, spec, state)

    def drop(self, name: str) -> None:
        """Its row was not committed."""
        self._versions.pop(name, None)

    def committed(self, name: str) -> None:
        """Its row is durable: write its file. (Its session may have ended meanwhile.)"""
        if (version := self._versions.get(name)) is not None:
            self._begin_writing(version)

    def expect(self, row: Row, spec: AdapterSpec, *, is_in_log: bool) -> None:
        """After a crash: a sampler's row without a file. Replay brings its version again, if its save is in the log."""
        error = None if is_in_log else _lost(row["sampler_id"])
        self._versions[row["version"]] = _Version(row, spec, None, error)

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
        """The session's end is durable: nobody samples from its versions any more."""
        for version in [each for each in self._versions.values() if each.row["session_id"] == session_id]:
            self._settle(version)
            if version.state is None:
                self._on_derived(version.name)

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
            if version.writing is None or version.writing.done():
                raise StorageError(f"the weights that {version.name} has saved were not written")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            version.waiters.append(waiter)
            await waiter

    async def state(self, sampler_id: str) -> AdapterState:
        """The weights of an unnamed sampler that nobody waits for (`is_awaited`).

        Raises ServiceError if they are damaged, could not be made again, or have gone with their session.
        """
        row = self._store.read_one("SELECT version, folder, sha256 FROM samplers WHERE sampler_id = ?", (sampler_id,))
        assert row is not None
        version = self._versions.get(row["version"])
        if version is not None and version.error is not None:
            raise version.error
        if version is not None:
            assert version.state is not None, f"{version.name} is sampled from before it was made again"
            return version.state
        if not row["folder"]:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SESSION_ENDED",
                f"the session of {sampler_id} has ended, and its weights with it: save them under a name to keep them",
            )
        return await asyncio.to_thread(self._files.read, row["folder"], row["sha256"])

    # ---- writing

    def _of(self, adapter_id: str) -> list[_Version]:
        return [version for version in self._versions.values() if version.spec.adapter_id == adapter_id]

    def _settle(self, version: _Version) -> None:
        """It needs the log no more."""
        if self._versions.pop(version.name, None) is not None:
            version.tell(None)
            self._on_settled(version.base_model)

    def _begin_writing(self, version: _Version) -> None:
        assert version.writing is None
        version.writing = asyncio.get_running_loop().create_task(self._write(version))
        self._writing.add(version.writing)
        version.writing.add_done_callback(functools.partial(self._written, version))

    def _written(self, version: _Version, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and (error := writing.exception()) is not None:
            version.tell(StorageError(f"the weights that {version.name} has saved were not written: {error!r}"))
            self._fatal(error)

    async def _write(self, version: _Version) -> None:
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

    async def _write_once(self, version: _Version) -> None:
        """Raises OSError and StorageError; nothing is durable then, or the log is not known to be needed no more."""
        if version.name not in self._versions:
            return
        assert version.state is not None
        model = self._models(version.base_model)
        saved = await asyncio.to_thread(self._files.write, version.spec, model, version.state)
        try:
            await self._store.commit_file(version.row["sampler_id"], saved.folder, saved.sha256)
        except StoreBrokenError:
            raise  # the row may be durable: the next start sees what is an orphan
        except StorageError:
            self._files.remove(saved.folder)
            raise
        if version.name not in self._versions:  # its session has ended meanwhile
            self._files.remove(saved.folder)


def _lost(sampler_id: str) -> ServiceError:
    return ServiceError(
        Code.DATA_LOSS,
        "VERSION_LOST",
        f"the weights of {sampler_id} were not on disk when the service died, and their adapter is gone: train again",
    )
