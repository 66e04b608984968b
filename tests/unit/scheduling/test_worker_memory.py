"""Memory of workers: who leaves a full one, in which order, and who waits for room."""

from typing import cast

from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.fleet.fleet import Fleet, Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.operations.windows import Window
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.worker_memory import WorkerMemory
from tests.support.adapter_logs import FB, STEP, Files, adapter_with, operation, run, spec_named
from tests.support.classes import classes_of
from tests.support.toy_engine import toy_bytes, toy_worker_info
from tests.support.toy_pool import FakeTime
from workers.contract.gradient_windows import EMPTY
from workers.contract.messages import ItemResult

COPY = toy_bytes(spec_named("a"))
VERSION = COPY // 4
WINDOW = cast("Window", EMPTY)


class Bench:
    """Workers that hold a number of copies each, and adapters at home there."""

    def __init__(self, *copies_max: int) -> None:
        self.fleet, self.group, self.quarantine = Fleet(), AdapterGroup(FakeTime()), Quarantine()
        self.files, self.held = Files(), set[str]()
        for index, number in enumerate(copies_max):
            self.fleet.add(toy_worker_info(f"w{index}", host_bytes_max=number * COPY))
        self.memory = WorkerMemory(
            "toy",
            self.fleet,
            self.group,
            self.quarantine,
            cast("Snapshots", self.files),
            cast("Publishing", self.files),
            classes_of(self.fleet),
            self.held.__contains__,
        )

    def put(self, name: str, worker_id: str = "w0", *, has_run: bool = False, is_covered: bool = False) -> AdapterLog:
        """Put an adapter's copy on a worker; with `has_run` a step ran on it, which `is_covered` by a snapshot."""
        log = adapter_with(FB, STEP, name=name)
        self.group.add(log)
        log.place_copy(worker_id)
        self.fleet.worker(worker_id).sent(COPY)
        if has_run or is_covered:
            run(log, 1, 2)
        if is_covered:
            log.cover(2, WINDOW, 0.0)
        return log

    def waits(self, name: str, *workers: str) -> bool:
        """Return whether another adapter must wait for room on these workers."""
        return self.memory.must_wait(adapter_with(FB, name=name), workers)

    def at_home(self, worker_id: str = "w0") -> list[str]:
        return self.group.residency.on(worker_id)


def test_nothing_leaves_a_worker_within_its_limit() -> None:
    bench = Bench(2)
    for name in "ab":
        bench.put(name, is_covered=True)
    assert not bench.memory.make_room()
    assert bench.at_home() == ["a", "b"]


def test_the_least_recently_used_copy_that_a_snapshot_covers_leaves_for_one_that_waits() -> None:
    bench = Bench(2)
    kept, dropped = bench.put("kept", is_covered=True), bench.put("dropped", is_covered=True)
    bench.group.residency.enter("w0", "kept")  # it was used again
    assert bench.waits("new", "w0")
    assert bench.memory.make_room()
    assert (kept.home, dropped.home) == ("w0", "")
    assert bench.fleet.worker("w0").take_removals() == ("dropped",)
    assert not bench.waits("new", "w0")


def test_adapters_with_nothing_to_run_leave_first() -> None:
    bench = Bench(2)
    busy, idle = bench.put("busy"), bench.put("idle", is_covered=True)
    assert bench.waits("new", "w0")
    bench.memory.make_room()
    assert (busy.home, idle.home) == ("w0", "")


def test_a_copy_that_no_snapshot_covers_is_snapshotted_first_and_leaves_then() -> None:
    bench = Bench(1)
    log = bench.put("a", has_run=True)
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room()
    assert bench.memory.needs_cycle
    assert bench.memory.take_due() == [log]
    assert not bench.memory.needs_cycle
    bench.files.unsettled.add("a")
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room(), "its snapshot does not count yet"
    assert not bench.memory.needs_cycle
    bench.files.unsettled.clear()
    log.cover(2, WINDOW, 0.0)
    assert bench.waits("new", "w0")
    assert bench.memory.make_room()
    assert bench.at_home() == []


