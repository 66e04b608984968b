"""What stays in memory of a refused request: nothing, also before the next garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.http_app import PREFIX
from tests.support.doors.fake_service import KEY, FakeBackend, FakeService
from tests.support.doors.open_doors import grpc_door, http_door
from tinkerpool.v1 import sessions_pb2, sessions_pb2_grpc


class Work:
    """What a use case makes of a large request. It keeps the refusal, whose frames have the request and this work."""

    refusal: ServiceError


@pytest.fixture
def works() -> Iterator[list[weakref.ref[Work]]]:
    """Return the list to which a refused call adds its work; collect no garbage meanwhile."""
    gc.collect()
    gc.disable()
    yield []
    gc.enable()


def refusing(works: list[weakref.ref[Work]]) -> FakeBackend:
    async def get_capabilities(*_: Any) -> sessions_pb2.GetCapabilitiesResponse:
        work = Work()
        works.append(weakref.ref(work))
        try:
            raise invalid("tokens: a million too many")
        except ServiceError as error:
            work.refusal = error
        raise work.refusal

    return FakeBackend(FakeService(get_capabilities=get_capabilities))


async def test_a_request_refused_over_grpc_leaves_memory_with_its_call(works: list[weakref.ref[Work]]) -> None:
    async with (
        grpc_door(refusing(works)) as door,
        grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel,
    ):
        stub: Any = sessions_pb2_grpc.SessionServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="too many"):
            await stub.GetCapabilities(
                sessions_pb2.GetCapabilitiesRequest(), metadata=(("authorization", f"Bearer {KEY}"),)
            )
    assert [work() for work in works] == [None]


@pytest.mark.parametrize("path", [f"{PREFIX}/get_server_capabilities", "/v1/models"])
async def test_a_request_refused_over_http_leaves_memory_with_its_call(
    path: str, works: list[weakref.ref[Work]]
) -> None:
    async with (
        http_door(refusing(works)) as door,
        httpx.AsyncClient(base_url=door.url, headers={"x-api-key": KEY}) as client,
    ):
        assert "too many" in (await client.get(path)).text
    assert [work() for work in works] == [None]
