"""The cycle clock, with a clock of its own: who waits for whom, and how long."""

import asyncio
from collections.abc import Iterable

from coordinator.scheduling.clock import GIVEN_UP_S, GUESSES_MAX, CycleClock
from coordinator.scheduling.cost_model import CycleCosts

FIXED_S = 0.02
BACK_S = 0.005
LINGER_S = 0.1


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


def known_costs(fixed_s: float = FIXED_S) -> CycleCosts:
    costs = CycleCosts()
    for num_tokens in (16, 64, 256) * 3:
        costs.observe_pass(num_tokens, 16.0, fixed_s + 1e-4 * num_tokens)
    assert costs.line is not None
    return costs


async def start(clock: CycleClock, ready: Iterable[str], *, is_full: bool = False) -> None:
    tenants = frozenset(ready)
    await clock.next_cycle(lambda: bool(tenants), lambda: tenants, lambda: is_full)


async def clock_after(
    *tenants: str, back_s: float = BACK_S, linger_s: float = LINGER_S, costs: CycleCosts | None = None
) -> tuple[CycleClock, FakeTime]:
    """A clock at the end of a cycle with these tenants, who came back after `back_s` the last times."""
    time = FakeTime()
    clock = CycleClock(time, linger_s, costs or known_costs())
    for _ in range(3):
        clock.finished(frozenset(tenants))
        time.now += back_s
        for tenant in tenants:
            clock.arrived(tenant)
        await start(clock, tenants)
    time.slept.clear()
    clock.finished(frozenset(tenants))
    return clock, time


async def lingered(clock: CycleClock, time: FakeTime, *ready: str, is_full: bool = False) -> float:
    """Seconds until a cycle starts for those who are ready."""
    began = time.now
    await asyncio.wait_for(start(clock, ready, is_full=is_full), 5.0)
    return time.now - began


async def test_a_lone_tenant_never_waits() -> None:
    clock, time = await clock_after("a")
    clock.arrived("a")
    assert await lingered(clock, time, "a") == 0.0 == sum(time.slept)


async def test_a_tenant_who_is_ready_without_having_asked_again_is_not_waited_for() -> None:
    """Its snapshot has been settled, say, or its turn has come."""
    clock, time = await clock_after("a", back_s=0.008)
    ready: set[str] = set()
    starting = asyncio.create_task(clock.next_cycle(lambda: bool(ready), lambda: frozenset(ready), lambda: False))
    await asyncio.sleep(0)
    time.now += 0.003
    ready.add("a")
    clock.notify()
    await asyncio.wait_for(starting, 5.0)
    assert time.slept == []


async def test_nobody_waits_for_a_tenant_who_is_away_for_longer_than_a_cycle_of_its_own_costs() -> None:
    clock, time = await clock_after("a", "b", back_s=FIXED_S * 1.2)
    clock.arrived("a")
    assert await lingered(clock, time, "a") == 0.0


async def test_a_tenant_who_usually_comes_back_soon_is_waited_for_twice_as_long_and_no_longer() -> None:
    clock, time = await clock_after("a", "b")
    clock.arrived("a")
    assert abs(await lingered(clock, time, "a") - 2 * BACK_S) < 1e-9


async def first_arrival_after(idle_s: float, clock: CycleClock, time: FakeTime) -> float:
    """Seconds that the clock lingers when the first tenant comes back so long after the workers are free."""
    ready: set[str] = set()
    waiting = asyncio.ensure_future(clock.next_cycle(lambda: bool(ready), lambda: frozenset(ready), lambda: False))
    await asyncio.sleep(0)
    time.now += idle_s
    ready.add("a")
    clock.arrived("a")
    began = time.now
    await asyncio.wait_for(waiting, 5.0)
    return time.now - began


async def test_the_workers_are_never_idle_for_longer_than_lingering_can_save() -> None:
    clock, time = await clock_after("a", "b", back_s=FIXED_S * 0.8)
    assert abs(await first_arrival_after(0.0, clock, time) - FIXED_S) < 1e-9
    clock, time = await clock_after("a", "b", back_s=FIXED_S * 0.8)
    assert abs(await first_arrival_after(FIXED_S * 0.7, clock, time) - FIXED_S * 0.3) < 1e-9
    clock, time = await clock_after("a", "b", back_s=FIXED_S * 1.2)
    assert await first_arrival_after(FIXED_S * 0.5, clock, time) == 0.0, "it would come too late to save anything"


