"""Turns: bounded holders, tenants in rotation, nothing lost when a waiting call is cancelled."""

import asyncio

from coordinator.runtime.turns import Turns


async def hold(turns: Turns, tenant: str, log: list[str], may_end: asyncio.Event) -> None:
    async with turns.turn(tenant):
        log.append(tenant)
        await may_end.wait()


async def test_at_most_so_many_hold_a_turn_and_waiting_tenants_are_served_in_rotation() -> None:
    turns, log, events = Turns(2), list[str](), [asyncio.Event() for _ in range(7)]
    tenants = ["a", "a", "a", "a", "a", "b", "c"]
    holders = [asyncio.create_task(hold(turns, *each)) for each in zip(tenants, [log] * 7, events, strict=True)]
    await asyncio.sleep(0)
    assert log == ["a", "a"]
    for event in events:
        event.set()
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.gather(*holders)
    assert log == ["a", "a", "a", "b", "c", "a", "a"]


async def test_a_cancelled_wait_loses_no_turn() -> None:
    turns, log, may_end = Turns(1), list[str](), asyncio.Event()
    holders = [asyncio.create_task(hold(turns, tenant, log, may_end)) for tenant in "abc"]
    await asyncio.sleep(0)
    holders[1].cancel()
    may_end.set()
    await asyncio.gather(*holders, return_exceptions=True)
    assert log == ["a", "c"]
    granted = asyncio.create_task(hold(turns, "d", log, may_end))
    await granted
    assert log == ["a", "c", "d"]


async def test_a_wait_that_is_cancelled_after_its_turn_was_granted_passes_it_on() -> None:
    turns, log, may_end = Turns(1), list[str](), asyncio.Event()
    first, second, third = (asyncio.create_task(hold(turns, tenant, log, may_end)) for tenant in "abc")
    await asyncio.sleep(0)
    may_end.set()
    first.add_done_callback(lambda _: second.cancel())  # runs after the turn was granted, before `second` resumes
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert log[0] == "a"
    assert log[-1] == "c"
