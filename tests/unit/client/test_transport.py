"""The gRPC transport against a real door with a fake service, and the table of methods against the contract."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tinkerpool import ServiceClient, errors
from tinkerpool.client.calls import methods
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport
from tinkerpool.credentials import Credentials, write_credentials
from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    history_pb2,
    imports_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    probation_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
)

MODULES = (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    history_pb2,
    imports_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    probation_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
)
FULL = ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_delay_s=0.05)


@pytest.fixture
def service() -> FakeService:
    return FakeService(get_capabilities=sessions_pb2.GetCapabilitiesResponse(version="9"))


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    with open_door(service) as url:
        yield url


async def call(url: str, key: str = KEY) -> sessions_pb2.GetCapabilitiesResponse:
    transport = GrpcTransport(Endpoint(url, key))
    try:
        return await transport.call(methods.GET_CAPABILITIES, sessions_pb2.GetCapabilitiesRequest(), timeout_s=5)
    finally:
        await transport.close()


def test_every_method_of_the_contract_is_in_the_table_with_its_types() -> None:
    table = {value.path: value for value in vars(methods).values() if isinstance(value, methods.Unary)}
    contract = {
        f"/{service.full_name}/{method.name}": method
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert table.keys() == contract.keys()
    for path, method in contract.items():
        assert table[path].request_type.DESCRIPTOR is method.input_type
        assert table[path].response_type.DESCRIPTOR is method.output_type
        assert isinstance(table[path], methods.ServerStream) is method.server_streaming


async def test_a_call_carries_its_key(url: str) -> None:
    assert (await call(url)).version == "9"
    with pytest.raises(errors.Unauthenticated) as raised:
        await call(url, "wrong")
    assert raised.value.reason == "API_KEY_INVALID"


async def test_a_refusal_keeps_code_reason_message_and_details(url: str, service: FakeService) -> None:
    service.responses["get_capabilities"] = ServiceError(
        Code.ALREADY_EXISTS, "SEQ_TAKEN", "seq 3 is taken", metadata={"expected_seq": "7"}
    )
    with pytest.raises(errors.AlreadyExists) as raised:
        await call(url)
    error = raised.value
    assert (error.reason, error.message, error.metadata["expected_seq"]) == ("SEQ_TAKEN", "seq 3 is taken", "7")
    assert error.retry_delay_s is None
    service.responses["get_capabilities"] = FULL
    with pytest.raises(errors.ResourceExhausted) as full:
        await call(url)
    assert full.value.retry_delay_s == 0.05


async def test_a_missing_pool_is_unavailable_and_the_error_has_its_address_and_the_command_that_starts_it() -> None:
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1: start it with `tinkerpool up`") as raised:
        await call("127.0.0.1:1")
    assert raised.value.reason == ""
    write_credentials(Credentials(url="http://127.0.0.1:1", api_key=KEY, data_dir="/my data"))
    with pytest.raises(errors.Unavailable, match="start it with `tinkerpool up --data-dir '/my data'`"):
        await call("http://127.0.0.1:1")


async def test_a_stream_breaks_with_the_services_error(url: str, service: FakeService) -> None:
    first = operations_pb2.WaitOperationsResponse(operation=operations_pb2.Operation(name="a:1"))
    ending = ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "later", retry_delay_s=1.0)
    service.responses["wait_operations"] = [first, ending]
    transport = GrpcTransport(Endpoint(url, KEY))
    responses = transport.stream(methods.WAIT_OPERATIONS, operations_pb2.WaitOperationsRequest())
    assert await anext(responses) == first
    with pytest.raises(errors.Unavailable, match="later"):
        await anext(responses)
    await transport.close()


def test_closing_ends_running_calls(url: str, service: FakeService) -> None:
    async def never(principal: object, request: object) -> Any:
        await asyncio.sleep(60)

    async def no_cycles(principal: object, request: object) -> Any:
        await asyncio.sleep(60)
        yield pool_pb2.WatchCyclesResponse()

    service.responses |= {"get_usage": never, "watch_cycles": no_cycles}
    client = ServiceClient(url, KEY)
    rest = client.create_rest_client()
    call = rest.get_usage()
    with ThreadPoolExecutor(1) as thread:
        cycles = thread.submit(next, rest.watch_cycles())
        time.sleep(0.2)
        client.close()
        for future in (call.future(), cycles):
            with pytest.raises(errors.ClientClosed):
                future.result(60)
