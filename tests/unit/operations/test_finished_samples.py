"""Finished samples of a client: each is returned until the cursor passes it, and memory is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.base.errors import ServiceError
from coordinator.operations import in_flight
from coordinator.operations.in_flight import CLIENT_SEQS, Finished, FinishedSamples, Unfetched
from tinkerpool.v1 import operations_pb2 as ops_pb


def sample(seq: int, *, is_failed: bool = False, target: str = "s:sample:0") -> ops_pb.Operation:
    state = ops_pb.OPERATION_STATE_FAILED if is_failed else ops_pb.OPERATION_STATE_SUCCEEDED
    return ops_pb.Operation(name=f"{target}:{seq}", target_id=target, seq=seq, state=state)


async def returned(
    finished: FinishedSamples,
    cursor: int = 0,
    client: int = 0,
    timeout_s: float = 0,
    unfetched: Sequence[Finished] = (),
) -> tuple[list[str], int]:
    store = Unfetched(unfetched, None)
    found, cursor = await finished.since("s:sample:0", client, cursor, timeout_s, lambda _: store)
    return [each.name.rpartition(":")[2] for each in found], cursor


def nothing(behind: int) -> Unfetched:
    return Unfetched([], None)


async def test_a_finished_sample_is_returned_until_the_cursor_passes_it() -> None:
    finished = FinishedSamples(epoch=3)
    assert (await returned(finished))[0] == []
    finished.note(sample(2))
    finished.note(sample(1, is_failed=True))
    first, cursor = await returned(finished)
    assert (first, (await returned(finished))[0]) == (["2", "1"], ["2", "1"])
    finished.note(sample(7))
    after, last = await returned(finished, cursor)
    assert (after, last > cursor) == (["7"], True)
    assert await returned(finished, last) == ([], last)
    states = [each.is_failed for each in (await finished.since("s:sample:0", 0, 0, 0, nothing))[0]]
    assert states == []  # everything up to a cursor is dropped


async def test_each_client_gets_its_own_block_of_numbers() -> None:
    finished = FinishedSamples(epoch=1)
    for client in (0, 5):
        await returned(finished, client=client)
    for seq in (CLIENT_SEQS, 5 * CLIENT_SEQS + 1, 6 * CLIENT_SEQS, 6 * CLIENT_SEQS + 1):
        finished.note(sample(seq))
    finished.note(sample(1, target="s:sample:1"))
    assert (await returned(finished))[0] == [str(CLIENT_SEQS)]
    assert (await returned(finished, client=5))[0] == [str(5 * CLIENT_SEQS + 1), str(6 * CLIENT_SEQS)]


async def test_every_wait_ends_with_the_first_sample_that_finishes() -> None:
    finished = FinishedSamples(epoch=1)
    waiting = [asyncio.create_task(returned(finished, timeout_s=30)) for _ in range(2)]
    await asyncio.sleep(0)
    finished.note(sample(4))
    assert [(await each)[0] for each in waiting] == [["4"], ["4"]]
    assert (await returned(finished, timeout_s=0.01, client=1))[0] == []


async def test_a_cursor_of_an_earlier_epoch_begins_with_the_stored_samples_that_were_not_fetched() -> None:
    _, cursor = await returned(
        FinishedSamples(epoch=1), unfetched=[Finished("s:sample:0:9", is_failed=False, num_bytes=1)]
    )
    later = FinishedSamples(epoch=2)
    stored = [Finished(f"s:sample:0:{seq}", is_failed=False, num_bytes=1) for seq in (3, 2)]
    names, after = await returned(later, cursor, unfetched=stored)
    assert (names, after > cursor) == (["3", "2"], True)
    assert (await returned(later, after, unfetched=stored))[0] == []  # the store is read once


async def test_a_dropped_list_is_rebuilt_behind_every_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    # the real bounds are too large for a test
    monkeypatch.setattr(in_flight, "CLIENTS_MAX", 2)
    monkeypatch.setattr(in_flight, "UNREPORTED_MAX", 3)
    monkeypatch.setattr(in_flight, "REPORTED_MAX", 2)
    finished = FinishedSamples(epoch=1)
    await returned(finished)
    finished.note(sample(1))
    _, cursor = await returned(finished)
    waiting = asyncio.create_task(returned(finished, cursor, timeout_s=30, unfetched=[Finished("a:b:8", True, 1)]))
    await asyncio.sleep(0)
    for client in (1, 2):
        await returned(finished, client=client)  # one client too many: the list of the first is dropped and rebuilt
    assert (await waiting)[0] == ["8"]
    for seq in range(2, 7):
        finished.note(sample(2 * CLIENT_SEQS + seq))  # not polled: the list is dropped
    stored = [Finished(f"a:b:{seq}", is_failed=False, num_bytes=1) for seq in range(2, 7)]
    first, cursor = await returned(finished, client=2, unfetched=stored)
    second, _ = await returned(finished, cursor, client=2)
    assert (first, second) == (["2", "3"], ["4", "5"])


async def test_unfetched_samples_are_read_as_the_client_takes_them() -> None:
    finished, reads = FinishedSamples(epoch=1), list[int]()
    stored = [Finished(f"s:sample:0:{seq}", is_failed=False, num_bytes=1) for seq in range(1, 8)]

    def read(behind: int) -> Unfetched:
        reads.append(behind)
        some = stored[behind : behind + 3]
        return Unfetched(some, behind + 3 if len(some) == 3 else None)

    async def taken(cursor: int) -> tuple[list[str], int]:
        found, cursor = await finished.since("s:sample:0", 0, cursor, 0, read)
        return [each.name.rpartition(":")[2] for each in found], cursor

    first, cursor = await taken(0)
    assert (first, reads) == (["1", "2", "3"], [0])
    stored.append(Finished("s:sample:0:8", is_failed=False, num_bytes=1))
    finished.note(sample(8))  # the store has it
    finished.note(sample(2))  # it was not finished when the store was read
    names = list[str]()
    while found := (await taken(cursor))[0]:
        names, cursor = names + found, (await taken(cursor))[1]
    assert (names, reads) == (["2", "4", "5", "6", "7", "8"], [0, 3, 6])
    finished.note(sample(9))
    assert (await taken(cursor))[0] == ["9"]
    assert reads == [0, 3, 6]


async def test_a_stop_ends_every_wait() -> None:
    finished = FinishedSamples(epoch=1)
    waiting = asyncio.create_task(returned(finished, timeout_s=30))
    await asyncio.sleep(0)
    finished.close()
    for asking in (waiting, returned(finished)):
        with pytest.raises(ServiceError) as raised:
            await asking
        assert raised.value.retry_delay_s is not None


def test_numbers_of_clients_are_new_in_every_epoch_and_never_zero() -> None:
    numbers = [FinishedSamples(epoch).new_client() for epoch in range(1, 900)]
    finished = FinishedSamples(epoch=7)
    numbers += [finished.new_client() for _ in range(1000)][1:]
    assert len(set(numbers)) == len(numbers)
    assert 0 < min(numbers) <= max(numbers) < CLIENT_SEQS
