"""A worker's loss is one step: fleet, copies, quarantine and poison are updated before a receiver reads the event."""

import asyncio
from collections.abc import Collection
from typing import cast

import pytest

from coordinator.base.errors import ServiceError
from coordinator.checkpoints.published_weights import Publishing
from coordinator.fleet.fleet import Fleet, Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import Holdings
from coordinator.operations.operation import Operation
from coordinator.operations.registry import AdapterRegistry
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import SOLO_LOSSES_MAX, Quarantine
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.worker_losses import LossKind, LossRecorder, WorkerLoss
from coordinator.storage.adapters import Adapters
from tests.support.adapter_logs import FB, STEP, adapter_with, appending, run
from tests.support.classes import classes_of
from tests.support.probation import MemoryRecords
from tests.support.toy_engine import toy_worker_info
from tests.support.toy_pool import FakeTime

SAMPLE = Flight("s:sample:0:1", "s:sample:0", 1, 0, "t")


class Refusals:
    """Stands for published weights; records the adapters that cannot be rebuilt."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, adapter_id: str, error: ServiceError) -> None:
        self.failed.append(adapter_id)


class Uncounted:
    """Counts no states."""

    def add_state(self, *_: object) -> None:
        pass

    def remove_state(self, *_: object) -> None:
        pass


class Bench:
    """Two workers, adapters with copies on the first one, and a recorder."""

    def __init__(self, *adapters: AdapterLog) -> None:
        self.fleet, self.quarantine, self.publishing = Fleet(), Quarantine(), Refusals()
        self.fleet.add(toy_worker_info("w0"))
        self.fleet.add(toy_worker_info("w1"))
        self.registry = AdapterRegistry(FakeTime(), cast("Adapters", None), cast("Holdings", Uncounted()))
        for adapter in adapters:
            self.registry.add(adapter)
            adapter.place_copy("w0")
        self.group = self.registry.group("toy")
        publishing, time = cast("Publishing", self.publishing), FakeTime()
        self.records = MemoryRecords()
        self.probation = Probation(self.records, halving_s=3600.0)
        classes = classes_of(self.fleet)
        self.turns = SoloTurns("toy", self.probation, self.group, self.fleet, classes, lambda _: False)
        self.recorder = LossRecorder(
            self.fleet, self.registry, {"toy": self.quarantine}, {"toy": self.turns}, self.probation, publishing, time
        )
        self.woken = asyncio.Event()
        self.feed = self.recorder.subscribe(self.woken)

    def dispatch(self, *operations: Operation, samples: Collection[Flight] = ()) -> None:
        """Dispatch operations and samples to the first worker."""
        worker = self.fleet.worker("w0")
        if operations:
            worker.begin_phase(tuple(Flight(o.name, o.target_id, o.seq, o.append_id, o.tenant_id) for o in operations))
        for operation in operations:
            self.registry.logs[operation.target_id].copy.start(operation)
        for sample in samples:
            worker.begin_sample(sample)
            worker.send_sample(sample.name)

    def lose(self, kind: LossKind = LossKind.DIED) -> WorkerLoss:
        """Lose the first worker's incarnation, and find that the second one lives; return the event."""
        self.recorder.record("w0", self.fleet.worker("w0").name, kind, "test")
        [loss] = self.feed.take()
        assert loss.worker_id == "w0"
        if loss.unproven:
            self.recorder.checked(loss)
        return loss

    def lose_solo(self, operation: Operation, times: int) -> list[str]:
        """Lose the worker `times` times while the operation runs solo; return the poison that each loss decided."""
        found = []
        for incarnation in range(2, times + 2):
            self.fleet.add(toy_worker_info("w0", incarnation))
            self.quarantine.pause(is_paused=False)
            if operation.target_id in self.registry.logs:
                self.registry.logs[operation.target_id].place_copy("w0")
                self.dispatch(operation)
            found.append(self.lose().poison)
        return found


