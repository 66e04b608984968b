"""Waits for many operations over few streams: no operation is lost or requested twice without need."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from tinkerpool.client.calls.connection import STREAMS_MAX, Waiter
from tinkerpool.client.calls.retry import Backoff, Retries
from tinkerpool.errors import ApiError, ClientClosed, Code, NotFound, Unauthenticated, api_error
from tinkerpool.v1.operations_pb2 import Operation, WaitOperationsRequest, WaitOperationsResponse

BROKEN = api_error(Code.UNAVAILABLE, "connection lost")


class CountedRetries(Retries):
    """Retries without delays."""

    num_pauses = 0

    async def pause(self, backoff: Backoff, error: ApiError) -> None:
        self.num_pauses += 1
        backoff.next_delay_s(error, has_connected=True)
        await asyncio.sleep(0)


@dataclass
class Service:
    """Streams operations as they finish. `faults` are raised by the next streams, each after one delivery."""

    finished: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    faults: list[Exception] = field(default_factory=list)
    requests: list[list[str]] = field(default_factory=list)
    num_open: int = 0
    num_open_max: int = 0

    def __post_init__(self) -> None:
        self.changed = asyncio.Condition()

    async def finish(self, *names: str) -> None:
        async with self.changed:
            self.finished |= set(names)
            self.changed.notify_all()

    async def stream(self, request: WaitOperationsRequest) -> AsyncGenerator[WaitOperationsResponse, None]:
        missing = list(request.names)
        self.requests.append(list(missing))
        if self.unknown & set(missing):
            raise api_error(Code.NOT_FOUND, "no such operation", reason="NOT_FOUND")
        fault = self.faults.pop(0) if self.faults else None
        self.num_open += 1
        self.num_open_max = max(self.num_open_max, self.num_open)
        try:
            while missing:
                async with self.changed:
                    await self.changed.wait_for(lambda: self.finished & set(missing))
                for name in sorted(self.finished & set(missing)):
                    missing.remove(name)
                    yield WaitOperationsResponse(operation=Operation(name=name))
                    if fault is not None:
                        raise fault
        finally:
            self.num_open -= 1

    def waiter(self) -> Waiter:
        self.retries = CountedRetries()
        return Waiter(self.stream, self.retries)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_waits_begun_in_the_same_turn_of_the_loop_share_one_stream() -> None:
    service = Service()
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait(f"a:{i}")) for i in range(500)]
    await settle()
    assert [len(names) for names in service.requests] == [500]
    await service.finish(*(f"a:{i}" for i in range(500)))
    assert [operation.name for operation in await asyncio.gather(*waits)] == [f"a:{i}" for i in range(500)]


async def test_two_waits_for_one_operation_send_one_request() -> None:
    service = Service()
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait("a:1")) for _ in range(2)]
    await settle()
    await service.finish("a:1")
    await asyncio.gather(*waits)
    assert service.requests == [["a:1"]]


async def test_a_broken_stream_is_reopened_for_the_missing_operations() -> None:
    service = Service(faults=[BROKEN, BROKEN])
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait(f"a:{i}")) for i in range(4)]
    await settle()
    await service.finish("a:0", "a:1", "a:2", "a:3")
    await asyncio.gather(*waits)
    assert service.requests == [["a:0", "a:1", "a:2", "a:3"], ["a:1", "a:2", "a:3"], ["a:2", "a:3"]]
    assert service.retries.num_pauses == 2


async def test_many_streams_opened_one_by_one_are_merged() -> None:
    service = Service()
    waiter = service.waiter()
    names = [f"a:{i}" for i in range(3 * STREAMS_MAX)]
    waits = []
    for name in names:
        waits.append(asyncio.create_task(waiter.wait(name)))
        await settle()
    await asyncio.sleep(0.05)
    assert service.num_open_max <= STREAMS_MAX + 1  # one may still be closing
    await service.finish(*names)
    assert [operation.name for operation in await asyncio.gather(*waits)] == names
    await settle()
    assert service.num_open == 0


async def test_cancelling_one_wait_does_not_cancel_another_for_the_same_operation() -> None:
    service = Service()
    waiter = service.waiter()
    cancelled, kept = (asyncio.create_task(waiter.wait("a:1")) for _ in range(2))
    await settle()
    cancelled.cancel()
    await settle()
    await service.finish("a:1")
    assert (await kept).name == "a:1"


async def test_an_unknown_name_fails_only_its_own_wait() -> None:
    service = Service(unknown={"a:2"})
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait(f"a:{i}")) for i in range(5)]
    await settle()
    await service.finish(*(f"a:{i}" for i in range(5)))
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert isinstance(results.pop(2), NotFound)
    assert [r.name for r in results if isinstance(r, Operation)] == ["a:0", "a:1", "a:3", "a:4"]


async def test_a_final_refusal_fails_the_waits_under_way_and_no_later_ones() -> None:
    service = Service(faults=[api_error(Code.UNAUTHENTICATED, "revoked", reason="API_KEY_INVALID")])
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait(f"a:{i}")) for i in range(3)]
    await settle()
    await service.finish("a:0", "a:1", "a:2")
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(r) for r in results] == [Operation, Unauthenticated, Unauthenticated]
    assert (await waiter.wait("a:1")).name == "a:1"


async def test_closing_ends_every_wait() -> None:
    service = Service()
    waiter = service.waiter()
    waits = [asyncio.create_task(waiter.wait(f"a:{i}")) for i in range(3)]
    await settle()
    await waiter.close()
    assert all(isinstance(r, ClientClosed) for r in await asyncio.gather(*waits, return_exceptions=True))
    assert service.num_open == 0


async def test_a_wait_after_closing_is_refused_also_if_a_name_was_not_sent_yet() -> None:
    service = Service()
    waiter = service.waiter()
    unsent = asyncio.create_task(waiter.wait("a:1"))
    await asyncio.sleep(0)
    await waiter.close()
    later = asyncio.wait_for(waiter.wait("a:2"), 10)
    results = await asyncio.gather(unsent, later, return_exceptions=True)
    assert [type(result) for result in results] == [ClientClosed, ClientClosed]
    assert service.requests == []


@pytest.mark.parametrize("seed", range(20))
async def test_no_operation_is_lost_when_streams_break_at_random(seed: int) -> None:
    rng = random.Random(seed)
    service = Service()
    waiter = service.waiter()
    names = [f"a:{i}" for i in range(200)]
    waits = {}
    unfinished: list[str] = []
    for name in names:
        waits[name] = asyncio.create_task(waiter.wait(name))
        unfinished.append(name)
        if rng.random() < 0.3:
            service.faults.append(BROKEN)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        if rng.random() < 0.5:
            await service.finish(unfinished.pop(rng.randrange(len(unfinished))))
    await service.finish(*unfinished)
    results = await asyncio.wait_for(asyncio.gather(*waits.values()), 60)
    assert [operation.name for operation in results] == names
