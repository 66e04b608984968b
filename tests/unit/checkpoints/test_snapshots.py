"""When adapters are snapshotted: writing takes a tenth of the time at most, except to keep the bound on a replay."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from coordinator.checkpoints.snapshots import LOGGED_OPERATIONS_MAX, RETRY_S, RETRY_S_MAX, Snapshots
from coordinator.checkpoints.states import States
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.windows import Window
from tests.support.adapter_logs import DISCARD, ERROR, FB, STEP, adapter_with, operation, run
from tests.support.toy_pool import FakeTime
from workers.contract.messages import AdapterState, ErrorCode, ItemError, ItemResult


@dataclass
class SlowSaver:
    """Writes a snapshot when `may_end` is set."""

    time: FakeTime
    seconds: float = 1.0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    written: list[int] = field(default_factory=list)

    async def write_snapshot(self, adapter: AdapterLog, state: AdapterState, window: Window) -> str:
        await self.may_end.wait()
        self.time.now += self.seconds
        self.written.append(state.applied_seq)
        return ""


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def saver(time: FakeTime) -> SlowSaver:
    return SlowSaver(time)


@pytest.fixture
def snapshots(saver: SlowSaver, time: FakeTime) -> Snapshots:
    return Snapshots(cast("States", saver), time, 10.0)


def trained(engine_s: float, *, worker: str = "w0", has_step: bool = True, name: str = "a") -> AdapterLog:
    """Return an adapter whose copy ran operations of this cost."""
    adapter = adapter_with(*((FB, STEP) if has_step else (FB,)), name=name)
    adapter.place_copy(worker)
    run(adapter, *((1, 2) if has_step else (1,)))
    adapter.charge_replay(engine_s)
    return adapter


def state(seq: int) -> ItemResult:
    return ItemResult(
        op_id="", state=AdapterState(weights=b"", optimizer=None, num_steps=0, applied_seq=seq, fingerprint="")
    )


async def write(snapshots: Snapshots, saver: SlowSaver, adapter: AdapterLog) -> None:
    saver.may_end.set()
    snapshots.begin(adapter)
    snapshots.take(adapter, state(adapter.copy.applied_seq))
    await snapshots.finish()
    snapshots.settle({adapter.adapter_id: adapter})


async def test_a_snapshot_is_due_at_a_quarter_of_the_bound_between_steps_and_at_the_bound_anywhere(
    snapshots: Snapshots,
) -> None:
    assert snapshots.due([trained(2.0)], ()) == []
    stepped, in_window = trained(3.0), trained(3.0, has_step=False)
    assert snapshots.due([stepped], ()) == [stepped]
    assert snapshots.due([in_window], ()) == []
    in_window.charge_replay(6.0)
    assert snapshots.due([in_window], ()) == []
    in_window.charge_replay(2.0)
    assert snapshots.due([in_window], ()) == [in_window]


async def test_the_bound_covers_all_adapters_of_a_worker_and_the_most_expensive_is_snapshotted_first(
    snapshots: Snapshots,
) -> None:
    adapters = [trained(0.7, name="a"), trained(1.6, name="b"), trained(0.4, name="c")]
    assert snapshots.due(adapters, ()) == [adapters[1]]
    elsewhere = [trained(0.7, name="a"), trained(1.6, name="b", worker="w1"), trained(0.4, name="c")]
    assert snapshots.due(elsewhere, ()) == []


async def test_slow_writes_take_at_most_a_tenth_of_the_time_until_the_bound_is_reached(
    snapshots: Snapshots, saver: SlowSaver
) -> None:
    adapter = trained(6.0)
    saver.seconds = 0.9
    await write(snapshots, saver, adapter)
    assert snapshots.due([trained(6.0, name="b")], ()) == [], "its first one is taken to cost as much"
    adapter = trained(6.0)
    assert snapshots.due([adapter], ()) == []
    adapter.charge_replay(2.2)
    assert snapshots.due([adapter], ()) == [adapter]
    saver.seconds = 5.0
    await write(snapshots, saver, adapter)
    adapter = trained(10.1)
    assert snapshots.due([adapter], ()) == [adapter], "the bound on a replay takes precedence"


async def test_an_adapter_has_one_snapshot_at_a_time_and_none_while_its_copy_is_ahead_of_the_log(
    snapshots: Snapshots, saver: SlowSaver
) -> None:
    adapter = trained(11.0)
    assert snapshots.due([adapter], {"a"}) == []
    snapshots.begin(adapter)
    snapshots.take(adapter, state(2))
    assert snapshots.is_unsettled("a")
    assert snapshots.due([adapter], ()) == []
    saver.may_end.set()
    await snapshots.finish()
    assert snapshots.is_unsettled("a"), "the snapshot is not in the adapter log yet"
    assert adapter.snapshot_seq == 0
    snapshots.settle({"a": adapter})
    assert not snapshots.is_unsettled("a")
    assert (adapter.snapshot_seq, adapter.engine_s_since_snapshot) == (2, 0.0)


async def test_a_failed_snapshot_is_retried_after_a_pause(snapshots: Snapshots, time: FakeTime) -> None:
    adapter = trained(11.0)
    snapshots.take(adapter, ItemResult(op_id="", error=ItemError(code=ErrorCode.NON_FINITE, message="no")))
    assert snapshots.due([adapter], ()) == []
    time.now += RETRY_S
    assert snapshots.due([adapter], ()) == [adapter]


async def test_a_retry_is_woken_after_the_pause_of_each_failure(snapshots: Snapshots, time: FakeTime) -> None:
    woken = asyncio.Event()
    snapshots.changed.subscribe(woken)
    waking = asyncio.ensure_future(snapshots.wake_to_retry())
    for _ in range(2):
        snapshots.failed(trained(1.0), "the disk is full")
        assert await time.until(woken.is_set, 2 * RETRY_S) >= RETRY_S
        woken.clear()
    waking.cancel()


async def test_a_copy_is_read_again_after_the_delay_of_the_failure_which_wakes_the_next_cycle(
    snapshots: Snapshots, time: FakeTime
) -> None:
    woken = asyncio.Event()
    snapshots.changed.subscribe(woken)
    waking = asyncio.ensure_future(snapshots.wake_to_retry())
    snapshots.postpone_read("b", 20.0)
    snapshots.postpone_read("a", 3.0)
    assert not snapshots.may_read("a")
    assert await time.until(woken.is_set, 20.0) >= 3.0
    assert snapshots.may_read("a")
    assert not snapshots.may_read("b")
    waking.cancel()


async def test_a_long_log_is_snapshotted_however_cheap_its_operations_were(snapshots: Snapshots) -> None:
    adapter = adapter_with(*[FB, STEP] * (LOGGED_OPERATIONS_MAX // 2 + 1))
    adapter.place_copy("w0")
    run(adapter, *range(1, LOGGED_OPERATIONS_MAX + 3))
    assert snapshots.due([adapter], ()) == [adapter]


async def test_an_adapter_whose_snapshots_lose_workers_is_retried_after_growing_pauses(
    snapshots: Snapshots, time: FakeTime
) -> None:
    adapter = trained(11.0)
    for pause_s in (RETRY_S, 2 * RETRY_S, 4 * RETRY_S):
        assert snapshots.due([adapter], ()) == [adapter]
        snapshots.begin(adapter)
        snapshots.end([(adapter, adapter.copy.generation)])
        time.now += pause_s - 1
        assert snapshots.due([adapter], ()) == []
        time.now += 1


async def test_a_failed_snapshot_for_which_others_wait_is_retried_after_the_first_pause_each_time(
    snapshots: Snapshots, time: FakeTime
) -> None:
    adapter = trained(1.0)
    for _ in range(4):
        snapshots.failed(adapter, "the disk is full")
    time.now += RETRY_S
    assert not snapshots.may_take(adapter)
    assert snapshots.may_take(adapter, is_awaited=True)
    snapshots.failed(adapter, "the disk is full")
    assert not snapshots.may_take(adapter, is_awaited=True)


async def test_an_adapter_is_retried_also_after_thousands_of_failures(snapshots: Snapshots, time: FakeTime) -> None:
    adapter = trained(11.0)
    for _ in range(3000):
        snapshots.failed(adapter, "no")
    assert snapshots.due([adapter], ()) == []
    time.now += RETRY_S_MAX
    assert snapshots.due([adapter], ()) == [adapter]


async def test_no_snapshot_is_taken_while_an_outcome_is_decided_and_not_committed(snapshots: Snapshots) -> None:
    """A snapshot would contain its effect, and the next epoch might decide another outcome."""
    adapter = trained(11.0)
    adapter.add(operation(3, STEP))
    adapter.fail(adapter.operations[3], ERROR)
    assert snapshots.due([adapter], ()) == []
    [failed] = adapter.take_decided()
    assert snapshots.due([adapter], ()) == []
    failed.commit()
    assert snapshots.due([adapter], ()) == [adapter]


async def test_an_operation_that_arrives_during_a_commit_puts_off_no_snapshot(snapshots: Snapshots) -> None:
    adapter = trained(11.0)
    adapter.add(operation(3, DISCARD))
    assert snapshots.due([adapter], ()) == [adapter]


async def test_an_adapter_that_cannot_be_snapshotted_does_not_make_others_due_in_every_cycle(
    snapshots: Snapshots,
) -> None:
    busy, small = trained(30.0, name="busy"), trained(0.1, name="small")
    busy.add(operation(3, STEP))
    busy.fail(busy.operations[3], ERROR)
    assert snapshots.due([busy, small], ()) == []


async def test_the_end_of_a_write_is_signalled(snapshots: Snapshots, saver: SlowSaver) -> None:
    written = asyncio.Event()
    snapshots.changed.subscribe(written)
    await write(snapshots, saver, trained(11.0))
    assert written.is_set()


async def test_a_snapshot_that_becomes_durable_after_its_adapter_was_deleted_covers_nothing(
    snapshots: Snapshots, saver: SlowSaver
) -> None:
    deleted, namesake = trained(11.0), trained(0.0)
    saver.may_end.set()
    snapshots.begin(deleted)
    snapshots.take(deleted, state(2))
    await snapshots.finish()
    snapshots.settle({"a": namesake})
    assert (deleted.snapshot_seq, namesake.snapshot_seq) == (0, 0)
    assert not snapshots.is_unsettled("a")
