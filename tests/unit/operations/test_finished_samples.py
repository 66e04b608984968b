"""Which samples of a client have finished: each told until it is behind the cursor, none lost, memory bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from coordinator.base.errors import ServiceError
from coordinator.operations import finished_samples as following
from coordinator.operations.finished_samples import CLIENT_SEQS, Finished, Followers
from tinkerpool.v1 import operations_pb2 as ops_pb


def sample(seq: int, *, is_failed: bool = False, target: str = "s:sample:0") -> ops_pb.Operation:
    state = ops_pb.OPERATION_STATE_FAILED if is_failed else ops_pb.OPERATION_STATE_SUCCEEDED
    return ops_pb.Operation(name=f"{target}:{seq}", target_id=target, seq=seq, state=state)


async def told(
    followers: Followers, cursor: int = 0, client: int = 0, timeout_s: float = 0, unfetched: Iterable[Finished] = ()
) -> tuple[list[str], int]:
    found, cursor = await followers.since("s:sample:0", client, cursor, timeout_s, lambda: unfetched)
    return [each.name.rpartition(":")[2] for each in found], cursor


async def test_what_finishes_is_told_again_until_the_cursor_is_behind_it() -> None:
    followers = Followers(epoch=3)
    assert (await told(followers))[0] == []
    followers.note(sample(2))
    followers.note(sample(1, is_failed=True))
    first, cursor = await told(followers)
    assert (first, (await told(followers))[0]) == (["2", "1"], ["2", "1"])
    followers.note(sample(7))
    after, last = await told(followers, cursor)
    assert (after, last > cursor) == (["7"], True)
    assert await told(followers, last) == ([], last)
    states = [each.is_failed for each in (await followers.since("s:sample:0", 0, 0, 0, list))[0]]
    assert states == []  # what is behind a cursor is forgotten


async def test_each_client_hears_of_its_own_block_of_numbers() -> None:
    followers = Followers(epoch=1)
    for client in (0, 5):
        await told(followers, client=client)
    for seq in (CLIENT_SEQS, 5 * CLIENT_SEQS + 1, 6 * CLIENT_SEQS, 6 * CLIENT_SEQS + 1):
        followers.note(sample(seq))
    followers.note(sample(1, target="s:sample:1"))
    assert (await told(followers))[0] == [str(CLIENT_SEQS)]
    assert (await told(followers, client=5))[0] == [str(5 * CLIENT_SEQS + 1), str(6 * CLIENT_SEQS)]


async def test_who_waits_is_woken_by_the_first_that_finishes() -> None:
    followers = Followers(epoch=1)
    waiting = [asyncio.create_task(told(followers, timeout_s=30)) for _ in range(2)]
    await asyncio.sleep(0)
    followers.note(sample(4))
    assert [(await each)[0] for each in waiting] == [["4"], ["4"]]
    assert (await told(followers, timeout_s=0.01, client=1))[0] == []


async def test_a_cursor_of_an_earlier_life_begins_with_what_nobody_has_fetched() -> None:
    _, cursor = await told(Followers(epoch=1), unfetched=[Finished("s:sample:0:9", is_failed=False, num_bytes=1)])
    later = Followers(epoch=2)
    stored = [Finished(f"s:sample:0:{seq}", is_failed=False, num_bytes=1) for seq in (3, 2)]
    names, after = await told(later, cursor, unfetched=stored)
    assert (names, after > cursor) == (["3", "2"], True)
    assert (await told(later, after, unfetched=stored))[0] == []  # and reads it once


async def test_a_list_that_is_lost_is_made_again_behind_every_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "CLIENTS_MAX", 2)
    monkeypatch.setattr(following, "UNTOLD_MAX", 3)
    monkeypatch.setattr(following, "TOLD_MAX", 2)
    followers = Followers(epoch=1)
    await told(followers)
    followers.note(sample(1))
    _, cursor = await told(followers)
    waiting = asyncio.create_task(told(followers, cursor, timeout_s=30, unfetched=[Finished("a:b:8", True, 1)]))
    await asyncio.sleep(0)
    for client in (1, 2):
        await told(followers, client=client)  # one too many: the first loses its list, and begins anew
    assert (await waiting)[0] == ["8"]
    for seq in range(2, 7):
        followers.note(sample(2 * CLIENT_SEQS + seq))  # nobody asks: dropped
    stored = [Finished(f"a:b:{seq}", is_failed=False, num_bytes=1) for seq in range(2, 7)]
    first, cursor = await told(followers, client=2, unfetched=stored)
    second, _ = await told(followers, cursor, client=2)
    assert (first, second) == (["2", "3"], ["4", "5"])


async def test_a_stop_ends_every_wait() -> None:
    followers = Followers(epoch=1)
    waiting = asyncio.create_task(told(followers, timeout_s=30))
    await asyncio.sleep(0)
    followers.close()
    for asking in (waiting, told(followers)):
        with pytest.raises(ServiceError) as raised:
            await asking
        assert raised.value.retry_delay_s is not None


def test_numbers_of_clients_are_new_in_every_life_and_never_the_first_clients() -> None:
    numbers = [Followers(epoch).new_client() for epoch in range(1, 900)]
    followers = Followers(epoch=7)
    numbers += [followers.new_client() for _ in range(1000)][1:]
    assert len(set(numbers)) == len(numbers)
    assert 0 < min(numbers) <= max(numbers) < CLIENT_SEQS
