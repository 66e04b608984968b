"""Ray in this process: starts or joins it, watches it, ends it, and removes its processes and folder.

Has Ray's processes and folder; not the workers in Ray.

Main invariant: the owner file names a private Ray's processes and folder from before they exist until they are removed.
So a start with the same file removes exactly the leftovers of a killed owner. The token of a private Ray exists only in
the environment and the memory of its processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
from ray._private.services import find_node_ids
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from workers.contract.logs import take_over
from workers.contract.protocols import PoolStartError
from workers.contract.settings import PoolConfig, num_cores
from workers.pool.processes import MARK_VARIABLE, Process, find_marked, kill_marked
from workers.pool.ray_head import CONNECT_TIMEOUT_S, check_head, is_refused, refused_s_max

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "tinkerpool-"
ESSENTIAL = ("gcs_server", "raylet")
"""If one of these processes has died, Ray starts no worker any more; if the first has, Ray ends this process after a
minute."""
WATCH_S = 0.1
"""Seconds between two checks of the essential processes."""
HEAD_WATCH_S = 0.5
"""Seconds between two connections to the head of a cluster."""
HEARD_TIMEOUT_S = 30.0
"""Seconds that the event loop has to take the news of Ray's death, before Ray is ended in this process anyway."""
TOKEN_BYTES = 32
"""Random bytes of a private Ray's token: too many to guess."""
KILL_TIMEOUT_S = 10.0
"""Seconds that killed processes have to end; only one that hangs in the kernel takes longer than milliseconds."""

PRIVATE_RAY = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Default environment of a private Ray: it starts no idle workers, reports no usage, and its workers have normal
priority (Ray's own default is niceness 15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belongings:
    """The processes and the folder of a private Ray on this machine."""

    mark: str
    """Value of `MARK_VARIABLE` in the environment of each process."""
    folder: str | None
    """Folder of sockets and logs, removed at the end; None: the operator chose the folder, and it stays."""

    def __post_init__(self) -> None:
        if not self.mark:
            raise ValueError("a mark must not be empty")
        if self.folder is not None and not Path(self.folder).name.startswith(FOLDER_PREFIX):
            raise ValueError(f"folder is {self.folder!r}; its name must begin with {FOLDER_PREFIX}")

    def write(self, path: Path) -> None:
        """Write to a file, atomically."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Belongings | None:
        """Read from a file; None if there is no such file, or its contents are something else."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read, so nothing is removed: %s", path, error)
            return None

    def remove(self) -> int:
        """Kill the processes, then remove the folder; return how many processes there were."""
        num_killed, num_left = kill_marked(self.mark, KILL_TIMEOUT_S)
        if num_left:
            logger.warning("%d processes of Ray were killed and have not ended", num_left)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        return num_killed


