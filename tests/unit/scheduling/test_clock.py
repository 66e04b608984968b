"""The cycle clock in virtual time: for which tenants it lingers, and how long."""

import asyncio
from collections.abc import Mapping

from coordinator.base.time import Signal
from coordinator.operations.registry import Arrivals
from coordinator.scheduling.clock import ABSENCE_S_MAX, GUESSES_MAX, RETURNS_KEPT, CycleClock
from coordinator.scheduling.cost_model import CycleCosts

FIXED_S = 0.02
BACK_S = 0.005
LINGER_S = 0.1


class FakeTime:
    """Time that passes only in sleeps; `slept` has their seconds."""

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


class Bench:
    """A clock, the arrivals that it drains, and the ready work that it reads."""

    def __init__(self, linger_s: float = LINGER_S, costs: CycleCosts | None = None) -> None:
        self.time, changed = FakeTime(), Signal()
        self.arrivals = Arrivals(self.time, changed)
        self.clock = CycleClock(self.time, linger_s, costs or known_costs(), self.arrivals)
        self.ready: set[str] = set()
        self.has_full_budget = False
        changed.subscribe(self.clock.wake)

    def is_ready(self) -> bool:
        return bool(self.ready)

    def tenants(self) -> frozenset[str]:
        return frozenset(self.ready)

    def is_full(self) -> bool:
        return self.has_full_budget

    def arrive(self, *tenants: str) -> None:
        for tenant in tenants:
            self.arrivals.note(tenant)

    def finish(self, *tenants: str) -> None:
        """Commit a cycle with these tenants, which have no more operations."""
        self.ready.clear()
        self.clock.finished(frozenset(tenants))

    async def start(self, *ready: str) -> None:
        """Wait until the next cycle starts, with these tenants ready."""
        self.ready.update(ready)
        await self.clock.next_cycle(self)

    async def lingered(self, *ready: str) -> float:
        """Return the seconds until a cycle starts for these tenants."""
        began = self.time.now
        await asyncio.wait_for(self.start(*ready), 5.0)
        return self.time.now - began

    async def rounds(self, count: int, back_s: Mapping[str, float]) -> None:
        """Run cycles of these tenants, each of which returns `back_s` after its last cycle."""
        for _ in range(count):
            self.finish(*back_s)
            ended = self.time.now
            for tenant, seconds in sorted(back_s.items(), key=lambda each: each[1]):
                self.time.now = ended + seconds
                self.arrive(tenant)
            await self.start(*back_s)


async def bench_after(
    *tenants: str, back_s: float = BACK_S, linger_s: float = LINGER_S, costs: CycleCosts | None = None
) -> Bench:
    """Return a clock at the end of a cycle with these tenants, which returned after `back_s` in earlier cycles."""
    bench = Bench(linger_s, costs)
    await bench.rounds(3, dict.fromkeys(tenants, back_s))
    bench.time.slept.clear()
    bench.finish(*tenants)
    return bench


async def test_a_lone_tenant_never_waits() -> None:
    bench = await bench_after("a")
    bench.arrive("a")
    assert await bench.lingered("a") == 0.0 == sum(bench.time.slept)


async def test_a_tenant_that_is_ready_without_an_arrival_is_not_awaited() -> None:
    """It is ready because its snapshot is durable, or its quarantine has ended."""
    bench = await bench_after("a", back_s=0.008)
    starting = asyncio.create_task(bench.start())
    await asyncio.sleep(0)
    bench.time.now += 0.003
    bench.ready.add("a")
    bench.clock.wake.set()
    await asyncio.wait_for(starting, 5.0)
    assert bench.time.slept == []


async def test_a_tenant_that_is_away_for_longer_than_a_cycle_of_its_own_costs_is_not_awaited() -> None:
    bench = await bench_after("a", "b", back_s=FIXED_S * 1.2)
    bench.arrive("a")
    assert await bench.lingered("a") == 0.0


async def test_a_tenant_is_awaited_for_at_most_twice_its_usual_time_to_return() -> None:
    bench = await bench_after("a", "b")
    bench.arrive("a")
    assert abs(await bench.lingered("a") - 2 * BACK_S) < 1e-9


async def first_arrival_after(idle_s: float, bench: Bench) -> float:
    """Return how long the clock lingers when the first tenant arrives `idle_s` after the workers are free."""
    waiting = asyncio.ensure_future(bench.start())
    await asyncio.sleep(0)
    bench.time.now += idle_s
    bench.ready.add("a")
    bench.arrive("a")
    began = bench.time.now
    await asyncio.wait_for(waiting, 5.0)
    return bench.time.now - began


