"""Adapters stay within the class of their worker, wait for it, and change it with a note."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.scheduling.classes import Classes
from tests.support.adapter_logs import FB, adapter_with
from tests.support.classes import MemoryReports, classes_of
from tests.support.logs import logged_by
from tests.support.toy_engine import toy_worker_info
from tests.support.toy_pool import FakeTime

WAIT_S = 60.0


def a_fleet(**fingerprints: str) -> Fleet:
    fleet = Fleet()
    for worker_id, fingerprint in fingerprints.items():
        fleet.add(toy_worker_info(worker_id, fingerprint=fingerprint))
    return fleet


def an_adapter(fingerprint: str) -> AdapterLog:
    log = adapter_with(FB)
    log.fingerprint = fingerprint
    return log


def lose(fleet: Fleet, worker_id: str) -> None:
    fleet.lose(worker_id, fleet.worker(worker_id).name)


def test_an_adapter_that_never_ran_may_be_placed_anywhere() -> None:
    classes = classes_of(a_fleet(w0="a", w1="b"))
    assert classes.others(an_adapter("")) == frozenset()


def test_an_adapter_stays_with_workers_of_its_class() -> None:
    classes = classes_of(a_fleet(w0="a", w1="b", w2="b"))
    assert classes.others(an_adapter("a")) == {"w1", "w2"}
    assert classes.others(an_adapter("b")) == {"w0"}


def test_it_waits_for_a_lost_worker_of_its_class_and_goes_on_in_another_one_when_that_takes_too_long() -> None:
    fleet, time, log = a_fleet(w0="a", w1="b"), FakeTime(0.0), an_adapter("a")
    classes = classes_of(fleet, time, WAIT_S)
    lose(fleet, "w0")
    assert classes.others(log) == {"w1"}, "it waits"
    time.now = WAIT_S - 1
    assert classes.others(log) == {"w1"}
    time.now = WAIT_S
    assert classes.others(log) == frozenset()


def test_it_waits_for_a_worker_that_is_missing_since_the_start() -> None:
    fleet = a_fleet(w1="b")
    fleet.expect(["w0", "w1"])
    assert classes_of(fleet, w0="a").others(an_adapter("a")) == {"w1"}
    assert classes_of(fleet, w0="b").others(an_adapter("a")) == frozenset(), "none of its class is to come"


def test_it_does_not_wait_for_a_worker_that_ends() -> None:
    fleet = a_fleet(w0="a", w1="b")
    classes = classes_of(fleet)
    fleet.drain("w0", is_ending=True)
    fleet.dismiss("w0")
    assert classes.others(an_adapter("a")) == frozenset()


def test_workers_that_all_report_another_class_than_before_get_its_adapters_at_once() -> None:
    reports = MemoryReports({"w0": "torch 1", "w1": "torch 1"})
    classes = Classes("toy", a_fleet(w0="torch 2", w1="torch 2"), FakeTime(0.0), WAIT_S, reports)
    assert classes.others(an_adapter("torch 1")) == frozenset()
    assert reports.rows == {"w0": "torch 2", "w1": "torch 2"}


def test_nobody_waits_for_a_worker_that_has_just_come_back_with_another_class() -> None:
    fleet = a_fleet(w0="a")
    classes = classes_of(fleet)
    lose(fleet, "w0")
    fleet.add(toy_worker_info("w0", 2, fingerprint="b"))
    assert classes.others(an_adapter("a")) == frozenset()


async def test_the_wait_begins_anew_when_a_worker_of_the_class_was_there_meanwhile() -> None:
    fleet, time, log = a_fleet(w0="a", w1="b"), FakeTime(0.0), an_adapter("a")
    classes = classes_of(fleet, time, WAIT_S)
    running = asyncio.create_task(classes.run())
    lose(fleet, "w0")
    assert classes.others(log)
    time.now = WAIT_S - 1
    fleet.add(toy_worker_info("w0", 2, fingerprint="a"))
    await asyncio.sleep(0.01)
    lose(fleet, "w0")
    time.now = 2 * WAIT_S - 2
    assert classes.others(log) == {"w1"}
    running.cancel()


async def test_the_end_of_a_wait_is_notified() -> None:
    fleet, woken = a_fleet(w0="a", w1="b"), asyncio.Event()
    classes = classes_of(fleet, wait_s=0.05)
    classes.changed.subscribe(woken)
    running = asyncio.create_task(classes.run())
    lose(fleet, "w0")
    assert classes.others(an_adapter("a"))
    async with asyncio.timeout(20):
        await woken.wait()
    assert not classes.others(an_adapter("a"))
    running.cancel()


def test_a_change_is_logged_noted_once_and_committed_with_results_only(caplog: pytest.LogCaptureFixture) -> None:
    fleet, log = a_fleet(w0="a", w1="b"), an_adapter("")
    classes = classes_of(fleet)
    classes.placed(log, fleet.worker("w0"))
    assert not log.take_class_change(), "the first class is no change"
    assert not logged_by("coordinator", caplog)
    classes.placed(log, fleet.worker("w1"))
    assert "goes on with other numerics" in caplog.text
    assert (log.take_class_change(), log.take_class_change()) == (True, False)
    assert classes.take_moved([]) == {}
    assert classes.take_moved([log.adapter_id]) == {log.adapter_id: "b"}
    assert classes.take_moved([log.adapter_id]) == {}
