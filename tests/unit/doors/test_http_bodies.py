"""Bodies of HTTP requests: their bytes are taken from budgets before they are received and decompressed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zstandard
from starlette.requests import Request

from coordinator.base.config import HttpConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http import bodies
from coordinator.doors.http.bodies import Bodies, UnreadableBody

LIMIT = 100_000
CONFIG = HttpConfig(message_bytes_max=LIMIT, receive_bytes_max=8 * LIMIT)
"""400,000 bytes that are being received, 100,000 of one tenant, and as many decompressed ones."""


class Upload:
    """A request whose body arrives when the test says so."""

    def __init__(self, body: bytes, *, is_chunked: bool = False, encoding: str = "identity") -> None:
        self._body = body
        self.may_arrive = asyncio.Event()
        self.is_read = asyncio.Event()
        headers = [(b"content-encoding", encoding.encode())]
        if not is_chunked:
            headers.append((b"content-length", str(len(body)).encode()))
        self.request = Request({"type": "http", "method": "POST", "headers": headers}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        self.is_read.set()
        await self.may_arrive.wait()
        return {"type": "http.request", "body": self._body, "more_body": False}


class Calls:
    """Calls of tenants, each held until the test ends it."""

    def __init__(self) -> None:
        self._bodies = Bodies(CONFIG)
        self.may_end = asyncio.Event()

    def begin(self, tenant_id: str, upload: Upload) -> asyncio.Task[bytes]:
        return asyncio.create_task(self._call(tenant_id, upload))

    async def _call(self, tenant_id: str, upload: Upload) -> bytes:
        with self._bodies.of_call(tenant_id) as held:
            body = await held.received(upload.request, LIMIT)
            await self.may_end.wait()
        return body


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_that_never_end_take_a_tenants_part_and_others_are_received(is_chunked: bool) -> None:
    calls = Calls()
    uploads = [Upload(bytes(LIMIT), is_chunked=is_chunked) for _ in range(3)]
    tasks = [calls.begin("alice", upload) for upload in uploads]
    others, small = Upload(bytes(LIMIT)), Upload(bytes(100))
    tasks += [calls.begin("bob", others), calls.begin("alice", small)]
    await asyncio.gather(*(each.is_read.wait() for each in (uploads[0], others, small)))
    assert not uploads[1].is_read.is_set()
    assert not uploads[2].is_read.is_set()
    calls.may_end.set()
    for each in (*uploads, others, small):
        each.may_arrive.set()
    assert [len(body) for body in await asyncio.gather(*tasks)] == [LIMIT, LIMIT, LIMIT, LIMIT, 100]


async def test_what_a_body_turns_out_not_to_need_is_given_back_when_it_has_arrived() -> None:
    calls = Calls()
    first, second = Upload(bytes(20_000), is_chunked=True), Upload(bytes(80_000))
    tasks = [calls.begin("alice", upload) for upload in (first, second)]
    await first.is_read.wait()
    assert not second.is_read.is_set()
    first.may_arrive.set()
    await second.is_read.wait()
    for task in tasks:
        task.cancel()


async def test_bytes_are_taken_before_a_body_is_decompressed_and_held_until_its_call_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "ROOM_S", 0.05)
    calls = Calls()
    packed = zstandard.compress(bytes(60_000))

    def upload(tenant_id: str) -> asyncio.Task[bytes]:
        body = Upload(packed, encoding="zstd")
        body.may_arrive.set()
        return calls.begin(tenant_id, body)

    first, second, others = upload("alice"), upload("alice"), upload("bob")
    with pytest.raises(ServiceError) as refused:
        await second
    assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "CALLS_BUSY")
    assert refused.value.retry_delay_s is not None
    calls.may_end.set()
    assert [len(await each) for each in (first, others, upload("alice"))] == [60_000] * 3


async def test_a_frame_that_does_not_say_its_size_takes_the_largest_one() -> None:
    calls = Calls()
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    first, second = (Upload(compressor.compress(bytes(20_000)), encoding="zstd") for _ in range(2))
    for each in (first, second):
        each.may_arrive.set()
    calls.may_end.set()
    assert [len(body) for body in await asyncio.gather(*(calls.begin("alice", each) for each in (first, second)))] == [
        20_000,
        20_000,
    ]


async def test_a_frame_larger_than_it_says_is_refused() -> None:
    packed = bytearray(zstandard.compress(bytes(70_000)))
    size = packed.index((70_000).to_bytes(4, "little"))
    packed[size : size + 4] = (20_000).to_bytes(4, "little")
    upload = Upload(bytes(packed), encoding="zstd")
    upload.may_arrive.set()
    with pytest.raises(UnreadableBody, match="not zstd"):
        await Calls().begin("alice", upload)


async def test_a_call_that_fails_gives_its_bytes_back() -> None:
    calls = Calls()
    for _ in range(5):
        upload = Upload(b"\1" * LIMIT, encoding="zstd")
        upload.may_arrive.set()
        with pytest.raises(UnreadableBody, match="not zstd"):
            await calls.begin("alice", upload)


def test_budgets_in_which_one_body_would_take_everything_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 times"):
        HttpConfig(message_bytes_max=100, receive_bytes_max=399)
