"""The gRPC door over real gRPC with a fake service: keys, refusals, streams, limits, health, reflection."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from coordinator.base.config import GrpcConfig
from coordinator.base.errors import Code, Quota, ServiceError, busy, over_ceiling
from coordinator.doors.door import DoorError
from coordinator.doors.grpc.calls import Calls
from coordinator.doors.grpc.intake import Intake
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.rpcs import SERVICES, use_case_name
from coordinator.service import Service
from coordinator.tenants.principals import Caller, Principal, Role
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door
from tinkerpool.v1 import operations_pb2, operations_pb2_grpc, sessions_pb2, sessions_pb2_grpc

WITH_KEY = (("authorization", f"Bearer {KEY}"),)
CAPABILITIES = sessions_pb2.GetCapabilitiesResponse(version="1")
Start = Callable[..., Awaitable[GrpcDoor]]
Open = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Return a function that starts a door on a free port."""
    async with AsyncExitStack() as doors:

        async def start_one(backend: FakeBackend, **config: Any) -> GrpcDoor:
            return await doors.enter_async_context(grpc_door(backend, **config))

        yield start_one


@pytest.fixture
async def open_door(start: Start) -> AsyncIterator[Open]:
    """Return a function that starts a door and returns a channel to it."""
    async with AsyncExitStack() as channels:

        async def open_one(service: object, **config: Any) -> grpc.aio.Channel:
            door = await start(FakeBackend(service), **config)
            return await channels.enter_async_context(plaintext(door))

        yield open_one


def plaintext(door: GrpcDoor) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{door.port}")


def capabilities(channel: grpc.aio.Channel, metadata: Any = WITH_KEY) -> Any:
    stub = sessions_pb2_grpc.SessionServiceStub(channel)
    return stub.GetCapabilities(sessions_pb2.GetCapabilitiesRequest(), metadata=metadata)


def wait(channel: grpc.aio.Channel) -> Any:
    stub = operations_pb2_grpc.OperationServiceStub(channel)
    return stub.WaitOperations(operations_pb2.WaitOperationsRequest(names=["a:1"]), metadata=WITH_KEY)


async def refusal(call: Awaitable[Any]) -> tuple[grpc.aio.AioRpcError, status_pb2.Status]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value, rpc_status.from_call(caught.value)  # type: ignore[arg-type]  # typed for synchronous calls


def details_of(status: status_pb2.Status) -> list[Any]:
    classes = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.QuotaFailure)
    kinds = {kind.DESCRIPTOR.full_name: kind for kind in classes}
    details: list[Any] = []
    for packed in status.details:
        details.append(kinds[packed.TypeName()]())
        packed.Unpack(details[-1])
    return details


def test_the_service_has_a_use_case_of_the_right_kind_for_every_rpc() -> None:
    for method in (method for descriptor in SERVICES for method in descriptor.methods):
        use_case = getattr(Service, use_case_name(method))
        is_right_kind = inspect.isasyncgenfunction if method.server_streaming else inspect.iscoroutinefunction
        assert is_right_kind(use_case), use_case


def test_a_service_without_a_use_case_for_an_rpc_is_refused_at_the_start() -> None:
    class Empty:
        pass

    with pytest.raises(AttributeError, match="get_capabilities"):
        Calls(FakeBackend(Empty()), Intake(GrpcConfig()), "127.0.0.1")
    names = {use_case_name(method) for service in SERVICES for method in service.methods}
    assert {"create_adapter", "save_weights_for_sampler", "wait_operations", "list_api_keys"} <= names
    assert len(SERVICES) == 12


