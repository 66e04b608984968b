"""The workers: a lost incarnation never becomes live again, and its state does not pass to the next one."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.fleet import fleet as fleet_module
from coordinator.fleet.fleet import Fleet, Flight, Losses
from tests.support.adapter_logs import spec_named
from tests.support.toy_engine import toy_bytes, toy_worker_info

PASS = Flight("a:1", "a", 1, 0, "t")


def sample(name: str, version: str = "") -> Flight:
    return Flight(name, name.partition(":")[0], 1, 0, "t", version)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for info in (toy_worker_info("w0"), toy_worker_info("w1"), toy_worker_info("w2", model="other")):
        fleet.add(info)
    return fleet


def test_a_loss_returns_the_work_in_flight_once_and_the_worker_is_not_live(fleet: Fleet) -> None:
    worker = fleet.worker("w0")
    worker.begin_phase((PASS,))
    worker.begin_sample(sample("s:1"))
    worker.begin_sample(sample("s:2"))
    assert worker.end_sample("s:2")
    assert fleet.lose("w0", "w0.1") == ((PASS,), (sample("s:1"),))
    assert fleet.lose("w0", "w0.1") is None
    assert (fleet.find("w0"), fleet.has_lost("toy"), fleet.has_lost("other")) == (None, True, False)
    assert [each.info.worker_id for each in fleet.available("toy")] == ["w1"]
    assert not worker.end_sample("s:1")


def test_a_lost_incarnation_never_becomes_live_again(fleet: Fleet) -> None:
    lost = fleet.worker("w0")
    fleet.lose("w0", "w0.1")
    fleet.add(toy_worker_info("w0", 2))
    assert fleet.is_live("w0")
    assert not lost.is_live
    assert fleet.worker("w0").name == "w0.2"
    assert fleet.lose("w0", "w0.1") is None, "a late report of the earlier loss is ignored"
    assert fleet.is_live("w0")


def test_why_a_worker_was_lost_is_kept_on_one_short_line_until_the_worker_is_removed(fleet: Fleet) -> None:
    assert fleet.losses("w0") == Losses()
    fleet.note_reason("w0", "it has died", 10.0)
    fleet.lose("w0", "w0.1")
    fleet.note_start_problem("w0", "no memory\nis left")
    fleet.note_reason("w0", "CUDA error\n" + "Compile with more checks. " * 100, 20.0)
    losses = fleet.losses("w0")
    assert (losses.num, losses.last_at, losses.start_problem) == (2, 20.0, "no memory is left")
    assert losses.reason.startswith("CUDA error Compile with more")
    assert losses.reason.endswith(" ...")
    assert len(losses.reason) == fleet_module.REASON_CHARS_MAX
    fleet.add(toy_worker_info("w0", 2))
    assert fleet.losses("w0") == replace(losses, start_problem="")
    assert fleet.losses("w1") == Losses()
    fleet.drain("w0", is_ending=True)
    fleet.remove("w0")
    assert fleet.losses("w0") == Losses()


def test_a_completed_phase_is_not_in_flight(fleet: Fleet) -> None:
    fleet.worker("w0").begin_phase((PASS,))
    fleet.worker("w0").end_phase(0)
    assert fleet.lose("w0", "w0.1") == ((), ())


def test_a_version_is_held_by_the_incarnation_that_has_it_and_by_no_other(fleet: Fleet) -> None:
    fleet.hold_version("w0", "w0.1", "v")
    assert fleet.worker("w0").holds("v")
    assert not fleet.worker("w1").holds("v")
    fleet.lose("w0", "w0.1")
    fleet.add(toy_worker_info("w0", 2))
    fleet.hold_version("w0", "w0.1", "v")
    assert not fleet.worker("w0").holds("v")


def test_the_least_recently_used_versions_are_removed_and_none_that_is_in_use(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "VERSIONS_MAX", 3)  # the real bound is 64
    worker = fleet.worker("w0")
    worker.begin_sample(sample("s:1", "v1"))
    for version in ("v1", "v2", "v3", "v2", "v4"):
        worker.hold(version)
    assert [worker.holds(version) for version in ("v1", "v2", "v3", "v4")] == [True, True, False, True]
    assert worker.take_removals() == ("v3",)
    worker.end_sample("s:1")
    worker.hold("v5")
    assert worker.take_removals() == ("v1",)


def test_a_version_that_is_wanted_again_is_not_removed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "VERSIONS_MAX", 1)  # the real bound is 64
    worker = fleet.worker("w0")
    for version in ("v1", "v2", "v1"):
        worker.hold(version)
    assert worker.take_removals() == ("v2",)
    worker.misses("v1")
    assert not worker.holds("v1")


def test_a_removal_is_sent_once_and_to_no_other_incarnation(fleet: Fleet) -> None:
    fleet.drop_version("w0", "a")
    assert fleet.worker("w0").take_removals() == ("a",)
    assert fleet.worker("w0").take_removals() == ()
    fleet.drop_version("w0", "b")
    fleet.lose("w0", "w0.1")
    fleet.drop_version("w0", "c")
    fleet.add(toy_worker_info("w0", 2))
    assert fleet.worker("w0").take_removals() == ()


def test_losses_are_counted_until_the_worker_completes_a_batch(fleet: Fleet) -> None:
    assert [fleet.note_loss("w0") for _ in range(3)] == [1, 2, 3]
    assert fleet.note_loss("w1") == 1
    fleet.answered("w0")
    assert fleet.note_loss("w0") == 1


def test_a_base_model_has_the_least_memory_to_train_and_the_most_to_sample_of_its_workers() -> None:
    fleet = Fleet()
    fleet.add(toy_worker_info("w0", fitting_tokens=100, num_cache_blocks=7))
    fleet.add(toy_worker_info("w1", num_cache_blocks=9))
    fleet.add(toy_worker_info("w2", fitting_tokens=80, num_cache_blocks=5))
    assert (fleet.models["toy"].fitting_tokens, fleet.models["toy"].num_cache_blocks) == (80, 9)
    fleet.lose("w2", "w2.1")
    fleet.add(toy_worker_info("w2", 2, fitting_tokens=120))
    assert (fleet.models["toy"].fitting_tokens, fleet.models["toy"].num_cache_blocks) == (100, None)
    for worker_id in ("w0", "w2", "w1"):
        fleet.drain(worker_id, is_ending=True)
        fleet.remove(worker_id)
    assert fleet.models["toy"].num_cache_blocks == 9, "the facts of the last one stay"


def test_a_drained_worker_gets_nothing_new_and_is_removed_when_nothing_is_in_flight(fleet: Fleet) -> None:
    changes = asyncio.Event()
    fleet.changed.subscribe(changes)
    worker = fleet.worker("w0")
    worker.begin_sample(sample("s:1"))
    fleet.drain("w0", is_ending=True)
    assert changes.is_set()
    assert fleet.is_live("w0")
    assert [each.name for each in fleet.available("toy")] == ["w1.1"]
    assert fleet.drained("toy") == [worker]
    with pytest.raises(AssertionError):
        fleet.remove("w0")


def test_a_drained_worker_that_is_lost_is_not_awaited(fleet: Fleet) -> None:
    fleet.drain("w0", is_ending=True)
    fleet.lose("w0", "w0.1")
    assert not fleet.has_lost("toy")
    fleet.remove("w0")
    assert fleet.worker_ids() == ["w1", "w2"]
    assert fleet.lose("w0", "w0.1") is None, "a late report"


def test_a_drained_worker_whose_next_incarnation_follows_is_awaited_when_it_is_lost(fleet: Fleet) -> None:
    fleet.drain("w0", is_ending=False)
    assert fleet.leaving == {"w0"}
    fleet.lose("w0", "w0.1")
    assert fleet.has_lost("toy")
    fleet.add(toy_worker_info("w0", 2))
    assert fleet.leaving == frozenset()
    assert [each.name for each in fleet.available("toy")] == ["w0.2", "w1.1"]


def test_an_undrained_worker_takes_work_again(fleet: Fleet) -> None:
    changes = asyncio.Event()
    fleet.drain("w0", is_ending=True)
    fleet.changed.subscribe(changes)
    fleet.undrain("w0")
    assert changes.is_set()
    assert fleet.leaving == frozenset()
    assert [each.name for each in fleet.available("toy")] == ["w0.1", "w1.1"]
    assert [each.name for each in fleet.staying("toy")] == ["w0.1", "w1.1"]


def test_a_worker_has_room_up_to_its_limit_and_one_that_holds_nothing_takes_anything() -> None:
    fleet, spec = Fleet(), spec_named("a")
    num_bytes = toy_bytes(spec)
    fleet.add(toy_worker_info("w0", host_bytes_max=2 * num_bytes))
    worker = fleet.worker("w0")
    assert fleet.copy_bytes("toy", spec) == num_bytes
    assert worker.has_room(3 * num_bytes)
    worker.sent(num_bytes)
    assert [worker.has_room(n * num_bytes) for n in (1, 2)] == [True, False]
    worker.end_phase(2 * num_bytes)
    assert not worker.has_room(1)
    fleet.drop_copy("w0", spec)
    assert worker.held_bytes == num_bytes
    assert worker.take_removals() == ("a",)


def test_a_worker_without_a_limit_always_has_room(fleet: Fleet) -> None:
    fleet.worker("w0").end_phase(1 << 50)
    assert fleet.worker("w0").has_room(1 << 50)


def test_a_worker_that_joins_takes_work(fleet: Fleet) -> None:
    fleet.add(toy_worker_info("w3"))
    assert [each.info.worker_id for each in fleet.available("toy")] == ["w0", "w1", "w3"]
