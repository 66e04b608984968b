"""Streams that watch cycles: a tenant with many of them gets each cycle in slices, and delays no other tenant."""

import asyncio
from contextlib import ExitStack

import pytest

from coordinator.cycle import watchers
from coordinator.cycle.watchers import AT_ONCE, Watcher, Watchers
from tinkerpool.v1 import pool_pb2

NUM_MANY = 3 * AT_ONCE + 1


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "PAUSE_S", 0.0)


def number_unread(queues: list[Watcher]) -> int:
    return sum(queue.qsize() for queue in queues)


def read(queue: Watcher) -> list[int | None]:
    """Return the ids of what a stream has not sent."""
    cycles = [queue.get_nowait() for _ in range(queue.qsize())]
    return [None if cycle is None else cycle.cycle_id for cycle in cycles]


async def test_many_streams_of_a_tenant_get_each_cycle_in_slices_between_which_others_run() -> None:
    watching = Watchers()
    with ExitStack() as watches:
        many = [watches.enter_context(watching.watch("mallory")) for _ in range(NUM_MANY)]
        for cycle_id in (1, 2):
            watching.publish(pool_pb2.Cycle(cycle_id=cycle_id))
        before, now = 0, number_unread(many)
        while now < 2 * NUM_MANY:
            assert now - before <= AT_ONCE
            await asyncio.sleep(0)
            before, now = now, number_unread(many)
        assert [read(queue) for queue in many] == [[1, 2]] * NUM_MANY


async def test_a_stream_of_another_tenant_waits_for_none_of_them() -> None:
    watching = Watchers()
    with ExitStack() as watches:
        many = [watches.enter_context(watching.watch("mallory")) for _ in range(NUM_MANY)]
        own = watches.enter_context(watching.watch("alice"))
        for cycle_id in (1, 2, 3):
            watching.publish(pool_pb2.Cycle(cycle_id=cycle_id))
        assert read(own) == [1, 2, 3]
        assert number_unread(many) == AT_ONCE


async def test_cycles_are_dropped_for_streams_that_are_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "UNREAD_MAX", 2)
    watching = Watchers()
    with watching.watch("mallory") as slow:
        for cycle_id in (1, 2, 3):
            watching.publish(pool_pb2.Cycle(cycle_id=cycle_id))
        assert read(slow) == [1, 2]


async def test_a_close_ends_all_streams_also_those_that_wait_for_a_cycle() -> None:
    watching = Watchers()
    with ExitStack() as watches:
        many = [watches.enter_context(watching.watch("mallory")) for _ in range(NUM_MANY)]
        watching.publish(pool_pb2.Cycle(cycle_id=1))
        watching.close()
        await asyncio.sleep(0.01)
        assert {read(queue)[-1] for queue in many} == {None}
        with watching.watch("alice") as late:
            assert read(late) == [None]
