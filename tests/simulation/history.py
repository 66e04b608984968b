"""One history: consecutive epochs of a coordinator over one disk, one set of workers and the same clients.

Draws the faults, injects them, and compares the results with the oracle at the end. Each epoch but the last may end in
a crash; no fault is injected into the last one, and all operations must finish in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest import mock

import apsw

from coordinator.base.config import CoordinatorConfig
from coordinator.checkpoints import published_weights as publishing
from coordinator.coordinator import Coordinator
from coordinator.runtime.core import Core
from coordinator.runtime.data_dir import FAILED_SYNC, RESERVE, DataDirLock, Seams
from coordinator.storage import database as coordinator_database
from coordinator.storage import disk as coordinator_disk
from coordinator.storage.disk import RESERVE_FILE
from coordinator.storage.identity import DATABASE, DataDirError, check, identity_of
from coordinator.storage.rows import START
from coordinator.storage.sqlite import Connection, StorageError, open_read_only, read_closed, set_pragmas
from coordinator.storage.store import Store
from tests.simulation.administrator import Administrator
from tests.simulation.client import Behaviour, Client
from tests.simulation.counts import check_counts
from tests.simulation.disk import SimDisk
from tests.simulation.key_rotations import KeyRotations
from tests.simulation.loop import Crash, Deadlock, SimLoop, TooLong
from tests.simulation.membership import Membership
from tests.simulation.oracle import Mismatch, check_checkpoints, check_published, expect
from tests.simulation.poisoner import Kills, Poisoner
from tests.simulation.pool import SimPool, SimPoolFront, WorkerFaults
from tests.simulation.script import draw_script
from tests.simulation.short_sessions import ShortSessions
from tests.simulation.standing import ContractViolation, Standings
from tests.simulation.world import SimTime, World
from tests.support.disk.apsw_connection import ApswConnection, Cursor, locked_error
from tests.support.disk.lossy_vfs import LossyVfs, close_quietly, sync_error
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract import failpoints
from workers.contract.messages import AdapterState

EPOCH_S_MAX = 3000.0
"""Most virtual seconds of an epoch."""
RESERVE_BYTES = 1 << 18
"""A smaller reserve than the product's: it is written in each epoch."""
NOTICE_S = 10.0
"""Seconds within which a coordinator must end after a sync of its database failed."""
DAY_S = 86400.0
NAMED_FOLDERS = (
    "SELECT 'checkpoints', folder FROM checkpoints UNION ALL SELECT 'snapshots', folder FROM snapshots"
    " UNION ALL SELECT 'samplers', folder FROM samplers"
)
COORDINATOR_POINTS = tuple(point for point in failpoints.POINTS if not point.startswith("worker."))
_vfs_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an epoch ends, unless the clients finish first."""

    kind: str
    """"failpoint", "moment", "database", "files", "database sync", "stop", or "" to end when the clients are done."""
    point: str = ""
    count: int = 0
    """The occurrence of `point`, or of an operation on the database or on files, at which the epoch ends."""
    after_s: float = 0.0
    keep: float | None = None
    """A power cut that keeps about this share of unsynced writes; None: only the process is killed."""


class SimConnection(ApswConnection):
    """A connection of a process that may be killed in the middle of a statement."""

    def __init__(self, world: World, path: Path, vfs: str, *, is_read_only: bool = False) -> None:
        self._world = world
        super().__init__(path, vfs=vfs, is_read_only=is_read_only)

    def execute(self, sql: str, parameters: Any = ()) -> Cursor:
        if self._world.is_database_locked and sql.startswith("BEGIN"):
            raise locked_error()
        try:
            return super().execute(sql, parameters)
        finally:
            if self._world.is_killed:
                raise Crash("the process was killed")


class History:
    """The history of a seed."""

    def __init__(self, seed: int, folder: Path, on_event: Callable[[str], None] | None = None) -> None:
        self.world = world = World(seed, on_event)
        self._random = random = world.random("history")
        self._folder = folder
        self._vfs = LossyVfs(f"lossy-{next(_vfs_numbers)}", world.random("vfs"))
        self._vfs.on_operation = self._on_database
        self._disk = SimDisk(folder, world.random("disk"), self._on_files)
        self._disk.on_room = self._add_room
        self._disk.room = lambda: self._vfs.room
        self._connections: list[ApswConnection] = []
        self._lock: DataDirLock | None = None
        self._standings = Standings(world)
        self._poisoner = Poisoner(world, self._standings)
        self._kills = Kills(world, self._poisoner)
        faults = _draw_worker_faults(world.random("faults"))
        self._pool = SimPool(world, random.randrange(1, 4), faults, self._kills, self._standings)
        self._checkpoint_commits = random.choice((100, 20, 3))
        self._config = CoordinatorConfig(
            data_dir=folder,
            cycle_tokens_max=random.choice((16, 64, None)),
            linger_s=random.choice((0.0, 0.03)),
            replay_s_max=random.choice((0.0, 5e-5, 10.0)),
            sweep_interval_s=world.random("sweeps").choice((0.1, 1.0, 5.0)),
            ended_retention_s=world.random("retention").choice((0.0, 0.3, 3.0)),
            class_wait_s=world.random("class wait").choice((0.0, 1.0, 600.0)),
        )
        self._held_bytes_max = random.choice((1 << 30, 1 << 30, 400))
        self._files_start_s = random.choice((0.0005, 0.0005, 0.05, 0.5))
        self._file_sync_fails = random.choice((0.0, 0.0, 0.0, 0.05))
        self._clients = [self._draw_client(index) for index in range(random.choice((1, 1, 2, 2, 3, 4)))]
        self._short_sessions = [ShortSessions(world, client) for client in self._clients]
        self._administrator = Administrator(world, self._clients, self._standings)
        self._membership = Membership(world, self._pool)
        self._rotations = [KeyRotations(world, client) for client in self._clients]
        self._endings = [_draw_ending(world.random(f"ending {number}")) for number in range(random.randrange(5))]
        self._ending = Ending(kind="")
        self._num_hits = 0
        self._is_last = False
        self._must_end_at: float | None = None
        self._has_file_failed = False
        self._folders_at_start: set[str] = set()
        """The state folders when the running start began; empty after its end."""
        self._num_starts = 0
        self._older: tuple[int, dict[str, bytes]] = 0, {}
        """A copy of the database's files, and how many starts had ended before it was made."""

    def run(self) -> None:
        """Run all epochs. Raises the error if the service fails its promises."""
        try:
            for ending in [*self._endings, Ending(kind="")]:
                self._ending, self._num_hits = ending, 0
                self._is_last = ending.kind == ""
                if self._is_last or not self._is_done():
                    self._run_epoch()
        finally:
            failpoints.disarm()
            self._vfs.kill()
            for connection in self._connections:
                close_quietly(connection)
            self._vfs.unregister()

    def _is_done(self) -> bool:
        are_clients_done = all(each.is_done for each in self._clients) and all(each.is_done for each in self._rotations)
        return are_clients_done and self._poisoner.is_done and self._administrator.is_done

    def _run_epoch(self) -> None:
        world = self.world
        world.trace(f"an epoch begins, to end by {self._ending}")
        world.work["epochs"] += 1
        world.is_killed = False
        self._must_end_at = None
        self._has_file_failed = False
        self._empty_disk()
        world.is_database_locked = False
        if self._is_last:
            self._pool.faults = WorkerFaults(survive=1.0)
        random = world.random(f"loop {world.work['epochs']}")
        loop = SimLoop(random, world.now, world.now + EPOCH_S_MAX, self._files_start_s)
        time = SimTime(world)
        front = SimPoolFront(self._pool)
        seams = Seams(self._disk, self._connect, self._take_lock, self._connect_read_only, mounts=str)
        coordinator = Coordinator(self._config, front, time, seams)
        self._kills.begin_epoch(coordinator)
        self._standings.begin_epoch(coordinator)
        self._arm_failpoints()
        patches = contextlib.ExitStack()
        patches.enter_context(mock.patch.object(coordinator_database, "CHECKPOINT_COMMITS", self._checkpoint_commits))
        patches.enter_context(mock.patch.object(coordinator_disk, "RESERVE_BYTES", RESERVE_BYTES))
        patches.enter_context(mock.patch.object(publishing, "HELD_BYTES_MAX", self._held_bytes_max))
        try:
            loop.run_until_complete(self._serve(coordinator))
        except Crash:
            assert world.is_killed
        finally:
            patches.close()
            failpoints.disarm()
            world.now = loop.now
            problems = loop.problems
            loop.drop()
            self._vfs.kill()
            for connection in self._connections:
                close_quietly(connection)
            self._connections.clear()
            if self._lock is not None:
                self._lock.release()
            loop.close()
        if problems:
            raise ContractViolation("\n".join(problems))
        self._pool.end_epoch(front.outstanding)
        if world.is_killed and self._ending.keep is not None:
            world.fault("power cut", f"keeping {self._ending.keep}")
            self._vfs.power_cut(self._ending.keep)
            self._disk.power_cut(self._ending.keep)
            self._check_folders("a power cut during a start")
        elif world.is_killed:
            world.fault("process killed")
        self._vfs.restart()
        self._put_an_older_copy_back()
        world.now += self._random.choice((0.0, 0.1, 100.0))

    async def _serve(self, coordinator: Coordinator) -> None:
        """Serve from the start until a stop, a failure or the end of the clients' work."""
        self._folders_at_start = self._disk.state_folders()
        if not self._is_last:
            self._fill_disk_at_start()
        try:
            await coordinator.start()
        except (StorageError, OSError, sqlite3.Error) as error:
            if self._is_last or not self._may_fail():
                raise
            self.world.work["coordinator did not start"] += 1
            self.world.trace(f"the coordinator does not start: {type(error).__name__}")
            return
        finally:
            self._check_folders("a start")
        self._folders_at_start = set()
        self._num_starts += 1
        store = coordinator.core.store
        self.world.work["weights to rematerialize"] += _num_unwritten(store)
        loop = asyncio.get_running_loop()
        failed = loop.create_task(coordinator.failed())
        work = loop.create_task(self._work(coordinator))
        stop = loop.create_task(self._until_stopped())
        faults = () if self._is_last else (self._fill_disk(coordinator), self._lock_database(), self._set_wall_clock())
        timers = [
            loop.create_task(each) for each in (*faults, self._membership.change(coordinator, is_last=self._is_last))
        ]
        await asyncio.wait((failed, work, stop), return_when=asyncio.FIRST_COMPLETED)
        for timer in timers:
            if not timer.cancel():
                timer.result()
        self._empty_disk()
        self.world.is_database_locked = False
        if self._must_end_at is not None:
            await asyncio.wait((failed,), timeout=NOTICE_S)
        if self._must_end_at is not None and (not failed.done() or loop.time() > self._must_end_at):
            raise ContractViolation("the coordinator continued after a sync of its database failed")
        if failed.done():
            await self._failed(failed, work)
        elif work.done():
            work.result()
        for task in (failed, stop):
            task.cancel()
        await coordinator.stop()
        work.cancel()
        await asyncio.gather(failed, work, stop, *timers, return_exceptions=True)

    def _check_folders(self, when: str) -> None:
        """Raise Mismatch if a state folder that was there when the last start began, and has not ended, is gone."""
        if missing := self._folders_at_start - self._disk.state_folders():
            raise Mismatch(f"state folders disappeared at {when}: {sorted(missing)}")

    def _put_an_older_copy_back(self) -> None:
        """Try a start on an older copy of the database, then undo that; keep a copy for the next time."""
        now = {name: (self._folder / name).read_bytes() for name in _files(self._folder)}
        num_starts, older = self._older
        if older and num_starts < self._num_starts:
            self.world.is_killed = False
            self._replace_database(older)
            self.world.fault("older database put back")
            try:
                # Past the lossy file system, which would take these files for durable ones.
                database = read_closed(self._folder / DATABASE, identity_of, open_read_only, is_alone=True)
                check(self._folder, database, self._disk)
            except DataDirError as error:
                self.world.trace(str(error).replace(str(self._folder), "").partition(":")[0])
            else:
                raise Mismatch("a start on an older copy of the database was not refused")
            if _files(self._folder) != sorted(older):
                raise Mismatch(f"a refused start changed {sorted(older)} to {_files(self._folder)}")
            self._replace_database(now)
        if not older or self._random.random() < 0.5:
            self._older = self._num_starts, now

    def _replace_database(self, files: dict[str, bytes]) -> None:
        for name in _files(self._folder):
            (self._folder / name).unlink()
        for name, content in files.items():
            (self._folder / name).write_bytes(content)

    async def _work(self, coordinator: Coordinator) -> None:
        loop = asyncio.get_running_loop()
        clients = [*self._clients, self._poisoner.client]
        heartbeats = [loop.create_task(client.keep_alive(coordinator)) for client in clients]
        try:
            parts: list[Client | ShortSessions | KeyRotations | Poisoner | Administrator] = [
                *self._clients,
                *self._short_sessions,
                *self._rotations,
                self._poisoner,
                self._administrator,
            ]
            await asyncio.gather(*(part.run(coordinator, is_last=self._is_last) for part in parts))
        finally:
            for each in heartbeats:
                each.cancel()
        if self._is_last:
            await self._verify(coordinator)

    async def _failed(self, failed: asyncio.Task[None], work: asyncio.Task[None]) -> None:
        """End the epoch of a coordinator that reported a fatal error."""
        error = failed.exception()
        if self._must_end_at is None:
            raise ContractViolation(f"the coordinator failed without a reason: {error!r}") from error
        self.world.work["coordinator failed"] += 1
        self.world.trace(f"the coordinator failed: {type(error).__name__}")
        if self._random.random() < 0.5:
            self.world.crash("failure")
        work.cancel()

    def _may_fail(self) -> bool:
        """Whether a fault of this epoch permits the coordinator to fail."""
        return self._must_end_at is not None or self._has_file_failed

    def _arm_failpoints(self) -> None:
        for point in COORDINATOR_POINTS:
            failpoints.arm(point, lambda point=point: self._reach(point))  # type: ignore[misc]

    def _reach(self, point: str) -> None:
        self.world.work[f"passed {point}"] += 1
        if self._ending.kind == "failpoint" and self._ending.point == point and self._hit():
            self.world.crash(point)

    def _hit(self) -> bool:
        self._num_hits += 1
        return self._num_hits == self._ending.count

    def _on_database(self, operation: str, file: str) -> None:
        if self._ending.kind == "database" and self._hit():
            self._vfs.kill()
            with contextlib.suppress(Crash):
                self.world.crash(f"database {operation} of {file}")
            raise apsw.exception_for(apsw.SQLITE_IOERR)
        if self._ending.kind == "database sync" and operation == "sync" and self._hit():
            self.world.fault("database sync fails", file)
            self._must_end_at = self.world.time() + NOTICE_S
            raise sync_error()

    def _on_files(self, operation: str, file: str) -> None:
        if self.world.is_killed:
            raise Crash("the process was killed")
        if self._ending.kind == "files" and self._hit():
            self.world.crash(f"files {operation} {file}")
        if operation == "sync" and not self._is_last and self._random.random() < self._file_sync_fails:
            self.world.fault("file sync fails", file)
            self._has_file_failed = True
            raise OSError(errno.EIO, "Input/output error")

    async def _until_stopped(self) -> None:
        """Return at the moment of a clean stop; crash at a drawn moment; otherwise never return."""
        if self._ending.kind not in {"stop", "moment"}:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._ending.after_s)
        if self._ending.kind == "moment":
            self.world.crash("moment")
        self.world.fault("clean stop")

    async def _fill_disk(self, coordinator: Coordinator) -> None:
        """Make the disk full for a while, repeatedly, in some histories."""
        if self._random.random() < 0.7:
            return
        while True:
            await asyncio.sleep(self._random.expovariate(1))
            self.world.fault("disk full")
            self._vfs.is_full = self._disk.is_full = True
            self._vfs.room = 0
            self.world.has_reserve_for_deletions = coordinator.core.store.database.has_reserve
            await asyncio.sleep(self._random.choice((0.02, 0.2, 5.0)))
            self._empty_disk()

    def _fill_disk_at_start(self) -> None:
        """Let some starts find a full disk, on which the last epoch has left its reserve."""
        random = self.world.random(f"full start {self.world.work['epochs']}")
        names = self._disk.names(self._folder)
        # After a failed sync a start needs room for the whole log, and may be refused.
        if RESERVE not in names or FAILED_SYNC in names or random.random() < 0.5:
            return
        if RESERVE_FILE not in self._disk.names(self._folder / RESERVE):
            return
        self.world.fault("disk full at a start")
        self._vfs.is_full = self._disk.is_full = True
        self._vfs.room = 0
        asyncio.get_running_loop().call_later(random.choice((0.02, 5.0)), self._empty_disk)

    def _empty_disk(self) -> None:
        self._vfs.is_full = self._disk.is_full = self.world.has_reserve_for_deletions = False

    def _add_room(self, num_bytes: int) -> None:
        self._vfs.room += num_bytes
        if num_bytes == RESERVE_BYTES:
            self.world.work["reserves released"] += 1

    async def _lock_database(self) -> None:
        """Let another process lock the database for a while, repeatedly, in some histories."""
        random = self.world.random(f"lock {self.world.work['epochs']}")
        if random.random() < 0.7:
            return
        while True:
            await asyncio.sleep(random.expovariate(1))
            self.world.fault("database locked")
            self.world.is_database_locked = True
            await asyncio.sleep(random.choice((0.02, 0.2, 20.0)))
            self.world.is_database_locked = False

    async def _set_wall_clock(self) -> None:
        """Set the wall clock to another time, repeatedly, in some histories."""
        if self._random.random() < 0.5:
            return
        while True:
            await asyncio.sleep(self._random.expovariate(1))
            self.world.wall_offset = self._random.uniform(-DAY_S, DAY_S)
            self.world.fault("wall clock set", f"to {self.world.wall_offset:+.0f} s")

    def _take_lock(self, path: Path) -> DataDirLock:
        self._lock = DataDirLock(path)
        return self._lock

    def _connect(self, path: Path) -> Connection:
        connection = SimConnection(self.world, path, self._vfs.name)
        self._connections.append(connection)
        database = cast("Connection", connection)
        set_pragmas(database)
        return database

    def _connect_read_only(self, path: Path) -> Connection:
        connection = SimConnection(self.world, path, self._vfs.name, is_read_only=True)
        self._connections.append(connection)
        return cast("Connection", connection)

    def _needed(self, key: str) -> set[str]:
        """Return the ids of the sessions or adapters whose rows something needs."""
        kept = [life for each in self._short_sessions for life in each.lives if life.saving]
        hostile = [self._poisoner.client] if self._poisoner.is_there else []
        return {getattr(each, key) for each in (*self._clients, *hostile, *kept)}

    async def _check_no_needless_folder(self, store: Store) -> None:
        """Check that each state folder has a row soon, in an epoch without faults: also those of a deleted tenant."""
        deadline = self.world.time() + NOTICE_S
        while needless := self._disk.named_folders() - {(row[0], row[1]) for row in store.database.read(NAMED_FOLDERS)}:
            if self.world.time() > deadline:
                raise Mismatch(f"state folders without a row: {sorted(needless)}")
            await asyncio.sleep(0.1)

    def _draw_client(self, index: int) -> Client:
        name = f"tenant{index}"
        random = self.world.random(f"script {name}")
        behaviour = Behaviour(
            window=random.choice((1, 3, 8)),
            drop=random.choice((0.0, 0.3)),
            repeat=random.choice((0.0, 0.3)),
            other=random.choice((0.0, 0.3)),
            think_s=random.choice((0.001, 0.02)),
        )
        return Client(self.world, name, draw_script(random, random.randrange(3, 14)), behaviour, self._standings)

    async def _verify(self, coordinator: Coordinator) -> None:
        """Compare all results with the oracle."""
        core = coordinator.core
        for client in self._clients:
            if not client.is_done:
                raise Mismatch(f"{client.name} is not done")
            may_lack_room = self.world.faults["disk full"] + self.world.faults["file sync fails"] > 0
            expected = expect(client, core.registry.logs[client.adapter_id].spec, may_lack_room=may_lack_room)
            request = checkpoints_pb2.ListCheckpointsRequest(
                adapter_id=client.adapter_id, kind=checkpoints_pb2.CHECKPOINT_KIND_TRAINING
            )
            listed = (await coordinator.service.list_checkpoints(client.principal, request)).checkpoints
            stored = {}
            for each in listed:
                row = core.store.checkpoints.by_path(each.path)
                assert row is not None
                stored[each.path] = each.seq, core.states.folders.checkpoints.read(row.folder, row.sha256)
            check_checkpoints(expected, stored)
            while _num_unwritten(core.store):  # noqa: ASYNC110 (no event for it)
                await asyncio.sleep(0.01)
            unnamed, named = _unnamed(core, client.session_id), _named(core, client.adapter_id)
            check_published(expected.unnamed, unnamed, expected)
            check_published(set(expected.published) - expected.unnamed, named, expected)
            for kind in {step.kind for step in client.script}:
                self.world.work[kind] += sum(1 for step in client.script if step.kind == kind)
            self.world.work["sample"] += len(client.samples)
            self.world.work["windows begun behind a failed batch"] += expected.num_corrected
        for table, key in (("sessions", "session_id"), ("adapters", "adapter_id")):
            ids = {row[0] for row in core.store.database.read(f"SELECT {key} FROM {table}")}
            if ids != (needed := self._needed(key)):
                raise Mismatch(f"{table}: {sorted(ids)} are stored, {sorted(needed)} are needed")
        await asyncio.sleep(0.01)  # a commit that was just seen in the rows is counted a turn of the loop later
        check_counts(core)
        await self._check_no_needless_folder(core.store)
        check = core.store.database.read_one("PRAGMA integrity_check")
        if check is None or check[0] != "ok":
            raise Mismatch(f"the database is damaged: {check}")
        self.world.trace("verified")


