"""The cycle clock, with a clock of its own: who waits for whom, and how long."""

import asyncio

from coordinator.clock import CycleClock

LINGER_S = 0.004


class FakeTime:
    """Time that passes only when somebody sleeps; the log has how long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
        self.now += seconds


def clock_after(*tenants: str) -> tuple[CycleClock, FakeTime]:
    time = FakeTime()
    clock = CycleClock(time, LINGER_S)
    clock.finished(frozenset(tenants))
    return clock, time


async def start(clock: CycleClock, ready: set[str], *, is_full: bool = False) -> None:
    await clock.next_cycle(lambda: bool(ready), lambda: frozenset(ready), lambda: is_full)


async def test_a_lone_tenant_never_waits() -> None:
    clock, time = clock_after("a")
    await start(clock, {"a"})
    assert time.slept == []


async def test_a_newcomer_is_not_held_up_by_a_lone_tenant_of_the_last_cycle() -> None:
    clock, time = clock_after("a")
    await start(clock, {"b"})
    assert time.slept == []


async def test_several_tenants_linger_at_most_the_limit() -> None:
    clock, time = clock_after("a", "b")
    await start(clock, {"a"})
    assert 0 < time.now <= LINGER_S + 1e-9


async def test_nobody_lingers_once_all_are_back() -> None:
    clock, time = clock_after("a", "b")
    await start(clock, {"a", "b"})
    assert time.slept == []


async def test_lingering_ends_when_the_last_one_arrives() -> None:
    clock, time = clock_after("a", "b")
    ready = {"a"}
    real_sleep = time.sleep

    async def sleep(seconds: float) -> None:
        ready.add("b")
        clock.notify()
        await asyncio.Event().wait()
        await real_sleep(seconds)

    time.sleep = sleep  # type: ignore[method-assign]
    await asyncio.wait_for(start(clock, ready), 1.0)
    assert time.now == 0.0


async def test_a_full_budget_does_not_linger() -> None:
    clock, time = clock_after("a", "b")
    await start(clock, {"a"}, is_full=True)
    assert time.slept == []


async def test_an_idle_clock_sleeps_until_it_is_notified() -> None:
    clock, _ = clock_after()
    ready: set[str] = set()
    waiting = asyncio.ensure_future(start(clock, ready))
    await asyncio.sleep(0)
    assert not waiting.done()
    ready.add("a")
    clock.notify()
    await asyncio.wait_for(waiting, 1.0)
