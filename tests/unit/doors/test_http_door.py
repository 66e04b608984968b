"""The HTTP door with a fake service: ports, TLS, errors, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from google.protobuf import json_format
from pydantic import BaseModel, ValidationError

from coordinator.base.config import HttpConfig
from coordinator.base.errors import Code, Quota, ServiceError, busy, over_ceiling
from coordinator.doors.door import DoorError
from coordinator.doors.http.calls import read_json
from coordinator.doors.http.downloads import DOWNLOAD_S, Downloads
from coordinator.doors.http_app import HANDLERS, PREFIX
from coordinator.doors.http_server import HttpDoor
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.results import JSON_RESULT_BYTES_MAX, PROTOBUF
from coordinator.doors.tinker.runs import CHECKPOINTS_MAX
from coordinator.tenants.principals import Principal, Role
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService, KeysByName
from tests.support.doors.open_doors import http_door
from tests.support.toy_pool import FakeTime
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import checkpoints_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

Open = Callable[..., Awaitable[tuple[HttpDoor, httpx.AsyncClient]]]


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as things:

        async def open_one(
            service: Any = None, verify: ssl.SSLContext | bool = False, **options: Any
        ) -> tuple[HttpDoor, httpx.AsyncClient]:
            door = await things.enter_async_context(http_door(FakeBackend(service), **options))
            headers = {"x-api-key": KEY}
            client = httpx.AsyncClient(base_url=door.url + PREFIX, headers=headers, verify=verify, timeout=60)
            return door, await things.enter_async_context(client)

        yield open_one


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "later", retry_delay_s=1.5), 429, "1500"),
        (ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "later", retry_delay_s=1.0), 429, "1000"),
        (busy("QUEUE_FULL", Quota("operations", 2, 2), "wait", delay_s=1.5), 429, "1500"),
        (over_ceiling("ADAPTER_QUOTA", Quota("adapters", 2, 2), "delete some"), 403, None),
        (ServiceError(Code.ALREADY_EXISTS, "SEQ_TAKEN", "another"), 400, None),
        (ServiceError(Code.FAILED_PRECONDITION, "SESSION_ENDED", "ended"), 403, None),
        (ServiceError(Code.NOT_FOUND, "NOT_FOUND", "none"), 404, None),
    ],
)
async def test_only_calls_that_may_succeed_later_get_a_status_that_the_sdk_retries(
    opened: Open, error: ServiceError, status: int, header: str | None
) -> None:
    _, client = await opened(FakeService(get_capabilities=error))
    response = await client.get("/get_server_capabilities")
    assert response.status_code == status
    assert response.json()["detail"] == error.message
    assert response.json()["reason"] == error.reason
    assert response.headers.get("retry-after-ms") == header


@pytest.mark.parametrize(
    ("retries", "seconds", "milliseconds"),
    [("0", "2", "1500"), ("1", "3", "3000"), ("5", "48", "48000"), ("9", "60", "60000"), ("-1", "2", "1500")],
)
async def test_the_delay_doubles_with_each_retry_of_a_call(
    opened: Open, retries: str, seconds: str, milliseconds: str
) -> None:
    busy = ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "later", retry_delay_s=1.5)
    _, client = await opened(FakeService(create_session=busy))
    response = await client.post("/create_session", json={}, headers={"x-stainless-retry-count": retries})
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == (seconds, milliseconds)


async def test_a_delay_that_the_sdks_would_ignore_is_sent_as_the_longest_that_they_accept(opened: Open) -> None:
    slow = busy("RATE_LIMITED", Quota("operations", 10, 10), "send less at once", delay_s=1000.0)
    _, client = await opened(FakeService(create_session=slow))
    response = await client.post("/create_session", json={})
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("60", "60000")
    assert "after 1000 s at the earliest" in response.json()["detail"]


async def test_an_internal_error_is_logged_and_not_sent(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    _, client = await opened(FakeService(get_capabilities=RuntimeError("the secret of the house")))
    response = await client.get("/get_server_capabilities")
    assert response.status_code == 500
    assert "secret" not in response.text
    [record] = [record for record in caplog.records if record.exc_info]
    assert response.json()["detail"].split()[2].rstrip(":") in record.getMessage()
    assert response.headers["x-request-id"] in record.getMessage()


@pytest.mark.parametrize(
    ("path", "status"), [("/get_server_capabilities", 200), ("/nowhere", 404), ("/download/x", 403), ("/healthz", 200)]
)
async def test_every_response_has_an_id_which_a_client_may_choose(opened: Open, path: str, status: int) -> None:
    _, client = await opened(FakeService(get_capabilities=sessions_pb2.GetCapabilitiesResponse()))
    for given in ("", "a b", "x" * 65, "<script>"):
        headers = {"x-request-id": given} if given else {}
        responses = [await client.get(path, headers=headers) for _ in range(2)]
        assert [response.status_code for response in responses] == [status] * 2
        ids = {response.headers["x-request-id"] for response in responses}
        assert len(ids - {given}) == 2
        assert all(re.fullmatch("[0-9a-f]{16}", each) for each in ids)
    chosen = await client.get(path, headers={"x-request-id": "trace-1.2:3_4"})
    assert chosen.headers.get_list("x-request-id") == ["trace-1.2:3_4"]


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, *_ in HANDLERS])
async def test_every_path_needs_a_key(opened: Open, method: str, path: str) -> None:
    service = FakeService()
    _, client = await opened(service)
    filled = re.sub("{([a-z]+)(:path)?}", r"\1", path)
    response = await client.request(method, filled, headers={"x-api-key": "tml-wrong"})
    assert response.status_code == 401
    assert service.calls == []
    assert (await client.request(method, filled, json={})).status_code != 401


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (
            schemas.Sample,
            {"prompt": {"chunks": [{"tokens": ["x"] * 100_000}]}, "sampling_params": {"stop": [[]] * 9999}},
        ),
        (schemas.Sample, {"prompt": {"chunks": [{"type": 1}] * 10_000}, "sampling_params": {}}),
        (schemas.Sample, {"prompt": {"chunks": [{}] * 1001}, "sampling_params": {}}),
        (schemas.CreateSession, {"tags": [1] * 100_000, "user_metadata": dict.fromkeys(map(str, range(100_000)), 1)}),
        (schemas.JsonPassInput, {"data": [{"model_input": 1}] * 10_000, "loss_fn": "x" * 100_000}),
        (schemas.JsonDatum, {"model_input": {"chunks": []}, "loss_fn_inputs": dict.fromkeys(["a" * 10**5, "b"], 1)}),
        (schemas.JsonTensor, {"data": ["x"] * 100_000, "dtype": "int64", "shape": [-1] * 100_000}),
    ],
)
def test_the_error_for_a_million_wrong_items_names_the_first(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as counted:
        model.model_validate(body)
    assert counted.value.error_count() < 10
    with pytest.raises(ServiceError, match="body is wrong") as raised:
        read_json(model, json.dumps(body).encode())
    assert len(raised.value.message) < 1000


@pytest.mark.slow
async def test_a_body_that_does_not_arrive_in_time_is_refused(opened: Open) -> None:
    _, client = await opened(body_s=1.0)

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" "
            await asyncio.sleep(0.7)

    response = await client.post("/create_session", content=trickle())
    assert response.status_code == 429
    assert response.json()["reason"] == "BODY_TOO_SLOW"


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTT"])
async def test_an_idle_connection_is_closed(opened: Open, begun: bytes) -> None:
    door, client = await opened(head_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(begun)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    may_go = asyncio.create_task(asyncio.sleep(0.5))
    assert (await client.get("/healthz")).status_code == 200  # a connection that sent a request is kept
    await may_go
    [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
    assert not connection.has_expired()


async def test_a_head_that_begins_during_a_call_has_the_same_deadline(opened: Open) -> None:
    begun, may_go = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> sessions_pb2.GetCapabilitiesResponse:
        begun.set()
        await may_go.wait()
        return sessions_pb2.GetCapabilitiesResponse()

    door, _ = await opened(FakeService(get_capabilities=slow), head_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    head = f"GET {PREFIX}/get_server_capabilities HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n\r\n"
    writer.write(head.encode())
    await begun.wait()
    writer.write(b"GET /healthz HTT")
    await asyncio.sleep(0.3)  # longer than the deadline of a head
    may_go.set()
    async with asyncio.timeout(60):
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(1000):
                received += piece
    assert b"supported_models" in received
    writer.close()


async def test_a_call_that_arrives_while_the_door_closes_does_not_start(opened: Open) -> None:
    service = FakeService()
    door, client = await opened(service)

    async def closing() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(0.2)
        await door.refuse()
        yield b"}"

    assert (await client.post("/create_session", content=closing())).status_code == 429
    assert service.calls == []


async def test_small_responses_are_sent_without_delay(opened: Open) -> None:
    """Without TCP_NODELAY, a delayed acknowledgement holds back a response for 0.04 s."""
    door, client = await opened(FakeService(get_capabilities=sessions_pb2.GetCapabilitiesResponse()))
    await client.get("/get_server_capabilities")
    transports = list(asyncio.get_running_loop()._transports.values())  # type: ignore[attr-defined]  # no public list
    accepted = [each for each in transports if each.get_extra_info("sockname")[1] == door.port]
    options = [each.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in accepted]
    assert options == [1]


async def test_a_port_in_use_is_an_error_that_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DoorError, match="--http-port"):
            HttpDoor(HttpConfig(port=taken.getsockname()[1])).bind()


async def test_the_door_speaks_tls(opened: Open, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(cert))
    door, client = await opened(verify=trusting, tls_cert=cert, tls_key=key)
    assert door.url.startswith("https://")
    assert (await client.get("/healthz")).json() == {"status": "ok"}


async def test_without_a_key_health_tells_a_process_that_must_end_from_a_pool_that_waits() -> None:
    backend = FakeBackend()
    async with http_door(backend) as door, httpx.AsyncClient(base_url=door.url) as client:

        async def asked(path: str) -> tuple[int, dict[str, str]]:
            response = await client.get(path)
            return response.status_code, response.json()

        assert await asked("/healthz") == (200, {"status": "ok"})
        assert await asked("/readyz") == (200, {"status": "ready"})
        backend.why_unready = "a worker starts"
        assert await asked("/healthz") == (200, {"status": "ok"})
        assert await asked("/readyz") == (503, {"status": "not ready", "reason": "a worker starts"})
        backend.has_failed, backend.why_unready = True, "the disk fails"
        assert await asked("/healthz") == (503, {"status": "failed", "reason": "the disk fails"})
        assert await asked(f"{PREFIX}/healthz") == (503, {"status": "failed", "reason": "the disk fails"})
        assert await asked("/readyz") == (503, {"status": "not ready", "reason": "the disk fails"})


async def test_a_malformed_certificate_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    door = HttpDoor(HttpConfig(port=0, is_remote=True, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "cert.pem"))
    door.bind()
    with pytest.raises(DoorError, match="in PEM"):
        await door.start(FakeBackend(), tmp_path)
    await door.stop(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "0 .any free one. to 65535"),
        ({"host": "0.0.0.0", "is_remote": True}, "0.0.0.0 can be reached from other machines: give --tls-cert"),
        ({"tls_cert": Path("c")}, "both a certificate and its key"),
        ({"poll_s": 0}, "poll_s must be above 0"),
        ({"public_url": "pool.example"}, "must be http:// or https:// with a host"),
        ({"public_url": "https://"}, "got 'https://'"),
        ({"public_url": "https://pool.example:70000"}, "may have a port and a path"),
        ({"public_url": "https://pool.example?key=1"}, "got 'https://pool.example.key=1'"),
        ({"public_url": "ftp://pool.example"}, "https://pool.example, got"),
    ],
)
def test_settings_out_of_range_of_the_http_door_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpConfig(**options)


async def test_a_closing_door_finishes_running_calls_and_refuses_new_ones(opened: Open) -> None:
    may_go = asyncio.Event()

    async def slow(*_: Any) -> sessions_pb2.GetCapabilitiesResponse:
        await may_go.wait()
        return sessions_pb2.GetCapabilitiesResponse()

    door, client = await opened(FakeService(get_capabilities=slow))
    assert (await client.get("/healthz")).status_code == 200  # keeps a connection open
    running = asyncio.create_task(client.get("/get_server_capabilities"))
    await asyncio.sleep(0.2)
    await door.refuse()
    refused = await asyncio.gather(client.get("/sessions"), return_exceptions=True)
    assert isinstance(refused[0], httpx.TransportError) or refused[0].status_code == 429  # type: ignore[union-attr]
    may_go.set()
    assert (await running).json() == {"supported_models": []}
    await door.stop(5)
    with pytest.raises(httpx.TransportError):
        await client.get("/healthz")


async def test_a_stop_aborts_calls_after_its_grace_period(opened: Open) -> None:
    async def never(*_: Any) -> ops_pb.GetOperationResponse:
        await asyncio.Event().wait()
        raise AssertionError

    door, client = await opened(FakeService(get_capabilities=never))
    running = asyncio.create_task(client.get("/get_server_capabilities", timeout=60))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(60):
        await door.stop(0.2)
        [dropped] = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(dropped, httpx.TransportError)


async def test_a_timeline_is_downloaded_with_the_role_of_the_call_that_signed_its_url() -> None:
    service: Any = FakeService()
    readers = []

    async def trace(principal: Principal, session_id: str) -> AsyncIterator[bytes]:
        readers.append(principal)
        yield session_id.encode()

    async def holder(key_id: str) -> Principal:  # of a key that is an administrator's on the pool's machine only
        return Principal(tenant_id=key_id, tenant_name=key_id, key_id=key_id, role=Role.ADMIN)

    async def exists(*_: Any) -> None:
        return None

    service.session_trace, service.holder_of_key, service.check_session_trace = trace, holder, exists
    async with http_door(FakeBackend(service, keys=KeysByName())) as door, httpx.AsyncClient(timeout=60) as client:
        response = await client.get(f"{door.url}{PREFIX}/sessions/s1/trace_export", headers={"x-api-key": "alice"})
        assert (response.json()["status"], response.json()["error"]) == ("ready", None)
        assert (await client.get(response.json()["url"])).content == b"s1"
    assert [(each.key_id, each.role) for each in readers] == [("alice", Role.MEMBER)]


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ({}, "http://forged.example/api/v1/download/"),
        ({"public_url": "https://pool.example"}, "https://pool.example/api/v1/download/"),
        ({"public_url": "https://example.com:8443/pool/"}, "https://example.com:8443/pool/api/v1/download/"),
    ],
)
async def test_a_download_url_begins_with_the_public_url_or_with_the_callers_own_host_and_is_never_cached(
    opened: Open, options: dict[str, Any], begin: str
) -> None:
    _, client = await opened(FakeService(get_checkpoint=checkpoints_pb2.GetCheckpointResponse()), **options)
    forged = {"host": "forged.example"}
    files = await client.get("/training_runs/r/checkpoints/weights/a/external_weights_urls", headers=forged)
    archive = await client.get("/training_runs/r/checkpoints/weights/a/archive", headers=forged)
    for url in (*files.json()["urls"].values(), archive.headers["location"]):
        assert url.startswith(begin)
    assert [each.headers["cache-control"] for each in (files, archive)] == ["no-store"] * 2


def metadata_of(index: int) -> dict[str, str]:
    return {"note": f"{index} " + "x" * 10_000}


def checkpoint(index: int) -> checkpoints_pb2.Checkpoint:
    path = f"tinker://s:train:0/weights/c{index}"
    kind = checkpoints_pb2.CHECKPOINT_KIND_TRAINING
    return checkpoints_pb2.Checkpoint(path=path, kind=kind, user_metadata=metadata_of(index))


async def longest_stop(call: Awaitable[httpx.Response]) -> tuple[httpx.Response, float]:
    """Return a call's response, and the longest time in which no other task ran, as a part of the call's time."""
    running, turns = asyncio.ensure_future(call), [time.perf_counter()]
    while not running.done():
        await asyncio.sleep(0.001)
        turns.append(time.perf_counter())
    return running.result(), max(np.diff(turns)) / (turns[-1] - turns[0])


def threads_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str) -> list[threading.Thread]:
    """Return a list that gets the thread of each call of a module's function."""
    made, threads = getattr(module, function), list[threading.Thread]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*args, **kwargs)

    monkeypatch.setattr(module, function, noted)
    return threads


