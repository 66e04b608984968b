"""The ready set: which adapters may be in a cycle, and that idle adapters cost a cycle nothing."""

from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.payloads.passes import Chunk
from coordinator.scheduling.adapter_costs import Costs
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.ready_set import ReadySet
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.worker_memory import WorkerMemory
from tests.support.adapter_logs import FB, LOAD, SAVE, STEP, Files, adapter_with, operation, run, spec_named
from tests.support.classes import classes_of
from tests.support.probation import MemoryRecords
from tests.support.toy_engine import toy_bytes, toy_worker_info
from tests.support.toy_pool import FakeTime, running_pool
from workers.contract.gradient_windows import EMPTY
from workers.contract.messages import ItemResult

NUM_IDLE = 1000


class Watched(AdapterLog):
    """An adapter log that counts reads of attributes, of all its instances together."""

    num_reads = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.num_reads += 1
        return super().__getattribute__(name)


class Bench:
    """A ready set, and the state that it reads."""

    def __init__(self, *adapters: AdapterLog, host_bytes_max: int | None = None) -> None:
        self.held: set[str] = set()
        self.group, self.quarantine, self.files = AdapterGroup(FakeTime()), Quarantine(), Files()
        fleet, snapshots, publishing = Fleet(), cast("Snapshots", self.files), cast("Publishing", self.files)
        classes = classes_of(fleet)
        is_held, quarantine = self.held.__contains__, self.quarantine
        turns = SoloTurns("toy", Probation(MemoryRecords(), 0.0), self.group, fleet, classes, is_held)
        memory = WorkerMemory("toy", fleet, self.group, quarantine, snapshots, publishing, classes, is_held)
        fleet.add(toy_worker_info(host_bytes_max=host_bytes_max))
        costs = Costs("toy", fleet)
        self.ready = ReadySet(self.group, quarantine, turns, memory, snapshots, publishing, costs, is_held)
        for adapter in adapters:
            self.group.add(adapter)
            self.group.mark_dirty(adapter)

        self.fleet, self.memory = fleet, memory

    def allowed(self) -> list[str]:
        """Return the adapters that may run."""
        self.ready.refresh()
        return [adapter.adapter_id for adapter in self.ready.allowed()]


async def test_an_adapter_whose_part_of_a_cycle_is_open_waits_also_if_its_worker_was_lost() -> None:
    """What its part has decided must be committed before anything behind it."""
    late, other = adapter_with(FB, STEP), adapter_with(FB, name="b")
    bench = Bench(late, other)
    bench.ready.hold_back(frozenset({"a"}))
    assert bench.allowed() == ["b"]
    assert bench.ready.dirty() == [other]
    bench.ready.hold_back(frozenset())
    assert bench.allowed() == ["a", "b"]


async def test_an_adapter_waits_while_its_copy_is_about_to_leave_a_drained_worker() -> None:
    leaving, other = adapter_with(FB, FB), adapter_with(FB, name="b")
    bench = Bench(leaving, other)
    leaving.place_copy("w0")
    bench.fleet.add(toy_worker_info("w1"))
    bench.fleet.drain("w0", is_ending=True)
    assert bench.allowed() == ["b"]
    leaving.lose_copy()
    assert bench.allowed() == ["a", "b"]


