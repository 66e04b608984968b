"""Requests of many empty elements are counted on a thread and refused undecoded, at their place in the sequence."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
import zstandard

from coordinator.base.config import DATUMS_MAX, ELEMENTS_MAX
from coordinator.base.errors import Code, ServiceError
from coordinator.doors.grpc import calls as grpc_calls
from coordinator.doors.http.bodies import UnreadableBody
from coordinator.doors.http.calls import check_elements, read_json
from coordinator.doors.http_app import PREFIX
from coordinator.doors.openai import schemas as openai_schemas
from coordinator.doors.tinker import schemas, training
from coordinator.doors.tinker.results import PROTOBUF
from coordinator.payloads import elements
from coordinator.tenants.principals import Principal
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door, http_door
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.v1 import training_pb2

EMPTY_DATA = 8_300_000


async def refuse(_principal: Principal, request: Any) -> None:
    """Refuse as the service does: the refusal names the operation that records it."""
    error = ServiceError(Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE", "too large")
    error.operation = f"{request.adapter_id}:{request.seq}"
    raise error


def seq_of(request: Any) -> int:
    seq: int = request.seq
    return seq


def num_data(request: Any) -> int:
    return len(request.data)


@pytest.fixture
def parsed_on_loop(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each message that a door parses: whether it did so on the thread of the event loop."""
    seen: list[bool] = []

    def parse(message_type: Any, body: bytes) -> Any:
        if len(body) > ELEMENTS_MAX:  # the bodies of this module, and no small call that a door makes besides
            seen.append(threading.current_thread() is threading.main_thread())
        return elements.parse(message_type, body)

    monkeypatch.setattr(grpc_calls, "parse", parse)
    monkeypatch.setattr(training, "parse", parse)
    return seen


@pytest.fixture
def service() -> FakeService:
    return FakeService(refuse=refuse)


@pytest.fixture
async def http(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        http_door(FakeBackend(service)) as door,
        httpx.AsyncClient(base_url=door.url + PREFIX, headers={"x-api-key": KEY}, timeout=60) as client,
    ):
        yield client


@pytest.fixture
async def channel(service: FakeService) -> AsyncIterator[Any]:
    async with (
        grpc_door(FakeBackend(service)) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel,
    ):
        yield channel


async def test_millions_of_empty_data_in_a_small_body_are_refused_at_their_seq(
    http: httpx.AsyncClient, service: FakeService, parsed_on_loop: list[bool]
) -> None:
    head = wire.ForwardBackwardRequest(model_id="a", seq_id=7).SerializeToString()
    body = zstandard.compress(head + b"\x1a\x00" * EMPTY_DATA)
    assert len(body) < 4096
    headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
    response = await http.post("/forward_backward", content=body, headers=headers)
    assert response.json() == {"request_id": "a:7"}
    [(name, _, request)] = service.calls
    assert (name, seq_of(request)) == ("refuse", 7)
    assert parsed_on_loop == [False]


async def test_more_data_than_any_pass_may_have_are_not_converted(
    http: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[str] = []
    monkeypatch.setattr(training, "tokens", lambda _, label: converted.append(label))
    monkeypatch.setattr(training, "_datum", lambda label, _: converted.append(label))
    head = wire.ForwardBackwardRequest(model_id="a", seq_id=7, loss_fn="cross_entropy").SerializeToString()
    headers = {"content-type": PROTOBUF}
    response = await http.post("/forward_backward", content=head + b"\x1a\x00" * 100_000, headers=headers)
    datum: dict[str, Any] = {"model_input": {"chunks": []}, "loss_fn_inputs": {}}
    in_json = {"model_id": "a", "seq_id": 8, "forward_input": {"loss_fn": "x", "data": [datum] * (DATUMS_MAX + 1)}}
    as_json = await http.post("/forward", json=in_json)
    assert (response.json(), as_json.json()) == ({"request_id": "a:7"}, {"request_id": "a:8"})
    assert [num_data(request) for _, _, request in service.calls] == [0, 0]
    assert converted == []


@pytest.mark.parametrize("num_empty", [ELEMENTS_MAX, EMPTY_DATA])
async def test_empty_data_over_grpc_are_counted_on_a_thread_and_refused_at_their_seq(
    service: FakeService, channel: Any, parsed_on_loop: list[bool], num_empty: int
) -> None:
    key = (("authorization", f"Bearer {KEY}"),)
    head = training_pb2.TrainStepRequest(adapter_id="a", seq=7).SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/tinkerpool.v1.TrainingService/TrainStep")(
            head + b"\x22\x00" * num_empty, metadata=key
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"more than {ELEMENTS_MAX} fields" in (raised.value.details() or "")
    [(name, _, request)] = service.calls
    assert (name, type(request).__name__, seq_of(request)) == ("refuse", "TrainStepRequest", 7)
    assert parsed_on_loop == [False]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/tinkerpool.v1.OperationService/GetOperation")(b"\x12\x00" * num_empty, metadata=key)
    assert raised.value.code() is not grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("what", "item"),
    [("objects and lists", b"{},"), ("objects and lists", b"[],"), ("strings", b'"",'), ("items", b"1,")],
)
def test_a_json_body_of_many_small_items_is_refused_before_it_is_parsed(what: str, item: bytes) -> None:
    body = b'{"model_id":"a","seq_id":7,"x":[' + item * (8_000_000 // len(item)) + b"1]}"
    for parse in (partial(read_json, schemas.JsonPass), partial(openai_schemas.parse, openai_schemas.Completion)):
        with pytest.raises(UnreadableBody, match=what) as raised:
            parse(body)
        assert len(raised.value.head) < 100_000


def test_the_largest_honest_json_bodies_are_parsed() -> None:
    tensor = {"data": [0.5] * 64, "dtype": "float32", "shape": [64]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [50_000] * 64}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": tensor},
    }
    body = {"model_id": "a", "seq_id": 1, "forward_input": {"loss_fn": "cross_entropy", "data": [datum] * DATUMS_MAX}}
    assert read_json(schemas.JsonPass, json.dumps(body).encode()).seq_id == 1
    check_elements(json.dumps({"prompt": '"Yes," said {she}. ' * 10_000}).encode())
