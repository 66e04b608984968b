"""A revoked key's open calls end at both doors, with real keys and a fake service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from coordinator.base.config import GrpcConfig, HttpConfig
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_app import PREFIX
from coordinator.doors.http_server import HttpDoor
from coordinator.storage.store import Store
from coordinator.tenants.accounts import Accounts
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from scripts.attack.frames import Connection
from tests.support.doors.fake_service import FakeBackend, FakeService
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import operations_pb2_grpc

WAIT_OPERATIONS = "/tinkerpool.v1.OperationService/WaitOperations"


class Waits:
    """A use case that responds once and then waits for ever."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, _principal: Principal, _request: Message) -> AsyncIterator[Message]:
        try:
            yield ops_pb.WaitOperationsResponse(operation=ops_pb.Operation(name="a:1"))
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            self.begun.set()
            self.ended.set()


@pytest.fixture
def keys(store: Store) -> Authenticator:
    return Authenticator(store, Accounts(store, lambda: 1.0), lambda: 1.0)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def door(keys: Authenticator, waits: Waits) -> AsyncIterator[GrpcDoor]:
    door = GrpcDoor(GrpcConfig(port=0))
    door.bind()
    await door.start(FakeBackend(FakeService(wait_operations=waits), keys=keys))
    yield door
    await door.stop(0.1)


async def test_a_revoked_keys_grpc_streams_end_with_unauthenticated_and_another_keys_do_not(
    keys: Authenticator, waits: Waits, door: GrpcDoor
) -> None:
    (key, row), (other, _) = await keys.create_key("alice"), await keys.create_key("alice")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel:
        stub: Any = operations_pb2_grpc.OperationServiceStub(channel)
        request = ops_pb.WaitOperationsRequest(names=["a:1"])
        call, others = (
            stub.WaitOperations(request, metadata=(("authorization", f"Bearer {each}"),)) for each in (key, other)
        )
        assert (await call.read()).operation.name == (await others.read()).operation.name == "a:1"
        await keys.revoke_key(row.key_id)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not others.done()


async def test_a_revoked_keys_stream_ends_although_its_client_reads_nothing(
    keys: Authenticator, waits: Waits, door: GrpcDoor
) -> None:
    key, row = await keys.create_key("alice")
    connection = await Connection.open(f"127.0.0.1:{door.port}", window=0)
    await connection.call(WAIT_OPERATIONS, ops_pb.WaitOperationsRequest(names=["a:1"]).SerializeToString(), key)
    await asyncio.sleep(0.1)  # the response is being written, to a client that takes no byte
    assert not waits.ended.is_set()
    await keys.revoke_key(row.key_id)
    async with asyncio.timeout(60):
        await waits.ended.wait()
    await connection.close()


async def test_a_revoked_keys_long_poll_over_http_ends_with_unauthorized(keys: Authenticator, waits: Waits) -> None:
    key, row = await keys.create_key("alice")
    door = HttpDoor(HttpConfig(port=0, is_remote=True, allow_plaintext=True))
    door.bind()
    await door.start(FakeBackend(FakeService(wait_operations=waits), keys=keys), Path("nowhere"))
    client: Any = httpx.AsyncClient(base_url=door.url + PREFIX, headers={"x-api-key": key}, timeout=60, verify=False)
    async with client:
        polling = asyncio.create_task(client.post("/retrieve_future", json={"request_id": "a:1"}))
        await waits.begun.wait()
        await keys.revoke_key(row.key_id)
        response = await polling
    assert (response.status_code, response.json()["reason"]) == (401, "API_KEY_INVALID")
    assert waits.ended.is_set()
    await door.stop(0)
