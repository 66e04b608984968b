"""The room of results: counted with their copies, a part for each tenant, given back."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.limits import results
from coordinator.limits.results import COPIES, UNCOUNTED_BYTES, Responses

RESULT = 100 << 10
ONE = COPIES * RESULT


async def test_a_result_counts_with_its_copies_until_its_room_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOM_S", 0.01)
    room = Responses(bytes_max=2 * ONE - 1, of_tenant_max=2 * ONE - 1)
    first = room.room("a")
    await first.take(RESULT)
    with pytest.raises(ServiceError, match="bytes of your results that are being sent") as refused:
        await room.room("a").take(RESULT)
    assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "CALLS_BUSY")
    assert refused.value.retry_delay_s
    first.close()
    with room.room("a") as again:
        await again.take(RESULT)


async def test_a_call_waits_until_an_earlier_result_was_sent() -> None:
    room = Responses(bytes_max=ONE, of_tenant_max=ONE)
    first, second = room.room("a"), room.room("b")
    await first.take(RESULT)
    waiting = asyncio.create_task(second.take(RESULT))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.close()
    await asyncio.wait_for(waiting, 60)


async def test_a_tenant_that_does_not_read_leaves_room_for_others() -> None:
    room = Responses(bytes_max=2 * ONE, of_tenant_max=ONE)
    await room.room("a").take(RESULT)
    with pytest.raises(ServiceError):
        room.room("a").fit(RESULT)
    room.room("b").fit(RESULT)


async def test_small_results_need_no_room_and_larger_ones_than_the_part_take_all_of_it() -> None:
    room = Responses(bytes_max=ONE, of_tenant_max=ONE)
    large = room.room("a")
    await large.take(10 * ONE)
    room.room("a").fit(UNCOUNTED_BYTES)
    with pytest.raises(ServiceError):
        room.room("b").fit(UNCOUNTED_BYTES + 1)
    large.close()


async def test_a_response_that_is_smaller_than_its_result_gives_the_rest_back() -> None:
    room = Responses(bytes_max=2 * ONE, of_tenant_max=2 * ONE)
    first = room.room("a")
    await first.take(2 * RESULT)
    first.fit(RESULT)
    room.room("b").fit(RESULT)
