"""Downloads over HTTP with a fake service: sizes, ranges, places in line, and how a download is cut."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http import downloads
from coordinator.doors.http.downloads import AT_ONCE_MAX, WAITING_MAX
from coordinator.doors.http_app import PREFIX
from coordinator.doors.http_server import HttpDoor
from coordinator.service.checkpoints import ExportedFile
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tests.support.doors.fake_service import FakeBackend, FakeService
from tests.support.doors.open_doors import http_door
from tests.support.logs import records_of
from tests.support.waiting import until
from tinkerpool.v1 import checkpoints_pb2

CONTENT = bytes(range(250))
SHA256 = "5a" * 32
NAME = "adapter_model.safetensors"
ETAG = f'"{SHA256}-{NAME}"'
LARGE_BYTES = 1 << 30


class Files(FakeService):
    """One file, of any checkpoint; `read` yields its bytes."""

    def __init__(self, keys: Authenticator, num_bytes: int = len(CONTENT)) -> None:
        super().__init__(get_checkpoint=checkpoints_pb2.GetCheckpointResponse())
        self.keys = keys
        self.num_bytes = num_bytes
        self.num_read = self.num_running = 0
        self.failing: Exception | None = None
        """Raised by the next piece."""

    async def holder_of_key(self, key_id: str) -> Principal:
        return self.keys.holder(key_id)

    async def file_for_tinker(self, _reader: Principal, _path: str, _seq: int, _file: str) -> ExportedFile:
        return ExportedFile(self.num_bytes, SHA256, self.read)

    async def read(self, start: int, stop: int) -> AsyncGenerator[bytes]:
        self.num_running += 1
        try:
            while start < stop:
                if self.failing is not None:
                    raise self.failing
                piece = CONTENT[start:stop] if self.num_bytes == len(CONTENT) else bytes(min(1 << 16, stop - start))
                self.num_read += len(piece)
                yield piece
                start += len(piece)
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1


OF_THE_DOOR = ("coordinator", "uvicorn")
"""Loggers."""


class Opened:
    """An open door of a service, and a client with a key."""

    def __init__(self, door: HttpDoor, client: httpx.AsyncClient, service: Files, key_id: str) -> None:
        self.door, self.client, self.service, self.key_id = door, client, service, key_id

    async def url(self) -> httpx.URL:
        response = await self.client.get(f"{PREFIX}/training_runs/r/checkpoints/weights/a/external_weights_urls")
        return httpx.URL(response.json()["urls"][NAME])

    async def begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Begin a download, and read no more than its head."""
        url = await self.url()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.door.port, limit=1 << 16)
        writer.write(b"GET " + url.raw_path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        return reader, writer


Open = Callable[..., Any]


@pytest.fixture
async def opened(keys: Authenticator) -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as things:

        async def open_one(num_bytes: int = len(CONTENT), **options: Any) -> Opened:
            service = Files(keys, num_bytes)
            key, row = await keys.create_key("alice")
            door = await things.enter_async_context(http_door(FakeBackend(service, keys=keys), **options))
            client = httpx.AsyncClient(base_url=door.url, headers={"x-api-key": key}, timeout=60, verify=False)
            return Opened(door, await things.enter_async_context(client), service, row.key_id)

        yield open_one


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ({}, 200, range(250)),
        ({"range": "bytes=0-"}, 206, range(250)),
        ({"range": "bytes=100-"}, 206, range(100, 250)),
        ({"range": "bytes=100-199"}, 206, range(100, 200)),
        ({"range": "bytes=100-9999"}, 206, range(100, 250)),
        ({"range": "bytes=249-249"}, 206, range(249, 250)),
        ({"range": "bytes=-10"}, 206, range(240, 250)),
        ({"range": "bytes=-9999"}, 206, range(250)),
        ({"range": "bytes=100-", "if-range": ETAG}, 206, range(100, 250)),
        ({"range": "bytes=100-", "if-range": '"another version"'}, 200, range(250)),
        ({"range": "bytes=100-", "if-range": f"W/{ETAG}"}, 200, range(250)),
        ({"range": "bytes=100-", "if-range": "Mon, 30 Nov 2026 00:00:00 GMT"}, 200, range(250)),
        ({"range": "bytes=250-"}, 416, range(0)),
        ({"range": "bytes=-0"}, 416, range(0)),
        ({"range": "bytes=0-9,20-29"}, 200, range(250)),
        ({"range": "bytes=20-10"}, 200, range(250)),
        ({"range": "bytes=-"}, 200, range(250)),
        ({"range": f"bytes={'9' * 5000}-"}, 200, range(250)),
        ({"range": "lines=0-9"}, 200, range(250)),
    ],
)
async def test_one_range_of_a_download_is_sent_alone_and_what_cannot_be_one_is_sent_whole(
    opened: Open, asked: dict[str, str], status: int, part: range
) -> None:
    here = await opened()
    response = await here.client.get(await here.url(), headers=asked)
    assert response.status_code == status
    if status == 416:
        assert response.headers["content-range"] == "bytes */250"
        assert "has 250 bytes" in response.json()["detail"]
        return
    assert response.content == CONTENT[part.start : part.stop]
    assert response.headers["content-length"] == str(len(part))
    found = response.headers.get("content-range")
    assert found == (f"bytes {part.start}-{part.stop - 1}/250" if status == 206 else None)


