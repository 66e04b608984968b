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
from tests.support.toy_pool import FakeTime


def sample(name: str, tenant: str) -> Any:
    operation, decoded = SimpleNamespace(tenant_id=tenant), SimpleNamespace(num_tokens_max=1)
    return SimpleNamespace(name=name, base_model="toy", operation=operation, decoded=decoded)


def test_a_suspended_tenants_samples_wait_except_those_that_others_wait_for_in_quarantine() -> None:
    held, quarantine = {"suspended"}, Quarantine()
    fleet = Fleet()
    turns = SoloTurns("toy", Probation(MemoryRecords(), 0.0), AdapterGroup(FakeTime()), fleet, classes_of(fleet))
    scheduling: Any = SimpleNamespace(
        quarantines={"toy": quarantine},
        turns={"toy": turns},
        fair=SimpleNamespace(shares={}),
        accounts=SimpleNamespace(is_held=lambda tenant_id: tenant_id in held),
    )
    queues = SampleQueues(scheduling)
    queues.add(sample("s:1", "suspended"))
    assert queues.peek("toy") is None
    queues.add(sample("t:1", "other"))
    assert queues.peek("toy") == "t:1"
    quarantine.record_loss(["s:1"], ["s:1"])
    assert queues.peek("toy") == "s:1", "nothing else may run until it has"
    quarantine.release("s:1")
    held.clear()
    assert queues.peek("toy") == "s:1"
