"""The tokens of a month: exact over restarts, and from zero in the next month."""

import calendar

from coordinator.base.time import day_of, month_of
from coordinator.operations.in_flight import FinishedSamples, InFlightTable
from coordinator.operations.operation import Kind, Operation, Usage, decided_row, new_row
from coordinator.operations.spending import Spending
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.store import Store
from tests.support.database import TENANT
from tests.support.toy_pool import FakeTime


def at(year: int, month: int, day: int) -> float:
    return float(calendar.timegm((year, month, day, 0, 0, 0)))


class Bench:
    """A store, and operations that finish at a moment of the wall clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        time = store.database._time  # private: the clock of the fixture
        assert isinstance(time, FakeTime)
        self.time = time
        self.in_flight = InFlightTable(FinishedSamples(epoch=1))
        self.seq = 0

    def now(self, wall: float) -> None:
        self.time.wall_offset = wall - self.time.now

    async def finish(self, num_tokens: int) -> None:
        self.show(*await self.commit(num_tokens))

    async def commit(self, num_tokens: int) -> tuple[Operation, int]:
        """Store an outcome; return its operation, which is not visible yet, and its day."""
        self.seq += 1
        operation = Operation(
            tenant_id=TENANT,
            target_id="a",
            seq=self.seq,
            kind=Kind.FORWARD,
            payload=b"p",
            payload_hash=b"h",
            request_id="",
            chunk_tokens=16,
            num_bytes=1,
            append_id=self.store.operations.new_append_id(),
        )
        self.in_flight.add(operation)
        await self.store.operations.append([new_row(operation)])
        operation.accept()
        operation.succeed(1, Usage(num_tokens=num_tokens))
        day = self.store.database.day()
        await self.store.cycles.commit(CycleCommit(finished=[decided_row(operation, day)]))
        return operation, day

    def show(self, operation: Operation, day: int) -> None:
        self.in_flight.finish(operation, day)

    def spending(self) -> Spending:
        return Spending(self.store, self.in_flight, self.time.wall)

    def after_a_restart(self) -> int:
        table = InFlightTable(FinishedSamples(epoch=2))
        return Spending(self.store, table, self.time.wall).tokens(TENANT)


def test_a_month_is_of_the_calendar_in_utc() -> None:
    assert month_of(day_of(at(2026, 11, 23))) == 202611
    assert month_of(day_of(at(2026, 12, 1) - 1)) == 202611
    assert month_of(day_of(at(2027, 1, 1))) == 202701


async def test_tokens_of_a_month_are_the_same_after_a_restart_and_begin_again_in_the_next(store: Store) -> None:
    bench = Bench(store)
    bench.now(at(2026, 11, 30))
    spending = bench.spending()
    for num_tokens, total in ((5, 5), (0, 5), (7, 12)):
        await bench.finish(num_tokens)
        assert spending.tokens(TENANT) == bench.after_a_restart() == total
    assert spending.tokens("another") == 0
    bench.now(at(2026, 12, 1) + 3600)
    await bench.finish(3)
    assert spending.tokens(TENANT) == bench.after_a_restart() == 3, "also what ended before anybody asked"
    await bench.finish(4)
    assert spending.tokens(TENANT) == bench.after_a_restart() == 7


async def test_an_outcome_at_the_turn_of_a_month_counts_for_the_month_that_it_is_stored_for(store: Store) -> None:
    """The first outcome is stored before midnight, the second after it; both become visible later."""
    bench = Bench(store)
    bench.now(at(2026, 12, 31))
    spending = bench.spending()
    bench.now(at(2027, 1, 1) - 1)
    before_midnight = await bench.commit(5)
    bench.now(at(2027, 1, 1))
    after_midnight = await bench.commit(7)
    assert spending.tokens(TENANT) == 0
    for stored, total in ((before_midnight, 0), (after_midnight, 7)):
        bench.show(*stored)
        assert spending.tokens(TENANT) == total
    assert spending.tokens(TENANT) == bench.after_a_restart()


async def test_a_clock_that_runs_ahead_for_a_moment_gives_no_tokens_back_and_takes_none_of_the_next_month(
    store: Store,
) -> None:
    bench = Bench(store)
    bench.now(at(2026, 11, 20))
    spending = bench.spending()
    await bench.finish(80)
    bench.now(at(2026, 12, 30))
    assert spending.tokens(TENANT) == bench.after_a_restart() == 0
    bench.now(at(2026, 11, 20))
    assert spending.tokens(TENANT) == bench.after_a_restart() == 80
    await bench.finish(5)
    assert spending.tokens(TENANT) == bench.after_a_restart() == 85
    bench.now(at(2026, 12, 1))
    assert spending.tokens(TENANT) == bench.after_a_restart() == 0