def test_a_copy_whose_snapshot_failed_stays() -> None:
    bench = Bench(1)
    bench.put("failing", has_run=True)
    bench.files.failing.add("failing")
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room()
    assert not bench.memory.needs_cycle
    assert bench.at_home() == ["failing"]


def test_a_quarantined_copy_that_may_not_run_leaves_without_a_snapshot() -> None:
    """Else the first half of its quarantine, which waits for room, and it would wait for each other."""
    bench = Bench(1)
    log = bench.put("second", has_run=True)
    bench.quarantine.record_loss(["first", "second"], ["first:1", "second:1"])
    assert bench.waits("first", "w0")
    assert bench.memory.make_room()
    assert (log.home, bench.at_home()) == ("", [])


def test_a_copy_with_a_begun_operation_stays_unless_the_quarantine_holds_it_back() -> None:
    """Else what it waits for would wait for its room."""
    bench = Bench(1)
    log = bench.put("other", has_run=True)
    log.add(operation(3, FB, name="other"))
    log.copy.add_result(log.operations[3], 0, ItemResult(op_id="other:3"))
    assert bench.waits("suspect", "w0")
    assert not bench.memory.make_room()
    bench.quarantine.record_loss(["suspect"], ["suspect:1"])
    assert bench.waits("suspect", "w0")
    assert bench.memory.make_room()
    assert (log.home, bench.at_home()) == ("", [])


def test_a_copy_in_the_middle_of_a_suspended_tenants_replay_leaves_unless_a_sampler_needs_it() -> None:
    """Else it would keep its room until the tenant is resumed."""
    bench = Bench(1)
    log = bench.put("a", has_run=True)
    log.lose_copy()
    log.place_copy("w0")
    run(log, 1)
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room(), "the replay goes on"
    bench.held.add(log.tenant_id)
    bench.files.awaited.add("a")
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room()
    bench.files.awaited.clear()
    assert bench.waits("new", "w0")
    assert bench.memory.make_room()
    assert (log.home, log.copy.cursor, bench.memory.take_due()) == ("", 0, [])
    log.place_copy("w0")
    run(log, 1, 2)


def test_a_worker_whose_report_is_outdated_is_asked_if_nothing_else_makes_room() -> None:
    bench = Bench(1)
    worker = bench.fleet.worker("w0")
    worker.begin_phase(())
    worker.drop("a")  # deleted while a batch runs that has it
    worker.end_phase(COPY)
    assert bench.waits("new", "w0")
    assert not bench.memory.make_room()
    assert bench.memory.needs_cycle
    assert bench.memory.take_asked() == {"w0"}
    worker.begin_phase(())
    worker.end_phase(COPY)
    assert bench.waits("new", "w0")
    bench.memory.make_room()
    assert not bench.memory.needs_cycle, "the report is new"


def test_a_worker_whose_report_is_outdated_is_asked_if_what_leaves_it_does_not_make_enough_room() -> None:
    """Nothing else may ever wake the clock again: the client waits for this adapter."""
    bench = Bench(1)
    worker = bench.fleet.worker("w0")
    bench.put("lost").lose_copy()
    worker.hold("v:1", VERSION)
    worker.sent(VERSION)
    assert bench.waits("new", "w0")
    assert bench.memory.make_room(), "the version leaves"
    assert bench.waits("new", "w0"), "the lost copy still counts"
    assert not bench.memory.make_room()
    assert bench.memory.take_asked() == {"w0"}


def test_a_copy_that_was_lost_while_its_worker_lives_is_dropped_there_unless_another_is_installed() -> None:
    bench = Bench(2)
    worker = bench.fleet.worker("w0")
    gone, again = bench.put("gone"), bench.put("again")
    gone.lose_copy()
    again.lose_copy()
    again.place_copy("w0")
    bench.memory.make_room()
    assert worker.take_removals() == ("gone",)
    worker.drop("again")
    worker.keep("again")
    assert worker.take_removals() == ()


def test_room_is_made_on_the_worker_that_holds_least_of_those_that_the_adapter_may_have() -> None:
    bench = Bench(2, 1, 1)
    for name, worker in (("a", "w0"), ("b", "w0"), ("c", "w1"), ("d", "w2")):
        bench.put(name, worker, is_covered=True)
    assert bench.waits("new", "w0", "w1")
    assert bench.memory.make_room()
    assert [bench.at_home(worker) for worker in ("w0", "w1", "w2")] == [["a", "b"], [], ["d"]]


