"""The composition root: starts a pool, a coordinator and the doors in one process, and stops them after a signal.

Decides only the order in which these parts start and stop. Main invariant: the doors accept calls only while the
coordinator runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.base.config import ServerConfig
from coordinator.base.errors import ServiceError
from coordinator.base.memory import Collections, return_large_blocks
from coordinator.coordinator import Coordinator
from coordinator.doors.door import DoorError
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from coordinator.doors.metrics import MetricsDoor
from coordinator.doors.tls import server_name
from coordinator.runtime.backup import remove_leftovers
from coordinator.runtime.data_dir import DataDirError
from coordinator.runtime.gauges import PoolGauges
from coordinator.storage.sqlite import StorageError
from tinkerpool.credentials import Certificate, Credentials, credentials_file, kept_credentials, write_credentials
from tinkerpool.serving import READY_FILE, Serving
from workers.contract.protocols import Pool, PoolStartError

_log = logging.getLogger(__name__)
DOOR_GRACE_S = 5.0
"""How long running calls may take to end after the coordinator has ended their waits."""
LOCAL_KEY_NOTE = "an administrator's key for programs on the pool's machine; for others it is a member's"
"""What the operator's key may do: for the credentials file, and for people who read it there."""
TOKENIZERS_DIR = "tokenizers"
"""In the data directory: tokenizers of the base models, for clients on this machine."""
_KILLS_WHEN_REPEATED = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_KILLS_WHEN_REPEATED, signal.SIGHUP)
_ENDS_WORKERS = (signal.SIGINT, signal.SIGHUP)
"""SIGTERM, from a service manager, may leave workers on a cluster for the next start."""


class StartError(Exception):
    """The pool cannot start; the message has the reason."""


