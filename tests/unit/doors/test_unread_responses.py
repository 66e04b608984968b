"""Clients that request large results and do not read them: what the pool holds for them, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import numpy as np

from coordinator.doors.http_app import PREFIX
from coordinator.limits import results
from coordinator.limits.results import Responses
from scripts.attack.frames import Connection
from tests.support.doors.fake_service import FakeBackend, FakeService, KeysByName
from tests.support.doors.open_doors import grpc_door, http_door
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import operations_pb2, operations_pb2_grpc

GET_OPERATION = "/tinkerpool.v1.OperationService/GetOperation"
NUM_TOKENS = 1 << 20
RESULT_BYTES = 4 * NUM_TOKENS


def result() -> operations_pb2.Operation:
    """Return a finished pass of 4 MiB."""
    logprobs = to_tensor(np.full(NUM_TOKENS, -1.5, np.float32))
    return operations_pb2.Operation(
        name="a:1",
        state=operations_pb2.OPERATION_STATE_SUCCEEDED,
        forward_backward=operations_pb2.ForwardBackwardResult(logprobs=[logprobs]),
    )


def backend() -> FakeBackend:
    """Return a backend with room for one result of each of two tenants."""
    service = FakeService(
        get_operation=operations_pb2.GetOperationResponse(operation=result()),
        wait_operations=[operations_pb2.WaitOperationsResponse(operation=result())] * 2,
    )
    made = FakeBackend(service, keys=KeysByName())
    one = results.COPIES * (RESULT_BYTES + 1000)
    made.responses = Responses(bytes_max=2 * one, of_tenant_max=one)
    return made


async def fetch(address: str, tenant: str) -> None:
    """Fetch the result over gRPC, and read it."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub: Any = operations_pb2_grpc.OperationServiceStub(channel)
        request = operations_pb2.GetOperationRequest(name="a:1")
        await stub.GetOperation(request, metadata=(("authorization", f"Bearer {tenant}"),))


async def until(is_reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_reached():  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)


async def is_refused(address: str, tenant: str) -> bool:
    try:
        await fetch(address, tenant)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return True
        raise
    return False


async def test_an_unread_result_over_grpc_takes_room_until_its_connection_closes() -> None:
    behind = backend()
    async with grpc_door(behind) as door:
        address = f"127.0.0.1:{door.port}"
        attacker = await Connection.open(address, window=0)
        await attacker.call(GET_OPERATION, b"", "mallory")
        await until(lambda: has_begun(behind))
        assert await is_refused(address, "mallory")
        await fetch(address, "alice")
        await fetch(address, "alice")  # what was read is free again
        await attacker.close()
        await until(lambda: is_served(address, "mallory"))


async def has_begun(behind: FakeBackend) -> bool:
    return bool(behind.service.calls)


async def is_served(address: str, tenant: str) -> bool:
    return not await is_refused(address, tenant)


async def test_an_unread_result_over_http_takes_room_until_it_is_read() -> None:
    body, headers = b'{"request_id":"a:1"}', {"accept": "application/x-protobuf"}
    async with (
        http_door(backend()) as door,
        httpx.AsyncClient(base_url=door.url + PREFIX, headers=headers, timeout=60) as client,
    ):
        reader, writer = await asyncio.open_connection(sock=small_socket(door.url))
        with contextlib.closing(writer):
            writer.write(
                f"POST {PREFIX}/retrieve_future HTTP/1.1\r\nhost: x\r\nx-api-key: mallory\r\n"
                f"accept: {headers['accept']}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )

            async def status(tenant: str) -> int:
                return (await client.post("/retrieve_future", content=body, headers={"x-api-key": tenant})).status_code

            async def is_busy() -> bool:
                return await status("mallory") == 429

            await until(is_busy)
            assert await status("alice") == 200
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            await reader.readexactly(RESULT_BYTES)

            async def is_free() -> bool:
                return await status("mallory") == 200

            await until(is_free)


def small_socket(url: str) -> socket.socket:
    """Return a connection whose kernel buffers less than the result."""
    address = httpx.URL(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    connection.connect((address.host, address.port))
    connection.setblocking(False)
    return connection
