"""The commands that look into a pool, over real gRPC to a fake service: output, requests and errors."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.base.errors import Code, ServiceError, invalid, not_found
from tests.support.adapters import adapter_files as imported_files
from tests.support.command_line import Done, Run
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tests.support.exports import adapter_files, pieces_of, pool_of
from tests.support.toy_engine import toy_model_info
from tinkerpool.credentials import (
    Credentials,
    credentials_file,
    kept_credentials,
    read_credentials,
    write_credentials,
)
from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    history_pb2,
    imports_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    probation_pb2,
    sessions_pb2,
)

ADAPTER = "s1:train:0"
CHECKPOINT = f"tinker://{ADAPTER}/weights/final"


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A service that the commands find by the credentials file. It has the adapter and the checkpoint of most tests."""
    fake = FakeService(
        list_adapters=adapters_pb2.ListAdaptersResponse(adapters=[adapters_pb2.Adapter(adapter_id=ADAPTER)]),
        list_checkpoints=checkpoints_pb2.ListCheckpointsResponse(
            checkpoints=[checkpoints_pb2.Checkpoint(path=CHECKPOINT, adapter_id=ADAPTER)]
        ),
    )
    with open_door(fake) as url:
        write_credentials(Credentials(url=url, api_key=KEY))
        yield fake


def requests_of(service: FakeService, name: str) -> list[Message]:
    """Return the requests of the calls of one use case."""
    return [request for called, _, request in service.calls if called == name]


def pool_status() -> pool_pb2.GetPoolStatusResponse:
    def entry(adapter_id: str, tenant: str, *, is_step: bool = False) -> pool_pb2.CycleEntry:
        return pool_pb2.CycleEntry(adapter_id=adapter_id, tenant=tenant, num_tokens=600, is_step=is_step)

    return pool_pb2.GetPoolStatusResponse(
        workers=[
            pool_pb2.Worker(worker_id="w0", base_model="kjv-2m", num_slots=16, num_adapters=3, is_live=True, pid=4711),
            pool_pb2.Worker(worker_id="w1", base_model="kjv-2m", num_slots=16),
        ],
        num_queued=1,
        num_running=2,
        cycles=[
            pool_pb2.Cycle(
                cycle_id=41,
                base_model="kjv-2m",
                pass_seconds=0.0183,
                entries=[entry("a", "alice"), entry("b", "alice", is_step=True), entry("", ""), entry("", "")],
            )
        ],
        version="9.9",
        epoch=3,
        num_tenants=3,
        uptime_seconds=200,
        tenants=[
            pool_pb2.TenantActivity(
                tenant="alice",
                num_queued=1,
                num_running=2,
                num_running_adapters=1,
                oldest_seconds=12,
                waiting=[pool_pb2.Waiting(reason=history_pb2.WAIT_REASON_BUDGET, num_operations=1)],
                trained_tokens_per_second=1000,
                sampled_tokens_per_second=5.6,
            ),
            pool_pb2.TenantActivity(trained_tokens_per_second=234),
        ],
        running_adapters=[
            pool_pb2.RunningAdapter(
                adapter_id="s1:train:0",
                tenant="alice",
                worker_id="w0",
                operation="s1:train:0:12",
                kind=operations_pb2.OPERATION_KIND_OPTIM_STEP,
            )
        ],
    )