async def test_copies_and_operations_of_a_lost_worker_are_dropped_and_quarantined_before_the_event_is_read() -> None:
    running, resident, elsewhere = adapter_with(FB, FB), adapter_with(FB, name="b"), adapter_with(FB, name="c")
    bench = Bench(running, resident, elsewhere)
    elsewhere.place_copy("w1")
    generation = running.copy.generation
    bench.dispatch(*running.operations.values(), samples=[SAMPLE])
    loss = bench.lose()
    assert (loss.worker_id, loss.samples, loss.poison) == ("w0", (SAMPLE,), "")
    assert bench.woken.is_set()
    assert not bench.fleet.is_live("w0")
    assert [log.home for log in (running, resident, elsewhere)] == ["", "", "w1"]
    assert running.copy.generation > generation, "late results are of an older generation"
    assert running.quarantined == (1, 2)
    assert set(bench.group.dirty) == {"a", "b"}
    assert [bench.quarantine.may_run(name) for name in ("a", SAMPLE.name, "b")] == [True, False, False]


async def test_what_was_in_flight_waits_until_the_other_workers_were_asked_whether_they_live() -> None:
    log, other = adapter_with(FB), adapter_with(FB, name="b")
    bench = Bench(log, other)
    bench.dispatch(log.operations[1])
    bench.recorder.record("w0", "w0.1", LossKind.DIED, "test")
    bench.recorder.record("w1", "w1.1", LossKind.DIED, "test")
    first, second = bench.feed.take()
    assert first.unproven == (bench.fleet.worker("w1"),)
    assert not bench.quarantine.may_run("a")
    assert bench.quarantine.may_run("b"), "it was not in flight"
    assert second.unproven == (), "no other worker is left"
    bench.recorder.checked(first)
    assert bench.quarantine.may_run("a")


async def test_a_first_silence_suspects_nothing_and_a_second_one_what_was_in_flight_at_both() -> None:
    log, other = adapter_with(FB), adapter_with(FB, name="b")
    bench = Bench(log, other)
    bench.dispatch(log.operations[1], other.operations[1], samples=[SAMPLE])
    assert bench.lose(LossKind.SILENT).poison == ""
    assert bench.quarantine.group == {"a", "b"}, "not halved"
    assert log.quarantined == other.quarantined == (1, 1)
    bench.quarantine.release("b")
    for incarnation in (2, 3):
        bench.fleet.add(toy_worker_info("w0", incarnation))
        log.place_copy("w0")
        bench.dispatch(log.operations[1])
        assert bench.lose(LossKind.SILENT).poison == ""
    bench.fleet.add(toy_worker_info("w0", 4))
    log.place_copy("w0")
    bench.dispatch(log.operations[1])
    assert bench.lose(LossKind.SILENT).poison == "a:1", "lost solo twice as a suspect"


async def test_a_sample_whose_weights_are_being_read_is_not_suspected_of_the_loss_of_its_worker() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.fleet.worker("w0").begin_sample(SAMPLE)
    for incarnation in (2, 3, 4):
        loss = bench.lose()
        assert (loss.samples, loss.poison) == ((SAMPLE,), ""), "it is started elsewhere"
        assert not bench.quarantine.group
        bench.fleet.add(toy_worker_info("w0", incarnation))
        bench.fleet.worker("w0").begin_sample(SAMPLE)
    log.place_copy("w0")
    bench.dispatch(log.operations[1])
    bench.lose()
    assert bench.quarantine.group == {"a"}, "the pass was alone there"


@pytest.mark.parametrize("is_snapshot", [False, True])
async def test_a_suspect_did_not_run_solo_beside_something_that_is_not_suspected(is_snapshot: bool) -> None:
    """The silence may be that of the pass, or of the snapshot, that was in flight as well."""
    log = adapter_with(FB)
    bench = Bench(log)
    for incarnation in (2, 3):
        bench.dispatch(samples=[SAMPLE])
        assert bench.lose().poison == ""
        bench.fleet.add(toy_worker_info("w0", incarnation))
        bench.recorder.settled("w0")
    assert bench.quarantine.num_solo_losses(SAMPLE.name) == SOLO_LOSSES_MAX - 1
    log.place_copy("w0")
    if is_snapshot:
        bench.fleet.worker("w0").begin_phase(())
    bench.dispatch(*[] if is_snapshot else [log.operations[1]], samples=[SAMPLE])
    assert bench.lose(LossKind.SILENT).poison == ""
    assert bench.quarantine.num_solo_losses(SAMPLE.name) == SOLO_LOSSES_MAX - 1
    bench.fleet.add(toy_worker_info("w0", 4))
    bench.recorder.settled("w0")
    assert bench.quarantine.group == {SAMPLE.name}, "it runs again, by itself"
    bench.dispatch(samples=[SAMPLE])
    assert bench.lose(LossKind.SILENT).poison == SAMPLE.name