async def test_a_thousand_idle_adapters_are_not_read_in_a_cycle(tmp_path: Path) -> None:
    """Half of them have a copy on the worker. Only the sweep, every few seconds, may read all."""
    async with running_pool(tmp_path, sweep_interval_s=1000.0, linger_s=0.0) as pool:
        core = pool.core
        active, other = await pool.adapter(), await pool.adapter("bob")
        for index in range(NUM_IDLE):
            idle = Watched("idle", "s", "toy", spec_named(f"idle-{index}"))
            core.registry.add(idle)
            core.registry.group_of(idle).mark_dirty(idle)
            if index % 2:
                idle.place_copy("w0")
        await pool.wait(await pool.forward_backward(active, 1, 5))  # removes the idle ones from the ready set
        num_reads = Watched.num_reads
        for seq in range(2, 10, 2):
            await pool.wait(await pool.optim_step(active, seq), await pool.forward_backward(active, seq + 1, 5))
            await pool.wait(await pool.forward_backward(other, seq // 2, 5, tenant="bob"), tenant="bob")
        assert len(core.journal.recent) >= 5
        assert Watched.num_reads == num_reads > NUM_IDLE


def test_an_idle_adapter_leaves_the_ready_set_until_it_changes() -> None:
    busy, idle = adapter_with(FB, name="busy"), adapter_with(name="idle")
    bench = Bench(busy, idle)
    assert bench.ready.refresh()
    assert bench.ready.dirty() == [busy]
    idle.add(operation(1, STEP))
    bench.group.submitted(idle)
    assert bench.ready.refresh()
    assert bench.ready.dirty() == [busy, idle]
    assert [log for log, _ in bench.ready.due_steps()] == [idle]


def test_a_deleted_adapter_never_becomes_dirty() -> None:
    adapter = adapter_with(FB)
    bench = Bench(adapter)
    bench.group.remove(adapter)
    bench.group.mark_dirty(adapter)
    bench.group.submitted(adapter)
    assert not bench.ready.refresh()
    assert bench.group.arrivals.drain() == {}


def test_residents_are_the_adapters_with_a_copy_without_deleted_ones() -> None:
    one, other, away = (adapter_with(name=name) for name in ("one", "other", "away"))
    bench = Bench(one, other, away)
    one.place_copy("w0")
    other.place_copy("w0")
    assert bench.ready.residents(["w0", "w1"]) == {"w0": 2, "w1": 0}
    bench.group.remove(one)
    bench.group.remove(away)
    assert bench.ready.residents(["w0"]) == {"w0": 1}
    one.place_copy("w0")  # a running cycle still had the deleted adapter
    assert bench.ready.residents(["w0"]) == {"w0": 1}
    one.lose_copy()
    bench.group.add(one)  # the deletion failed
    one.place_copy("w1")
    assert bench.ready.residents(["w0", "w1"]) == {"w0": 1, "w1": 1}


def test_an_adapter_is_ahead_from_its_first_operation_until_a_snapshot_covers_it() -> None:
    adapter = adapter_with(FB)
    bench = Bench(adapter)
    adapter.place_copy("w0")
    bench.ready.ran(["a", "deleted meanwhile"])
    assert bench.ready.past_snapshots() == [], "no operation was applied"
    run(adapter, 1)
    bench.ready.ran(["a"])
    assert bench.ready.past_snapshots() == [adapter]
    adapter.cover(1, EMPTY, 0.0)
    assert bench.ready.past_snapshots() == []


def test_the_budget_is_full_once_the_ready_chunks_fill_it() -> None:
    bench = Bench(adapter_with(FB, FB), adapter_with(FB, name="b"))  # 4 tokens each
    assert bench.ready.has_tokens(12)
    assert not bench.ready.has_tokens(13)


def test_while_files_are_written_a_copy_is_not_installed_and_a_load_does_not_cut_the_log() -> None:
    away, resident, loading = adapter_with(FB, name="away"), adapter_with(FB, name="resident"), adapter_with(LOAD)
    bench = Bench(away, resident, loading)
    for adapter in (resident, loading):
        adapter.place_copy("w0")
    bench.files.unsettled = {"away", "resident", "a"}
    assert bench.allowed() == ["resident"]
    bench.files.unsettled, bench.files.unwritten = set(), {"away", "resident", "a"}
    assert bench.allowed() == ["away", "resident"]
    bench.files.unwritten = set()
    assert bench.allowed() == ["away", "resident", "a"]


def test_a_quarantined_adapter_is_released_once_it_ran_or_has_no_operation_to_run() -> None:
    ran, idle, other = adapter_with(FB, SAVE, name="ran"), adapter_with(name="idle"), adapter_with(FB, name="other")
    bench = Bench(ran, idle, other)
    ran.quarantine(1, 1)
    for name in ("idle", "ran"):
        bench.quarantine.record_loss([name], [f"{name}:1"])
    assert bench.allowed() == ["ran"]
    run(ran, 1)
    assert bench.allowed() == ["ran", "other"]
    assert not bench.quarantine.group


def test_nobody_waits_for_a_quarantined_adapter_that_waits_for_a_file_or_a_late_worker() -> None:
    suspect, other = adapter_with(FB, name="suspect"), adapter_with(FB, name="other")
    bench = Bench(suspect, other)
    bench.fleet.add(toy_worker_info("w1"))
    bench.quarantine.record_loss(["suspect"], ["suspect:1"])
    suspect.quarantine(1, 1)
    assert bench.allowed() == ["suspect"]
    bench.files.unsettled.add("suspect")
    assert bench.allowed() == ["other"]
    assert bench.quarantine.may_run("sample")
    bench.files.unsettled.clear()
    assert bench.allowed() == ["suspect"]
    suspect.place_copy("w1")
    bench.fleet.be_late(bench.fleet.worker("w1"), is_late=True)
    assert bench.allowed() == ["other"]
    bench.fleet.be_late(bench.fleet.worker("w1"), is_late=False)
    assert bench.allowed() == ["suspect"]


def test_during_a_stop_only_operations_that_ran_in_part_continue() -> None:
    begun, waiting = adapter_with(FB, name="begun"), adapter_with(FB, name="waiting")
    bench = Bench(begun, waiting)
    begun.copy.add_result(begun.operations[1], 0, ItemResult(op_id="begun:1"))
    bench.ready.stop()
    assert bench.allowed() == ["begun"]


@pytest.mark.parametrize("is_stop", [True, False], ids=["stop", "suspension"])
def test_behind_an_operation_that_ran_in_part_no_other_begins_during_a_stop_or_a_suspension(is_stop: bool) -> None:
    adapter = adapter_with(FB, FB, STEP, tenant="suspended")
    adapter.operations[1].chunks = (Chunk(0, 1, 4), Chunk(1, 2, 5))
    bench = Bench(adapter)
    adapter.place_copy("w0")
    adapter.copy.add_result(adapter.operations[1], 0, ItemResult(op_id="a:1"))
    assert [list(each.chunks()) for each in bench.ready.candidates({})] == [[5, 4]]
    if is_stop:
        bench.ready.stop()
    else:
        bench.held.add("suspended")
    assert [list(each.chunks()) for each in bench.ready.candidates({})] == [[5]]
    run(adapter, 1)
    assert not bench.allowed()
    assert not list(bench.ready.due_steps())


def test_an_adapter_of_a_suspended_tenant_waits_between_operations_and_others_run() -> None:
    held, other = adapter_with(FB, name="held", tenant="suspended"), adapter_with(FB, name="other")
    bench = Bench(held, other)
    bench.held.add("suspended")
    assert bench.allowed() == ["other"]
    bench.held.clear()
    assert bench.allowed() == ["held", "other"]


def test_no_room_is_made_for_an_adapter_of_a_suspended_tenant() -> None:
    held, idle = adapter_with(FB, name="held", tenant="suspended"), adapter_with(FB, name="idle")
    bench = Bench(held, idle, host_bytes_max=toy_bytes(spec_named("a")))
    idle.place_copy("w0")
    bench.fleet.worker("w0").sent(toy_bytes(idle.spec))
    run(idle, 1)
    idle.cover(1, EMPTY, 0.0)
    bench.held.add("suspended")
    assert bench.allowed() == []
    assert not bench.memory.make_room()
    bench.held.clear()
    assert bench.allowed() == []
    assert bench.memory.make_room()
    assert bench.allowed() == ["held"]


def test_nobody_waits_for_a_quarantined_adapter_of_a_suspended_tenant() -> None:
    held, other = adapter_with(FB, name="a", tenant="suspended"), adapter_with(FB, name="b")
    bench = Bench(held, other)
    for log in (held, other):
        log.quarantine(1, 1)
    bench.quarantine.record_loss(["a", "b"], ["a:1", "b:1"])
    assert bench.allowed() == ["a"], "the first half"
    bench.held.add("suspended")
    assert bench.allowed() == ["b"]
