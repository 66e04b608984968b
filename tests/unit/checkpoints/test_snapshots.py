"""When adapters are snapshotted: the bound on a replay wins; otherwise writing takes a tenth of the time at most."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.snapshots import LOGGED_OPERATIONS_MAX, RETRY_S, Snapshots
from coordinator.operations.adapter_log import AdapterQueue
from tests.support.adapter_logs import ERROR, FB, STEP, adapter_with, operation, run
from tests.support.toy_pool import FakeTime
from workers.contract.messages import AdapterState, ErrorCode, ItemError, ItemResult


@dataclass
class SlowSaver:
    """Writes when it is told to."""

    time: FakeTime
    seconds: float = 1.0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    written: list[int] = field(default_factory=list)
    snapshots: Any = None

    async def write_snapshot(self, adapter: AdapterQueue, state: AdapterState, window_error: bytes) -> str:
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
    return Snapshots(cast("Saver", saver), time, 10.0, lambda: None)


def trained(engine_s: float, *, worker: str = "w0", has_step: bool = True, name: str = "a") -> AdapterQueue:
    adapter = adapter_with(FB, STEP) if has_step else adapter_with(FB)
    adapter.spec = type(adapter.spec)(
        adapter_id=name, rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True
    )
    adapter.placed(worker)
    run(adapter, *((1, 2) if has_step else (1,)))
    adapter.engine_s_since_snapshot = engine_s
    return adapter


def state(seq: int) -> ItemResult:
    return ItemResult(
        op_id="", state=AdapterState(weights=b"", optimizer=None, num_steps=0, applied_seq=seq, fingerprint="")
    )


async def write(snapshots: Snapshots, saver: SlowSaver, adapter: AdapterQueue) -> None:
    saver.may_end.set()
    snapshots.begin(adapter)
    snapshots.take(adapter, state(adapter.placed_seq))
    await snapshots.finish()
    snapshots.settle({adapter.adapter_id: adapter})


async def test_half_of_the_bound_is_soon_enough_between_steps_and_all_of_it_anywhere(snapshots: Snapshots) -> None:
    assert snapshots.due([trained(4.0)], ()) == []
    stepped, in_window = trained(6.0), trained(6.0, has_step=False)
    assert snapshots.due([stepped], ()) == [stepped]
    assert snapshots.due([in_window], ()) == []
    in_window.engine_s_since_snapshot = 11.0
    assert snapshots.due([in_window], ()) == [in_window]


async def test_the_bound_is_for_all_adapters_of_a_worker_together_and_the_dearest_goes_first(
    snapshots: Snapshots,
) -> None:
    adapters = [trained(2.0, name="a"), trained(4.0, name="b"), trained(1.0, name="c")]
    assert snapshots.due(adapters, ()) == [adapters[1]]
    elsewhere = [trained(2.0, name="a"), trained(4.0, name="b", worker="w1"), trained(1.0, name="c")]
    assert snapshots.due(elsewhere, ()) == []


async def test_what_takes_long_to_write_waits_until_writing_is_a_tenth_of_the_time_or_the_bound_is_reached(
    snapshots: Snapshots, saver: SlowSaver
) -> None:
    adapter = trained(6.0)
    saver.seconds = 0.9
    await write(snapshots, saver, adapter)
    adapter = trained(6.0)
    assert snapshots.due([adapter], ()) == []
    adapter.engine_s_since_snapshot = 8.2
    assert snapshots.due([adapter], ()) == [adapter]
    saver.seconds = 5.0
    await write(snapshots, saver, adapter)
    adapter = trained(10.1)
    assert snapshots.due([adapter], ()) == [adapter], "the bound on a replay wins"


async def test_one_at_a_time_and_none_of_a_copy_that_ran_what_was_never_logged(
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
    assert snapshots.is_unsettled("a"), "its queue does not know yet"
    assert adapter.snapshot_seq == 0
    snapshots.settle({"a": adapter})
    assert not snapshots.is_unsettled("a")
    assert (adapter.snapshot_seq, adapter.engine_s_since_snapshot) == (2, 0.0)


async def test_one_that_fails_is_tried_again_after_a_while(snapshots: Snapshots, time: FakeTime) -> None:
    adapter = trained(11.0)
    snapshots.take(adapter, ItemResult(op_id="", error=ItemError(code=ErrorCode.NON_FINITE, message="no")))
    assert snapshots.due([adapter], ()) == []
    time.now += RETRY_S
    assert snapshots.due([adapter], ()) == [adapter]


async def test_a_long_log_is_cut_however_cheap_it_was(snapshots: Snapshots) -> None:
    adapter = adapter_with(*[FB, STEP] * (LOGGED_OPERATIONS_MAX // 2 + 1))
    adapter.placed("w0")
    run(adapter, *range(1, LOGGED_OPERATIONS_MAX + 3))
    assert snapshots.due([adapter], ()) == [adapter]


async def test_who_died_over_being_asked_is_left_alone_longer_each_time(snapshots: Snapshots, time: FakeTime) -> None:
    adapter = trained(11.0)
    for pause_s in (RETRY_S, 2 * RETRY_S, 4 * RETRY_S):
        assert snapshots.due([adapter], ()) == [adapter]
        snapshots.begin(adapter)
        snapshots.end()
        time.now += pause_s - 1
        assert snapshots.due([adapter], ()) == []
        time.now += 1


async def test_none_is_taken_while_something_is_decided_that_the_log_does_not_have(snapshots: Snapshots) -> None:
    """A snapshot would hold its consequences, and the next life would decide otherwise."""
    adapter = trained(11.0)
    adapter.add(operation(3, STEP))
    adapter.operations[3].fail(ERROR)
    adapter.decided.append(adapter.operations[3])
    adapter.settle()
    assert snapshots.due([adapter], ()) == []
    adapter.decided.clear()
    assert snapshots.due([adapter], ()) == []
    adapter.operations[3].is_committed = True
    assert snapshots.due([adapter], ()) == [adapter]


async def test_an_adapter_that_cannot_be_asked_makes_nobody_else_be_asked_in_every_cycle(snapshots: Snapshots) -> None:
    busy, small = trained(30.0, name="busy"), trained(0.1, name="small")
    busy.decided.append(operation(9, STEP))
    assert snapshots.due([busy, small], ()) == []