async def test_suspects_that_have_killed_a_worker_wait_while_one_is_left_and_another_missing() -> None:
    log, other = adapter_with(FB), adapter_with(FB, name="b")
    bench = Bench(log, other)
    bench.dispatch(log.operations[1])
    bench.lose()
    assert bench.quarantine.may_run("a"), "it runs on the worker that is left"
    bench.fleet.add(toy_worker_info("w0", 2))
    bench.recorder.settled("w0")
    log.place_copy("w0")
    bench.dispatch(log.operations[1])
    bench.lose()
    assert [bench.quarantine.may_run(name) for name in ("a", "b")] == [False, True]
    bench.recorder.not_replaced("w0")
    assert bench.quarantine.may_run("a")


async def test_the_second_report_of_a_loss_and_a_late_one_are_ignored() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.dispatch(log.operations[1])
    bench.lose()
    bench.recorder.record("w0", "w0.1", LossKind.DIED, "again")
    bench.fleet.add(toy_worker_info("w0", 2))
    log.place_copy("w0")
    bench.recorder.record("w0", "w0.1", LossKind.DIED, "late")
    assert bench.feed.take() == []
    assert (log.home, bench.fleet.is_live("w0")) == ("w0", True)


async def test_every_receiver_gets_every_loss_once_in_order() -> None:
    bench, woken = Bench(), asyncio.Event()
    other = bench.recorder.subscribe(woken)
    for worker_id in ("w1", "w0"):
        bench.recorder.record(worker_id, f"{worker_id}.1", LossKind.DIED, "test")
    assert woken.is_set()
    for feed in (bench.feed, other):
        assert [loss.worker_id for loss in feed.take()] == ["w1", "w0"]
        assert feed.take() == []


async def test_a_training_operation_that_is_the_poison_fails_and_closes_its_window() -> None:
    log = adapter_with(FB, STEP)
    bench = Bench(log)
    poison = log.operations[1]
    bench.dispatch(poison)
    bench.lose()
    assert bench.lose_solo(poison, SOLO_LOSSES_MAX) == [""] * (SOLO_LOSSES_MAX - 1) + ["a:1"]
    assert poison.outcome is not None
    assert poison.outcome.error.reason == "WORKER_DIED"
    assert log.take_decided() == [poison, log.operations[2]]
    assert "a" in bench.group.dirty
    assert bench.publishing.failed == []


async def test_an_adapter_whose_replay_is_the_poison_is_aborted() -> None:
    log = adapter_with(FB, FB)
    bench = Bench(log)
    run(log, 1)
    log.place_copy("w0")
    bench.dispatch(log.operations[1])
    bench.lose()
    assert bench.lose_solo(log.operations[1], SOLO_LOSSES_MAX)[-1] == "a:1"
    assert log.damage is not None
    assert log.damage.reason == "REPLAY_DIFFERS"
    assert log.take_decided() == [log.operations[2]]
    assert bench.publishing.failed == ["a"]


async def test_operations_of_a_deleted_adapter_quarantine_nothing() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.dispatch(log.operations[1])
    bench.registry.remove(log)
    assert bench.lose().poison == ""
    assert not bench.quarantine.group


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_poison_whose_append_failed_meanwhile_is_not_failed(is_taken: bool) -> None:
    """It was withdrawn: its caller has an error, and its sequence number may belong to another operation."""
    log = adapter_with()
    log.add(appending(1, FB))
    bench = Bench(log)
    one = log.operations[1]
    bench.dispatch(one)
    bench.lose()
    bench.lose_solo(one, SOLO_LOSSES_MAX - 1)
    bench.fleet.add(toy_worker_info("w0", 9))
    log.place_copy("w0")
    bench.dispatch(one)
    log.withdraw(one)
    if is_taken:
        other = appending(1, FB)
        other.append_id = one.append_id + 1
        log.add(other)
    assert bench.lose().poison == "a:1"
    assert log.take_decided() == []
    assert log.quarantined == (0, -1)


