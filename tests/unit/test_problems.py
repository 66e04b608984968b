"""What is wrong with a pool, in words: from a status alone, so that nobody is told more than that."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.service.problems import problems
from tinkerpool.v1 import pool_pb2 as pb
from tinkerpool.v1.probation_pb2 import Probation

READY, LATE, LOST, DRAINED = (
    pb.WORKER_STATE_READY,
    pb.WORKER_STATE_LATE,
    pb.WORKER_STATE_LOST,
    pb.WORKER_STATE_DRAINED,
)


def status(*workers: pb.Worker, **fields: Any) -> pb.GetPoolStatusResponse:
    return pb.GetPoolStatusResponse(workers=workers or [worker("w0")], **fields)


def worker(worker_id: str, state: pb.WorkerState.ValueType = READY, **fields: Any) -> pb.Worker:
    return pb.Worker(worker_id=worker_id, base_model="toy", state=state, **fields)


def found(response: pb.GetPoolStatusResponse, *, is_admin: bool = True) -> list[tuple[str, str, bool]]:
    return [(each.text, each.command, each.is_severe) for each in problems(response, is_admin=is_admin)]


def test_a_pool_that_works_has_no_problem() -> None:
    assert found(status(tenants=[pb.TenantActivity(tenant="a", num_queued=9, oldest_seconds=2.0)])) == []


def test_what_stands_still_comes_first() -> None:
    response = status(worker("w0", LOST, last_loss_reason="no memory"), problem="the pool's disk is full: wait")
    texts = [text for text, _, _ in found(response)]
    assert texts == [
        "The pool's disk is full: wait.",
        "No worker of toy takes work: its operations wait.",
        "Worker w0 was lost and starts again: no memory",
    ]


@pytest.mark.parametrize(
    ("given", "text", "command"),
    [
        (worker("w1", LATE), "Worker w1 does not reply: its adapters wait for it.", "tinkerpool logs"),
        (worker("w1", LOST, start_problem="no GPU"), "Worker w1 does not start: no GPU", "tinkerpool logs"),
        (worker("w1", slow_because="no Triton"), "Worker w1 is slower than it could be: no Triton.", "tinkerpool logs"),
        (worker("w1", host_leaves_in_seconds=29.7), "The host of worker w1 leaves in 30 s: its adapters move.", ""),
    ],
)
def test_a_worker_that_is_away_is_named_with_the_reason(given: pb.Worker, text: str, command: str) -> None:
    assert found(status(worker("w0"), given)) == [(text, command, False)]


def test_if_all_workers_are_drained_the_command_undrains_one() -> None:
    [(_, command, is_severe)] = found(status(worker("w3", DRAINED)))
    assert (command, is_severe) == ("tinkerpool worker undrain w3", True)


def test_a_probation_says_why_and_how_an_administrator_ends_it() -> None:
    response = status(probations=[Probation(tenant="mallory", operation="a:7", remaining_seconds=600.0)])
    for is_admin, command in ((True, "tinkerpool tenant release mallory"), (False, "")):
        [(text, shown, _)] = found(response, is_admin=is_admin)
        assert text.startswith("Tenant mallory is on probation: a:7 ended its worker")
        assert "10 more minutes" in text
        assert shown == command


def test_an_operation_that_waits_for_a_minute_is_named_by_its_tenant() -> None:
    response = status(tenants=[pb.TenantActivity(tenant="a", num_queued=1, oldest_seconds=61.0)])
    [(text, command, _)] = found(response)
    assert text == "An operation of a has waited for 61 s."
    assert command == "tinkerpool why OPERATION"
    others = status(tenants=[pb.TenantActivity(num_queued=1, oldest_seconds=61.0)])
    assert found(others) == [], "nothing is told of others"
