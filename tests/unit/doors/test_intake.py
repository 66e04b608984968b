"""The intake of the gRPC door: which requests are received, and how many bytes of them are held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coordinator.base.config import GrpcConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.doors.grpc import intake
from coordinator.doors.grpc.intake import Intake
from scripts.attack.frames import Connection
from tests.support.doors.fake_service import FakeBackend, FakeService, KeysByName
from tests.support.doors.open_doors import grpc_door
from tinkerpool.v1 import operations_pb2, operations_pb2_grpc, training_pb2, training_pb2_grpc

MIB = 1 << 20
FORWARD_BACKWARD = "/tinkerpool.v1.TrainingService/ForwardBackward"
GET_OPERATION = "/tinkerpool.v1.OperationService/GetOperation"


class Door:
    """A door that takes requests of 4 MiB, and 32 MiB of them at once."""

    def __init__(self, service: FakeService, address: str, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.address = address
        self.channel = channel

    async def forward_backward(self, tenant: str, num_bytes: int = 100) -> None:
        stub: Any = training_pb2_grpc.TrainingServiceStub(self.channel)
        request = training_pb2.ForwardBackwardRequest(adapter_id="x" * num_bytes)
        await stub.ForwardBackward(request, metadata=(("authorization", f"Bearer {tenant}"),))

    async def get_operation(self, tenant: str, num_bytes: int = 10) -> None:
        stub: Any = operations_pb2_grpc.OperationServiceStub(self.channel)
        request = operations_pb2.GetOperationRequest(name="x" * num_bytes)
        await stub.GetOperation(request, metadata=(("authorization", f"Bearer {tenant}"),))


@contextlib.asynccontextmanager
async def opened(**config: Any) -> AsyncIterator[Door]:
    service = FakeService(
        forward_backward=training_pb2.ForwardBackwardResponse(), get_operation=operations_pb2.GetOperationResponse()
    )
    backend, sizes = (
        FakeBackend(service, keys=KeysByName()),
        {"message_bytes_max": 4 * MIB, "receive_bytes_max": 32 * MIB},
    )
    async with grpc_door(backend, **sizes, **config) as door:
        address = f"127.0.0.1:{door.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Door(service, address, channel)


@pytest.mark.slow
async def test_requests_that_never_end_take_a_tenants_part_and_others_are_served() -> None:
    async with opened() as door:
        attacker = await Connection.open(door.address)
        taken = await asyncio.gather(*(attacker.send_most(FORWARD_BACKWARD, 3 * MIB, "mallory") for _ in range(20)))
        assert sum(taken) < 2 * 3 * MIB + 18 * 64 * 1024 + MIB, "two are being received; the others wait unread"
        async with asyncio.timeout(60):
            await door.forward_backward("alice", 2 * MIB)
            await door.get_operation("mallory")  # small requests do not wait behind large ones
        await attacker.close()
        async with asyncio.timeout(60):
            await door.forward_backward("mallory", 2 * MIB)  # what the connection held is free again


async def test_a_request_that_does_not_arrive_in_time_is_refused() -> None:
    async with opened(receive_s=0.2) as door:
        attacker = await Connection.open(door.address)
        await attacker.send_most(FORWARD_BACKWARD, MIB, "mallory")
        async with asyncio.timeout(60):
            while not attacker.num_ended:  # noqa: ASYNC110  # the client's count has no event
                await asyncio.sleep(0.01)
        await attacker.close()
    assert door.service.calls == []


@pytest.mark.slow
async def test_small_requests_that_never_end_are_received_one_at_a_time_of_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "SMALL_S", 60.0)  # not a setting
    async with opened() as door:
        attacker = await Connection.open(door.address)
        taken = await asyncio.gather(*(attacker.send_most(GET_OPERATION, 3 * MIB, "mallory") for _ in range(20)))
        assert sum(taken) < 3 * MIB + 19 * 64 * 1024 + MIB
        async with asyncio.timeout(60):
            await door.get_operation("alice")
        await attacker.close()


async def test_a_large_request_of_a_call_without_data_is_refused() -> None:
    async with opened() as door:
        with pytest.raises(grpc.aio.AioRpcError, match="this call takes at most") as refused:
            await door.get_operation("alice", intake.SMALL_BYTES_MAX)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_of_a_received_request_are_held_until_its_call_ends() -> None:
    receiving = Intake(GrpcConfig(message_bytes_max=100, receive_bytes_max=800, receive_s=0.05))

    async def read() -> bytes:
        return bytes(90)

    async with contextlib.AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(receiving.received("alice", read, is_large=True))
        with pytest.raises(ServiceError) as refused:
            await held.enter_async_context(receiving.received("alice", read, is_large=True))
        assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "CALLS_BUSY")
        assert refused.value.retry_delay_s is not None
        await held.enter_async_context(receiving.received("bob", read, is_large=True))
    async with receiving.received("alice", read, is_large=True) as received:
        assert received.num_bytes == len(received.take()) == 90


@pytest.mark.parametrize("receive_bytes_max", [0, 6 * 100 - 1])
def test_a_budget_without_room_for_all_readers_is_refused(receive_bytes_max: int) -> None:
    with pytest.raises(ValueError, match="at least 6 times"):
        GrpcConfig(message_bytes_max=100, receive_bytes_max=receive_bytes_max)
