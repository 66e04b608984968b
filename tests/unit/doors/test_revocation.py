"""A revoked key's open calls end at both doors, with real keys and a fake service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_app import PREFIX
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from scripts.attack.frames import Connection
from tests.support.doors.fake_service import FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door, http_door
from tinkerpool.v1 import admin_pb2, admin_pb2_grpc, checkpoints_pb2, checkpoints_pb2_grpc, operations_pb2_grpc
from tinkerpool.v1 import operations_pb2 as ops_pb

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
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def door(keys: Authenticator, waits: Waits) -> AsyncIterator[GrpcDoor]:
    async with grpc_door(FakeBackend(FakeService(wait_operations=waits), keys=keys)) as door:
        yield door


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


async def test_a_running_call_without_a_stream_ends_with_its_key_but_one_that_ends_its_own_key_responds(
    keys: Authenticator,
) -> None:
    begun = asyncio.Event()

    async def copy(_principal: Principal, _request: Message) -> Message:
        begun.set()
        forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await forever

    async def rotate(principal: Principal, _request: Message) -> Message:
        await keys.revoke_key(principal.key_id)
        await asyncio.sleep(0)  # a cancelled call would end here
        return admin_pb2.RotateApiKeyResponse(key="the successor")

    service = FakeService(copy_checkpoint=copy, rotate_api_key=rotate)
    key, _ = await keys.create_key("alice")
    metadata = (("authorization", f"Bearer {key}"),)
    async with (
        grpc_door(FakeBackend(service, keys=keys)) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel,
    ):
        checkpoints: Any = checkpoints_pb2_grpc.CheckpointServiceStub(channel)
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        copying = checkpoints.CopyCheckpoint(checkpoints_pb2.CopyCheckpointRequest(), metadata=metadata)
        await begun.wait()
        rotated = await admin.RotateApiKey(admin_pb2.RotateApiKeyRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await copying
    assert rotated.key == "the successor"
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_revoked_keys_long_poll_over_http_ends_with_unauthorized(keys: Authenticator, waits: Waits) -> None:
    key, row = await keys.create_key("alice")
    async with (
        http_door(FakeBackend(FakeService(wait_operations=waits), keys=keys)) as door,
        httpx.AsyncClient(base_url=door.url + PREFIX, headers={"x-api-key": key}, timeout=60, verify=False) as client,
    ):
        polling = asyncio.create_task(client.post("/retrieve_future", json={"request_id": "a:1"}))
        await waits.begun.wait()
        await keys.revoke_key(row.key_id)
        response = await polling
        assert (response.status_code, response.json()["reason"]) == (401, "API_KEY_INVALID")
        assert waits.ended.is_set()