async def test_a_valid_key_reaches_the_use_case_with_its_principal(open_door: Open) -> None:
    service = FakeService(get_capabilities=CAPABILITIES)
    assert await capabilities(await open_door(service)) == CAPABILITIES
    [(name, principal, _)] = service.calls
    assert (name, principal.tenant_name) == ("get_capabilities", "default")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "API_KEY_MISSING"),
        ((("authorization", KEY),), "API_KEY_MISSING"),
        ((("authorization", f"Basic {KEY}"),), "API_KEY_MISSING"),
        ((("authorization", "Bearer tp_wrong"),), "API_KEY_INVALID"),
    ],
)
async def test_no_use_case_runs_without_a_valid_key(open_door: Open, metadata: Any, reason: str) -> None:
    service = FakeService(get_capabilities=sessions_pb2.GetCapabilitiesResponse())
    error, status = await refusal(capabilities(await open_door(service), metadata))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert details_of(status)[0].reason == reason
    assert service.calls == []


async def test_a_wrong_key_is_refused_before_the_message_is_read(open_door: Open) -> None:
    channel: Any = await open_door(FakeService(), message_bytes_max=1000)
    call = channel.unary_unary("/tinkerpool.v1.TrainingService/ForwardBackward")
    error, _ = await refusal(call(bytes(100_000)))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_refusal_carries_its_details_and_a_delay_exactly_if_a_retry_makes_sense(open_door: Open) -> None:
    full = ServiceError(
        Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full: try again", retry_delay_s=1.5, metadata={"a": "b"}
    )
    error, status = await refusal(capabilities(await open_door(FakeService(get_capabilities=full))))
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full: try again")
    info, retry = details_of(status)
    assert (info.reason, info.domain, dict(info.metadata)) == ("QUEUE_FULL", "tinkerpool", {"a": "b"})
    assert retry.retry_delay.ToMilliseconds() == 1500

    quota = Quota("operations of yours", 7, 8)
    error, status = await refusal(capabilities(await open_door(FakeService(get_capabilities=busy("R", quota, "wait")))))
    info, retry, failure = details_of(status)
    assert "operations of yours: 7 in use, at most 8; wait, then try again: after 1 s" in (error.details() or "")
    assert dict(info.metadata) == {"limit": "operations of yours", "usage": "7", "maximum": "8"}
    assert retry.retry_delay.ToMilliseconds() == 1000
    [violation] = failure.violations
    assert (violation.subject, violation.description) == ("operations of yours", str(quota))

    ceiling = over_ceiling("R", quota, "delete some")
    error, status = await refusal(capabilities(await open_door(FakeService(get_capabilities=ceiling))))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    kinds = [error_details_pb2.ErrorInfo, error_details_pb2.QuotaFailure]
    assert [type(detail) for detail in details_of(status)] == kinds

    final = ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no adapter 'x'")
    error, status = await refusal(capabilities(await open_door(FakeService(get_capabilities=final))))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert [type(detail) for detail in details_of(status)] == [error_details_pb2.ErrorInfo]


@pytest.mark.parametrize("code", list(Code))
async def test_every_code_of_the_service_is_the_same_number_on_the_wire(open_door: Open, code: Code) -> None:
    error, status = await refusal(
        capabilities(await open_door(FakeService(get_capabilities=ServiceError(code, "R", "text"))))
    )
    assert error.code().value[0] == status.code == code