async def test_other_calls_run_while_the_json_of_a_large_rpc_is_parsed_and_made(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, making = (threads_of(monkeypatch, json_format, name) for name in ("Parse", "MessageToJson"))
    metadata = {str(number): "a" for number in range(30_000)}
    listed = sessions_pb2.ListSessionsResponse(sessions=[sessions_pb2.Session(user_metadata=metadata)] * 4)
    door, client = await opened(FakeService(create_session=sessions_pb2.CreateSessionResponse(), list_sessions=listed))
    service = f"{door.url}/tinkerpool.v1.SessionService/"
    body = json.dumps({"userMetadata": metadata}).encode()
    for path, content, threads in (("CreateSession", body, parsing), ("ListSessions", b"{}", making)):
        threads.clear()
        response = await client.post(service + path, content=content)
        assert response.is_success, response.text
        [thread] = threads
        assert thread is not threading.current_thread(), "the event loop's"


@pytest.mark.parametrize("path", ["/checkpoints", "/training_runs/r/checkpoints"])
async def test_a_large_listing_has_every_row_and_other_calls_run_between_its_slices(opened: Open, path: str) -> None:
    found = [checkpoint(index) for index in range(CHECKPOINTS_MAX)]
    listed = checkpoints_pb2.ListCheckpointsResponse(checkpoints=found, total_size=2 * CHECKPOINTS_MAX)
    _, client = await opened(FakeService(list_checkpoints=listed))
    response, stop = await longest_stop(client.get(f"{path}?limit=5000"))
    body = response.json()
    assert [c["user_metadata"] for c in body["checkpoints"]] == [metadata_of(i) for i in range(CHECKPOINTS_MAX)]
    assert body["cursor"] == {"offset": 0, "limit": CHECKPOINTS_MAX, "total_count": 2 * CHECKPOINTS_MAX}
    assert stop < 0.3


def pass_result(num_datums: int, num_tokens: int) -> ops_pb.WaitOperationsResponse:
    """Return the response of a wait for a finished pass."""
    logprobs = [to_tensor(np.full(num_tokens, -1.5, np.float32)) for _ in range(num_datums)]
    result = ops_pb.ForwardBackwardResult(logprobs=logprobs, metrics={"loss:sum": 1.0})
    state = ops_pb.OPERATION_STATE_SUCCEEDED
    operation = ops_pb.Operation(name="s:train:0:1", state=state, forward_backward=result)
    return ops_pb.WaitOperationsResponse(operation=operation)


@pytest.mark.slow
async def test_other_calls_run_while_a_large_result_is_encoded_as_json(opened: Open) -> None:
    _, client = await opened(FakeService(wait_operations=[pass_result(1, JSON_RESULT_BYTES_MAX // 4 - 1000)]))
    response, stop = await longest_stop(client.post("/retrieve_future", json={"request_id": "s:train:0:1"}))
    [output] = response.json()["loss_fn_outputs"]
    assert set(output["logprobs"]["data"]) == {-1.5}
    assert stop < 0.3  # with the fast encoder it is most of the call


async def test_a_result_too_large_for_json_is_announced_and_sent_as_protobuf(opened: Open) -> None:
    _, client = await opened(FakeService(wait_operations=[pass_result(3, JSON_RESULT_BYTES_MAX // 8)]))
    body = {"request_id": "s:train:0:1", "allow_metadata_only": True}
    refused = await client.post("/retrieve_future", json=body)
    assert (refused.status_code, refused.json()["reason"]) == (406, "RESULT_TOO_LARGE")
    accept = {"accept": PROTOBUF}
    announced = (await client.post("/retrieve_future", json=body, headers=accept)).json()
    assert announced["status"] == "complete_metadata"
    response = await client.post("/retrieve_future", json={**body, "allow_metadata_only": False}, headers=accept)
    output = wire.ForwardBackwardOutput.FromString(response.content)
    assert len(output.loss_fn_outputs[0].fields["logprobs"].data) == 3 * JSON_RESULT_BYTES_MAX // 2
    assert announced["response_payload_size"] == pytest.approx(len(response.content), rel=0.01)


def test_a_download_url_is_valid_for_its_file_until_it_expires() -> None:
    time = FakeTime()
    downloads = Downloads(time)
    query = dict(httpx.QueryParams(downloads.query("k", "tinker://p", "7", "a.json", downloads.expiry())))
    assert downloads.check(query, "a.json") == ("k", "tinker://p", "7")
    for file, changed in (
        ("b.json", {}),
        ("a.json", {"key": "u"}),
        ("a.json", {"version": "8"}),
        ("a.json", {"expires": "99999"}),
        ("a.json", {"signature": ""}),
    ):
        with pytest.raises(ServiceError, match="since its last start"):
            downloads.check({**query, **changed}, file)
    with pytest.raises(ServiceError, match="since its last start"):
        Downloads(time).check(query, "a.json")
    time.now += DOWNLOAD_S + 1
    with pytest.raises(ServiceError, match="has expired"):
        downloads.check(query, "a.json")
