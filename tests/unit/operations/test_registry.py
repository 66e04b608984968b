"""Arrivals: the first one of each tenant reaches the clock, and the last awaited tenant wakes it."""

import asyncio

from coordinator.base.time import Signal
from coordinator.operations.registry import Arrivals
from tests.support.toy_pool import FakeTime


def test_a_drain_returns_the_first_arrival_of_each_tenant_since_the_last_one() -> None:
    time = FakeTime(now=5.0)
    arrivals = Arrivals(time, Signal())
    for tenant in ("a", "b", "a"):
        arrivals.note(tenant)
        time.now += 1.0
    assert arrivals.drain() == {"a": 5.0, "b": 6.0}
    assert arrivals.drain() == {}
    arrivals.note("a")
    assert arrivals.drain() == {"a": 8.0}


def test_the_clock_is_woken_by_the_last_awaited_tenant_and_by_every_arrival_when_none_is_awaited() -> None:
    changed, woken = Signal(), asyncio.Event()
    changed.subscribe(woken)
    arrivals = Arrivals(FakeTime(), changed)
    arrivals.await_tenants(["a", "b"])
    for tenant in ("a", "c"):
        arrivals.note(tenant)
    assert (arrivals.is_awaiting, woken.is_set()) == (True, False)
    arrivals.note("b")
    assert (arrivals.is_awaiting, woken.is_set()) == (False, True)
    woken.clear()
    arrivals.note("c")
    assert woken.is_set()