async def test_a_download_has_its_size_name_and_version_and_head_reads_nothing_of_it(opened: Open) -> None:
    here = await opened(LARGE_BYTES)
    response = await here.client.head(await here.url(), headers={"range": "bytes=5-"})
    assert (response.status_code, response.content, here.service.num_read) == (200, b"", 0)
    expected = {
        "content-length": str(LARGE_BYTES),
        "accept-ranges": "bytes",
        "etag": ETAG,
        "content-disposition": f'attachment; filename="{NAME}"',
        "cache-control": "private, no-store",
        "content-type": "application/octet-stream",
    }
    assert expected.items() <= dict(response.headers).items()


async def test_a_revoked_keys_running_download_is_cut_at_once_also_if_its_client_reads_nothing(
    opened: Open, keys: Authenticator, caplog: pytest.LogCaptureFixture
) -> None:
    here = await opened(LARGE_BYTES)
    reader, writer = await here.begin()
    await asyncio.sleep(0.2)  # the buffers are full
    before = here.service.num_read
    assert here.service.num_running == 1
    with caplog.at_level(logging.INFO):
        await keys.revoke_key(here.key_id)
        await until(lambda: not here.service.num_running)
    assert here.service.num_read - before <= 1 << 16
    assert len(await reader.read(-1)) < LARGE_BYTES
    writer.close()
    [line] = [each for each in records_of(caplog, *OF_THE_DOOR) if "was cut" in each.message]
    assert (line.levelno, line.exc_info) == (logging.INFO, None)
    assert not [each for each in records_of(caplog, *OF_THE_DOOR) if each.levelno >= logging.ERROR]


async def test_a_download_that_cannot_go_on_is_cut_with_one_line_in_the_log(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here, failing = await opened(LARGE_BYTES), ServiceError(Code.ABORTED, "CHECKPOINT_GONE", "it was deleted")
    url = await here.url()

    async def read() -> None:
        async with here.client.stream("GET", url) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                here.service.failing = failing

    with caplog.at_level(logging.INFO):
        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        lines = records_of(caplog, *OF_THE_DOOR)
    assert [(each.levelno, each.exc_info) for each in lines] == [(logging.INFO, None)]
    assert failing.message in lines[0].message
    here.service.failing = None
    assert (await here.client.head(url)).status_code == 200


async def test_a_file_that_ends_early_is_cut_and_never_ends_cleanly(opened: Open) -> None:
    here = await opened()
    here.service.read = lambda start, stop: Files.read(here.service, start, stop - 1)
    with pytest.raises(httpx.RemoteProtocolError):
        await here.client.get(await here.url())


async def test_a_stop_cuts_downloads_without_an_error_in_the_log(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here = await opened(LARGE_BYTES)
    reader, writer = await here.begin()
    with caplog.at_level(logging.INFO):
        await here.door.stop(0)
    assert not here.service.num_running
    assert len(await reader.read(-1)) < LARGE_BYTES
    writer.close()
    assert [each.message for each in records_of(caplog, *OF_THE_DOOR) if each.levelno >= logging.WARNING] == []
    assert "1 running calls over HTTP are cut by the stop" in caplog.messages


async def test_a_tenants_downloads_above_their_highest_number_wait_for_a_place(opened: Open) -> None:
    here = await opened(LARGE_BYTES)
    begun = [await here.begin() for _ in range(AT_ONCE_MAX)]
    url = await here.url()
    waiting = [asyncio.create_task(here.client.get(url, headers={"range": "bytes=7-16"})) for _ in range(2)]
    await asyncio.sleep(0.2)
    assert not any(each.done() for each in waiting)
    begun[0][1].transport.abort()
    assert [(await each).content for each in waiting] == [bytes(10)] * 2
    for _, writer in begun[1:]:
        writer.transport.abort()


@pytest.mark.slow
async def test_a_download_that_is_not_read_is_aborted(opened: Open) -> None:
    here = await opened(LARGE_BYTES, body_s=1.0)
    _, writer = await here.begin()
    await until(lambda: not here.service.num_running)  # the door has no event for the end of a download
    assert here.service.num_read < LARGE_BYTES // 4, "the socket's buffers are full before"
    writer.close()


@pytest.mark.slow
async def test_the_line_of_waiting_downloads_is_bounded_in_number_and_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.doors.tinker.runs.WAIT_S", 1.0)  # 30 s
    here = await opened(LARGE_BYTES)
    begun = [await here.begin() for _ in range(AT_ONCE_MAX)]
    url = await here.url()
    waiting = [asyncio.create_task(here.client.head(url)) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0.3)
    refused = await here.client.get(url)
    assert not any(each.done() for each in waiting)
    late = await asyncio.gather(*waiting)
    assert {each.status_code for each in (refused, *late)} == {429}
    assert refused.json()["reason"] == "DOWNLOADS_BUSY"
    assert (await here.client.get(url)).json()["detail"].startswith("places of your downloads: 4 in use, at most 4")
    for _, writer in begun:
        writer.transport.abort()
    assert downloads.WAIT_S < 60, "the SDK's command line gives up then"
