"""A pool in a child process, on free ports, with a data directory that is removed with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from coordinator.cli import process
from scripts.terminal import uninterrupted
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import read_credentials
from tinkerpool.serving import running_pid
from tinkerpool.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOG_LINES = 20


class PoolError(Exception):
    """The pool did not start, or ended by itself; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPool:
    """A running pool."""

    url: str
    """URL of the gRPC door."""
    http_url: str
    """URL of the door for the Tinker SDK; empty if that door is closed."""
    api_key: str
    """An administrator's key."""
    data_dir: Path

    def check(self) -> None:
        """Raise PoolError if the pool has ended: clients would retry forever."""
        if running_pid(self.data_dir) is None:
            log = "".join(process.tail(self.data_dir, LOG_LINES, follow=False))
            raise PoolError(f"the pool has ended; the end of its log:\n{log}")


@contextlib.contextmanager
def embedded_pool(
    serve_arguments: Sequence[str], on_line: Callable[[str], None] = lambda line: None
) -> Iterator[EmbeddedPool]:
    """Run `tinkerpool serve` with these arguments until the block ends. Raises PoolError if it does not start.

    `on_line` is called with each line of its log until the pool is ready.
    """
    with tempfile.TemporaryDirectory(prefix="tinkerpool-") as folder:
        data_dir = Path(folder) / "pool"
        os.environ["TINKERPOOL_HOME"] = folder  # do not overwrite the credentials of this user's other pools
        try:
            serving = process.start(data_dir, ["--port", "0", *serve_arguments], on_line, START_TIMEOUT_S)
            credentials = read_credentials()
            assert credentials is not None
            yield EmbeddedPool(
                url=credentials.url, http_url=serving.http_url, api_key=credentials.api_key, data_dir=data_dir
            )
        except CliError as error:
            raise PoolError(str(error)) from None
        finally:
            with uninterrupted():
                if running_pid(data_dir) is not None:
                    process.stop(data_dir, STOP_TIMEOUT_S)


def create_key(pool: EmbeddedPool, tenant: str) -> str:
    """Create a key for a tenant, through a stub generated from the contract."""
    with grpc.insecure_channel(pool.url.removeprefix("http://")) as channel:
        request = admin_pb2.CreateApiKeyRequest(tenant=tenant)
        metadata = (("authorization", f"Bearer {pool.api_key}"),)
        return str(admin_pb2_grpc.AdminServiceStub(channel).CreateApiKey(request, metadata=metadata).key)
