"""What keeps a pool from starting and shows at once: `up` and `serve` check it before anything is started.

The parts of a pool refuse the same things when they start, some of them after Ray and the models, and in a process that
logs to a file. Changes nothing.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from coordinator.base.config import GrpcConfig, HttpConfig
from coordinator.cli.options import Settings
from coordinator.doors.door import DoorError, check_free
from coordinator.doors.tls import TlsFiles
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import data_dir_option
from tinkerpool.serving import READY_FILE, Serving, running_pid
from workers.contract.protocols import PoolStartError
from workers.pool.factory import check_host


def check_start(settings: Settings) -> None:
    """Raise CliError for the first thing that keeps a pool with these settings from starting."""
    _check_data_dir(settings.data_dir)
    try:
        _check_door(settings.server.grpc, "--port")
        if settings.server.http is not None:
            _check_door(settings.server.http, "--http-port")
        if (metrics := settings.server.metrics) is not None:
            check_free(metrics.host, metrics.port, "--metrics-port")
        check_host(settings.pool)
        if settings.server.coordinator.otlp_endpoint is not None:
            importlib.import_module("coordinator.observe.traces")
    except (DoorError, PoolStartError, ImportError) as error:
        raise CliError(str(error)) from None


def _check_data_dir(data_dir: Path) -> None:
    if (pid := running_pid(data_dir)) is not None:
        serving = Serving.read(data_dir / READY_FILE)
        where = f"at {serving.url} " if serving else ""
        raise CliError(
            f"a pool is already running {where}on {data_dir} (process {pid}); stop it with "
            f"`tinkerpool down{data_dir_option(data_dir)}`, or give another --data-dir and --port"
        )
    found = next(path for path in (data_dir, *data_dir.parents) if os.path.lexists(path))
    if not os.path.isdir(found):  # noqa: PTH112 (Path.is_dir raises PermissionError)
        raise CliError(f"{found} is a file, and the data directory a folder: give another one with --data-dir")
    if not os.access(found, os.W_OK | os.X_OK):
        raise CliError(
            f"this user may not write to {found}: give a data directory that it owns with --data-dir, or run the "
            "command as the owner"
        )


def _check_door(config: GrpcConfig | HttpConfig, option: str) -> None:
    check_free(config.host, config.port, option)
    if config.is_tls:
        TlsFiles(config)