def test_status_shows_workers_queue_and_tenants_of_the_last_cycles(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = pool_status()
    done = run("status", "-n", "5")
    assert done.code == 0, done.err
    assert "tinkerpool 9.9" in done.out
    assert "up 3.3 min" in done.out
    assert "1 operation queued, 2 running, 0 sample requests open, of 3 tenants" in done.out
    assert "1,234 tokens/s trained, 5.6 sampled for you" in done.out
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "alice 1 2 1 12 s 1,000 5.6 budget 1" in rows
    assert "(others) 0 0 0 234 0" in rows
    assert "s1:train:0 alice w0 optim_step 12" in rows
    assert "lost, being replaced" in done.out
    assert "alice x2 +step, (others) x2" in done.out
    assert "2,400" in done.out
    [(_, _, request)] = service.calls
    assert isinstance(request, pool_pb2.GetPoolStatusRequest)
    assert request.num_cycles == 5


def test_worker_list_shows_where_workers_are_what_they_hold_and_what_they_do(run: Run, service: FakeService) -> None:
    ready = pool_pb2.Worker(
        worker_id="w0", node="10.0.0.1", num_adapters=3, held_bytes=12_000_000, state=pool_pb2.WORKER_STATE_READY
    )
    draining = pool_pb2.Worker(
        worker_id="w1", node="10.0.0.2", state=pool_pb2.WORKER_STATE_DRAINING, host_leaves_in_seconds=90
    )
    late = pool_pb2.Worker(worker_id="w3", state=pool_pb2.WORKER_STATE_LATE)
    for each in (ready, draining, late):
        each.MergeFrom(pool_pb2.Worker(base_model="kjv-2m", device="cpu", num_slots=16, is_live=True))
    drained = pool_pb2.Worker(worker_id="w2", state=pool_pb2.WORKER_STATE_DRAINED, base_model="kjv-2m")
    service.responses["get_pool_status"] = pool_pb2.GetPoolStatusResponse(workers=[ready, draining, drained, late])
    done = run("worker", "list")
    assert done.code == 0, done.err
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "w0 kjv-2m 10.0.0.1 cpu 16 3 12 MB ready" in rows
    assert "w1 kjv-2m 10.0.0.2 cpu 16 0 0 B drains, its host leaves in 1.5 min" in rows
    assert "w2 kjv-2m 0 0 B drained" in rows
    assert "w3 kjv-2m cpu 16 0 0 B late" in rows
    assert json.loads(run("worker", "list", "--json").out)["workers"][2]["state"] == "WORKER_STATE_DRAINED"


def test_workers_that_were_lost_are_listed_with_how_often_when_and_why(run: Run, service: FakeService) -> None:
    workers = [
        pool_pb2.Worker(worker_id="w0", num_losses=3, last_loss_reason="it has died: CUDA error: device-side assert"),
        pool_pb2.Worker(worker_id="w1", num_losses=1, last_loss_reason="its host leaves", start_problem="no memory"),
        pool_pb2.Worker(worker_id="w2", start_problem="no such model"),
        pool_pb2.Worker(worker_id="w3"),
    ]
    workers[0].last_loss_time.FromSeconds(1_700_000_000)
    workers[1].last_loss_time.FromSeconds(1_700_000_000)
    service.responses["get_pool_status"] = pool_pb2.GetPoolStatusResponse(workers=workers)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    for command in ("status", "worker list"):
        _, _, losses = run(*command.split()).out.partition("Losses since the pool started")
        assert [" ".join(line.split()) for line in losses.splitlines()[1:5]] == [
            "worker losses last one why",
            f"w0 3 {moment} it has died: CUDA error: device-side assert",
            f"w1 1 {moment} its host leaves; does not start: no memory",
            "w2 0 does not start: no such model",
        ]
        assert "w3" not in losses


def test_worker_drain_and_undrain_say_what_happens_next(run: Run, service: FakeService) -> None:
    worker = pool_pb2.Worker(worker_id="w1", num_adapters=2, is_live=True, state=pool_pb2.WORKER_STATE_DRAINING)
    service.responses["drain_worker"] = pool_pb2.DrainWorkerResponse(worker=worker)
    done = run("worker", "drain", "w1")
    assert done.code == 0, done.err
    note = "Worker w1 drains, with 2 adapters to move. To take it back: tinkerpool worker undrain w1"
    assert " ".join(done.err.split()) == note
    assert service.calls[-1][2] == pool_pb2.DrainWorkerRequest(worker_id="w1")
    service.responses["undrain_worker"] = pool_pb2.UndrainWorkerResponse()
    assert run("worker", "undrain", "w1").code == 0
    assert service.calls[-1][2] == pool_pb2.UndrainWorkerRequest(worker_id="w1")


def test_status_shows_who_is_on_probation_and_tenant_release_ends_it(run: Run, service: FakeService) -> None:
    status = pool_status()
    status.probations.add(tenant="mallory", num_kills=3, operation="a:7", remaining_seconds=7200, backoff_seconds=40)
    service.responses["get_pool_status"] = status
    done = run("status")
    assert ["mallory", "3", "a:7", "2.0", "h", "in", "40", "s"] in [line.split() for line in done.out.splitlines()]
    service.responses["release_tenant"] = probation_pb2.ReleaseTenantResponse()
    assert run("tenant", "release", "mallory").code == 0
    assert service.calls[-1][2] == probation_pb2.ReleaseTenantRequest(tenant="mallory")


def test_status_and_usage_print_json_for_scripts(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = pool_status()
    assert json.loads(run("status", "--json").out)["workers"][0]["num_slots"] == 16
    service.responses["get_usage"] = pool_pb2.GetUsageResponse()
    limit = limits_pb2.TenantLimit(name="adapters_max", value="7", usage=3)
    service.responses["get_tenant_limits"] = limits_pb2.GetTenantLimitsResponse(tenant="alice", limits=[limit])
    assert json.loads(run("usage", "--json").out) == {
        "rows": [],
        "tenant": "alice",
        "limits": [{"name": "adapters_max", "value": "7", "usage": "3", "is_set": False}],
    }


def test_watch_prints_a_line_for_each_cycle_and_ends_after_the_requested_number(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = pool_status()
    cycles = [pool_pb2.WatchCyclesResponse(cycle=pool_pb2.Cycle(cycle_id=n, base_model="kjv-2m")) for n in (7, 8, 9)]
    service.responses["watch_cycles"] = list(cycles)
    done = run("watch", "-n", "2")
    assert done.code == 0, done.err
    assert [line.split()[1] for line in done.out.splitlines()] == ["#7", "#8"]
    assert [json.loads(line)["cycle_id"] for line in run("watch", "-n", "3", "--json").out.splitlines()] == [
        "7",
        "8",
        "9",
    ]


def test_watch_reports_that_the_pool_shuts_down(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = pool_status()
    service.responses["watch_cycles"] = [
        ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down", retry_delay_s=1)
    ]
    done = run("watch")
    assert (done.code, "the pool is shutting down" in done.err) == (1, True)


def finished_entry() -> history_pb2.HistoryEntry:
    entry = history_pb2.HistoryEntry(
        operation="s1:train:0:12",
        kind=operations_pb2.OPERATION_KIND_FORWARD_BACKWARD,
        state=operations_pb2.OPERATION_STATE_SUCCEEDED,
        target_id="s1:train:0",
        worker_id="w0",
        num_begins=1,
        cycle_id=33,
        num_tenants=3,
        pass_seconds=0.12,
        step_seconds=0.01,
        num_tokens=2048,
        engine_seconds=0.1,
        metrics={"loss:sum": 12.5, "clock_cycle:unique": 33.0},
        waits=[
            history_pb2.Wait(reason=history_pb2.WAIT_REASON_BUDGET, seconds=0.9),
            history_pb2.Wait(reason=history_pb2.WAIT_REASON_ORDER, seconds=0.42),
        ],
    )
    for field, seconds in (("arrive_time", 100.0), ("begin_time", 101.32), ("end_time", 101.5)):
        getattr(entry, field).FromNanoseconds(int(seconds * 1e9))
    return entry


def test_why_tells_what_a_finished_operation_waited_for_and_where_it_ran(run: Run, service: FakeService) -> None:
    service.responses["get_history_entry"] = history_pb2.GetHistoryEntryResponse(entry=finished_entry())
    out = run("why", "s1:train:0:12").out
    assert "s1:train:0:12 (forward_backward)" in out
    assert "waited     1.3 s" in out
    assert "900 ms for room in a cycle, while others had their turn" in out
    assert "420 ms behind earlier operations of its adapter" in out
    assert "on worker w0, in cycle 33 with 2 other tenants (pass 120 ms, steps 10 ms): 2,048 tokens" in out
    assert "succeeded, 1.5 s after it came" in out
    assert requests_of(service, "get_history_entry") == [history_pb2.GetHistoryEntryRequest(name="s1:train:0:12")]


def test_why_tells_what_an_unfinished_operation_waits_for(run: Run, service: FakeService) -> None:
    entry = history_pb2.HistoryEntry(
        operation="s1:train:0:12",
        kind=operations_pb2.OPERATION_KIND_OPTIM_STEP,
        state=operations_pb2.OPERATION_STATE_QUEUED,
        waits_for=history_pb2.WAIT_REASON_QUARANTINE,
        position=2,
        remaining_seconds=7.0,
    )
    service.responses["get_history_entry"] = history_pb2.GetHistoryEntryResponse(entry=entry)
    out = run("why", "s1:train:0:12").out
    assert "before the pool's last start" in out
    assert "waits because a worker was lost, and what ran there runs one by one (2 before it), about 7 s more" in out
    assert json.loads(run("why", "s1:train:0:12", "--json").out)["position"] == 2


def test_session_trace_writes_the_file_and_says_how_to_open_it(run: Run, service: FakeService, tmp_path: Path) -> None:
    parts: list[Message | Exception] = [
        history_pb2.ExportSessionTraceResponse(data=b"first "),
        history_pb2.ExportSessionTraceResponse(data=b"second"),
    ]
    service.responses["export_session_trace"] = parts
    done = run("session", "trace", ADAPTER)
    assert (done.code, done.out) == (0, "first second")
    assert "https://ui.perfetto.dev" in done.err
    assert requests_of(service, "export_session_trace") == [history_pb2.ExportSessionTraceRequest(session_id="s1")]
    file = tmp_path / "session.pftrace"
    done = run("session", "trace", "s1", "--output", file)
    assert (done.code, done.out, file.read_bytes()) == (0, "", b"first second")
    assert str(file) in done.err


def test_a_session_trace_is_written_whole_or_not_at_all(run: Run, service: FakeService, tmp_path: Path) -> None:
    broken = ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no such session")
    service.responses["export_session_trace"] = [history_pb2.ExportSessionTraceResponse(data=b"first "), broken]
    file = tmp_path / "session.pftrace"
    file.write_bytes(b"before")
    done = run("session", "trace", "s1", "--output", file)
    assert (done.code, "no such session" in done.err, "perfetto" in done.err) == (1, True, False)
    assert [(each.name, each.read_bytes()) for each in tmp_path.glob("*session*")] == [(file.name, b"before")]
    done = run("session", "trace", "s1", "--output", tmp_path / "missing" / "session.pftrace")
    assert (done.code, "cannot be written: no such file or directory" in done.err) == (1, True)


def test_a_session_trace_is_not_written_to_a_terminal(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    done = run("session", "trace", "s1")
    assert (done.code, done.out) == (1, "")
    assert "--output FILE" in done.err
    assert not requests_of(service, "export_session_trace")


def test_history_shows_the_last_entries_of_an_adapter(run: Run, service: FakeService) -> None:
    first, second = finished_entry(), finished_entry()
    second.operation, second.error_reason = "s1:train:0:13", "NON_FINITE"
    reported = history_pb2.HistoryEntry(target_id="s1:train:0", step=4, metrics={"reward": 0.5})
    entries = [first, second, reported]
    service.responses["list_history"] = history_pb2.ListHistoryResponse(entries=entries)
    out = run("history", "s1:train:0").out
    assert out.startswith("History of s1:train:0 "), "and no emoji"
    lines = [line.split() for line in out.splitlines()[2:]]
    assert lines[0][:2] == ["12", "forward_backward"]
    assert lines[0][3:] == ["1.3", "s", "180", "ms", "2,048", "loss", "12.5"]
    assert lines[1][-1] == "NON_FINITE"
    assert lines[2] == ["step", "4", "report", "0", "s", "0", "reward", "0.5"]
    assert run("history", "s1:train:0", "-n", "1").out.count("\n") == 3


def test_history_shows_metrics_that_differ_only_in_their_reduction_by_their_whole_names(
    run: Run, service: FakeService
) -> None:
    metrics = {"reward:max": 3.0, "reward:min": 1.0, "loss:sum": 2.0, "tokens:sum": 4.0, "tokens:mean": 2.0}
    entry = history_pb2.HistoryEntry(target_id="s1:train:0", step=4, metrics=metrics)
    service.responses["list_history"] = history_pb2.ListHistoryResponse(entries=[entry])
    shown = " ".join(run("history", "s1:train:0").out.split())
    assert shown.endswith("loss 2, reward:max 3, reward:min 1")
    service.responses["list_history"] = history_pb2.ListHistoryResponse()
    assert "The history has nothing of s1:train:0." in run("history", "s1:train:0").out


def test_usage_shows_each_kind_and_the_sum_of_each_tenant(run: Run, service: FakeService) -> None:
    rows = [
        pool_pb2.UsageRow(tenant="alice", kind=kind, num_operations=2, num_tokens=1500, engine_seconds=90)
        for kind in ("forward_backward", "sample")
    ]
    service.responses["get_usage"] = pool_pb2.GetUsageResponse(rows=rows)
    service.responses["get_tenant_limits"] = limits_of_bob()
    lines = run("usage").out.splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["alice", "forward_backward", "2", "1,500", "1.5", "min"],
        ["alice", "sample", "2", "1,500", "1.5", "min"],
        ["alice", "all", "4", "3,000", "3.0", "min"],
    ]
    assert ["adapters_max", "1,200", "2000", "for", "this", "tenant"] in [line.split() for line in lines[5:]]


def test_usage_by_groups_shows_their_sums_from_a_day_on_without_limits(run: Run, service: FakeService) -> None:
    rows = [
        pool_pb2.UsageRow(base_model="toy", adapter_id=each, num_operations=2, num_tokens=1500, engine_seconds=90)
        for each in ("", "*", "s:train:0")
    ]
    response = pool_pb2.GetUsageResponse(rows=rows, start_day="2026-11-20")
    service.responses["get_usage"] = response
    done = run("usage", "--since", "2026-11-20", "--by", "model,adapter")
    assert done.code == 0, done.err
    assert [" ".join(line.split()) for line in done.out.splitlines()] == [
        "Usage since 2026-11-20 (UTC)",
        "model adapter operations tokens engine time",
        "toy (base model) 2 1,500 1.5 min",
        "toy (several) 2 1,500 1.5 min",
        "toy s:train:0 2 1,500 1.5 min",
        "all 6 4,500 4.5 min",
    ]
    assert done.err == ""
    [(_, _, request)] = service.calls
    groups = [pool_pb2.USAGE_GROUP_MODEL, pool_pb2.USAGE_GROUP_ADAPTER]
    assert request == pool_pb2.GetUsageRequest(since="2026-11-20", group_by=groups)
    earlier = run("usage", "--since", "2026-11-01", "--by", "adapter", "--json")
    assert "The pool keeps days apart since 2026-11-20" in earlier.err
    assert [row["adapter_id"] for row in json.loads(earlier.out)["rows"]] == ["", "*", "s:train:0"]


def test_usage_as_csv_has_a_header_and_plain_numbers(run: Run, service: FakeService) -> None:
    row = pool_pb2.UsageRow(
        tenant="alice", day="2026-11-26", num_operations=1200, num_tokens=10**12, engine_seconds=1e-7, file_bytes=5
    )
    service.responses["get_usage"] = pool_pb2.GetUsageResponse(rows=[row])
    assert run("usage", "--by", "tenant,day", "--csv").out.splitlines() == [
        "tenant,day,num_operations,num_tokens,engine_seconds,file_bytes,file_seconds",
        "alice,2026-11-26,1200,1000000000000,0.000000,5,0.000000",
    ]
    assert run("usage", "--csv").out.startswith("tenant,kind,num_operations")
    assert service.calls[-1][2] == pool_pb2.GetUsageRequest()


def test_a_duration_before_now_is_a_day_in_utc(run: Run, service: FakeService) -> None:
    service.responses["get_usage"] = pool_pb2.GetUsageResponse()
    before = time.time()
    assert run("usage", "--since", "7d").out == "Nothing was used in this time.\n"
    request = service.calls[-1][2]
    assert isinstance(request, pool_pb2.GetUsageRequest)
    days = [time.strftime("%Y-%m-%d", time.gmtime(now - 7 * 86_400)) for now in (before, time.time())]
    assert request.since in days
    assert list(request.group_by) == [pool_pb2.USAGE_GROUP_TENANT, pool_pb2.USAGE_GROUP_KIND]


def test_usage_and_audit_take_a_day_in_both_forms(run: Run, service: FakeService) -> None:
    service.responses["get_usage"] = pool_pb2.GetUsageResponse()
    service.responses["list_audit_entries"] = admin_pb2.ListAuditEntriesResponse()
    for day in ("20261126", "2026-11-26"):
        for command in ("usage", "audit"):
            done = run(command, "--since", day)
            assert done.code == 0, done.err
        usage, audit = (request for _, _, request in service.calls[-2:])
        assert isinstance(usage, pool_pb2.GetUsageRequest)
        assert isinstance(audit, admin_pb2.ListAuditEntriesRequest)
        assert (usage.since, audit.start_time.ToJsonString()) == ("2026-11-26", "2026-11-26T00:00:00Z")


@pytest.mark.parametrize("command", ["usage", "audit"])
@pytest.mark.parametrize(
    "since", ["7", "2026", "202611261", "yesterday", "20261326", "2026-02-30", "2026-1126", "9999999999d"]
)
def test_what_is_neither_a_day_nor_a_duration_is_refused_with_both_forms(
    run: Run, service: FakeService, command: str, since: str
) -> None:
    error = " ".join(run(command, "--since", since).err.replace("\u2502", "").split())
    expected = f"expected a day such as 2026-11-26 or 20261126, or a duration such as 7d or 12h, not {since!r}"
    assert expected in error
    assert service.calls == []


def test_usage_refuses_groups_and_formats_that_make_no_sense(run: Run, service: FakeService) -> None:
    assert "--by takes some of tenant,model,adapter,kind,day" in run("usage", "--by", "tenant,gpu").err
    assert "two formats" in run("usage", "--csv", "--json").err
    assert service.calls == []


def limits_of_bob() -> limits_pb2.GetTenantLimitsResponse:
    limits = [
        limits_pb2.TenantLimit(name="weight", value="1"),
        limits_pb2.TenantLimit(name="adapters_max", value="2000", is_set=True, usage=1200),
    ]
    return limits_pb2.GetTenantLimitsResponse(tenant="bob", limits=limits)


def test_tenant_limit_names_the_base_models_that_the_pool_does_not_serve(run: Run, service: FakeService) -> None:
    service.responses["set_tenant_limits"] = limits_pb2.SetTenantLimitsResponse()
    service.responses["get_tenant_limits"] = limits_of_bob()
    service.responses["get_capabilities"] = pool_of("toy")
    done = run("tenant", "limit", "bob", "base_models=toy, tyo,later")
    assert (done.code, done.err) == (0, "Note: the pool does not serve tyo, later. It serves toy.\n")
    assert service.calls[0][2] == limits_pb2.SetTenantLimitsRequest(
        tenant="bob", limits={"base_models": "toy, tyo,later"}
    )
    for value in ("toy", "unlimited", ""):
        assert run("tenant", "limit", "bob", f"base_models={value}").err == ""


def test_tenant_limit_sets_what_is_given_and_shows_all(run: Run, service: FakeService) -> None:
    service.responses["set_tenant_limits"] = limits_pb2.SetTenantLimitsResponse()
    service.responses["get_tenant_limits"] = limits_of_bob()
    done = run("tenant", "limit", "bob", "adapters_max=2000", "weight=")
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[2:]] == ["weight", "adapters_max"]
    assert [call for _, _, call in service.calls] == [
        limits_pb2.SetTenantLimitsRequest(tenant="bob", limits={"adapters_max": "2000", "weight": ""}),
        limits_pb2.GetTenantLimitsRequest(tenant="bob"),
    ]
    assert run("tenant", "limit", "bob").code == 0
    assert len(service.calls) == 3, "without changes it only shows"
    done = run("tenant", "limit", "bob", "adapters_max")
    assert (done.code, "NAME=VALUE" in done.err) == (1, True)
    done = run("tenant", "limit", "bob", "weight=0.1", "weight=2")
    assert (done.code, "weight is given twice" in done.err) == (1, True)
    assert len(service.calls) == 3, "what is refused calls nothing"


def test_key_create_prints_only_the_key_on_stdout(run: Run, service: FakeService) -> None:
    service.responses["create_api_key"] = admin_pb2.CreateApiKeyResponse(key="tp_new")
    done = run("key", "create", "bob", "--role", "admin", "--expires", "90d", "--certificate", "ab:cd")
    assert (done.code, done.out) == (0, "tp_new\n")
    assert "It expires in 90 days." in done.err
    [(_, _, request)] = service.calls
    assert request == admin_pb2.CreateApiKeyRequest(
        tenant="bob", role=admin_pb2.ROLE_ADMIN, ttl_seconds=90 * 86_400, certificate_sha256="ab:cd"
    )


@pytest.mark.parametrize("given", ["0123456789ab", "tp_0123456789ab_secret_with_underscore", "tml-tp_0123456789ab_s"])
def test_key_revoke_takes_an_id_or_a_whole_key_and_sends_only_the_id(
    run: Run, service: FakeService, given: str
) -> None:
    service.responses["revoke_api_key"] = admin_pb2.RevokeApiKeyResponse()
    assert run("key", "revoke", given).code == 0
    assert service.calls[0][2] == admin_pb2.RevokeApiKeyRequest(key_id="0123456789ab")


def test_key_revoke_names_successors_that_are_still_valid(run: Run, service: FakeService) -> None:
    service.responses["revoke_api_key"] = admin_pb2.RevokeApiKeyResponse(successors=["111111111111"])
    assert "tinkerpool key revoke 111111111111" in " ".join(run("key", "revoke", "0" * 12).err.split())


def test_key_list_shows_which_keys_are_revoked(run: Run, service: FakeService) -> None:
    keys = [
        admin_pb2.ApiKey(key_id="k1", tenant="a", role=admin_pb2.ROLE_ADMIN),
        admin_pb2.ApiKey(key_id="k2", is_revoked=True, successor="k3"),
    ]
    service.responses["list_api_keys"] = admin_pb2.ListApiKeysResponse(api_keys=keys)
    lines = run("key", "list").out.splitlines()
    assert "good" in lines[2]
    assert "revoked, replaced by k3" in lines[3]


def test_key_list_shows_roles_last_uses_and_expiries(run: Run, service: FakeService) -> None:
    keys = [
        admin_pb2.ApiKey(key_id="k1", role=admin_pb2.ROLE_ADMIN, is_local=True),
        admin_pb2.ApiKey(key_id="k2", role=admin_pb2.ROLE_READ_ONLY, is_expired=True, expire_time=Timestamp(seconds=1)),
        admin_pb2.ApiKey(key_id="k3", role=admin_pb2.ROLE_MEMBER, expire_time=Timestamp(seconds=4_000_000_000)),
    ]
    keys[0].last_use_time.GetCurrentTime()
    service.responses["list_api_keys"] = admin_pb2.ListApiKeysResponse(api_keys=keys)
    local, expired, good = run("key", "list").out.splitlines()[2:]
    assert "admin (on its machine)" in local
    assert local.count("ago") == 2
    assert "read-only" in expired
    assert "expired" in expired
    assert "never" in expired
    assert "good until 2096" in good


def rotated(key_id: str = "000000000000", *, is_revoked: bool = False) -> admin_pb2.RotateApiKeyResponse:
    return admin_pb2.RotateApiKeyResponse(
        key="tp_111111111111_new",
        api_key=admin_pb2.ApiKey(key_id="111111111111"),
        replaced=admin_pb2.ApiKey(key_id=key_id, is_revoked=is_revoked, expire_time=Timestamp(seconds=4_000_000_000)),
    )


def test_key_rotate_replaces_the_key_in_the_credentials_file(run: Run, service: FakeService) -> None:
    service.responses["rotate_api_key"] = rotated()
    before = read_credentials()
    done = run("key", "rotate", "--grace", "12h")
    assert (done.code, done.out) == (0, ""), done.err
    assert "expires 2096" in done.err
    after = read_credentials()
    assert before is not None
    assert after is not None
    assert (after.url, after.api_key) == (before.url, "tp_111111111111_new")
    assert list(kept_credentials()) == [after], "the replaced key is not kept"
    assert service.calls[0][2] == admin_pb2.RotateApiKeyRequest(grace_seconds=12 * 3600)


def test_key_rotate_prints_a_key_that_is_not_from_the_credentials_file(run: Run, service: FakeService) -> None:
    before = read_credentials()
    for arguments, key_id in ((("--api-key", KEY), "0" * 12), (("2" * 12,), "2" * 12)):
        service.responses["rotate_api_key"] = rotated(key_id, is_revoked=True)
        done = run("key", "rotate", "--grace", "0", *arguments)
        assert (done.code, done.out) == (0, "tp_111111111111_new\n"), done.err
        assert "is revoked" in done.err
        assert read_credentials() == before
    assert service.calls[1][2] == admin_pb2.RotateApiKeyRequest(key_id="2" * 12, grace_seconds=0)


def test_a_duration_of_another_form_is_refused_with_examples(run: Run, service: FakeService) -> None:
    done = run("key", "create", "bob", "--expires", "soon")
    assert done.code != 0
    assert "90d, 12h" in done.err
    assert service.calls == []


@pytest.mark.parametrize("given", ["0", "0d", "0s"])
def test_a_key_that_would_never_expire_is_not_created_by_an_expiry_of_zero(
    run: Run, service: FakeService, given: str
) -> None:
    done = run("key", "create", "bob", "--expires", given)
    assert done.code != 0
    assert "would never expire" in done.err
    assert service.calls == []


def test_audit_lists_acts_with_filters_and_pages(run: Run, service: FakeService) -> None:
    async def page(_: object, request: admin_pb2.ListAuditEntriesRequest) -> admin_pb2.ListAuditEntriesResponse:
        start = int(request.page_token or 90)
        entries = [
            admin_pb2.AuditEntry(
                entry_id=n, act="key.create", subject="k", key_id="b", tenant="root", details={"x": "y"}
            )
            for n in (start, start - 1)
        ]
        return admin_pb2.ListAuditEntriesResponse(entries=entries, next_page_token=str(start - 2))

    service.responses["list_audit_entries"] = page
    done = run("audit", "--act", "key", "--subject", "k", "--key", "b", "--since", "1d", "-n", "4")
    assert [line.split()[0] for line in done.out.splitlines()[2:]] == ["90", "89", "88", "87"]
    assert "b (root)" in done.out
    assert "x y" in done.out
    assert "There are more" in done.err
    request = service.calls[0][2]
    assert isinstance(request, admin_pb2.ListAuditEntriesRequest)
    assert (request.act, request.subject, request.key_id) == ("key", "k", "b")
    assert abs(request.start_time.seconds - (time.time() - 86_400)) < 600
    assert len(json.loads(run("audit", "-n", "2", "--json").out)["entries"]) == 2


def test_audit_shows_details_for_people_and_json_as_they_were_recorded(run: Run, service: FakeService) -> None:
    details = {
        "ttl_seconds": "7776000",
        "grace_seconds": "0",
        "engine_seconds": "5400",
        "num_tokens": "1234567",
        "stored_bytes_max": "5000000000",
        "queued_bytes_max": "1GiB",
        "tokens_per_month": "1000000",
        "weight": "",
        "successor": "012345678901",
        "reason": "20260101",
    }
    response = admin_pb2.ListAuditEntriesResponse(entries=[admin_pb2.AuditEntry(entry_id=1, act="a", details=details)])
    service.responses["list_audit_entries"] = response
    shown = " ".join(run("audit").out.split())
    for detail in (
        "ttl 90 days",
        "grace 0 s",
        "engine 1.5 h",
        "num_tokens 1,234,567",
        "stored_bytes_max 5.0 GB",
        "queued_bytes_max 1GiB",
        "tokens_per_month 1,000,000",
        "weight default",
        "successor 012345678901",
        "reason 20260101",
    ):
        assert detail in shown, shown
    assert json.loads(run("audit", "--json").out)["entries"][0]["details"] == details


def test_tenant_create_says_how_to_make_its_first_key(run: Run, service: FakeService) -> None:
    service.responses["create_tenant"] = admin_pb2.CreateTenantResponse()
    done = run("tenant", "create", "bob")
    assert (done.code, done.out) == (0, "")
    assert "tinkerpool key create bob" in done.err
    [(_, _, request)] = service.calls
    assert request == admin_pb2.CreateTenantRequest(tenant="bob")


def test_tenant_show_suspend_and_resume(run: Run, service: FakeService) -> None:
    suspended = admin_pb2.Tenant(name="bob", state=admin_pb2.TENANT_STATE_SUSPENDED, suspension_reason="unpaid")
    service.responses["get_tenant"] = admin_pb2.GetTenantResponse(tenant=suspended, num_keys=2, stored_bytes=5000)
    service.responses["suspend_tenant"] = admin_pb2.SuspendTenantResponse()
    service.responses["resume_tenant"] = admin_pb2.ResumeTenantResponse()
    service.responses["get_tenant_limits"] = limits_of_bob()
    shown = run("tenant", "show", "bob").out
    assert "suspended: unpaid" in shown
    assert "5.0 kB" in shown
    assert ["adapters_max", "1,200", "2000", "for", "this", "tenant"] in [line.split() for line in shown.splitlines()]
    shown_json = json.loads(run("tenant", "show", "bob", "--json").out)
    assert (shown_json["num_keys"], shown_json["tenant"]["name"], len(shown_json["limits"])) == ("2", "bob", 2)
    assert "tinkerpool tenant resume bob" in run("tenant", "suspend", "bob", "--reason", "unpaid").err
    assert run("tenant", "resume", "bob").code == 0
    assert [request for _, _, request in service.calls][4:] == [
        admin_pb2.SuspendTenantRequest(tenant="bob", reason="unpaid"),
        admin_pb2.ResumeTenantRequest(tenant="bob"),
    ]


def test_tenant_delete_asks_first(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.responses["delete_tenant"] = admin_pb2.DeleteTenantResponse()
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert run("tenant", "delete", "bob").code != 0
    assert service.calls == []
    assert run("tenant", "delete", "bob", "--yes").code == 0
    [(_, _, request)] = service.calls
    assert request == admin_pb2.DeleteTenantRequest(tenant="bob")


def test_tenant_list_shows_every_tenant(run: Run, service: FakeService) -> None:
    tenants = [admin_pb2.Tenant(name="alice"), admin_pb2.Tenant(name="bob")]
    service.responses["list_tenants"] = admin_pb2.ListTenantsResponse(tenants=tenants)
    assert [line.split()[0] for line in run("tenant", "list").out.splitlines()[2:]] == ["alice", "bob"]
    assert [each["name"] for each in json.loads(run("tenant", "list", "--json").out)["tenants"]] == ["alice", "bob"]


def test_adapter_list_goes_through_the_pages_up_to_its_limit(run: Run, service: FakeService) -> None:
    async def page(_: object, request: adapters_pb2.ListAdaptersRequest) -> adapters_pb2.ListAdaptersResponse:
        start = int(request.page_token or 0)
        adapters = [
            adapters_pb2.Adapter(adapter_id=f"s:train:{n}", next_seq=4, applied_seq=1) for n in (start, start + 1)
        ]
        return adapters_pb2.ListAdaptersResponse(adapters=adapters, next_page_token=str(start + 2))

    service.responses["list_adapters"] = page
    done = run("adapter", "list", "-n", "4")
    assert [f"s:train:{n}" in done.out for n in range(5)] == [True] * 4 + [False]
    assert "There are more" in done.err
    assert len(service.calls) == 2


def test_adapter_delete_requires_confirmation(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.responses["delete_adapter"] = adapters_pb2.DeleteAdapterResponse()
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run("adapter", "delete", ADAPTER).code == 1
    assert not requests_of(service, "delete_adapter")
    assert run("adapter", "delete", ADAPTER, "--yes").code == 0
    assert requests_of(service, "delete_adapter") == [adapters_pb2.DeleteAdapterRequest(adapter_id=ADAPTER)]


def test_adapter_move_says_whether_numerics_change(run: Run, service: FakeService) -> None:
    service.responses["move_adapter"] = adapters_pb2.MoveAdapterResponse(changes_numerics=True)
    done = run("adapter", "move", ADAPTER, "w1")
    assert done.code == 0, done.err
    [request] = requests_of(service, "move_adapter")
    assert request == adapters_pb2.MoveAdapterRequest(adapter_id=ADAPTER, worker_id="w1")
    assert f"{ADAPTER} goes on on worker w1" in done.err
    assert "other numerics" in done.err


def test_checkpoint_list_does_not_truncate_paths(run: Run, service: FakeService) -> None:
    path = f"tinker://{'s' * 36}:train:0/sampler_weights/{'n' * 60}"
    checkpoint = checkpoints_pb2.Checkpoint(path=path, size_bytes=1_500_000, rank=8)
    service.responses["list_checkpoints"] = checkpoints_pb2.ListCheckpointsResponse(checkpoints=[checkpoint])
    done = run("checkpoint", "list")
    assert path in done.out
    assert "1.5 MB" in done.out


def test_checkpoint_export_writes_a_complete_directory_or_none(run: Run, service: FakeService, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "peft"
    files = adapter_files(["model.layers.0.mlp.up_proj", "lm_head"], base_model="kjv-2m")
    service.responses["get_capabilities"] = pool_of("kjv-2m", is_tied=True)
    service.responses["export_checkpoint"] = list(pieces_of(files))
    done = run("checkpoint", "export", CHECKPOINT, str(folder))
    assert done.code == 0, done.err
    assert "merge_and_unload() does not" in " ".join(done.err.split())
    assert sorted(path.name for path in folder.iterdir()) == [*files, "tinkerpool.json"]
    assert "is not an empty directory" in run("checkpoint", "export", CHECKPOINT, str(folder)).err

    refused = run("checkpoint", "export", CHECKPOINT, str(tmp_path / "out" / "vllm"), "--format", "vllm")
    assert refused.code == 1
    assert "train_unembed=False" in " ".join(refused.err.split())
    service.responses["export_checkpoint"] = [*pieces_of(files)[:1], not_found("checkpoint", CHECKPOINT)]
    assert run("checkpoint", "export", CHECKPOINT, str(tmp_path / "out" / "half")).code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["peft"]


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_checkpoint_export_leaves_nothing_when_a_signal_ends_it(
    run: Run, service: FakeService, tmp_path: Path, signum: signal.Signals
) -> None:
    async def stream(*_: object) -> AsyncIterator[Message]:
        yield pieces_of(adapter_files(["lm_head"]))[0]
        os.kill(os.getpid(), signum)
        await asyncio.Event().wait()

    service.responses["get_capabilities"] = pool_of("toy")
    service.responses["export_checkpoint"] = stream
    assert run("checkpoint", "export", CHECKPOINT, str(tmp_path / "out" / "peft")).code != 0
    assert list((tmp_path / "out").iterdir()) == []
    assert signal.getsignal(signum) is signal.SIG_DFL


def test_checkpoint_import_prints_the_path_and_says_what_to_do_next(
    run: Run, service: FakeService, tmp_path: Path
) -> None:
    files = imported_files(toy_model_info().modules[:1])
    size = len(files.data)
    upload = imports_pb2.Upload(
        base_model="toy", rank=4, alpha=8, size_bytes=size, part_bytes_max=size, notes=["k_proj is new"]
    )
    service.responses |= {
        "create_session": sessions_pb2.CreateSessionResponse(session=sessions_pb2.Session(session_id="s1")),
        "finish_session": sessions_pb2.FinishSessionResponse(),
        "create_upload": imports_pb2.CreateUploadResponse(upload=upload),
        "upload_part": imports_pb2.UploadPartResponse(num_bytes=size),
        "import_checkpoint": imports_pb2.ImportCheckpointResponse(
            checkpoint=checkpoints_pb2.Checkpoint(path=CHECKPOINT, adapter_id="s1:train:0")
        ),
    }
    directory = files.write(tmp_path / "adapter")
    done = run(
        "checkpoint", "import", str(directory), "--name", "final", "--base-model", "toy", "--adapter-name", "theirs"
    )
    assert (done.code, done.out) == (0, CHECKPOINT + "\n")
    [request] = requests_of(service, "import_checkpoint")
    assert isinstance(request, imports_pb2.ImportCheckpointRequest)
    assert (request.name, request.adapter_name) == ("final", "theirs")
    assert f'create_training_client_from_state("{CHECKPOINT}")' in done.err
    assert f'create_sampling_client("{CHECKPOINT}")' in done.err
    assert "k_proj is new" in done.err
    printed = json.loads(run("checkpoint", "import", str(directory), "--json").out)
    assert (printed["path"], printed["lora_rank"], printed["notes"]) == (CHECKPOINT, 4, ["k_proj is new"])
    refused = invalid("use_dora is set: train without DoRA", "NOT_IMPORTABLE")
    service.responses["create_upload"] = refused
    assert run("checkpoint", "import", str(directory)) == Done(1, "", f"Error: {refused.message}\n")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in run("checkpoint", "import", str(directory)).err


def test_checkpoint_save_waits_for_the_checkpoint_and_shows_why_there_is_none(run: Run, service: FakeService) -> None:
    operation = operations_pb2.Operation(name="s1:train:0:7")
    saved = operations_pb2.Operation(name=operation.name, save_state=operations_pb2.SaveStateResult(path=CHECKPOINT))
    failed = operations_pb2.Operation(
        name=operation.name, error=operations_pb2.OperationError(message="the disk is full")
    )
    service.responses["save_state"] = checkpoints_pb2.SaveStateResponse(operation=operation)
    service.responses["wait_operations"] = [operations_pb2.WaitOperationsResponse(operation=saved)]
    done = run("checkpoint", "save", "s1:train:0", "final")
    assert (done.code, done.err.startswith(f"Saved {CHECKPOINT}: ")) == (0, True)
    [request] = [request for name, _, request in service.calls if name == "save_state"]
    assert isinstance(request, checkpoints_pb2.SaveStateRequest)
    assert (request.adapter_id, request.name, request.seq, len(request.request_id)) == ("s1:train:0", "final", 0, 32)
    service.responses["wait_operations"] = [operations_pb2.WaitOperationsResponse(operation=failed)]
    assert run("checkpoint", "save", "s1:train:0", "final") == Done(1, "", "Error: the disk is full\n")


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (not_found("adapter", "s:train:0"), "Error: no adapter 's:train:0': check the name and the API key\n"),
        (ServiceError(Code.UNIMPLEMENTED, "", ""), "one of another version"),
        (RuntimeError("secret"), "Error: internal error"),
    ],
)
def test_a_refusal_is_printed_as_one_sentence(
    run: Run, service: FakeService, refusal: Exception, sentence: str
) -> None:
    service.responses["delete_adapter"] = refusal
    done = run("adapter", "delete", "s:train:0", "-y")
    assert done.code == 1
    assert sentence in done.err
    assert "secret" not in done.err
    assert "Traceback" not in done.err


def test_the_error_for_a_wrong_key_names_the_source_of_the_key(run: Run, service: FakeService) -> None:
    assert "from --api-key or TINKERPOOL_API_KEY" in run("status", "--api-key", "tp_wrong").err
    write_credentials(Credentials(url=json.loads(credentials_file().read_text())["url"], api_key="tp_old"))
    assert f"from the credentials files in {credentials_file().parent}" in run("status").err


def test_a_broken_credentials_file_and_a_malformed_url_are_reported(run: Run) -> None:
    assert "http://127.0.0.1:7600" in run("status", "--url", "ftp://x", "--api-key", "k").err
    credentials_file().parent.mkdir(parents=True)
    credentials_file().write_text("{")
    assert str(credentials_file()) in run("status").err


def test_help_lists_every_command_in_its_group(run: Run) -> None:
    out = run("--help").out
    assert (
        out.index("Try it on this machine") < out.index("Run a pool") < out.index("Look into") < out.index("Administer")
    )
    groups = (
        ("serve", "up", "down", "logs"),
        ("status", "top", "watch", "why", "history", "usage", "session"),
        ("adapter", "checkpoint"),
        ("key", "tenant", "version"),
    )
    for command in (command for group in groups for command in group):
        assert f" {command} " in out


def test_version_needs_no_pool(run: Run) -> None:
    assert run("version").out == run("--version").out
    assert run("version").out.startswith("tinkerpool 0.")


def test_the_error_for_a_missing_library_names_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # private: the real libraries are installed where tests run
    monkeypatch.setattr("coordinator.cli.options._LIBRARIES", ("json", "no_such_library"))
    done = run("serve")
    assert (done.code, "no_such_library not found" in done.err, "tinkerpool[pool]" in done.err) == (1, True, True)
    monkeypatch.delitem(sys.modules, "tinkerpool.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert "pip install 'tinkerpool[cli]'" in run("status").err
