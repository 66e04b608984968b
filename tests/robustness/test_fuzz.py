"""The short version of `make fuzz`: generated messages to every RPC and route of a pool without torch and Ray."""

from __future__ import annotations

import asyncio
import random

import grpc
import httpx
import pytest
from pydantic import BaseModel

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http_app import HANDLERS
from coordinator.doors.rpcs import methods
from coordinator.doors.tinker import schemas
from coordinator.doors.web.rpcs import unary
from scripts.reliability.fuzz.bodies import Bodies
from scripts.reliability.fuzz.messages import PLAIN, Messages
from scripts.reliability.fuzz.run import fuzz
from scripts.reliability.fuzz.targets import OTHERS, SHAPES, Fault, HttpMessage, HttpRoute, Rpc, make_targets
from scripts.reliability.fuzz.values import Known, Values
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door
from tests.support.serving import TOY

NUM_MESSAGES = 1
PATH = "POST /api/v1/get_info"


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_no_generated_message_gets_an_internal_error_a_path_or_a_neighbours_bit() -> None:
    report = asyncio.run(fuzz((), NUM_MESSAGES, 0, TOY[:4], lambda _: None))
    assert report.general == []
    assert {each.target: each.faults for each in report.found if each.num_faults} == {}
    assert len(report.found) == len(list(methods())) + len(unary()) + len(HANDLERS) + len(OTHERS)
    assert {sum(each.answers.values()) for each in report.found} == {NUM_MESSAGES}
    assert report.num_runs_of_neighbour > 0
    answers = {answer for each in report.found for answer in each.answers}
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "200", "400", "401", "404"} <= answers


def test_every_route_has_a_shape() -> None:
    assert set(SHAPES) == {path for _, path, *_ in HANDLERS}


def test_a_message_can_be_made_again_from_its_seed() -> None:
    def made() -> list[bytes]:
        values = Values(random.Random("3/a/7"), Known({"adapter": ["s:train:0"]}))
        rpcs = [Messages(values).body(method.input_type) for method in methods()]
        shapes = [shape for shape in SHAPES.values() if shape is not None]
        return rpcs + [Bodies(values).body(shape) for shape in shapes]

    assert made() == made()


@pytest.mark.parametrize("shape", [schemas.OptimStep, schemas.CreateModel, schemas.Sample])
def test_some_bodies_have_their_shape_and_some_have_not(shape: type[BaseModel]) -> None:
    def is_valid(body: bytes) -> bool:
        try:
            shape.model_validate_json(body)
        except ValueError:
            return False
        return True

    values = Values(random.Random(1), Known({"session": ["s"], "adapter": ["s:train:0"], "model": ["toy"]}))
    assert {is_valid(Bodies(values).body(shape)) for _ in range(60)} == {True, False}


def test_plain_messages_keep_their_type() -> None:
    values = Values(random.Random(1), Known())
    for name, make in PLAIN.items():
        assert make(values).DESCRIPTOR.full_name == name


@pytest.mark.parametrize(
    ("status", "headers", "text", "fault"),
    [
        (500, {}, "", "500"),
        (503, {"retry-after": "1"}, "", "503"),
        (429, {}, "", "without a delay"),
        (400, {}, 'File "/tmp/x.py", line 3', "what it should not"),
        (404, {}, "no such thing", ""),
        (429, {"retry-after": "1"}, "", ""),
    ],
)
async def test_answers_that_no_message_may_get_are_faults(
    status: int, headers: dict[str, str], text: str, fault: str
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, headers=headers, text=text))
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        route = HttpRoute("POST", "/api/v1/get_info", schemas.OfModel, client)
        sending = route.send(HttpMessage("/api/v1/get_info", b"{}", {}), "key")
        if fault:
            with pytest.raises(Fault, match=fault):
                await sending
        else:
            assert await sending == str(status)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("any"), "INTERNAL"),
        (ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no /home/pool/file"), "what it should not"),
        (ServiceError(Code.UNAVAILABLE, "BUSY", "later", retry_delay_s=1.0), ""),
    ],
)
async def test_refusals_that_no_message_may_get_are_faults(error: Exception, fault: str) -> None:
    async with (
        grpc_door(FakeBackend(FakeService(get_capabilities=error))) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel,
    ):
        [method] = [each for each in methods() if each.name == "GetCapabilities"]
        sending = Rpc(method, channel).send(b"", KEY)
        if fault:
            with pytest.raises(Fault, match=fault):
                await sending
        else:
            assert await sending == "UNAVAILABLE"


async def test_an_ended_pool_is_a_fault() -> None:
    async with (
        grpc.aio.insecure_channel("127.0.0.1:9") as channel,
        httpx.AsyncClient(base_url="http://127.0.0.1:9") as client,
    ):
        targets = {target.name: target for target in make_targets(channel, client)}
        with pytest.raises(Fault, match="no answer"):
            await targets["SessionService.GetCapabilities"].send(b"", "key")
        with pytest.raises(Fault, match="no answer"):
            await targets[PATH].send(HttpMessage("/api/v1/get_info", b"{}", {}), "key")
