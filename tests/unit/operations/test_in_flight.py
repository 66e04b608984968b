"""The in-flight table: each wait gets each outcome once, entries are removed afterwards, memory is bounded."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from coordinator.limits.results import UNCOUNTED_BYTES
from coordinator.observe.timeline import WaitClock
from coordinator.operations import in_flight
from coordinator.operations.in_flight import FinishedSamples, InFlightTable, Unfetched
from coordinator.operations.operation import Acceptance, Kind, Operation, Usage
from coordinator.payloads.passes import decoded_pass
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1.history_pb2 import WAIT_REASON_ORDER


def operation(seq: int, request_id: str = "", tenant: str = "t", kind: Kind = Kind.OPTIM_STEP) -> Operation:
    one = Operation(tenant, "a", seq, kind, b"", b"", request_id, 0, 100)
    one.accept()
    return one


def finish(table: InFlightTable, one: Operation, path: str = "") -> None:
    one.succeed(1, Usage()).save_state.path = path
    table.finish(one)


async def names_of(wait: AsyncIterator[ops_pb.Operation | str]) -> list[str]:
    return [each if isinstance(each, str) else each.name async for each in wait]


async def test_each_operation_is_delivered_once_finished_ones_first_then_in_order_of_finishing() -> None:
    table, ones = InFlightTable(FinishedSamples(epoch=1)), [operation(seq) for seq in (1, 2, 3)]
    for one in ones:
        table.add(one)
    waiting = asyncio.create_task(names_of(table.wait(["a:3", "a:1", "a:9", "a:2", "a:1"])))
    await asyncio.sleep(0)
    for one in (ones[1], ones[0], ones[2]):
        finish(table, one)
    assert await waiting == ["a:9", "a:2", "a:1", "a:3"]


async def test_two_waits_both_get_the_outcome_and_the_table_is_empty_afterwards() -> None:
    table, one = InFlightTable(FinishedSamples(epoch=1)), operation(1, "r")
    table.add(one)
    waits = [asyncio.create_task(names_of(table.wait(["a:1"]))) for _ in range(2)]
    await asyncio.sleep(0)
    finish(table, one)
    assert one.is_committed
    assert await asyncio.gather(*waits) == [["a:1"], ["a:1"]]
    assert (len(table), table.bytes_of_tenant("t"), table.num_of_target("a")) == (0, 0, 0)
    # private: memory that is never freed is visible nowhere else
    assert [*table._waiters, *table._open_queues, *table._num_by_target, *table._by_request_id] == []


async def test_a_cancelled_wait_is_removed_from_the_table() -> None:
    table = InFlightTable(FinishedSamples(epoch=1))
    table.add(operation(1))
    waiting = asyncio.create_task(names_of(table.wait(["a:1"])))
    await asyncio.sleep(0)
    assert table._waiters  # private, as above
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [*table._waiters, *table._open_queues] == []


async def test_closing_ends_every_wait_also_one_that_begins_later() -> None:
    table = InFlightTable(FinishedSamples(epoch=1))
    table.add(operation(1))
    waiting = asyncio.create_task(names_of(table.wait(["a:1"])))
    await asyncio.sleep(0)
    table.close()
    assert await asyncio.wait_for(waiting, 60) == []
    assert await asyncio.wait_for(names_of(table.wait(["a:1", "a:7"])), 60) == ["a:7"]


async def test_an_operation_with_a_large_result_is_yielded_as_its_name() -> None:
    table, ones = InFlightTable(FinishedSamples(epoch=1)), [operation(1), operation(2)]
    for one in ones:
        table.add(one)
    wait = table.wait(["a:1", "a:2"])
    first = asyncio.ensure_future(anext(wait))
    await asyncio.sleep(0)
    finish(table, ones[0], "x" * (UNCOUNTED_BYTES + 1))
    finish(table, ones[1])
    assert await first == "a:1"
    assert await anext(wait) is ones[1].outcome


def test_operations_in_flight_and_their_bytes_are_counted_by_owner() -> None:
    table = InFlightTable(FinishedSamples(epoch=1))
    ones = [operation(1), operation(2), operation(3, tenant="u")]
    for one in ones:
        table.add(one)
    assert (table.bytes_of_tenant("t"), table.bytes_of_tenant("u"), table.num_of_target("a")) == (200, 100, 3)
    table.remove(ones[0])
    table.remove(ones[0])
    assert (table.bytes_of_tenant("t"), table.num_of_target("a")) == (100, 2)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_request_id_leads_to_its_operation_in_flight(is_finished: bool) -> None:
    table, one = InFlightTable(FinishedSamples(epoch=1)), operation(1, "r")
    table.add(one)
    assert table.of_request("a", "r") is one
    assert table.of_request("b", "r") is None
    finish(table, one) if is_finished else table.remove(one)
    assert table.of_request("a", "r") is None


def test_decoded_payloads_take_bounded_memory_and_free_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = decoded_pass("cross_entropy", {}, [])
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 2 * decoded.num_bytes)  # the real bound is 256 MiB
    table, ones = InFlightTable(FinishedSamples(epoch=1)), [operation(seq) for seq in range(1, 6)]
    for one in ones:
        table.add(one)
        table.keep_decoded(one, decoded)
    held = [one.decoded is not None for one in ones]
    assert held == [True, True, False, False, False], "the others are decoded when they run"
    finish(table, ones[0])
    table.remove(ones[1])
    for one in ones[2:]:
        table.keep_decoded(one, decoded)
    assert [one.decoded is not None for one in ones[2:]] == [True, True, False]


def test_payloads_beyond_the_memory_for_requests_are_left_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 25)  # the real bound is 256 MiB
    table = InFlightTable(FinishedSamples(epoch=1))
    ones = [
        Operation("t", "a", seq, Kind.FORWARD_BACKWARD, bytes(10), b"", "", 10, 10, acceptance=Acceptance.APPENDING)
        for seq in range(1, 5)
    ]
    for one in ones:
        table.add(one)
    assert [len(one.payload) for one in ones] == [10, 10, 10, 10], "what is not durable is not dropped"
    for one in ones:
        one.accept()
        table.spill(one)
    assert [len(one.payload) for one in ones] == [0, 0, 10, 10]
    assert table.bytes_of_tenant("t") == 40, "a tenant's quota counts what it has queued, wherever that is"
    for one in ones:
        table.remove(one)
    table.add(restored := Operation("t", "a", 5, Kind.FORWARD, bytes(10), b"", "", 10, 10))
    assert restored.payload


def test_memory_for_requests_is_shared_equally_by_the_tenants_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 60)  # the real bound is 256 MiB
    table = InFlightTable(FinishedSamples(epoch=1))

    def accept(tenant: str, seq: int, num_bytes: int = 10) -> Operation:
        one = Operation(tenant, f"a-{tenant}", seq, Kind.FORWARD, bytes(num_bytes), b"", "", 10, num_bytes)
        table.add(one)
        one.accept()
        table.spill(one)
        return one

    def held(ones: list[Operation]) -> list[bool]:
        return [bool(one.payload) for one in ones]

    hog = [accept("hog", seq) for seq in range(1, 10)]
    assert held(hog) == [True] * 6 + [False] * 3, "alone, it may fill the memory"
    small = [accept("small", seq) for seq in range(1, 4)]
    assert held(small) == [True] * 3
    assert held(hog) == [True] * 3 + [False] * 6, "the newest of the largest tenant are left to the log"
    small.append(accept("small", 4))
    assert sum(held(small)) == sum(held(hog)) == 3
    third = [accept("third", seq, 20) for seq in (1, 2)]
    assert [sum(map(len, (one.payload for one in ones))) for ones in (hog, small, third)] == [20, 20, 20]
    for one in (*hog, *small, *third):
        table.remove(one)
    assert table._num_request_bytes == 0  # private: memory that is never freed is visible nowhere else
    assert len(table._request_bytes_by_tenant) == len(table._droppable) == 0


def test_a_tenant_within_its_part_loses_nothing_to_requests_that_are_not_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 60)  # the real bound is 256 MiB
    table = InFlightTable(FinishedSamples(epoch=1))
    small, hogs = (
        Operation(tenant, f"a-{tenant}", 1, Kind.FORWARD, bytes(num_bytes), b"", "", 10, num_bytes)
        for tenant, num_bytes in (("small", 20), ("hog", 100))
    )
    table.add(hogs)
    table.add(small)
    small.accept()
    table.spill(small)
    assert (len(small.payload), len(hogs.payload)) == (20, 100)
    hogs.accept()
    table.spill(hogs)
    assert (len(small.payload), len(hogs.payload)) == (20, 0)


def test_a_tenant_within_its_part_keeps_requests_decoded_beside_one_that_filled_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = decoded_pass("cross_entropy", {}, [])
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 4 * (decoded.num_bytes + 10))  # the real bound is 256 MiB
    table = InFlightTable(FinishedSamples(epoch=1))

    def accept(tenant: str, seq: int) -> Operation:
        one = Operation(tenant, f"a-{tenant}", seq, Kind.FORWARD, bytes(10), b"", "", 10, 10)
        table.add(one)
        table.keep_decoded(one, decoded)
        one.accept()
        table.spill(one)
        return one

    hog = [accept("hog", seq) for seq in range(1, 9)]
    small = accept("small", 1)
    assert small.decoded is not None
    assert sum(one.decoded is not None for one in hog) >= 2
    assert table._num_request_bytes <= in_flight.REQUEST_BYTES_MAX  # private: the bound is visible nowhere else


async def test_results_that_a_client_does_not_read_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "RESULT_BYTES_MAX", 100)  # the real bound is 8 MiB
    table = InFlightTable(FinishedSamples(epoch=1))
    ones = [operation(seq) for seq in range(1, 41)]
    for one in ones:
        table.add(one)
    names = [one.name for one in ones]
    waiting = table.wait(names)
    first = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    for one in ones:
        finish(table, one)
    found = [await first] + [each async for each in waiting]
    assert [each if isinstance(each, str) else each.name for each in found] == names
    assert 0 < sum(isinstance(each, str) for each in found) < len(names)
    for one in (late := [operation(seq) for seq in range(41, 43)]):
        table.add(one)
    waiting = table.wait(["a:41", "a:42"])
    first = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    for one in late:
        finish(table, one)
    await first
    assert isinstance(waiting, AsyncGenerator)
    await waiting.aclose()  # the client has gone, and has not read the second one
    assert table._num_result_bytes == 0  # private: memory that is never freed is visible nowhere else


async def test_only_committed_samples_are_reported_to_their_client() -> None:
    finished = FinishedSamples(epoch=1)
    table, ones = InFlightTable(finished), [operation(1, kind=Kind.SAMPLE), operation(2)]
    assert await finished.since("a", 0, 0, 0, lambda _: Unfetched([], None)) == ([], 1 << 32)
    for one in ones:
        table.add(one)
        finish(table, one)
    assert [each.name for each in (await finished.since("a", 0, 0, 0, lambda _: Unfetched([], None)))[0]] == ["a:1"]


def test_numbers_and_the_oldest_of_each_kind_are_those_of_the_operations_in_flight() -> None:
    table, ones = InFlightTable(FinishedSamples(epoch=1)), list[Operation]()
    for seq in range(1, 41):
        one = operation(seq, tenant=f"t{seq % 3}", kind=(Kind.SAVE_STATE, Kind.OPTIM_STEP)[seq % 2])
        if seq > 3:  # the first ones are of an earlier epoch
            one.timeline.arrive(WaitClock(WAIT_REASON_ORDER), float(seq))
        table.add(one)
        ones.append(one)
    while ones:
        finish(table, ones.pop(len(ones) * 7 % 11 % len(ones)))
        arrived = {kind: [one.timeline.arrived for one in ones if one.kind is kind] for kind in Kind}
        assert table.num_by_kind() == Counter(one.kind for one in ones)
        for kind, times in arrived.items():
            assert table.oldest(kind) == min((each for each in times if each is not None), default=None)
        assert set(table.tenants()) == {one.tenant_id for one in ones}
