"""Probation: how long a tenant runs solo after kills, how long it pauses, and that nothing but time ends it."""

import asyncio

import pytest

from coordinator.scheduling.probation import BACKOFF_S, BACKOFF_S_MAX, COST_FACTOR, Probation
from tests.support.probation import MemoryRecords
from tests.support.toy_pool import FakeTime
from tests.support.waiting import until

HALVING_S = 3600.0


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


def backoff_s(probation: Probation) -> float:
    standing = probation.standing("t")
    assert standing is not None
    return standing.backoff_s


async def test_the_back_off_doubles_with_each_kill_up_to_a_maximum(records: MemoryRecords) -> None:
    probation, found = Probation(records, HALVING_S), []
    for _ in range(10):
        probation.record_kill("t", "a:1")
        found.append(backoff_s(probation))
        records.now += found[-1]
        assert not probation.is_backing_off("t")
    assert found[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert max(found) == BACKOFF_S_MAX == found[-1]


async def test_the_pause_after_a_loss_is_a_multiple_of_its_cost_without_a_maximum(records: MemoryRecords) -> None:
    probation = Probation(records, HALVING_S)
    probation.record_kill("t", "a:1")
    probation.record_cost("t", 0.5)
    assert backoff_s(probation) == BACKOFF_S, "the longer of the two counts"
    probation.record_cost("t", 600.0)
    assert backoff_s(probation) == COST_FACTOR * 600.0 > BACKOFF_S_MAX
    probation.record_kill("t", "a:2")
    assert backoff_s(probation) == COST_FACTOR * 600.0, "a kill does not shorten it"


async def test_kills_halve_with_time_until_none_is_left(records: MemoryRecords) -> None:
    probation = Probation(records, HALVING_S)
    for _ in range(5):
        probation.record_kill("t", "a:1")
    found = []
    while (standing := probation.standing("t")) is not None:
        found.append((standing.num_kills, standing.remaining_s))
        records.now += HALVING_S
    assert found == [(5, 3 * HALVING_S), (2, 2 * HALVING_S), (1, HALVING_S)]
    assert not probation.has("t")
    probation.record_kill("t", "a:2")
    assert backoff_s(probation) == BACKOFF_S, "it begins anew"


async def test_a_restart_shortens_neither_probation_nor_back_off(records: MemoryRecords) -> None:
    """Service time stands still while the coordinator is down."""
    before = Probation(records, HALVING_S)
    before.record_kill("t", "a:1")
    before.record_kill("t", "a:2")
    records.now += 5.0
    after = Probation(records, HALVING_S)
    assert after.standing("t") == before.standing("t")
    after.record_kill("t", "a:3")
    assert backoff_s(after) == 4 * BACKOFF_S


async def test_without_a_halving_time_no_tenant_is_put_on_probation(records: MemoryRecords) -> None:
    probation = Probation(records, 0.0)
    probation.record_kill("t", "a:1")
    assert not probation.has("t")
    assert records.rows == {}
    Probation(records, HALVING_S).record_kill("t", "a:1")
    assert not Probation(records, 0.0).has("t")


async def test_other_tenants_are_not_affected(records: MemoryRecords) -> None:
    probation = Probation(records, HALVING_S)
    probation.record_kill("t", "a:1")
    assert (probation.has("t"), probation.has("u"), probation.tenants()) == (True, False, ["t"])
    probation.record_cost("u", 60.0)
    assert not probation.has("u"), "a loss without a kill puts no tenant on probation"


async def test_the_operator_is_told_once_and_the_owner_why_and_for_how_long(
    records: MemoryRecords, caplog: pytest.LogCaptureFixture
) -> None:
    probation = Probation(records, HALVING_S)
    for seq in range(3):
        probation.record_kill("t", f"a:{seq}")
    assert sum("is on probation" in record.message for record in caplog.records) == 1
    assert str(probation.standing("t")).startswith(
        "a:2 ended its worker, so all operations of this tenant run solo, one at a time on one worker, for 120 more "
        "minutes of service, the next one in 40 s at the earliest"
    )


async def test_waiting_parts_are_woken_when_a_back_off_and_the_probation_end(records: MemoryRecords) -> None:
    probation, time, woken = Probation(records, HALVING_S), FakeTime(), asyncio.Event()
    probation.changed.subscribe(woken)
    waking = asyncio.create_task(probation.wake_at_ends(time))
    probation.record_kill("t", "a:1")
    assert woken.is_set()
    for seconds in (BACKOFF_S, HALVING_S - BACKOFF_S):
        await until(lambda: time.sleepers)
        woken.clear()
        records.now += seconds
        await time.advance(seconds, step=seconds)
        await asyncio.wait_for(woken.wait(), 5)
    assert not probation.has("t")
    waking.cancel()
