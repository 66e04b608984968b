"""The cycles as server-sent events: each is a `WatchCyclesResponse` of the contract in JSON.

What a caller may see of a cycle depends on its tenant alone, or on its being an administrator. So each cycle is read
and encoded once for all readers with the same sight, in a feed that lives as long as it has readers; a reader gets what
has come together within `TOGETHER_S`. A slow reader misses events: the feed does not wait for it, and a feed
keeps a bounded number. Does not depend on what a cycle holds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager

from starlette.responses import Response

from coordinator.doors.door import to_refusal
from coordinator.doors.http.calls import Call
from coordinator.doors.http.responses import event_stream
from coordinator.doors.web.rpcs import refusal_body, to_json
from coordinator.service import Service
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import pool_pb2

PATH = "/tinkerpool.v1.PoolService/WatchCycles"
TOGETHER_S = 0.2
"""Seconds for which cycles are gathered before they are sent: a page shows no shorter time."""
KEPT = 500
"""Events that a feed keeps for readers that are behind."""


class _Feed:
    """The events of all readers that see the same of each cycle."""

    def __init__(self) -> None:
        self.num_readers = 0
        self.count = 0
        """Events so far."""
        self._events: deque[bytes] = deque(maxlen=KEPT)
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, responses: AsyncGenerator[pool_pb2.WatchCyclesResponse, None]) -> None:
        """Follow the responses until `stop`."""
        self._task = asyncio.create_task(self._follow(responses))

    def stop(self) -> None:
        """End: there is no reader."""
        assert self._task is not None
        self._task.cancel()

    async def after(self, number: int) -> tuple[bytes, int]:
        """Wait for events behind the first `number`; return those that are kept, joined, and the number of all.

        Raises the error that has ended the feed.
        """
        while self.count == number:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        await asyncio.sleep(TOGETHER_S)
        num_missed = self.count - len(self._events)
        return b"".join(itertools.islice(self._events, max(0, number - num_missed), None)), self.count

    async def _follow(self, responses: AsyncGenerator[pool_pb2.WatchCyclesResponse, None]) -> None:
        try:
            async with aclosing(responses):
                async for response in responses:
                    self._events.append(b"data: " + to_json(response) + b"\n\n")
                    self.count += 1
                    self._notify()
        except Exception as error:  # noqa: BLE001  # it is raised to each reader
            self._error = error
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class CycleFeeds:
    """The feeds that have readers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._feeds: dict[str, _Feed] = {}
        """By tenant; administrators', who all see the same, under the empty name."""

    async def watch(self, call: Call) -> Response:
        """GET of the stream. A refusal, as that of a key that ends meanwhile, is its last event."""
        return event_stream(self._events(call.principal, call.door.backend.authenticator.while_valid(call.principal)))

    async def _events(self, principal: Principal, while_valid: AbstractContextManager[None]) -> AsyncGenerator[bytes]:
        yield b": the next cycles\n\n"  # so that the browser knows at once that the stream is open
        try:
            with while_valid:
                async with self._feed(principal) as feed:
                    count = feed.count
                    while True:
                        events, count = await feed.after(count)
                        yield events
        except Exception as error:  # noqa: BLE001  # the status is already sent
            body = json.dumps(refusal_body(to_refusal(error, PATH)))
            yield f"event: refusal\ndata: {body}\n\n".encode()

    @asynccontextmanager
    async def _feed(self, principal: Principal) -> AsyncIterator[_Feed]:
        """Read the feed of the caller's sight, which begins with its first reader and ends with its last."""
        sight = "" if principal.is_admin else principal.tenant_id
        feed = self._feeds.get(sight)
        if feed is None:
            feed = self._feeds[sight] = _Feed()
            feed.start(self._service.watch_cycles(principal, pool_pb2.WatchCyclesRequest()))
        feed.num_readers += 1
        try:
            yield feed
        finally:
            feed.num_readers -= 1
            if not feed.num_readers:
                feed.stop()
                del self._feeds[sight]
