"""Connections that no retry mends fail at once with what to change; certificates of the pool and of the client."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.base.config import DoorConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.doors.tls import server_name
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door, http_door
from tinkerpool import RestClient, SamplingClient, ServiceClient, errors, types
from tinkerpool.client.calls.handshake import mistake_in
from tinkerpool.client.calls.retry import RetryPolicy
from tinkerpool.client.sampling_client import SamplerHandle
from tinkerpool.credentials import Certificate, Credentials, write_credentials
from tinkerpool.v1 import sessions_pb2

SOON_S = RetryPolicy().connect_timeout_s / 3
"""A client that tried again would try for three times as long."""


def backend() -> FakeBackend:
    return FakeBackend(
        FakeService(
            get_capabilities=sessions_pb2.GetCapabilitiesResponse(version="9"),
            sample=ServiceError(Code.NOT_FOUND, "SAMPLER_NOT_FOUND", "no such sampler"),
        )
    )


@asynccontextmanager
async def grpc_port(
    files: tuple[Path, Path] | None = None, port: int = 0, client_ca: Path | None = None
) -> AsyncIterator[int]:
    """Serve gRPC until the block ends; yield the port."""
    cert, key = files or (None, None)
    async with grpc_door(backend(), port=port, tls_cert=cert, tls_key=key, tls_client_ca=client_ca) as door:
        yield door.port


def version_at(url: str, roots: bytes | None = None) -> str:
    """Make one call as a user's program does."""
    with ServiceClient(url, KEY, root_certificates=roots) as service:
        return service.get_server_capabilities().version


Ask = Callable[[], str]


async def refusal(ask: Ask) -> str:
    """Return the message of a call that is refused, soon."""
    begin = time.monotonic()
    with pytest.raises(errors.ConfigurationError) as raised:
        await asyncio.to_thread(ask)
    assert time.monotonic() - begin < SOON_S
    return str(raised.value)


async def test_an_untrusted_certificate_fails_at_once_and_says_how_to_trust_it(tmp_path: Path) -> None:
    async with grpc_port(make_certificate(tmp_path)) as port:
        message = await refusal(lambda: version_at(f"https://127.0.0.1:{port}"))
    assert "is not trusted on this machine: pass" in message
    assert "root_certificates" in message


async def test_a_certificate_for_another_name_fails_at_once(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "DNS:pool.example.org")
    async with grpc_port((cert, key)) as port:
        message = await refusal(lambda: version_at(f"https://127.0.0.1:{port}", cert.read_bytes()))
    assert message.startswith(f"the certificate of https://127.0.0.1:{port} is for other names")


async def test_an_expired_certificate_is_told_from_an_unknown_one() -> None:
    details = (
        "SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired"
    )
    assert "has expired, or is not valid yet" in str(await mistake_in("https://pool", details, is_tls=True))


async def test_http_and_https_are_told_apart_at_once(tmp_path: Path) -> None:
    async with grpc_port(make_certificate(tmp_path)) as port:
        message = await refusal(lambda: version_at(f"http://127.0.0.1:{port}"))
    assert message == f"http://127.0.0.1:{port} speaks TLS: give the address with https://"
    async with grpc_port() as port:
        message = await refusal(lambda: version_at(f"https://127.0.0.1:{port}"))
    assert message == f"https://127.0.0.1:{port} does not speak TLS: give the address with http://"


async def test_a_door_that_requires_a_clients_certificate_says_so_at_once(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    async with grpc_port((cert, key), client_ca=cert) as port:
        message = await refusal(lambda: version_at(f"https://127.0.0.1:{port}", cert.read_bytes()))
    assert "--tls-client-ca takes only clients with a certificate of their own. Pass client_certificate" in message


class Machine:
    """Certificates of a pool and of a client, whose authority the pool's door asks for."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.mine, self.other = (self.made(folder / name) for name in ("pool", "mine", "other"))
        self.roots = self.pool[0].read_bytes()

    @staticmethod
    def made(folder: Path) -> tuple[Path, Path]:
        folder.mkdir()
        return make_certificate(folder)

    def version(self, port: int, *client: Path) -> str:
        """Make one call with a client's certificate and key, or none."""
        cert, key = (*client, None, None)[:2]
        with ServiceClient(
            f"https://127.0.0.1:{port}", KEY, root_certificates=self.roots, client_certificate=cert, client_key=key
        ) as service:
            return service.get_server_capabilities().version


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_a_client_shows_its_certificate_from_arguments_or_the_environment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = machine.mine
    both = cert.with_name("both.pem")
    both.write_text(key.read_text() + cert.read_text())
    async with grpc_port(machine.pool, client_ca=cert) as port:
        assert await asyncio.to_thread(machine.version, port, cert, key) == "9"
        assert await asyncio.to_thread(machine.version, port, both) == "9"
        monkeypatch.setenv("TINKERPOOL_CLIENT_CERTIFICATE", str(cert))
        monkeypatch.setenv("TINKERPOOL_CLIENT_KEY", str(key))
        assert await asyncio.to_thread(machine.version, port) == "9"
        url = f"https://127.0.0.1:{port}"
        assert (
            await RestClient(base_url=url, api_key=KEY, root_certificates=machine.roots).get_server_capabilities()
        ).version == "9"
        monkeypatch.setenv("TINKERPOOL_CLIENT_CERTIFICATE", str(both))
        monkeypatch.delenv("TINKERPOOL_CLIENT_KEY")
        assert await asyncio.to_thread(machine.version, port) == "9"
        assert str(machine.other[0]) in await refusal(lambda: machine.version(port, *machine.other)), "arguments win"


async def test_a_copy_of_a_sampling_client_shows_the_same_certificate(machine: Machine) -> None:
    cert, key = machine.mine
    async with grpc_port(machine.pool, client_ca=cert) as port:
        handle = SamplerHandle(base_url=f"https://127.0.0.1:{port}", sampler_id="s", base_model="toy").encode()
        first = SamplingClient.from_sampler_handle(
            handle, api_key=KEY, root_certificates=machine.roots, client_certificate=cert, client_key=key
        )
        copy = pickle.loads(pickle.dumps(first))
        with pytest.raises(errors.NotFound, match="no such sampler"):
            await copy.sample_async(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))


