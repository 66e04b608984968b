"""Waiting calls: tenants in turn or by what they used, nothing lost when one is cancelled, polls answered early."""

import asyncio

import pytest

from coordinator.base.errors import ServiceError
from coordinator.limits import polls as polls_module
from coordinator.limits.budget import Budget
from coordinator.limits.polls import Polls
from coordinator.limits.turns import Turns
from tests.support.waiting import until


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


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_wait_that_is_cancelled_before_or_after_its_turn_was_granted_loses_no_turn(is_granted: bool) -> None:
    turns, log, may_end = Turns(1), list[str](), asyncio.Event()
    async with turns.turn("a"):
        second, third = (asyncio.create_task(hold(turns, tenant, log, may_end)) for tenant in "bc")
        await asyncio.sleep(0)
        if not is_granted:
            second.cancel()
    second.cancel()  # it may have the turn now, and has not resumed
    may_end.set()
    await asyncio.gather(second, third, return_exceptions=True)
    await hold(turns, "d", log, may_end)
    assert log == ["c", "d"]


async def test_waiting_tenants_take_turns() -> None:
    budget = Budget(total=1, of_tenant_max=1, waiting_max=100)
    await budget.take("first", 1, 10)
    order: list[str] = []

    async def take(tenant: str) -> None:
        await budget.take(tenant, 1, 10)
        order.append(tenant)
        budget.give(tenant, 1)

    calls = [asyncio.create_task(take(tenant)) for tenant in ("a", "a", "a", "b", "c")]
    await asyncio.sleep(0)
    budget.give("first", 1)
    await asyncio.gather(*calls)
    assert order == ["a", "b", "c", "a", "a"]


async def test_a_call_that_leaves_while_it_waits_or_is_granted_takes_nothing() -> None:
    budget = Budget(total=1, of_tenant_max=1, waiting_max=8)
    await budget.take("a", 1, 10)
    waiting = [asyncio.create_task(budget.take("b", 1, 10)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    budget.give("a", 1)  # grants the second ...
    waiting[1].cancel()  # ... which leaves before it runs again
    await asyncio.wait(waiting)
    await budget.take("c", 1, 0.1)


async def test_calls_beyond_the_highest_number_of_waiting_ones_are_refused_at_once() -> None:
    budget = Budget(total=1, of_tenant_max=1, waiting_max=8)
    await budget.take("a", 1, 10)
    waiting = [asyncio.create_task(budget.take("b", 1, 10)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError, match="calls of yours that wait for room: 2 in use, at most 2"):
        await budget.take("b", 1, 10)
    waiting.pop().cancel()  # it is not the first
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(budget.take("b", 1, 10)))
    await asyncio.sleep(0)
    assert not waiting[-1].done(), "a call that has left does not count"
    for call in waiting:
        call.cancel()


async def answered_early(polls: Polls, *names: str, num: int) -> list[str]:
    """Poll for tenants, which are the first letters of names, in this order; return the first that are answered."""
    answered = list[str]()

    async def poll(name: str) -> None:
        try:
            async with polls.held(name[0], 60):
                await asyncio.Event().wait()
        except TimeoutError:
            answered.append(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(polls_module, "POLL_S_MIN", 0.05)
        tasks = [asyncio.create_task(poll(name)) for name in names]
        await asyncio.sleep(0)
    assert answered == []  # a client whose poll is answered at once asks again at once
    await until(lambda: len(answered) == num)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answered


async def test_polls_of_the_tenant_with_the_most_are_answered_early_to_make_room() -> None:
    assert await answered_early(Polls(3, lambda _: 10), "a1", "b1", "a2", "b2", "a3", num=2) == ["a1", "a2"]


async def test_a_poll_above_those_of_its_tenant_has_the_oldest_of_them_answered_early() -> None:
    assert await answered_early(Polls(100, lambda _: 2), "b1", "a1", "a2", "b2", "a3", num=1) == ["a1"]


async def test_a_poll_whose_time_is_just_over_is_passed_over() -> None:
    polls, loop = Polls(1, lambda _: None), asyncio.get_running_loop()
    may_begin = loop.create_future()

    async def poll(seconds: float, may_begin: asyncio.Future[None] | None = None) -> None:
        if may_begin is not None:
            await may_begin
        with pytest.raises(TimeoutError):
            async with polls.held("a", seconds):
                await asyncio.create_task(asyncio.Event().wait())  # as calls do: it takes two turns to cancel

    running = [asyncio.create_task(poll(0.01)), asyncio.create_task(poll(0.05, may_begin))]
    await asyncio.sleep(0)
    loop.call_later(0.02, may_begin.set_result, None)
    end = loop.time() + 0.03
    while loop.time() < end:
        pass  # the event loop is busy until both are due
    await asyncio.gather(*running)
    assert polls.used("a") == 0