async def test_a_refusal_with_a_very_long_message_reaches_the_client(open_door: Open) -> None:
    long = ServiceError(Code.INVALID_ARGUMENT, "R", "å" * 100_000)
    error, _ = await refusal(capabilities(await open_door(FakeService(get_capabilities=long))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").endswith(" ...")


async def test_an_unexpected_error_reveals_only_an_id(open_door: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "/var/lib/secret-path"
    error, status = await refusal(
        capabilities(await open_door(FakeService(get_capabilities=RuntimeError(f"cannot read {secret}"))))
    )
    assert error.code() is grpc.StatusCode.INTERNAL
    assert secret not in repr(error) + str(status)
    error_id = details_of(status)[0].metadata["error_id"]
    assert error_id in (error.details() or "")
    assert error_id in caplog.text
    assert secret in caplog.text
    assert KEY not in caplog.text


async def test_an_unexpected_error_in_a_stream_or_in_authentication_reveals_only_an_id(
    open_door: Open, start: Start
) -> None:
    done = operations_pb2.WaitOperationsResponse(operation=operations_pb2.Operation(name="a:1"))
    call = wait(await open_door(FakeService(wait_operations=[done, RuntimeError("secret")])))
    assert (await call.read()).operation.name == "a:1"
    error, _ = await refusal(call.read())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(error)

    class BrokenKeys:
        def admit(self, key: str, caller: Caller, least: Role) -> Principal:
            raise RuntimeError("secret")

    async with plaintext(await start(FakeBackend(keys=BrokenKeys()))) as channel:
        error, _ = await refusal(capabilities(channel))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(error)


async def test_a_response_has_the_same_bytes_in_every_process(open_door: Open) -> None:
    """The order of a map's entries differs between processes; on the wire they are sorted."""
    operation = operations_pb2.Operation(name="a:1")
    for index in range(20):
        operation.optim_step.metrics[f"metric-{7 * index % 20}:sum"] = index
    response = operations_pb2.GetOperationResponse(operation=operation)
    channel = await open_door(
        FakeService(
            get_operation=response, wait_operations=[operations_pb2.WaitOperationsResponse(operation=operation)]
        )
    )
    expected = response.SerializeToString(deterministic=True)
    method = "/tinkerpool.v1.OperationService/{}".format
    unary: Any = channel.unary_unary(method("GetOperation"))
    assert await unary(b"", metadata=WITH_KEY) == expected
    stream: Any = channel.unary_stream(method("WaitOperations"))
    assert [response async for response in stream(b"", metadata=WITH_KEY)] == [expected]


async def test_a_client_that_disconnects_ends_its_stream(open_door: Open) -> None:
    ended = asyncio.Event()

    async def for_ever(principal: Principal, request: Message) -> AsyncIterator[Message]:
        try:
            yield operations_pb2.WaitOperationsResponse()
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = wait(await open_door(FakeService(wait_operations=for_ever)))
    await call.read()
    call.cancel()
    async with asyncio.timeout(60):
        await ended.wait()


async def test_a_too_large_message_is_refused_also_if_it_is_compressed(open_door: Open) -> None:
    channel = await open_door(FakeService(), message_bytes_max=10_000)
    stub = sessions_pb2_grpc.SessionServiceStub(channel)
    large = sessions_pb2.CreateSessionRequest(request_id="x" * 1_000_000)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        error, _ = await refusal(stub.CreateSession(large, metadata=WITH_KEY, compression=compression))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")


async def test_a_malformed_request_is_an_invalid_argument(open_door: Open) -> None:
    channel: Any = await open_door(FakeService())
    for path in ("SessionService/CreateSession", "TrainingService/ForwardBackward"):
        error, _ = await refusal(channel.unary_unary(f"/tinkerpool.v1.{path}")(b"\xff\xff\xff", metadata=WITH_KEY))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = channel.unary_stream("/tinkerpool.v1.OperationService/WaitOperations")(b"\xff", metadata=WITH_KEY)
    error, _ = await refusal(call.read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_needs_no_key_and_reports_the_pools_state(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.doors.grpc.server.HEALTH_INTERVAL_S", 0.01)  # not a setting
    healthy = True
    async with plaintext(await start(FakeBackend(health=lambda: healthy))) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "tinkerpool.v1.TrainingService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        healthy = False
        async with asyncio.timeout(60):
            async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break


async def test_reflection_needs_no_key_and_each_method_of_the_services_that_it_lists_needs_one(open_door: Open) -> None:
    service = FakeService()
    channel: Any = await open_door(service)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {listed.name for listed in (await call.read()).list_services_response.service}
    assert names - {health.SERVICE_NAME, reflection.SERVICE_NAME} == {descriptor.full_name for descriptor in SERVICES}
    for method in (method for descriptor in SERVICES for method in descriptor.methods):
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = channel.unary_stream(path)(b"")  # of a unary method it reads the only response
        error, status = await refusal(call.read())
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, path
        assert details_of(status)[0].reason == "API_KEY_MISSING"
    assert service.calls == []


async def test_a_stopping_door_finishes_running_calls_and_accepts_no_new_ones(start: Start) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    async def slow(principal: Principal, request: Message) -> Message:
        started.set()
        await finish.wait()
        return sessions_pb2.GetCapabilitiesResponse(version="finished")

    door = await start(FakeBackend(FakeService(get_capabilities=slow)))
    async with plaintext(door) as channel:
        running = asyncio.ensure_future(capabilities(channel))
        await started.wait()
        stopping = asyncio.create_task(door.stop(grace_s=10))
        await asyncio.sleep(0.1)
        error, _ = await refusal(capabilities(channel))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        finish.set()
        assert (await running).version == "finished"
        async with asyncio.timeout(60):
            await stopping


async def test_watched_health_is_not_serving_before_the_door_closes(start: Start) -> None:
    door = await start(FakeBackend())
    async with plaintext(door) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        await door.refuse()
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_in_use_is_an_error_that_names_the_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DoorError, match=f"port {port} of 127.0.0.1: address already in use"):
            GrpcDoor(GrpcConfig(port=port)).bind()


async def test_two_doors_never_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: the check before would refuse the port, too, except when two doors bind at the same time
    monkeypatch.setattr("coordinator.doors.grpc.server.check_free", lambda *_: None)
    first = GrpcDoor(GrpcConfig(port=0))
    first.bind()
    with pytest.raises(DoorError, match=str(first.port)):
        GrpcDoor(GrpcConfig(port=first.port)).bind()


async def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(DoorError, match=r"cannot listen on port 7600 of 192\.0\.2\.1"):
        GrpcDoor(GrpcConfig(host="192.0.2.1", allow_plaintext=True)).bind()


def encrypted(door: GrpcDoor, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(f"127.0.0.1:{door.port}", credentials)


async def test_tls_serves_clients_that_trust_its_certificate_and_none_in_plaintext(
    start: Start, tmp_path: Path
) -> None:
    cert, key = make_certificate(tmp_path)
    backend = FakeBackend(FakeService(get_capabilities=CAPABILITIES))
    door = await start(backend, tls_cert=cert, tls_key=key)
    async with encrypted(door, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
        assert await capabilities(channel) == CAPABILITIES
    async with plaintext(door) as channel:
        error, _ = await refusal(capabilities(channel))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_refuses_clients_without_a_certificate(start: Start, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    backend = FakeBackend(FakeService(get_capabilities=CAPABILITIES))
    door = await start(backend, tls_cert=cert, tls_key=key, tls_client_ca=cert)
    pem = cert.read_bytes()
    async with encrypted(door, grpc.ssl_channel_credentials(pem, key.read_bytes(), pem)) as channel:
        assert await capabilities(channel) == CAPABILITIES
    async with encrypted(door, grpc.ssl_channel_credentials(pem)) as channel:
        error, _ = await refusal(capabilities(channel))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_unreadable_certificate_is_an_error_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(DoorError, match=r"missing\.pem: no such file"):
        GrpcDoor(GrpcConfig(port=0, tls_cert=missing, tls_key=missing)).bind()
    (tmp_path / "wrong.pem").write_text("no certificate")
    with pytest.raises(DoorError, match="certificate"):
        GrpcDoor(GrpcConfig(port=0, tls_cert=tmp_path / "wrong.pem", tls_key=tmp_path / "wrong.pem")).bind()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "pool.example.org"])
def test_a_public_address_without_tls_is_refused_unless_allowed(host: str) -> None:
    with pytest.raises(ValueError, match="without TLS"):
        GrpcConfig(host=host)
    assert GrpcConfig(host=host, allow_plaintext=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert not GrpcConfig(host=host).is_tls


@pytest.mark.parametrize("wrong", [{"port": 65536}, {"port": -1}, {"streams_max": 0}, {"keepalive_s": float("nan")}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GrpcConfig(**wrong)
