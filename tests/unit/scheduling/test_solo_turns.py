"""Solo turns: one thing of one tenant on probation at a time, on a worker that runs nothing else."""

from coordinator.fleet.fleet import Fleet, Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.probation import COST_FACTOR, Probation
from coordinator.scheduling.solo_turns import KEPT_S, REST_FACTOR, SoloTurns
from tests.support.adapter_logs import FB, adapter_with, run
from tests.support.classes import classes_of
from tests.support.probation import MemoryRecords
from tests.support.toy_engine import toy_worker_info
from tests.support.toy_pool import FakeTime

SAMPLE = "s:sample:0:1"


class Bench:
    """Workers, adapters, and the tenant `bad` on probation, whose back-off is over."""

    def __init__(self, *logs: AdapterLog, num_workers: int = 2) -> None:
        self.fleet, self.group, self.records = Fleet(), AdapterGroup(FakeTime()), MemoryRecords()
        for index in range(num_workers):
            self.fleet.add(toy_worker_info(f"w{index}"))
        self.probation = Probation(self.records, halving_s=3600.0)
        classes, self.suspended = classes_of(self.fleet), set[str]()
        is_suspended = self.suspended.__contains__
        self.turns = SoloTurns("toy", self.probation, self.group, self.fleet, classes, is_suspended)
        for log in logs:
            self.group.add(log)
            self.group.mark_dirty(log)
        self.convict("bad")

    def convict(self, tenant: str) -> None:
        self.probation.record_kill(tenant, "a:0")
        self.records.now += 60.0

    def update(self) -> str:
        """Update the turns between two cycles; return the adapter or sample whose turn runs."""
        self.turns.update(lambda log: True)
        names = [*self.group.logs, SAMPLE, f"{SAMPLE}1"]
        return next((name for name in names if self.turns.has_turn(name)), "")

    def sample_on(self, worker_id: str, tenant: str) -> None:
        self.fleet.worker(worker_id).begin_sample(Flight(f"other {tenant}", "s", 1, 0, tenant))


def test_an_adapter_runs_in_its_turns_only_and_others_keep_off_its_worker_meanwhile() -> None:
    bad, good = adapter_with(FB, name="bad", tenant="bad"), adapter_with(FB, name="good", tenant="good")
    bench = Bench(bad, good)
    good.place_copy("w1")
    assert bench.update() == "bad"
    assert (bench.turns.is_held(bad), bench.turns.is_held(good)) == (True, False)
    assert bench.turns.reserved == "w0", "the worker with the fewest adapters of others"
    assert bench.turns.leaves_room(good)
    assert bench.turns.workers_for(adapter_with(FB, name="new"), {"w0": 0, "w1": 1}) == {"w1": 1}
    assert bench.turns.workers_for(bad, {"w0": 0, "w1": 1}) == {"w0": 0}
    assert [bench.turns.may_place("other", worker) for worker in ("w0", "w1")] == [False, True]
    good.place_copy("w0")
    assert not bench.turns.leaves_room(good)
    bench.turns.end_cycle()
    assert not bench.turns.has_turn("bad")
    assert bench.turns.leaves_room(good)


def test_a_turn_begins_only_when_nothing_is_in_flight_on_its_worker() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"), num_workers=1)
    bench.sample_on("w0", "good")
    assert bench.update() == ""
    assert not bench.turns.may_place("other", "w0"), "no sample starts there, so that the turn can begin"
    assert not bench.turns.leaves_room(adapter_with(name="new", tenant="good"))
    assert bench.update() == ""
    bench.fleet.worker("w0").end_sample("other good")
    bench.turns.freed("w0")
    assert bench.update() == "bad"


def test_a_turn_does_not_begin_on_a_worker_that_is_late_and_goes_on_while_it_is() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"), num_workers=1)
    bench.sample_on("w0", "good")
    assert bench.update() == ""
    bench.fleet.be_late(bench.fleet.worker("w0"), is_late=True)
    bench.fleet.worker("w0").end_sample("other good")
    assert bench.update() == ""
    bench.fleet.be_late(bench.fleet.worker("w0"), is_late=False)
    assert bench.update() == "bad"
    bench.fleet.set_apart(bench.fleet.worker("w0"), is_apart=True)
    bench.turns.end_cycle()
    assert bench.update() == "bad"
    bench.fleet.set_apart(bench.fleet.worker("w0"), is_apart=False)
    bench.turns.end_cycle()
    assert not bench.turns.has_turn("bad")


def test_no_turn_is_granted_to_an_adapter_that_waits_for_a_late_worker() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    bench.turns.update(lambda log: True, frozenset({"bad"}))
    assert not bench.turns.reserved
    assert bench.update() == "bad"