async def test_a_certificate_that_the_pool_does_not_accept_is_named_at_once(machine: Machine) -> None:
    async with grpc_port(machine.pool, client_ca=machine.mine[0]) as port:
        message = await refusal(lambda: machine.version(port, *machine.other))
    assert f"with the client certificate {machine.other[0]}: is it valid now, and signed by an authority" in message


def encrypt(key: Path) -> None:
    encrypted = key.with_name("encrypted.pem")
    command = ["openssl", "pkcs8", "-topk8", "-passout", "pass:secret", "-in", str(key), "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    encrypted.replace(key)


@pytest.mark.parametrize("fault", ["missing", "nonsense", "of another key", "with a password", "key alone"])
async def test_files_that_are_no_certificate_and_its_key_are_named_at_once(machine: Machine, fault: str) -> None:
    cert, key = machine.mine
    expected = f"cannot use {cert} and {key}: expected the certificate of this client and its private key"
    if fault == "missing":
        key.unlink()
    elif fault == "nonsense":
        cert.write_text("nonsense")
    elif fault == "of another key":
        machine.other[1].replace(key)
    elif fault == "with a password":
        encrypt(key)
    async with grpc_port(machine.pool, client_ca=machine.other[0]) as port:
        if fault == "key alone":
            with pytest.raises(errors.ConfigurationError, match="give its certificate, too"):
                ServiceClient(f"https://127.0.0.1:{port}", KEY, client_key=key)
        else:
            assert expected in await refusal(lambda: machine.version(port, cert, key))


async def test_a_running_client_follows_its_renewed_certificate(machine: Machine) -> None:
    cert, key = machine.mine
    new = [path.read_bytes() for path in machine.other]
    async with grpc_port(machine.pool, client_ca=cert) as port:
        service = ServiceClient(
            f"https://127.0.0.1:{port}",
            KEY,
            root_certificates=machine.roots,
            client_certificate=cert,
            client_key=key,
        )
        assert (await service.get_server_capabilities_async()).version == "9"
    cert.write_bytes(new[0])
    key.write_bytes(new[1])
    async with grpc_port(machine.pool, port, client_ca=machine.other[0]):
        assert (await service.get_server_capabilities_async()).version == "9"
        await asyncio.to_thread(service.close)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_the_http_port_given_to_this_client_is_named_at_once(tmp_path: Path, is_tls: bool) -> None:
    cert, key = make_certificate(tmp_path) if is_tls else (None, None)
    roots = cert.read_bytes() if cert else None
    url = "https://127.0.0.1" if is_tls else "http://127.0.0.1"
    async with http_door(backend(), tmp_path, is_remote=False, tls_cert=cert, tls_key=key) as door:
        message = await refusal(lambda: version_at(f"{url}:{door.port}", roots))
    assert "is an HTTP port, and this client speaks gRPC: give the pool's gRPC port" in message
    assert "7600" in message


@pytest.mark.parametrize("names", ["DNS:localhost,IP:127.0.0.1", "DNS:pool.example.org", "DNS:*.example.org"])
async def test_a_client_trusts_the_certificate_in_the_credentials_file_whatever_its_names(
    tmp_path: Path, names: str
) -> None:
    cert, key = make_certificate(tmp_path, names)
    async with grpc_port((cert, key)) as port:
        url = f"https://127.0.0.1:{port}"
        name = server_name(DoorConfig(tls_cert=cert, tls_key=key), "127.0.0.1")
        write_credentials(Credentials(url=url, api_key=KEY, certificate=Certificate(path=str(cert), server_name=name)))

        def ask() -> str:
            with ServiceClient() as service:
                return service.get_server_capabilities().version

        assert await asyncio.to_thread(ask) == "9"
        cert.unlink()
        assert f"cannot read {cert}" in await refusal(ask)


async def test_a_running_client_follows_a_renewed_certificate_without_an_error(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "new").mkdir()
    new_cert, new_key = make_certificate(tmp_path / "new")
    async with grpc_port((cert, key)) as port:
        url = f"https://127.0.0.1:{port}"
        write_credentials(Credentials(url=url, api_key=KEY, certificate=Certificate(path=str(cert))))
        service = ServiceClient()
        assert (await service.get_server_capabilities_async()).version == "9"
    new_cert.replace(cert)
    new_key.replace(key)
    async with grpc_port((cert, key), port):
        assert (await service.get_server_capabilities_async()).version == "9"
        await asyncio.to_thread(service.close)


async def test_another_certificate_than_the_one_in_the_credentials_file_is_refused_and_both_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    known, _ = make_certificate(tmp_path / "other")
    async with grpc_port(make_certificate(tmp_path)) as port:
        url = f"https://127.0.0.1:{port}"
        write_credentials(Credentials(url=url, api_key=KEY, certificate=Certificate(path=str(known))))
        message = await refusal(lambda: version_at(url))
    assert f"the certificate of {url} is not the one that its pool left" in message
    assert str(known) in message
