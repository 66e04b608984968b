"""Turns: bounded holders, tenants by what they used, nothing lost when a waiting call is cancelled."""

import asyncio

from coordinator.limits.turns import Turns


async def hold(turns: Turns, tenant: str, log: list[str], may_end: asyncio.Event) -> None:
    async with turns.turn(tenant):
        log.append(tenant)
        await may_end.wait()


async def test_at_most_so_many_hold_a_turn_and_the_tenant_that_used_the_least_is_next() -> None:
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
    assert log == ["a", "a", "b", "c", "a", "a", "a"]


async def test_an_export_beside_two_hundred_large_ones_waits_for_a_piece_of_each_active_tenant() -> None:
    turns, log = Turns(1), list[str]()

    async def export(tenant: str, num_pieces: int, piece_bytes: int) -> None:
        for _ in range(num_pieces):
            async with turns.turn(tenant) as turn:
                log.append(tenant)
                await asyncio.sleep(0)
                turn.use(piece_bytes)
            await asyncio.sleep(0)  # its client takes the piece

    large = [asyncio.create_task(export("a", 10, 1000)) for _ in range(200)]
    other = [asyncio.create_task(export("b", 1_000_000, 10)) for _ in range(5)]
    for _ in range(1000):
        await asyncio.sleep(0)
    assert "a" in log
    began = len(log)
    await export("c", 20, 1000)
    since = log[began:]
    for each in (*large, *other):
        each.cancel()
    await asyncio.gather(*large, *other, return_exceptions=True)
    assert since.count("a") <= 21
    assert since.count("b") * 10 <= 21 * 1000, "by bytes: a tenant of small pieces gets more of them"
    assert since.count("b") > 1000


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