class Server:
    """One pool with its doors. `run` once."""

    def __init__(self, config: ServerConfig, pool: Pool, say: Callable[[str], None]) -> None:
        """`say`: prints a line for the operator."""
        self._config = config
        self._say = say
        self._coordinator = Coordinator(config.coordinator, pool)
        self._door = GrpcDoor(config.grpc)
        self._http_door = HttpDoor(config.http) if config.http is not None else None
        self._metrics_door = MetricsDoor(config.metrics) if config.metrics is not None else None
        self._key = ""
        self._ready_files: list[Path] = []
        self._sweeping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, then finish the running cycles and return.

        A SIGTERM or SIGINT during the stop kills the process. No worker outlives a stop by SIGINT or SIGHUP. Raises
        StartError if the pool cannot start, and any fatal error of the coordinator.
        """
        stopping = _Stopping()
        with stopping.signals() as take_signals:
            try:
                if not await self._start_before(stopping):
                    return
                take_signals()  # again, because Ray has replaced the handlers
                await _before(stopping.wait(), self._coordinator.failed())
                self._say("Stopping: finishing the running cycles.")
            finally:
                await self._stop(is_final=stopping.signum in _ENDS_WORKERS)
        self._say("Stopped.")

    async def _start_before(self, stopping: _Stopping) -> bool:
        try:
            self._door.bind()
            if self._http_door is not None:
                self._http_door.bind()
            if self._metrics_door is not None:
                self._metrics_door.bind()
            return await _before(stopping.wait(), self._start())
        except (DoorError, DataDirError, PoolStartError) as error:
            raise StartError(str(error)) from error
        except (OSError, StorageError) as error:
            raise StartError(f"the pool cannot start: {error}") from error

    async def _start(self) -> None:
        return_large_blocks()
        await self._coordinator.start()
        await asyncio.to_thread(remove_leftovers, self._config.coordinator.data_dir)
        await self._door.start(self._coordinator)
        if self._http_door is not None:
            await self._http_door.start(self._coordinator, self._config.coordinator.data_dir / TOKENIZERS_DIR)
        if self._metrics_door is not None:
            shown = self._metrics_door.config.num_tenants
            await self._metrics_door.start(PoolGauges(self._coordinator.core, shown))
        serving = Serving(
            url=self.url,
            http_url=self._http_door.url if self._http_door is not None else "",
            pid=os.getpid(),
            data_dir=str(self._config.coordinator.data_dir),
            models=tuple(self._coordinator.core.fleet.models),
            certificate=self._local_certificate(),
        )
        for line in await self._write_key(serving):
            self._say(line)
        for path in (self._config.coordinator.data_dir / READY_FILE, self._config.ready_file):
            if path is not None:
                serving.write(path)
                self._ready_files.append(path)
        key = self._key if self._config.is_key_shown else ""
        for line in serving.sdk_lines(key or f"<the key in {credentials_file()}>"):
            self._say(line)
        if self._metrics_door is not None:
            self._say(f"For Prometheus: {self._metrics_door.url}")
        self._sweeping = asyncio.create_task(self._sweep(Collections()), name="garbage collections")
        self._say(f"tinkerpool is ready at {self.url}")

    async def _sweep(self, collections: Collections) -> None:
        try:
            while True:
                await asyncio.sleep(self._config.coordinator.sweep_interval_s)
                collections.sweep(is_quiet=not len(self._coordinator.core.in_flight))
        finally:
            collections.close()

    async def _stop(self, *, is_final: bool) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._metrics_door is not None:
            await self._metrics_door.stop()
        for path in self._ready_files:
            path.unlink(missing_ok=True)
        await self._door.refuse()
        if self._http_door is not None:
            await self._http_door.refuse()
        await self._coordinator.stop(is_final=is_final)
        stops = [self._door.stop(DOOR_GRACE_S)]
        if self._http_door is not None:
            stops.append(self._http_door.stop(DOOR_GRACE_S))
        await asyncio.gather(*stops)

    @property
    def url(self) -> str:
        """Address of the pool for clients on this machine."""
        return self._config.grpc.url(self._door.port)

    def _local_certificate(self) -> Certificate | None:
        """Return what clients on this machine are to trust; None without TLS."""
        config = self._config.grpc
        if config.tls_cert is None:
            return None
        try:
            name = server_name(config, config.local_host)
        except ssl.SSLError as error:
            name = ""
            _log.warning("clients will not trust %s: %s", config.tls_cert, error)
        return Certificate(path=str(config.tls_cert.absolute()), server_name=name)

    async def _write_key(self, serving: Serving) -> list[str]:
        """Write what clients on this machine need to the credentials file; return lines for the operator."""
        of_this_start: dict[str, Any] = {
            "url": serving.url,
            "data_dir": serving.data_dir,
            "certificate": serving.certificate,
        }
        key = await self._coordinator.first_admin_key()
        if key is None and self._config.is_new_key_wanted:
            key = await self._coordinator.new_admin_key()
        if key is not None:
            self._key = key
            path = write_credentials(Credentials(**of_this_start, api_key=key, note=LOCAL_KEY_NOTE))
            return [
                f"A new key (tenant '{self._tenant_of(key)}') is in {path}, and nowhere else.",
                f"It is {LOCAL_KEY_NOTE}.",
                "Programs on this machine find it there: tinkerpool.ServiceClient().",
                "Other programs send it with every call, in the metadata 'authorization: Bearer <key>'.",
                "More keys: tinkerpool key create TENANT",
            ]
        for found in kept_credentials():
            if self._is_ours(found.api_key):
                self._key = found.api_key
                path = write_credentials(dataclasses.replace(found, **of_this_start))
                return [f"Its key is in {path}. More keys: tinkerpool key create TENANT"]
        return [
            f"{credentials_file()} has no key of this pool. Use an existing one, with --api-key or "
            "TINKERPOOL_API_KEY, or start with --new-key to create another."
        ]

    def _tenant_of(self, key: str) -> str:
        return self._coordinator.authenticator.authenticate(key).tenant_name

    def _is_ours(self, key: str) -> bool:
        try:
            self._coordinator.authenticator.authenticate(key)
        except ServiceError:
            return False
        return True


async def _before(interruption: Awaitable[object], work: Awaitable[None]) -> bool:
    """Run the work until it ends or the interruption does; return whether the work ended. Raises its errors."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(interruption)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for future in (working, waiting):
            future.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


class _Stopping:
    """The first SIGTERM, SIGINT or SIGHUP, which stops the server."""

    def __init__(self) -> None:
        self.signum: signal.Signals | None = None
        self._has_come = asyncio.Event()

    async def wait(self) -> None:
        """Return when a signal has come."""
        await self._has_come.wait()

    @contextlib.contextmanager
    def signals(self) -> Iterator[Callable[[], None]]:
        """Handle signals inside the block: the first one is noted, a SIGTERM or SIGINT after it kills the process.

        A SIGHUP after the first signal does nothing: a terminal that closes may send two. An ignored SIGHUP (nohup)
        stays ignored. Yields a function that installs the handlers again.
        """
        loop = asyncio.get_running_loop()
        previous = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        if previous[signal.SIGHUP] is signal.SIG_IGN:
            del previous[signal.SIGHUP]

        def on_signal(signum: signal.Signals) -> None:
            if self.signum is not None:
                return
            _log.info("%s: stopping", signum.name)
            self.signum = signum
            self._has_come.set()
            release(dict.fromkeys(_KILLS_WHEN_REPEATED, signal.SIG_DFL))

        def take() -> None:
            if self.signum is None:
                for signum in previous:
                    loop.add_signal_handler(signum, on_signal, signum)

        def release(handlers: Mapping[signal.Signals, Any]) -> None:
            for signum, handler in handlers.items():
                loop.remove_signal_handler(signum)
                signal.signal(signum, handler)

        take()
        try:
            yield take
        finally:
            release(previous)