def _files(folder: Path) -> list[str]:
    """Return the names of the database's files, without the index of its log, which SQLite makes again."""
    names = (path.name for path in folder.glob(f"{DATABASE}*"))
    return sorted(name for name in names if not name.endswith("-shm"))


def _unnamed(core: Core, session_id: str) -> dict[int, AdapterState]:
    """Return the states in the files of a session's unnamed samplers, by the seq of the save."""
    found = [core.store.samplers.get(sampler_id) for sampler_id in core.store.samplers.ids_of_session(session_id)]
    rows = [row for row in found if row is not None and not row.model_path]
    return {
        int(row.version.rpartition(":")[2]): core.states.folders.samplers.read(row.folder, row.sha256) for row in rows
    }


def _named(core: Core, adapter_id: str) -> dict[int, AdapterState]:
    """Return the states in the files of an adapter's sampler checkpoints, by the seq of the save."""
    tenant_id = core.registry.logs[adapter_id].tenant_id
    listing = core.store.checkpoints.listing(tenant_id, [names.SAMPLER], adapter_id, 1000, START)
    rows = listing.read(listing.keys)
    return {row.seq: core.states.folders.checkpoints.read(row.folder, row.sha256) for row in rows}


def _num_unwritten(store: Store) -> int:
    """Return the number of published versions that are not in a file yet."""
    return len(store.samplers.unwritten()) + len(store.checkpoints.unwritten())