async def test_the_workers_are_never_idle_for_longer_than_lingering_can_save() -> None:
    bench = await bench_after("a", "b", back_s=FIXED_S * 0.8)
    assert abs(await first_arrival_after(0.0, bench) - FIXED_S) < 1e-9
    bench = await bench_after("a", "b", back_s=FIXED_S * 0.8)
    assert abs(await first_arrival_after(FIXED_S * 0.7, bench) - FIXED_S * 0.3) < 1e-9
    bench = await bench_after("a", "b", back_s=FIXED_S * 1.2)
    assert await first_arrival_after(FIXED_S * 0.5, bench) == 0.0, "the other tenant would return too late to save time"


async def test_the_operators_limit_holds_however_expensive_a_cycle_is() -> None:
    bench = await bench_after("a", "b", linger_s=0.006, costs=known_costs(1.0))
    bench.arrive("a")
    assert abs(await bench.lingered("a") - 0.006) < 1e-9
    bench = await bench_after("a", "b", linger_s=0.004, costs=known_costs(1.0))
    bench.arrive("a")
    assert await bench.lingered("a") == 0.0, "the limit is shorter than the other tenant's time to return"


async def test_a_full_budget_does_not_linger() -> None:
    bench = await bench_after("a", "b")
    bench.arrive("a")
    bench.has_full_budget = True
    assert await bench.lingered("a") == 0.0


async def test_the_clock_does_not_linger_once_all_tenants_have_returned() -> None:
    bench = await bench_after("a", "b")
    bench.arrive("a", "b")
    assert await bench.lingered("a", "b") == 0.0


async def test_lingering_ends_when_the_last_awaited_tenant_arrives() -> None:
    bench = await bench_after("a", "b", "c")
    bench.arrive("a")

    async def sleep(seconds: float) -> None:
        await asyncio.Event().wait()

    bench.time.sleep = sleep  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(bench.start("a"))
    for _ in range(5):
        await asyncio.sleep(0)
    bench.arrive("b")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    bench.arrive("c")
    await asyncio.wait_for(waiting, 1.0)


async def test_a_tenant_that_always_has_more_operations_queued_is_not_away() -> None:
    bench = await bench_after("a", "b")
    assert await bench.lingered("a", "b") == 0.0
    bench.time.now += BACK_S
    assert await bench.lingered("a") == 0.0


async def test_a_tenant_is_awaited_after_one_slow_return_and_not_after_two() -> None:
    bench = await bench_after("a", "b")
    for expected in (True, True, False):
        bench.arrive("a")
        assert (await bench.lingered("a") > 0.0) is expected
        bench.time.now += 10 * FIXED_S
        bench.arrive("b")
        await bench.start("a", "b")
        bench.finish("a", "b")


async def test_a_tenant_that_does_not_return_is_not_awaited_again() -> None:
    bench = await bench_after("a", "b")
    bench.arrive("a")
    assert await bench.lingered("a") > 0.0
    bench.finish("a")
    bench.arrive("a")
    assert await bench.lingered("a") == 0.0
    bench.time.now += ABSENCE_S_MAX
    assert await bench.lingered("a") == 0.0
    assert not bench.clock._away  # private: entries of tenants that never return are visible nowhere else


async def test_lingering_for_some_tenants_is_worth_only_their_share_of_a_cycle() -> None:
    """Five of ten tenants return soon. The others return later, and need another cycle in any case."""
    bench = Bench()
    await bench.rounds(RETURNS_KEPT, {f"t{index}": FIXED_S * 0.6 if index < 5 else FIXED_S * 3 for index in range(10)})
    bench.finish(*(f"t{index}" for index in range(10)))
    bench.arrive("t0")
    assert await bench.lingered("t0") == 0.0


async def test_without_known_costs_lingering_is_tried_a_few_times_and_then_stopped() -> None:
    costs = CycleCosts()
    for _ in range(3):
        costs.observe_pass(64, 16.0, FIXED_S)
    bench = await bench_after("a", "b", costs=costs)
    waits = []
    for _ in range(GUESSES_MAX + 2):
        bench.finish("a", "b")
        bench.arrive("a")
        waits.append(await bench.lingered("a"))
    assert all(wait > 0 for wait in waits[:GUESSES_MAX])
    assert waits[GUESSES_MAX:] == [0.0, 0.0]


async def test_an_idle_clock_sleeps_until_it_is_woken() -> None:
    bench = Bench()
    waiting = asyncio.ensure_future(bench.start())
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.ready.add("a")
    bench.clock.wake.set()
    await asyncio.wait_for(waiting, 1.0)