def test_no_turn_is_granted_during_a_back_off_or_while_a_worker_is_missing() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    bench.probation.record_kill("bad", "a:1")
    assert (bench.update(), bench.turns.reserved) == ("", "")
    bench.records.now += 60.0
    bench.turns.pause(is_paused=True)
    assert (bench.update(), bench.turns.reserved) == ("", "")
    bench.turns.pause(is_paused=False)
    assert bench.update() == "bad"


def test_a_turn_that_waits_is_withdrawn_when_another_worker_is_lost() -> None:
    """Else others would have no worker."""
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    for worker in ("w0", "w1"):
        bench.sample_on(worker, "good")
    assert bench.update() == ""
    assert bench.turns.reserved
    bench.turns.pause(is_paused=True)
    assert not bench.turns.reserved


def test_others_that_use_the_worker_have_three_quarters_of_its_time() -> None:
    bad, good = adapter_with(FB, name="bad", tenant="bad"), adapter_with(name="good", tenant="good")
    bench = Bench(bad, good, num_workers=1)
    good.place_copy("w0")
    assert bench.update() == "bad"
    bench.records.now += 2.0
    bench.turns.end_cycle()
    bench.records.now += 2.0 * REST_FACTOR - 0.01
    assert bench.update() == ""
    bench.records.now += 0.02
    assert bench.update() == "bad"
    good.lose_copy()
    bench.turns.end_cycle()
    assert bench.update() == "bad", "without others it does not rest"


def test_tenants_on_probation_take_turns() -> None:
    bench = Bench(*(adapter_with(FB, name=name, tenant=name[:3]) for name in ("bad1", "bad2", "bas")))
    bench.convict("bas")
    found = []
    for _ in range(4):
        found.append(bench.update()[:3])
        bench.turns.end_cycle()
    assert sorted(found[:2]) == sorted(found[2:]) == ["bad", "bas"]


def test_a_copy_on_another_worker_is_moved_to_the_solo_worker() -> None:
    bad = adapter_with(FB, name="bad", tenant="bad")
    bench = Bench(bad)
    bad.place_copy("w1")
    assert bench.update() == "bad"
    assert (bad.home, bench.turns.reserved) == ("", "w0")
    assert bench.group.residency.take_left("w1") == ["bad"]


def test_each_undecided_operation_runs_in_a_turn_of_its_own() -> None:
    bad = adapter_with(FB, FB, FB, name="bad", tenant="bad")
    bench = Bench(bad)
    bench.update()
    bad.place_copy(bench.turns.reserved)
    assert [operation.seq for operation in bad.ahead().passes()] == [1]
    run(bad, 1)
    assert bench.turns.end_cycle() == []
    assert [operation.seq for operation in bad.ahead().passes()] == [2]


def test_a_sample_asks_for_a_turn_and_keeps_it_until_it_is_decided() -> None:
    bench = Bench()
    assert bench.turns.may_sample("good", "other")
    assert not bench.turns.may_sample("bad", SAMPLE)
    assert not bench.turns.may_sample("bad", f"{SAMPLE}1")
    assert bench.update() == SAMPLE == bench.turns.sample
    assert [bench.turns.may_place(SAMPLE, worker) for worker in ("w0", "w1")] == [True, False]
    assert bench.turns.end_cycle() == []
    assert bench.update() == SAMPLE
    bench.turns.end_sample(SAMPLE)
    assert bench.update() == f"{SAMPLE}1"


def test_a_sample_of_a_suspended_tenant_gets_no_turn_and_loses_one_that_it_has_not_used() -> None:
    bench = Bench()
    assert not bench.turns.may_sample("bad", SAMPLE)
    bench.suspended.add("bad")
    assert (bench.update(), bench.turns.reserved) == ("", "")
    bench.suspended.clear()
    assert bench.update() == SAMPLE == bench.turns.sample
    bench.suspended.add("bad")
    assert not bench.turns.sample
    assert (bench.update(), bench.turns.reserved) == ("", "")
    bench.suspended.clear()
    assert not bench.turns.may_sample("bad", SAMPLE), "it asks again"
    assert bench.update() == SAMPLE
    flight = Flight(SAMPLE, "s", 1, 0, "bad")
    bench.fleet.worker(bench.turns.reserved).begin_sample(flight)
    bench.suspended.add("bad")
    assert bench.update() == SAMPLE, "what has begun ends"