def _draw_worker_faults(random: Random) -> WorkerFaults:
    """Draw probabilities, many of them zero, so that each kind of fault also occurs without the others."""

    def some(probability: float) -> float:
        return random.choice((0.0, 0.0, probability, 3 * probability))

    return WorkerFaults(
        crash_before=some(0.02),
        crash_after=some(0.02),
        crash_sampling=some(0.02),
        pause=some(0.04),
        twice=some(0.03),
        slow_ping=some(0.03),
        no_replacement=some(0.1),
        reference_gone=some(0.1),
        survive=random.choice((0.0, 0.9)),
        refused=random.choice((0.0, 0.3)),
        late_join=some(0.1),
    )


def _draw_ending(random: Random) -> Ending:
    [kind] = random.choices(("failpoint", "moment", "database", "files", "database sync", "stop"), (8, 4, 4, 2, 2, 3))
    after_s = random.choice((0.05, 0.3, 1.0)) * random.expovariate(1)
    keep = random.choice((None, None, 0.0, 0.5, 0.9))
    match kind:
        case "failpoint":
            return Ending(kind=kind, point=random.choice(COORDINATOR_POINTS), count=random.randrange(1, 6), keep=keep)
        case "database":
            return Ending(kind=kind, count=random.choice((10, 100, 400)) + random.randrange(200), keep=keep)
        case "files":
            return Ending(kind=kind, count=random.randrange(1, random.choice((8, 60))), keep=keep)
        case "database sync":
            return Ending(kind=kind, count=random.randrange(4, 60), keep=keep)
    return Ending(kind=kind, after_s=after_s, keep=keep)


__all__ = ["Deadlock", "History", "TooLong"]
