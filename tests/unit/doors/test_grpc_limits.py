"""The gRPC door under calls that anybody can make: health, reflection, connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from coordinator.doors.grpc import public
from coordinator.doors.grpc.server import GrpcDoor
from scripts.attack.frames import PING, Connection, frame
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2, sessions_pb2, sessions_pb2_grpc

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
Start = Callable[..., Awaitable[GrpcDoor]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Return a function that starts a door on a free port."""
    capable = FakeBackend(FakeService(get_capabilities=sessions_pb2.GetCapabilitiesResponse()))
    async with contextlib.AsyncExitStack() as doors:

        async def start_one(backend: FakeBackend = capable, **config: Any) -> GrpcDoor:
            return await doors.enter_async_context(grpc_door(backend, **config))

        yield start_one


def address(door: GrpcDoor) -> str:
    return f"127.0.0.1:{door.port}"


@contextlib.asynccontextmanager
async def health_of(door: GrpcDoor) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address(door)) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def test_a_watcher_that_reads_nothing_delays_neither_a_check_nor_the_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.doors.grpc.server.HEALTH_INTERVAL_S", 0.01)  # not a setting
    is_healthy = True
    door = await start(FakeBackend(health=lambda: is_healthy))
    watcher = await Connection.open(address(door), window=0)
    await watcher.call(WATCH, b"")
    async with asyncio.timeout(60), health_of(door) as health:
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        is_healthy = False
        while (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)
        await door.stop(grace_s=0.2)
    await watcher.close()


async def test_a_client_that_does_not_even_read_its_socket_does_not_delay_the_stop(start: Start) -> None:
    large = operations_pb2.WaitOperationsResponse(operation=operations_pb2.Operation(name="x" * (16 << 20)))
    door = await start(FakeBackend(FakeService(wait_operations=[large] * 8)))
    client = await Connection.open(address(door), window=(1 << 31) - 1, is_read=False)
    await client.call("/tinkerpool.v1.OperationService/WaitOperations", b"", KEY)
    await asyncio.sleep(0.2)  # the sockets' buffers are full
    async with asyncio.timeout(60):
        await door.stop(grace_s=0.2)
    await client.close()


@pytest.mark.slow
async def test_replies_to_pings_that_nobody_reads_do_not_delay_the_stop(start: Start) -> None:
    door = await start(FakeBackend(FakeService()))
    client = await Connection.open(address(door), is_read=False)
    pings = frame(PING, 0, 0, bytes(8)) * 1000
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(2):  # the pool stops reading when its replies fill the sockets' buffers
            while not client.is_closed:
                await client.write(pings)
    async with asyncio.timeout(10):  # grpc would wait 20 s for the replies
        await door.stop(grace_s=0.2)
    await client.close()


async def test_a_client_may_ping_often(start: Start) -> None:
    """With a bound, grpc collects an error for each ping after it, which held its thread for seconds."""
    client = await Connection.open(address(await start()))
    await client.write(frame(PING, 0, 0, bytes(8)) * 1000)
    await client.call(CHECK, b"")
    await until(lambda: client.num_ended == 1 or client.is_closed)
    assert not client.is_closed
    await client.close()


async def test_health_checks_that_never_end_are_not_received_and_others_are_answered(start: Start) -> None:
    """One request is read at a time; the others are answered unread, and the pool takes no more of them."""
    num_bytes = 3 << 20
    door = await start(message_bytes_max=4 << 20)
    attacker = await Connection.open(address(door))
    sending = asyncio.gather(*(attacker.send_most(CHECK, num_bytes) for _ in range(20)))
    async with health_of(door) as health:
        for _ in range(5):
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
    taken = await sending
    assert sum(taken) < num_bytes + 20 * (128 << 10)
    assert attacker.num_ended >= 20
    await attacker.close()


async def test_a_health_check_of_an_unknown_service_or_of_many_bytes_is_refused(start: Start) -> None:
    async with health_of(await start()) as health:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="unknown"))
        with pytest.raises(grpc.aio.AioRpcError) as large:
            await health.Check(health_pb2.HealthCheckRequest(service="x" * public.REQUEST_BYTES_MAX))
        watched = await health.Watch(health_pb2.HealthCheckRequest(service="unknown")).read()
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert large.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert watched.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_watchers_have_a_highest_number_and_a_place_is_free_when_one_leaves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "WATCHERS_MAX", 2)  # not a setting
    async with health_of(await start()) as health:
        running = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watcher in running:
            assert (await watcher.read()).status == SERVING
        await assert_refused(health.Watch(health_pb2.HealthCheckRequest()))
        running[0].cancel()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await health.Watch(health_pb2.HealthCheckRequest()).read()).status == SERVING:
                        break


async def test_a_watcher_of_another_address_takes_the_newest_place_of_the_one_that_has_most(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "WATCHERS_MAX", 4)  # not a setting
    is_healthy = True
    monkeypatch.setattr("coordinator.doors.grpc.server.HEALTH_INTERVAL_S", 0.01)  # not a setting
    door = await start(FakeBackend(health=lambda: is_healthy))
    other = await Connection.open(address(door), source="127.0.0.2")
    async with asyncio.timeout(60), health_of(door) as health:
        running = []
        for _ in range(4):
            running.append(health.Watch(health_pb2.HealthCheckRequest()))
            assert (await running[-1].read()).status == SERVING
        taken = await other.call(WATCH, b"")
        await until(lambda: taken in other.answered)
        await assert_refused(running[3])
        await assert_refused(health.Watch(health_pb2.HealthCheckRequest()))  # 3 of 4: it would take one of its own
        is_healthy = False
        for watcher in running[:3]:
            assert (await watcher.read()).status == NOT_SERVING
        assert other.num_ended == 0
    await other.close()


async def test_watchers_that_read_nothing_give_way_until_both_addresses_have_as_many(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "WATCHERS_MAX", 4)  # not a setting
    door = await start()
    unread = await Connection.open(address(door), window=0, source="127.0.0.2")
    for _ in range(4):
        await unread.call(WATCH, b"")
    async with asyncio.timeout(60), health_of(door) as health:
        await asyncio.sleep(0.2)  # all four have begun
        running = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watcher in running:
            assert (await watcher.read()).status == SERVING
        await assert_refused(health.Watch(health_pb2.HealthCheckRequest()))
    await unread.close()


async def test_connections_above_their_highest_number_are_closed_and_open_ones_keep_working(start: Start) -> None:
    door = await start(connections_max=4)
    async with grpc.aio.insecure_channel(address(door)) as channel:
        stub: Any = sessions_pb2_grpc.SessionServiceStub(channel)

        async def call() -> None:
            request = sessions_pb2.GetCapabilitiesRequest()
            await stub.GetCapabilities(request, metadata=(("authorization", f"Bearer {KEY}"),))

        await call()
        opened = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(20)]
        async with asyncio.timeout(60):
            while sum(reader.at_eof() for reader, _ in opened) < 17:
                await asyncio.gather(*(read_some(reader) for reader, _ in opened))
        assert sum(reader.at_eof() for reader, _ in opened) == 17
        await call()
    for _, writer in opened:
        writer.close()


async def read_some(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(0.1):
            await reader.read(100)


async def assert_refused(watcher: Any) -> None:
    """Check that a watcher ends with a refusal that says when to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await watcher.read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status: Any = rpc_status.from_call(refused.value)  # type: ignore[arg-type]  # typed for synchronous calls
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