def test_a_lost_turn_is_charged_and_followed_by_a_pause_that_its_cost_decides() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    assert bench.update() == "bad"
    assert not bench.turns.lose("w1")
    assert bench.turns.lose("w0")
    assert bench.update() == "", "not before the cost is known"
    bench.records.now += 8.0
    bench.turns.settled("w0")
    assert bench.turns.take_charges() == [("bad", 8.0)]
    assert bench.turns.take_charges() == []
    bench.records.now += 8.0 * COST_FACTOR - 0.01
    assert bench.update() == ""
    bench.records.now += 0.02
    assert bench.update() == "bad"


def test_the_cost_of_a_loss_grows_until_its_worker_is_replaced() -> None:
    """If the worker never is, the tenant runs on another, seldom."""
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    assert bench.update() == "bad"
    bench.turns.lose("w0")
    bench.records.now += 2.0
    bench.turns.not_replaced("w0")
    bench.records.now += 1.0
    bench.turns.settled("w0")
    assert bench.turns.take_charges() == [("bad", 2.0), ("bad", 1.0)]
    bench.records.now += 3.0 * COST_FACTOR - 0.01
    assert bench.update() == ""
    bench.records.now += 0.02
    assert bench.update() == "bad"
    bench.turns.lose("w0")
    bench.turns.not_replaced("w0")
    assert bench.update() == "", "nothing is known of its cost"
    bench.records.now += 2.0
    bench.turns.not_replaced("w0")
    bench.records.now += 2.0 * COST_FACTOR + 0.01
    assert bench.update() == "bad"


def test_others_avoid_the_solo_worker_for_a_while_after_a_turn_if_they_can() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    bench.update()
    bench.turns.end_cycle()
    assert bench.turns.workers_for(adapter_with(FB, name="new"), {"w0": 0, "w1": 5}) == {"w1": 5}
    assert bench.turns.workers_for(adapter_with(FB, name="new"), {"w0": 0}) == {"w0": 0}
    bench.records.now += KEPT_S
    assert bench.turns.workers_for(adapter_with(FB, name="new"), {"w0": 0, "w1": 5}) == {"w0": 0, "w1": 5}


def test_a_turn_whose_adapter_has_nothing_to_run_ends() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    assert bench.update() == "bad"
    bench.group.mark_clean(["bad"])
    assert bench.update() == ""
    assert bench.turns.reserved == ""


def test_the_end_of_a_probation_lets_everything_run_at_once() -> None:
    bad = adapter_with(FB, name="bad", tenant="bad")
    bench = Bench(bad)
    bench.records.now += 3600.0
    assert bench.update() == ""
    assert not bench.turns.is_held(bad)
    assert bench.turns.may_sample("bad", SAMPLE)


def test_the_solo_worker_is_one_of_the_class_of_the_adapter_and_others_of_the_class_may_use_it_too() -> None:
    bad, good = adapter_with(FB, name="bad", tenant="bad"), adapter_with(FB, name="good", tenant="good")
    bench = Bench(bad, good, num_workers=0)
    for worker_id, fingerprint in (("w0", "a"), ("w1", "b")):
        bench.fleet.add(toy_worker_info(worker_id, fingerprint=fingerprint))
    bad.fingerprint = good.fingerprint = "b"
    assert bench.update() == "bad"
    assert bench.turns.reserved == "w1", "although both are empty"
    assert not bench.turns.leaves_room(good), "it must not run on w0"
    bench.turns.end_cycle()
    assert bench.turns.leaves_room(good)
    assert bench.turns.workers_for(good, {"w0": 0, "w1": 5}) == {"w1": 5}, "although others avoid it for a while"


def test_a_turn_that_is_in_flight_goes_on_whatever_its_adapter_waits_for_and_pays_for_its_loss() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"), num_workers=1)
    assert bench.update() == "bad"
    bench.fleet.worker("w0").begin_phase((Flight("bad:1", "bad", 1, 0, "bad"),))
    bench.turns.update(lambda log: False)  # a file is being written, or its tenant was suspended
    assert bench.turns.lose("w0"), "the loss is one of its turn"


def test_a_turn_that_is_in_flight_goes_on_while_its_worker_is_drained_and_pays_for_its_loss() -> None:
    bench = Bench(adapter_with(FB, name="bad", tenant="bad"))
    assert bench.update() == "bad"
    worker = bench.fleet.worker(bench.turns.reserved)
    worker.begin_phase((Flight("bad:1", "bad", 1, 0, "bad"),))
    bench.fleet.drain(worker.info.worker_id, is_ending=False)
    assert bench.update() == "bad"
    assert bench.turns.lose(worker.info.worker_id), "the loss is one of its turn"