async def test_the_operators_limit_holds_however_dear_a_cycle_is() -> None:
    clock, time = await clock_after("a", "b", linger_s=0.006, costs=known_costs(1.0))
    clock.arrived("a")
    assert abs(await lingered(clock, time, "a") - 0.006) < 1e-9
    clock, time = await clock_after("a", "b", linger_s=0.004, costs=known_costs(1.0))
    clock.arrived("a")
    assert await lingered(clock, time, "a") == 0.0, "it would be in vain"


async def test_a_full_budget_does_not_linger() -> None:
    clock, time = await clock_after("a", "b")
    clock.arrived("a")
    assert await lingered(clock, time, "a", is_full=True) == 0.0


async def test_nobody_lingers_once_all_are_back() -> None:
    clock, time = await clock_after("a", "b")
    clock.arrived("a")
    clock.arrived("b")
    assert await lingered(clock, time, "a", "b") == 0.0


async def test_lingering_ends_when_the_last_one_arrives() -> None:
    clock, time = await clock_after("a", "b", "c")
    clock.arrived("a")

    async def sleep(seconds: float) -> None:
        await asyncio.Event().wait()

    time.sleep = sleep  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(start(clock, ("a",)))
    for _ in range(5):
        await asyncio.sleep(0)
    clock.arrived("b")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    clock.arrived("c")
    await asyncio.wait_for(waiting, 1.0)


async def test_a_tenant_who_always_has_more_queued_is_not_away() -> None:
    clock, time = await clock_after("a", "b")
    assert await lingered(clock, time, "a", "b") == 0.0
    time.now += BACK_S
    assert await lingered(clock, time, "a") == 0.0


async def test_one_slow_return_is_an_exception_and_two_are_not() -> None:
    clock, time = await clock_after("a", "b")
    for expected in (True, True, False):
        clock.arrived("a")
        assert (await lingered(clock, time, "a") > 0.0) is expected
        time.now += 10 * FIXED_S
        clock.arrived("b")
        await start(clock, ("a", "b"))
        clock.finished(frozenset(("a", "b")))


async def test_a_tenant_who_has_gone_is_not_waited_for_again() -> None:
    clock, time = await clock_after("a", "b")
    clock.arrived("a")
    assert await lingered(clock, time, "a") > 0.0
    clock.finished(frozenset("a"))
    clock.arrived("a")
    assert await lingered(clock, time, "a") == 0.0
    time.now += GIVEN_UP_S
    assert await lingered(clock, time, "a") == 0.0
    assert not clock._away, "nor thought of"


async def test_waiting_for_a_part_is_worth_only_that_part() -> None:
    """Five of ten come back soon, the others in any case later: a cycle of theirs there will be."""
    names = [f"t{index}" for index in range(10)]
    clock, time = await clock_after(*names, back_s=FIXED_S * 0.6)
    for _ in range(5):
        for name in names[1:]:
            clock._note_return(name, FIXED_S * 0.6 if name < "t5" else FIXED_S * 3)
    clock.arrived("t0")
    assert await lingered(clock, time, "t0") == 0.0


async def test_without_known_costs_lingering_is_tried_a_few_times_and_then_left() -> None:
    costs = CycleCosts()
    for _ in range(3):
        costs.observe_pass(64, 16.0, FIXED_S)
    clock, time = await clock_after("a", "b", costs=costs)
    waits = []
    for _ in range(GUESSES_MAX + 2):
        for _ in range(5):
            clock._note_return("b", BACK_S)
        clock.finished(frozenset(("a", "b")))
        clock.arrived("a")
        waits.append(await lingered(clock, time, "a"))
    assert all(wait > 0 for wait in waits[:GUESSES_MAX])
    assert waits[GUESSES_MAX:] == [0.0, 0.0]


async def test_an_idle_clock_sleeps_until_it_is_notified() -> None:
    clock = CycleClock(FakeTime(), LINGER_S, known_costs())
    ready: set[str] = set()
    waiting = asyncio.ensure_future(clock.next_cycle(lambda: bool(ready), lambda: frozenset(ready), lambda: False))
    await asyncio.sleep(0)
    assert not waiting.done()
    ready.add("a")
    clock.notify()
    await asyncio.wait_for(waiting, 1.0)
