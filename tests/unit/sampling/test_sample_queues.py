"""Which sample is next, where its tenant is suspended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from coordinator.fleet.fleet import Fleet
from coordinator.operations.registry import AdapterGroup
from coordinator.sampling.fair_queue import SampleQueues
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.solo_turns import SoloTurns
from tests.support.classes import classes_of
from tests.support.probation import MemoryRecords
from tests.support.toy_engine import toy_worker_info
from tests.support.toy_pool import FakeTime


def sample(name: str, tenant: str) -> Any:
    operation, decoded = SimpleNamespace(tenant_id=tenant), SimpleNamespace(num_tokens_max=1)
    return SimpleNamespace(name=name, base_model="toy", operation=operation, decoded=decoded)


class Bench:
    """The queue of one base model, and what it asks."""

    def __init__(self) -> None:
        self.held, self.quarantine, self.records, fleet = set[str](), Quarantine(), MemoryRecords(), Fleet()
        fleet.add(toy_worker_info())
        self.probation, is_held = Probation(self.records, halving_s=3600.0), self.held.__contains__
        group, classes = AdapterGroup(FakeTime()), classes_of(fleet)
        self.turns = SoloTurns("toy", self.probation, group, fleet, classes, is_held)
        scheduling: Any = SimpleNamespace(
            quarantines={"toy": self.quarantine},
            turns={"toy": self.turns},
            fair=SimpleNamespace(shares={}),
            accounts=SimpleNamespace(is_held=is_held),
        )
        self.queues = SampleQueues(scheduling)


def test_a_suspended_tenants_samples_wait_except_those_that_others_wait_for_in_quarantine() -> None:
    bench = Bench()
    queues, quarantine = bench.queues, bench.quarantine
    bench.held.add("suspended")
    queues.add(sample("s:1", "suspended"))
    assert queues.peek("toy") is None
    queues.add(sample("t:1", "other"))
    assert queues.peek("toy") == "t:1"
    quarantine.record_loss(["s:1"], ["s:1"])
    assert queues.peek("toy") == "s:1", "nothing else may run until it has"
    quarantine.release("s:1")
    bench.held.clear()
    assert queues.peek("toy") == "s:1"


def test_a_suspended_tenants_sample_waits_although_its_solo_turn_was_to_come() -> None:
    bench = Bench()
    bench.probation.record_kill("bad", "a:0")
    bench.records.now += 60.0
    bench.queues.add(sample("s:1", "bad"))
    assert bench.queues.peek("toy") is None, "it asks for a turn"
    bench.held.add("bad")
    bench.turns.update(lambda _: True)
    assert bench.queues.peek("toy") is None
    bench.held.clear()
    bench.turns.update(lambda _: True)
    assert bench.queues.peek("toy") == "s:1"
    bench.held.add("bad")
    assert bench.queues.peek("toy") is None