class RayHost:
    """Ray in this process, from start to stop, in a thread of its own.

    The kernel kills the processes that Ray starts when the thread that started them ends, so the thread lasts until the
    stop. In the main thread Ray would block the event loop for seconds and take over the signals.
    """

    def __init__(self, config: PoolConfig, on_lost: Callable[[], None]) -> None:
        """Prepare a Ray; `on_lost` is called in the event loop when Ray is lost, after `ended` is done."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason why no call to Ray is possible any more; done before Ray is ended in this process."""
        self._config = config
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._belongings: Belongings | None = None
        self._essential: dict[str, Process] = {}
        self._started: Future[None] = Future()
        self._is_stopping = threading.Event()
        self._is_told = threading.Event()
        self._thread = threading.Thread(target=self._live, name="ray", daemon=True)

    async def start(self) -> None:
        """Remove the leftovers of a killed owner, then start or join Ray.

        Raises PoolStartError; call `stop` after that, too.
        """
        if ray.is_initialized():
            raise PoolStartError("this process uses Ray already; one pool at a time")
        try:
            if self._config.ray_address is not None:
                await check_head(self._config.ray_address)
            self._thread.start()
            await asyncio.shield(asyncio.wrap_future(self._started))
        except Exception as error:
            self._end(f"Ray does not start: {error}")
            raise PoolStartError(self.ended.result()) from error
        finally:
            _put_back_signal_handlers()

    async def stop(self) -> None:
        """End Ray, or leave the cluster; also during a start. Returns when all of its processes have ended."""
        self._end("Ray was stopped")
        self._is_stopping.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
            _put_back_signal_handlers()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    # ---- in the thread

    def _live(self) -> None:
        # Inherited by Ray's processes: a closed terminal sends SIGHUP to them too, and they are to run until the stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        config = self._config
        try:
            refused_s = refused_s_max()
            if config.owner_file is not None:
                remove_leftovers(config.owner_file)
            if config.ray_address is None:
                self._start_private()
            else:
                self._enter(None)
        except BaseException as error:  # noqa: BLE001 (raised by `start`)
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            if self._belongings is not None:
                self._watch_processes()
            elif not str(config.ray_address).startswith("ray://"):
                self._watch_head(ray.get_runtime_context().gcs_address, refused_s)
        try:
            ray.shutdown()
        finally:
            for process in self._essential.values():
                process.close()
            if self._belongings is not None:
                self._belongings.remove()
            if config.owner_file is not None:
                config.owner_file.unlink(missing_ok=True)

    def _start_private(self) -> None:
        """Start a Ray of this process alone; once more if that fails, as it may on a machine without a free core."""
        self._belongings = self._new_belongings()
        try:
            self._enter(self._belongings)
        except Exception as error:
            if self._is_stopping.is_set():
                raise
            logger.warning("Ray has not started and is started once more: %s", error)
            ray.shutdown()
            self._belongings.remove()
            self._belongings = self._new_belongings()
            self._enter(self._belongings)

    def _new_belongings(self) -> Belongings:
        # Ray makes its folder accessible to all users; the folder around it is not.
        name = f"{FOLDER_PREFIX}{secrets.token_hex(4)}"
        folder = None if self._config.ray_temp_dir else f"{tempfile.gettempdir()}/{name}"
        belongings = Belongings(mark=secrets.token_hex(16), folder=folder)
        if self._config.owner_file is not None:
            belongings.write(self._config.owner_file)
        if folder is not None:
            Path(folder).mkdir(mode=0o700)
        return belongings

    def _enter(self, belongings: Belongings | None) -> None:
        config = self._config
        options: dict[str, Any] = {"address": config.ray_address}
        if belongings is not None:
            for name, value in PRIVATE_RAY.items():
                os.environ.setdefault(name, value)
            folder = config.ray_temp_dir or f"{belongings.folder}/ray"
            options = {"address": "local", "_temp_dir": folder, "num_cpus": num_cores()}
        elif not str(config.ray_address).startswith("ray://"):
            self._check_raylet()
        with _marked(belongings):
            # Whatever `log_to_driver` says, Ray prints what raylets report, stacks of crashed processes among it.
            ray._private.worker.print_to_stdstream = _log_report
            AuthenticationTokenLoader.instance().reset_cache()  # or Ray would use the token of an earlier Ray
            ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, **options)
        take_over("ray")
        if belongings is not None:
            self._essential = _essential_processes(belongings)

    def _check_raylet(self) -> None:
        """Raise ConnectionError if this host is no node of a cluster, for which Ray would blame the head."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not find_node_ids():
            if time.monotonic() > deadline_s or self._is_stopping.wait(WATCH_S):
                raise ConnectionError(
                    "this host is not in the cluster, because no raylet runs on it: join it first, without workers if "
                    f"it is to have none, with `ray start --address={self._config.ray_address} --num-cpus=0`"
                )

    def _watch_processes(self) -> None:
        """Wait for the stop. If a private Ray dies first, report that."""
        while not self._is_stopping.wait(WATCH_S):
            if dead := [name for name, process in self._essential.items() if process.has_ended()]:
                self._lose(f"Ray has died (its {dead[0]} ended)")
                break

    def _watch_head(self, address: str, seconds_max: float) -> None:
        """Wait for the stop. If the head of a cluster refuses connections for `seconds_max`, report that.

        A head that is silent may still be there: it is left to Ray, which ends this process after its own time-out.
        """
        accepted_s = time.monotonic()
        while not self._is_stopping.wait(HEAD_WATCH_S):
            if not is_refused(address):
                accepted_s = time.monotonic()
            elif (refused_s := time.monotonic() - accepted_s) >= seconds_max:
                self._lose(f"the head of Ray's cluster, {address}, has refused connections for {refused_s:.0f} s")
                break

    def _lose(self, reason: str) -> None:
        def lose() -> None:
            self._end(reason)
            self._on_lost()
            self._is_told.set()

        logger.error("%s; every worker is lost", reason)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lose)
            self._is_told.wait(HEARD_TIMEOUT_S)


def remove_leftovers(owner_file: Path) -> None:
    """Kill the processes that the file names, and remove their folder and the file."""
    if (left := Belongings.read(owner_file)) is not None:
        num_killed = left.remove()
        logger.warning("removed the leftovers of a killed pool's Ray: %d processes", num_killed)
    owner_file.unlink(missing_ok=True)


@contextmanager
def _marked(belongings: Belongings | None) -> Iterator[None]:
    """Let processes that are started inside inherit the mark, and a token that no other Ray has."""
    if belongings is None:
        yield
        return
    # Ray's processes set their titles, which may overwrite the environment unless this variable forbids it.
    added = {MARK_VARIABLE: belongings.mark, "SPT_NOENV": "1", "RAY_AUTH_TOKEN": secrets.token_hex(TOKEN_BYTES)}
    before = {name: os.environ[name] for name in added if name in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ |= before


def _log_report(report: Mapping[str, Any], ignore_prefix: bool) -> None:
    logger.debug("Ray reports: %s", "\n".join(report["lines"]))


def _essential_processes(belongings: Belongings) -> dict[str, Process]:
    """Hold the essential processes, by name; none on systems where processes cannot be held."""
    essential: dict[str, Process] = {}
    found = find_marked(belongings.mark)
    for process in found:
        if (name := process.name) in ESSENTIAL:
            essential[name] = process
        else:
            process.close()
    for name in ESSENTIAL:
        if found and name not in essential:
            logger.warning("no process of Ray is called %s: its death will not be noticed", name)
    return essential


def _put_back_signal_handlers() -> None:
    """Install the signal handlers again: Ray's native code replaces them at its start and removes them at its end."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(signum)) is not None:
                signal.signal(signum, handler)