def test_versions_leave_before_copies_unless_a_sample_uses_them_or_they_have_no_file() -> None:
    bench = Bench(1)
    worker = bench.fleet.worker("w0")
    bench.put("a", is_covered=True)
    for version in ("v:1", "v:2", "v:3", "v:4", "v:5", "v:6"):
        worker.hold(version, VERSION)
        worker.sent(VERSION)
    worker.begin_sample(Flight("s:1", "s", 1, 0, "t", "v:1"))
    bench.files.unwritten.add("v:2")
    bench.memory.make_room()
    assert worker.versions == ("v:1", "v:2")
    assert bench.at_home() == [], "the versions that stay still take too much"
    assert worker.held_bytes == 2 * VERSION


def test_copies_leave_a_drained_worker_once_their_snapshots_count() -> None:
    bench = Bench(9, 9)
    covered, ahead = bench.put("covered", is_covered=True), bench.put("ahead", has_run=True)
    bench.fleet.drain("w0", is_ending=True)
    assert bench.memory.make_room()
    assert (covered.home, ahead.home) == ("", "w0")
    assert bench.memory.take_due() == [ahead]
    bench.files.unsettled.add("ahead")
    assert not bench.memory.make_room(), "its snapshot does not count yet"
    assert not bench.memory.needs_cycle
    bench.files.unsettled.clear()
    ahead.cover(2, WINDOW, 0.0)
    assert bench.memory.make_room()
    assert bench.at_home() == []
    assert bench.fleet.worker("w0").take_removals() == ("covered", "ahead"), "it may be undrained"


def test_a_copy_that_cannot_be_snapshotted_leaves_a_drained_worker_at_once() -> None:
    bench = Bench(9, 9)
    failing, held = bench.put("failing", has_run=True), bench.put("held", has_run=True)
    bench.files.failing.add("failing")
    bench.quarantine.record_loss(["first", "held"], ["first:1", "held:1"])
    bench.fleet.drain("w0", is_ending=False)
    assert bench.memory.make_room()
    assert (failing.home, held.home, bench.memory.take_due()) == ("", "", [])


def test_a_copy_whose_last_snapshot_has_failed_leaves_a_drained_worker_without_another_attempt() -> None:
    """While the disk is full, each attempt may take long: the worker would not end."""
    bench = Bench(9, 9)
    log = bench.put("a", has_run=True)
    bench.files.failed.add("a")
    bench.fleet.drain("w0", is_ending=True)
    assert bench.memory.make_room()
    assert (log.home, bench.memory.take_due()) == ("", [])


def test_copies_leave_a_drained_worker_that_is_late_without_a_snapshot() -> None:
    bench = Bench(9, 9)
    log = bench.put("a", has_run=True)
    bench.fleet.be_late(bench.fleet.worker("w0"), is_late=True)
    bench.fleet.drain("w0", is_ending=False)
    assert bench.memory.make_room()
    assert log.home == ""


def test_copies_of_a_drained_worker_are_snapshotted_as_many_at_a_time_as_may_be_read_the_ready_ones_first() -> None:
    bench = Bench(9, 9)
    idle = bench.put("idle", has_run=True)
    busy = bench.put("busy", has_run=True)
    busy.add(operation(3, FB, name="busy"))
    bench.files.readable_max = 1
    bench.fleet.drain("w0", is_ending=True)
    bench.memory.make_room()
    assert bench.memory.take_due() == [busy]
    bench.files.unsettled.add("busy")
    bench.memory.make_room()
    assert bench.memory.take_due() == [idle]


def test_an_adapter_that_is_deleted_while_it_is_to_be_moved_is_left_alone() -> None:
    bench = Bench(8, 8)
    log = bench.put("moved")
    bench.memory.move(log, "w1")
    assert bench.memory.is_moving(log)
    bench.group.remove(log)  # a deletion: the adapter is forgotten when no cycle has it any more
    assert not bench.memory.make_room()
    bench.memory.forget("moved")
    assert not bench.memory.targets
