"""TLS at both doors: certificates are read again when their files change, and keys can be bound to a client's."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from coordinator.base.config import GrpcConfig, HttpConfig
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_app import PREFIX
from coordinator.doors.http_server import HttpDoor
from coordinator.tenants.keys import Authenticator
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import FakeBackend, FakeService
from tinkerpool.v1 import sessions_pb2, sessions_pb2_grpc

SERVICE = {
    "get_capabilities": sessions_pb2.GetCapabilitiesResponse(version="9.9"),
    "list_sessions": sessions_pb2.ListSessionsResponse(),
}


class Doors:
    """Both doors with the same certificate files."""

    def __init__(self, folder: Path, keys: Authenticator, **tls: Path) -> None:
        self.keys = keys
        self._folder = folder
        self.grpc = GrpcDoor(GrpcConfig(port=0, **tls))  # type: ignore[arg-type]
        self.http = HttpDoor(HttpConfig(port=0, is_remote=True, **tls))  # type: ignore[arg-type]

    async def start(self) -> None:
        backend = FakeBackend(FakeService(**SERVICE), keys=self.keys)
        self.grpc.bind()
        self.http.bind()
        await self.grpc.start(backend)
        await self.http.start(backend, self._folder)

    async def stop(self) -> None:
        await self.grpc.stop(0.1)
        await self.http.stop(0)

    def certificates(self) -> set[str]:
        """Return the certificates that a new connection gets, in PEM."""
        return {ssl.get_server_certificate(("127.0.0.1", door.port)).strip() for door in (self.grpc, self.http)}

    async def reasons(self, key: str, trusted: Path, client: tuple[Path, Path]) -> tuple[str, str]:
        """Make a call at each door with a client's certificate; return the reasons of refusals."""
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (trusted, client[1], client[0])))
        over_grpc = ""
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.grpc.port}", credentials) as channel:
            stub: Any = sessions_pb2_grpc.SessionServiceStub(channel)
            metadata = (("authorization", f"Bearer {key}"),)
            call = stub.GetCapabilities(sessions_pb2.GetCapabilitiesRequest(), metadata=metadata)
            if await call.code() is not grpc.StatusCode.OK:
                over_grpc = "CERTIFICATE_REQUIRED" if "client certificate" in await call.details() else "other"
        context = ssl.create_default_context(cafile=str(trusted))
        context.load_cert_chain(*client)
        async with httpx.AsyncClient(base_url=self.http.url, verify=context, headers={"x-api-key": key}) as http:
            response = await http.get(f"{PREFIX}/sessions")
        return over_grpc, "" if response.status_code == 200 else response.json()["reason"]


def made(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    return make_certificate(folder)


@pytest.fixture
async def doors(tmp_path: Path, keys: Authenticator) -> AsyncIterator[tuple[Doors, Path, Path]]:
    """Both doors, with the files of their certificate and key."""
    cert, key = made(tmp_path / "used")
    doors = Doors(tmp_path, keys, tls_cert=cert, tls_key=key)
    await doors.start()
    yield doors, cert, key
    await doors.stop()


def replace(new: tuple[Path, Path], cert: Path, key: Path) -> None:
    for source, target in zip(new, (cert, key), strict=True):
        shutil.copy(source, target.with_suffix(".new"))
        target.with_suffix(".new").rename(target)


async def test_new_connections_use_a_replaced_certificate(doors: tuple[Doors, Path, Path], tmp_path: Path) -> None:
    served, cert, key = doors
    first = cert.read_text().strip()
    assert await asyncio.to_thread(served.certificates) == {first}
    async with httpx.AsyncClient(base_url=served.http.url, verify=ssl.create_default_context(cafile=cert)) as client:
        await client.get("/healthz")
        replace(made(tmp_path / "next"), cert, key)
        assert await asyncio.to_thread(served.certificates) == {cert.read_text().strip()} != {first}
        assert (await client.get("/healthz")).status_code == 200, "an open connection goes on"


@pytest.mark.parametrize("fault", ["missing", "nonsense", "of another key"])
async def test_files_that_cannot_be_used_leave_the_earlier_certificate_in_use_and_are_logged_once(
    doors: tuple[Doors, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    served, cert, key = doors
    first, new = cert.read_text().strip(), made(tmp_path / "next")
    if fault == "missing":
        cert.unlink()
    elif fault == "nonsense":
        cert.write_text("nonsense")
    else:
        shutil.copy(new[0], cert)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert await asyncio.to_thread(served.certificates) == {first}
    complaints = [record.getMessage() for record in caplog.records if "earlier certificate" in record.getMessage()]
    assert len(complaints) == 2, "one for each door"
    replace(new, cert, key)
    assert await asyncio.to_thread(served.certificates) == {new[0].read_text().strip()}


async def test_a_key_that_is_bound_to_a_certificate_is_refused_with_another_at_both_doors(
    tmp_path: Path, keys: Authenticator
) -> None:
    cert, server_key = made(tmp_path / "server")
    mine, other = made(tmp_path / "mine"), made(tmp_path / "other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_text(mine[0].read_text() + other[0].read_text())
    doors = Doors(tmp_path, keys, tls_cert=cert, tls_key=server_key, tls_client_ca=authorities)
    await doors.start()
    fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(mine[0].read_text())).hexdigest()
    bound, _ = await keys.create_key("alice", certificate_sha256=fingerprint)
    free, _ = await keys.create_key("alice")
    assert await doors.reasons(bound, cert, mine) == ("", "")
    assert await doors.reasons(bound, cert, other) == ("CERTIFICATE_REQUIRED", "CERTIFICATE_REQUIRED")
    assert await doors.reasons(free, cert, other) == ("", "")
    await doors.stop()
