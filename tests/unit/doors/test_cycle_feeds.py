"""The stream of cycles for browsers: read once for all that see the same; a slow reader misses events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, cast

import pytest

from coordinator.base.errors import ServiceError, unavailable
from coordinator.doors.web import cycles
from coordinator.doors.web.cycles import CycleFeeds
from coordinator.service import Service
from coordinator.tenants.principals import Principal, Role
from tests.support.waiting import until
from tinkerpool.v1 import pool_pb2 as pb

ADMIN = Principal("t0", "operator", "k0", Role.ADMIN)
ALICE, BOB = Principal("t1", "alice", "k1", Role.MEMBER), Principal("t2", "bob", "k2", Role.MEMBER)


class Watched:
    """A service whose cycles the test commits."""

    def __init__(self) -> None:
        self.watching: list[tuple[str, asyncio.Queue[int | ServiceError]]] = []

    async def watch_cycles(self, principal: Principal, _: Any) -> AsyncGenerator[pb.WatchCyclesResponse, None]:
        queue: asyncio.Queue[int | ServiceError] = asyncio.Queue()
        entry = (principal.tenant_name, queue)
        self.watching.append(entry)
        try:
            while not isinstance(number := await queue.get(), ServiceError):
                yield pb.WatchCyclesResponse(cycle=pb.Cycle(cycle_id=number))
            raise number
        finally:
            self.watching.remove(entry)

    def commit(self, *numbers: int | ServiceError) -> None:
        for _, queue in self.watching:
            for number in numbers:
                queue.put_nowait(number)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "TOGETHER_S", 0.001)


def ids(events: bytes) -> list[int]:
    return [int(json.loads(line[6:])["cycle"]["cycleId"]) for line in events.decode().splitlines() if line]


async def readers(feeds: CycleFeeds, principals: Sequence[Principal]) -> list[AsyncGenerator[bytes, None]]:
    """Begin a stream for each of these callers."""
    streams = [feeds._events(each, nullcontext()) for each in principals]
    assert {(await anext(each))[:1] for each in streams} == {b":"}
    return streams


async def test_callers_with_the_same_sight_share_one_watch_which_ends_with_the_last_of_them() -> None:
    service = Watched()
    feeds = CycleFeeds(cast("Service", service))
    streams = await readers(feeds, [ALICE, ALICE, BOB, ADMIN, ADMIN])
    waiting = [asyncio.ensure_future(anext(each)) for each in streams]
    await until(lambda: len(service.watching) == 3)
    service.commit(1, 2)
    assert [ids(await each) for each in waiting] == [[1, 2]] * 5
    for stream in streams[:4]:
        await stream.aclose()
    await until(lambda: [name for name, _ in service.watching] == ["operator"])
    await streams[4].aclose()
    await until(lambda: service.watching == [])


async def test_a_slow_reader_misses_the_oldest_events_and_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "KEPT", 5)
    service = Watched()
    feeds = CycleFeeds(cast("Service", service))
    slow, quick = await readers(feeds, [ALICE, ALICE])
    async with aclosing(slow), aclosing(quick):
        first = [asyncio.ensure_future(anext(each)) for each in (slow, quick)]
        await until(lambda: len(service.watching) == 1)
        service.commit(0)
        assert [ids(await each) for each in first] == [[0], [0]]
        for number in range(1, 12):
            service.commit(number)
            assert ids(await anext(quick)) == [number]
        assert ids(await anext(slow)) == [7, 8, 9, 10, 11]


async def test_a_refusal_is_the_last_event_of_every_reader() -> None:
    service = Watched()
    feeds = CycleFeeds(cast("Service", service))
    streams = await readers(feeds, [ALICE, ALICE])
    waiting = [asyncio.ensure_future(anext(each)) for each in streams]
    await until(lambda: len(service.watching) == 1)
    service.commit(unavailable("SHUTTING_DOWN", "the pool is shutting down"))
    for each, stream in zip(waiting, streams, strict=True):
        event = (await each).decode()
        assert event.startswith("event: refusal\ndata: ")
        assert "SHUTTING_DOWN" in event
        assert await anext(stream, None) is None
