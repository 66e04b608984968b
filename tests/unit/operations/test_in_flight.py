"""Waiting for operations: each outcome once, no waiter left behind, nothing kept afterwards."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.operations.in_flight import OperationTable
from coordinator.operations.operation import Kind, Operation
from tinkerpool.v1 import operations_pb2 as ops_pb


def operation(seq: int, request_id: str = "", tenant: str = "t") -> Operation:
    return Operation(tenant, "a", seq, Kind.OPTIM_STEP, b"", b"", request_id, 0, 100)


def finish(table: OperationTable, one: Operation) -> None:
    one.succeed(1)
    table.finished(one)


def stored(name: str) -> ops_pb.Operation:
    return ops_pb.Operation(name=name, state=ops_pb.OPERATION_STATE_SUCCEEDED)


async def names_of(wait: AsyncIterator[ops_pb.Operation]) -> list[str]:
    return [each.name async for each in wait]


async def test_each_is_delivered_once_the_finished_first_then_in_order_of_finishing() -> None:
    table, ones = OperationTable(), [operation(seq) for seq in (1, 2, 3)]
    for one in ones:
        table.add(one)
    waiting = asyncio.create_task(names_of(table.wait(["a:3", "a:1", "a:9", "a:2", "a:1"], stored)))
    await asyncio.sleep(0)
    for one in (ones[1], ones[0], ones[2]):
        finish(table, one)
    assert await waiting == ["a:9", "a:2", "a:1", "a:3"]


async def test_two_waiters_both_get_it_and_nothing_is_kept() -> None:
    table, one = OperationTable(), operation(1, "r")
    table.add(one)
    waits = [asyncio.create_task(names_of(table.wait(["a:1"], stored))) for _ in range(2)]
    await asyncio.sleep(0)
    finish(table, one)
    assert await asyncio.gather(*waits) == [["a:1"], ["a:1"]]
    assert (len(table), table.pending_bytes("t"), table.num_pending("a")) == (0, 0, 0)
    assert [*table._waiters, *table._open_queues, *table._num_by_target, *table._by_request_id] == []


async def test_a_waiter_that_goes_away_leaves_nothing_behind() -> None:
    table = OperationTable()
    table.add(operation(1))
    waiting = asyncio.create_task(names_of(table.wait(["a:1"], stored)))
    await asyncio.sleep(0)
    assert table._waiters
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [*table._waiters, *table._open_queues] == []


async def test_closing_ends_every_wait_also_one_that_begins_later() -> None:
    table = OperationTable()
    table.add(operation(1))
    waiting = asyncio.create_task(names_of(table.wait(["a:1"], stored)))
    await asyncio.sleep(0)
    table.close()
    assert await asyncio.wait_for(waiting, 5) == []
    assert await asyncio.wait_for(names_of(table.wait(["a:1", "a:7"], stored)), 5) == ["a:7"]


async def test_finished_ones_are_read_one_by_one_as_they_are_taken() -> None:
    table, read = OperationTable(), []

    def reading(name: str) -> ops_pb.Operation:
        read.append(name)
        return stored(name)

    wait = table.wait([f"a:{seq}" for seq in range(100)], reading)
    await anext(wait)
    assert read == ["a:0"]
    await wait.aclose()  # type: ignore[attr-defined]


def test_pending_operations_and_bytes_are_counted_by_owner() -> None:
    table = OperationTable()
    ones = [operation(1), operation(2), operation(3, tenant="u")]
    for one in ones:
        table.add(one)
    assert (table.pending_bytes("t"), table.pending_bytes("u"), table.num_pending("a")) == (200, 100, 3)
    table.remove(ones[0])
    table.remove(ones[0])
    assert (table.pending_bytes("t"), table.num_pending("a")) == (100, 2)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_request_id_leads_to_its_live_operation(is_finished: bool) -> None:
    table, one = OperationTable(), operation(1, "r")
    table.add(one)
    assert table.of_request("a", "r") is one
    assert table.of_request("b", "r") is None
    finish(table, one) if is_finished else table.remove(one)
    assert table.of_request("a", "r") is None
