"""Connections of the HTTP door under attack: honest clients always find a place, and none of them is reset."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.base.errors import ServiceError
from coordinator.doors.http import connections
from coordinator.doors.http.calls import RunningCalls
from coordinator.doors.http.connections import Listener
from coordinator.doors.http.places import Places, Report
from coordinator.doors.http_app import PREFIX
from coordinator.doors.http_server import HttpDoor
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService, KeysByName
from tests.support.doors.open_doors import http_door
from tests.support.logs import logged_by
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sessions_pb2

CAPABILITIES = sessions_pb2.GetCapabilitiesResponse()
CAPABILITIES_PATH = f"{PREFIX}/get_server_capabilities"
NUM_MAX = 8
"""Places of the door in these tests; an attack takes four times as many."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[..., Awaitable[HttpDoor]]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as doors:

        async def open_one(service: Any = None, keys: Any = None, **options: Any) -> HttpDoor:
            backend = FakeBackend(service or FakeService(get_capabilities=CAPABILITIES), keys=keys)
            settings = {"connections_max": NUM_MAX} | options
            return await doors.enter_async_context(http_door(backend, **settings))

        yield open_one


def client_of(door: HttpDoor, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=door.url, headers={"x-api-key": KEY}, timeout=20, **options)


async def hold(door: HttpDoor, begun: bytes = b"") -> Stream:
    """Open a connection that sends `begun` and nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(begun)
    return reader, writer


async def is_closed(stream: Stream) -> bool:
    """Return whether the pool has closed the connection."""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        async with asyncio.timeout(0.05):
            return await stream[0].read(1) == b""
        return True
    return stream[0].at_eof() or stream[0].exception() is not None


@pytest.mark.parametrize("begun", [b"", b"G", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_four_times_as_many_idle_connections_as_places_never_reset_an_honest_client(
    opened: Open, begun: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    door = await opened()
    async with client_of(door) as kept:
        assert (await kept.get(CAPABILITIES_PATH)).status_code == 200
        held: list[Stream] = []
        for _ in range(4):
            held += [await hold(door, begun) for _ in range(NUM_MAX)]
            for stream in held[-NUM_MAX:]:
                stream[1].write(b"a")  # one more byte of a head that never ends
            async with client_of(door) as fresh:
                assert (await fresh.get(CAPABILITIES_PATH)).status_code == 200
            assert (await kept.get(CAPABILITIES_PATH)).status_code == 200
        [connection] = kept._transport._pool.connections  # type: ignore[attr-defined]
        assert connection._connection._request_count == 5  # the same connection all the time
    assert sum([await is_closed(stream) for stream in held]) >= 3 * NUM_MAX
    for _, writer in held:
        writer.close()
    lines = [record for record in caplog.records if "HTTP connections" in record.getMessage()]
    assert len(lines) == 1  # the next line is due after a minute


async def test_tls_handshakes_that_are_never_begun_give_way_and_are_ended_in_time(opened: Open, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    door = await opened(tls_cert=cert, tls_key=key, handshake_s=0.5)
    held = [await hold(door) for _ in range(2 * NUM_MAX)]
    async with client_of(door, verify=ssl.create_default_context(cafile=str(cert))) as client:
        assert (await client.get(CAPABILITIES_PATH)).status_code == 200
        for reader, writer in held:
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
        assert (await client.get(CAPABILITIES_PATH)).status_code == 200


async def test_a_call_above_those_that_its_tenant_may_run_is_refused_with_a_delay(opened: Open) -> None:
    may_go, running = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(*_: Any) -> sessions_pb2.GetCapabilitiesResponse:
        running.release()
        await may_go.wait()
        return CAPABILITIES

    door = await opened(FakeService(get_capabilities=slow))
    async with client_of(door) as client:
        calls = [asyncio.create_task(client.get(CAPABILITIES_PATH)) for _ in range(NUM_MAX * 3 // 4)]
        for _ in calls:
            await running.acquire()
        refused = await client.get(CAPABILITIES_PATH)
        assert (refused.status_code, refused.json()["reason"]) == (429, "CALLS_BUSY")
        assert refused.headers["retry-after"]
        may_go.set()
        assert {(await call).status_code for call in calls} == {200}
        assert (await client.get(CAPABILITIES_PATH)).status_code == 200


async def test_connections_with_running_calls_keep_their_places_and_new_ones_wait_for_a_place(opened: Open) -> None:
    may_go, running = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(*_: Any) -> sessions_pb2.GetCapabilitiesResponse:
        running.release()
        await may_go.wait()
        return CAPABILITIES

    door = await opened(FakeService(get_capabilities=slow), KeysByName())
    async with client_of(door) as client:
        calls = []
        for tenant in (*"aaaaaa", "b", "c"):  # each as many as it may have
            calls.append(asyncio.create_task(client.get(CAPABILITIES_PATH, headers={"x-api-key": tenant})))
            await running.acquire()
        assert len(calls) == NUM_MAX
        async with client_of(door) as another:
            waiting = asyncio.create_task(another.get("/healthz"))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            may_go.set()
            assert [(await call).status_code for call in calls] == [200] * NUM_MAX
            assert (await waiting).status_code == 200


class Exhausted(socket.socket):
    """A listening socket in a process without free file descriptors."""

    num_accepts = 0
    is_exhausted = True

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_accepts += 1
        if self.is_exhausted:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


async def test_without_a_file_descriptor_the_door_pauses_and_then_accepts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "ACCEPT_RETRY_S", 0.2)
    listening, made = Exhausted(), asyncio.Event()
    listening.bind(("127.0.0.1", 0))

    class Accepted(asyncio.Protocol):
        opening: Any = None

        def drop(self) -> None: ...

        def connection_made(self, transport: Any) -> None:
            made.set()
            transport.abort()

    make: Any = Accepted
    listener = Listener(listening, make, Places(NUM_MAX), None, 1.0)
    listener.open()
    _, writer = await asyncio.open_connection(*listening.getsockname())
    await asyncio.sleep(0.5)
    assert 1 <= listening.num_accepts <= 4
    listening.is_exhausted = False
    async with asyncio.timeout(60):
        await made.wait()
    assert len([record for record in caplog.records if "file descriptor" in record.getMessage()]) == 1
    listener.close()
    await listener.wait_closed()
    writer.close()
    listening.close()


async def test_long_polls_leave_room_for_short_calls(opened: Open) -> None:
    async def never(*_: Any) -> AsyncIterator[ops_pb.WaitOperationsResponse]:
        await asyncio.Event().wait()
        yield ops_pb.WaitOperationsResponse()

    service = FakeService(wait_operations=never, queue_reason="", get_capabilities=CAPABILITIES)
    door = await opened(service, poll_s=60)
    async with client_of(door, limits=httpx.Limits(max_connections=None)) as client:
        path = f"{PREFIX}/retrieve_future"
        num_polls = NUM_MAX * 3 // 4 - 1  # one call less than a tenant may have
        polls = [asyncio.create_task(client.post(path, json={"request_id": "a:1"})) for _ in range(num_polls)]
        await until(lambda: len(service.calls) == num_polls)
        async with client_of(door) as another:
            assert (await another.get(CAPABILITIES_PATH)).status_code == 200
        await until(lambda: sum(poll.done() for poll in polls) == num_polls - NUM_MAX // 2)
        early = [await poll for poll in polls if poll.done()]
        assert {(response.status_code, response.json()["type"]) for response in early} == {(408, "try_again")}
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def test_tenants_that_hold_all_that_they_may_leave_places_for_others() -> None:
    running, num_taken = RunningCalls(64), list[int]()
    with contextlib.ExitStack() as held:
        for tenant in ("a", "b", "c"):
            calls = held.enter_context(contextlib.ExitStack())
            num = 0
            with contextlib.suppress(ServiceError):
                while True:
                    calls.enter_context(running.holding(tenant))
                    num += 1
            num_taken.append(num)
        assert num_taken == [48, 12, 3]
        with pytest.raises(ServiceError, match="calls of yours that run: 3 in use, at most 3") as refused:
            held.enter_context(running.holding("c"))
        assert refused.value.retry_delay_s
        held.enter_context(running.holding("d"))
    with contextlib.ExitStack() as held:  # what they held is free again
        for _ in range(48):
            held.enter_context(running.holding("a"))


async def test_refused_connections_are_logged_in_sum(caplog: pytest.LogCaptureFixture) -> None:
    report = Report("of the HTTP connections")
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            report.count("refused")
        assert logged_by("coordinator.doors", caplog) == ["of the HTTP connections: 1 refused"]
        report._write()  # as the timer does after a minute
        assert logged_by("coordinator.doors", caplog)[1:] == ["of the HTTP connections: 999 refused"]
    assert report._timer is not None
    report._timer.cancel()