async def test_the_tenant_of_a_poison_is_on_probation_and_its_error_says_so() -> None:
    log = adapter_with(FB, STEP)
    bench = Bench(log)
    poison = log.operations[1]
    bench.dispatch(poison)
    bench.lose()
    assert not bench.probation.has("t")
    bench.lose_solo(poison, SOLO_LOSSES_MAX)
    assert bench.probation.has("t")
    assert poison.outcome is not None
    assert "On probation: a:1 ended its worker" in poison.outcome.error.message


async def test_a_tenant_on_probation_leaves_no_adapter_or_sample_in_quarantine() -> None:
    """Its back-off would hold up everybody."""
    log, other, neighbour = adapter_with(FB), adapter_with(FB, name="b"), adapter_with(FB, name="c", tenant="u")
    bench = Bench(log, other, neighbour)
    bench.dispatch(*(each.operations[1] for each in (log, other, neighbour)), samples=[SAMPLE])
    bench.lose()
    bench.quarantine.pause(is_paused=False)
    while bench.quarantine.group != {"a"}:
        bench.quarantine.record_loss(bench.quarantine.group, [f"{name}:1" for name in bench.quarantine.group])
    bench.lose_solo(log.operations[1], SOLO_LOSSES_MAX)
    bench.quarantine.pause(is_paused=False)
    assert bench.quarantine.group == {"c"}
    bench.quarantine.release("c")
    assert all(bench.quarantine.may_run(name) for name in ("a", "b", "c", SAMPLE.name))


async def test_beside_an_operation_of_a_tenant_on_probation_no_other_is_suspected() -> None:
    log, neighbour = adapter_with(FB), adapter_with(FB, name="c", tenant="u")
    bench = Bench(log, neighbour)
    bench.probation.record_kill("t", "a:0")
    bench.dispatch(log.operations[1], neighbour.operations[1])
    assert bench.lose().poison == ""
    assert not bench.quarantine.group
    assert (log.quarantined, neighbour.quarantined) == ((1, 1), (0, -1))


async def test_two_losses_in_solo_turns_find_the_poison_without_a_quarantine() -> None:
    log, neighbour = adapter_with(FB), adapter_with(FB, name="c", tenant="u")
    bench = Bench(log, neighbour)
    bench.probation.record_kill("t", "a:0")
    neighbour.place_copy("w1")
    log.lose_copy()
    bench.group.mark_dirty(log)
    found = []
    for incarnation in (2, 3):
        bench.records.now += 1000.0
        bench.turns.update(lambda log: True)
        assert bench.turns.has_turn("a")
        log.place_copy("w0")
        bench.dispatch(log.operations[1])
        loss = bench.lose()
        assert loss.is_blameless
        found.append(loss.poison)
        assert not bench.quarantine.group
        bench.fleet.add(toy_worker_info("w0", incarnation))
        bench.recorder.settled("w0")
    assert found == ["", "a:1"]
    assert (neighbour.home, bench.quarantine.may_run("c")) == ("w1", True)


async def test_a_loss_in_a_turn_after_its_probation_has_ended_is_quarantined_as_any_other() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.probation.record_kill("t", "a:0")
    bench.records.now += 60.0
    bench.group.mark_dirty(log)
    bench.turns.update(lambda log: True)
    bench.dispatch(log.operations[1])
    bench.records.now += 3600.0
    assert bench.lose().poison == ""
    assert bench.quarantine.group == {"a"}


async def test_nothing_is_suspected_when_a_worker_is_ended_because_its_host_leaves() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.dispatch(log.operations[1], samples=[SAMPLE])
    bench.fleet.drain("w0", is_ending=False)
    loss = bench.lose(LossKind.LEFT)
    assert (loss.samples, loss.is_blameless, log.home, log.quarantined) == ((SAMPLE,), True, "", (0, -1))
    assert not bench.quarantine.group


async def test_a_tenant_on_probation_does_not_pay_for_a_host_that_leaves() -> None:
    log = adapter_with(FB)
    bench = Bench(log)
    bench.probation.record_kill("t", "a:0")
    log.lose_copy()
    bench.group.mark_dirty(log)
    bench.records.now += 1000.0
    bench.turns.update(lambda log: True)
    assert bench.turns.has_turn("a")
    log.place_copy("w0")
    bench.dispatch(log.operations[1])
    bench.lose(LossKind.LEFT)
    bench.fleet.add(toy_worker_info("w0", 2))
    bench.recorder.settled("w0")
    assert bench.turns.take_charges() == []
