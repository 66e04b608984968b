"""Every method returns the same error for another tenant's resource as for one that does not exist."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import MESSAGE_LENGTH_MAX, Code, ServiceError, invalid
from coordinator.tenants.principals import Principal, Role
from tests.support.database import query
from tests.support.toy_pool import ToyPool, datum, pass_request, refusal, running_pool, sample_request
from tinkerpool.names import CheckpointPath
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    history_pb2,
    imports_pb2,
    pool_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)
from tinkerpool.v1 import operations_pb2 as ops_pb

CROSS_ENTROPY = types_pb2.LOSS_FUNCTION_CROSS_ENTROPY


@dataclasses.dataclass
class Things:
    """The names of a tenant's resources, one of each kind."""

    session: str
    adapter: str
    checkpoint: str
    sampler: str
    operation: str
    sample: str


CALLS: dict[str, Callable[[Things], Any]] = {
    "heartbeat": lambda t: sessions_pb2.HeartbeatRequest(session_id=t.session),
    "finish_session": lambda t: sessions_pb2.FinishSessionRequest(session_id=t.session),
    "get_session": lambda t: sessions_pb2.GetSessionRequest(session_id=t.session),
    "create_adapter": lambda t: adapters_pb2.CreateAdapterRequest(session_id=t.session, base_model="toy", index=0),
    "create_sampler": lambda t: sampling_pb2.CreateSamplerRequest(session_id=t.session, base_model="toy", index=0),
    "get_adapter": lambda t: adapters_pb2.GetAdapterRequest(adapter_id=t.adapter),
    "delete_adapter": lambda t: adapters_pb2.DeleteAdapterRequest(adapter_id=t.adapter),
    "move_adapter": lambda t: adapters_pb2.MoveAdapterRequest(adapter_id=t.adapter, worker_id="w0"),
    "rename_adapter": lambda t: adapters_pb2.RenameAdapterRequest(adapter_id=t.adapter, name="mine"),
    "forward": lambda t: training_pb2.ForwardRequest(
        adapter_id=t.adapter, seq=1, data=[datum(3)], loss_function=CROSS_ENTROPY
    ),
    "forward_backward": lambda t: pass_request(t.adapter, 1, [3]),
    "optim_step": lambda t: training_pb2.OptimStepRequest(adapter_id=t.adapter, seq=2),
    "train_step": lambda t: training_pb2.TrainStepRequest(
        adapter_id=t.adapter, seq=1, data=[datum(3)], loss_function=CROSS_ENTROPY
    ),
    "load_state": lambda t: training_pb2.LoadStateRequest(adapter_id=t.adapter, seq=9, path=t.checkpoint),
    "discard_gradient": lambda t: training_pb2.DiscardGradientRequest(adapter_id=t.adapter, seq=9),
    "save_state": lambda t: checkpoints_pb2.SaveStateRequest(adapter_id=t.adapter, seq=9, name="mine"),
    "save_weights_for_sampler": lambda t: checkpoints_pb2.SaveWeightsForSamplerRequest(adapter_id=t.adapter, seq=9),
    "get_sampler": lambda t: sampling_pb2.GetSamplerRequest(sampler_id=t.sampler),
    "sample": lambda t: sample_request(t.sampler, 1),
    "stream_sample": lambda t: sampling_pb2.StreamSampleRequest(request=sample_request(t.sampler, 1)),
    "stream_outcome": lambda t: sampling_pb2.StreamSampleRequest(request=sample_request(t.sampler, 1)),
    "get_checkpoint": lambda t: checkpoints_pb2.GetCheckpointRequest(path=t.checkpoint),
    "delete_checkpoint": lambda t: checkpoints_pb2.DeleteCheckpointRequest(path=t.checkpoint),
    "set_checkpoint_ttl": lambda t: checkpoints_pb2.SetCheckpointTtlRequest(path=t.checkpoint, ttl_seconds=1),
    "set_checkpoint_access": lambda t: checkpoints_pb2.SetCheckpointAccessRequest(path=t.checkpoint, is_public=True),
    "copy_checkpoint": lambda t: checkpoints_pb2.CopyCheckpointRequest(path=t.checkpoint, request_id="copy"),
    "create_upload": lambda t: imports_pb2.CreateUploadRequest(session_id=t.session, upload_id="u"),
    "upload_part": lambda t: imports_pb2.UploadPartRequest(session_id=t.session, upload_id="u", data=b"x"),
    "import_checkpoint": lambda t: imports_pb2.ImportCheckpointRequest(
        session_id=t.session, upload_id="u", name="mine", index=0
    ),
    "export_checkpoint": lambda t: checkpoints_pb2.ExportCheckpointRequest(path=t.checkpoint),
    "get_operation": lambda t: ops_pb.GetOperationRequest(name=t.operation),
    "export_session_trace": lambda t: history_pb2.ExportSessionTraceRequest(session_id=t.session),
    "get_history_entry": lambda t: history_pb2.GetHistoryEntryRequest(name=t.operation),
    "report_metrics": lambda t: history_pb2.ReportMetricsRequest(adapter_id=t.adapter, metrics={"loss": 1.0}),
    "wait_operations": lambda t: ops_pb.WaitOperationsRequest(names=[t.operation]),
    "cancel_operation": lambda t: ops_pb.CancelOperationRequest(name=t.sample),
}
STREAMS = {"stream_sample", "stream_outcome", "export_checkpoint", "export_session_trace", "wait_operations"}
NAMELESS = {
    "get_capabilities",
    "get_tokenizer",
    "create_session",
    "list_sessions",
    "list_adapters",
    "list_history",
    "list_checkpoints",
    "get_pool_status",
    "watch_cycles",
    "get_usage",
    "create_api_key",
    "list_api_keys",
    "revoke_api_key",
    "create_tenant",
    "list_tenants",
    "get_tenant_limits",
    "set_tenant_limits",
    "get_tenant",
    "suspend_tenant",
    "resume_tenant",
    "delete_tenant",
    "rotate_api_key",  # of another key it needs an administrator
    "list_audit_entries",
    "release_tenant",
    "drain_worker",
    "undrain_worker",
}


async def things_of(pool: ToyPool, tenant: str) -> Things:
    adapter = await pool.adapter(tenant)
    names = [await pool.forward_backward(adapter, 1, 4, tenant=tenant), await pool.optim_step(adapter, 2, tenant)]
    await pool.wait(*names, tenant=tenant)
    saved = await pool.save(adapter, 3, "secret", tenant)
    session = adapter.partition(":")[0]
    sampler = await pool.sampler(session, tenant, model_path=saved.save_state.path)
    sample = await pool.sample(sampler, 1, tenant)
    await pool.wait(sample, tenant=tenant)
    return Things(session, adapter, saved.save_state.path, sampler, names[0], sample)


def absent(things: Things) -> Things:
    """Return names of the same form that do not exist."""
    values = dataclasses.asdict(things)
    session = things.session[:-4] + ("0000" if things.session[-4:] != "0000" else "1111")
    return Things(**{key: value.replace(things.session, session) for key, value in values.items()})


async def error_of(pool: ToyPool, principal: Principal, method: str, things: Things) -> ServiceError:
    call = getattr(pool.service, method)(principal, CALLS[method](things))
    return await refusal(anext(call) if method in STREAMS else call)


async def test_every_method_returns_the_same_error_for_anothers_resource_as_for_a_missing_one(
    tmp_path: Path, pool: ToyPool
) -> None:
    alices, eve = await things_of(pool, "alice"), await pool.principal("eve")
    absents = absent(alices)
    before = query(tmp_path, "SELECT COUNT(*) FROM operations")[0][0]
    for method in CALLS:
        foreign, missing = [await error_of(pool, eve, method, things) for things in (alices, absents)]
        assert foreign.code is missing.code is Code.NOT_FOUND, method
        assert (foreign.reason, foreign.metadata, foreign.retry_delay_s) == (
            missing.reason,
            missing.metadata,
            missing.retry_delay_s,
        )
        hidden = [value for value in dataclasses.asdict(absents).values() if value in missing.message]
        shown = [value for value in dataclasses.asdict(alices).values() if value in foreign.message]
        assert len(hidden) == len(shown)
        assert foreign.message.replace(alices.session, "X") == missing.message.replace(absents.session, "X")
    after = query(tmp_path, "SELECT COUNT(*) FROM operations")[0][0]
    assert before == after
    assert (await pool.wait(alices.operation, alices.sample))[0].state == ops_pb.OPERATION_STATE_SUCCEEDED
    await pool.service.heartbeat(await pool.principal(), CALLS["heartbeat"](alices))
    path = checkpoints_pb2.GetCheckpointRequest(path=alices.checkpoint)
    assert (await pool.service.get_checkpoint(await pool.principal(), path)).checkpoint.seq == 3


async def test_this_file_covers_every_method_of_the_service(pool: ToyPool) -> None:
    methods = {name for name in dir(pool.service) if not name.startswith("_")}
    beyond = {  # not in the gRPC contract; tested below
        "refuse",
        "file_for_tinker",
        "exported_files",
        "is_next",
        "newest_checkpoints",
        "find_session",
        "listed_adapters",  # what the RPCs read
        "listed_checkpoints",
        "session_ids",
        "trained_modules",
        "join_sampler",
        "finished_samples",
        "check_session_trace",  # what the RPC asks
        "session_trace",
        "queue_reason",  # tested with the probation
        "finished_operations",
        "make_room",
        "holder_of_key",  # called by a door that has signed the key's id
    }
    assert methods == set(CALLS) | NAMELESS | beyond


async def test_a_refusal_is_not_recorded_in_the_log_of_anothers_adapter(pool: ToyPool) -> None:
    adapter = await pool.adapter("alice")
    request = training_pb2.OptimStepRequest(adapter_id=adapter, seq=1)
    eve, alice = await pool.principal("eve"), await pool.principal("alice")
    foreign = await refusal(pool.service.refuse(eve, request, invalid("no")))
    own = await refusal(pool.service.refuse(alice, request, invalid("no")))
    assert (foreign.code, foreign.operation) == (Code.NOT_FOUND, "")
    assert own.message.startswith("no; a refused step drops its gradient")
    request.seq = 2
    longest = await refusal(pool.service.refuse(alice, request, invalid("n" * 2000)))
    assert len(longest.message) == MESSAGE_LENGTH_MAX
    assert longest.message.endswith("with its forward_backwards")
    assert own.operation == f"{adapter}:1"


async def test_the_order_of_anothers_adapter_is_not_told(pool: ToyPool) -> None:
    adapter = await pool.adapter("alice")
    eve, alice = await pool.principal("eve"), await pool.principal("alice")
    assert pool.service.is_next(alice, adapter, 1)
    with pytest.raises(ServiceError) as raised:
        pool.service.is_next(eve, adapter, 1)
    assert raised.value.code is Code.NOT_FOUND


async def test_a_refused_train_step_takes_the_seqs_of_both_its_operations(pool: ToyPool) -> None:
    adapter, alice = await pool.adapter("alice"), await pool.principal("alice")
    step = training_pb2.TrainStepRequest(adapter_id=adapter, seq=1)
    assert (await refusal(pool.service.refuse(alice, step, invalid("no")))).operation == f"{adapter}:1"
    following = training_pb2.OptimStepRequest(adapter_id=adapter, seq=3)
    assert (await refusal(pool.service.refuse(alice, following, invalid("no")))).operation == f"{adapter}:3"
    for seq in (1, 2, 3):
        name = ops_pb.GetOperationRequest(name=f"{adapter}:{seq}")
        found = (await pool.service.get_operation(alice, name)).operation
        assert found.state == ops_pb.OPERATION_STATE_FAILED


async def test_anothers_checkpoint_is_neither_listed_nor_read(pool: ToyPool) -> None:
    path = (await things_of(pool, "alice")).checkpoint
    adapter, eve, alice = CheckpointPath.parse(path).adapter_id, await pool.principal("eve"), await pool.principal()
    assert await pool.service.newest_checkpoints(eve, [adapter]) == {}
    assert await pool.service.newest_checkpoints(alice, [adapter]) != {}
    for reading in (
        pool.service.file_for_tinker(eve, path, 3, "adapter_config.json"),
        pool.service.trained_modules(eve, path),
        pool.service.exported_files(eve, path),
    ):
        assert (await refusal(reading)).code is Code.NOT_FOUND
    file = await pool.service.file_for_tinker(alice, path, 3, "adapter_config.json")
    assert len(await anext(file.read(0, file.num_bytes))) == file.num_bytes


async def test_a_session_is_found_by_its_metadata_only_by_its_tenant_and_while_it_is_live(pool: ToyPool) -> None:
    eve, alice = await pool.principal("eve"), await pool.principal("alice")
    metadata = {"door": "x"}
    session = sessions_pb2.CreateSessionRequest(user_metadata=metadata, request_id="r")
    session_id = (await pool.service.create_session(alice, session)).session.session_id
    assert await pool.service.find_session(alice, metadata) == session_id
    assert await pool.service.find_session(alice, metadata | {"more": "y"}) == ""
    assert await pool.service.find_session(eve, metadata) == ""
    await pool.finish_session(session_id)
    assert await pool.service.find_session(alice, metadata) == ""


async def test_anothers_sampler_cannot_be_joined_and_its_samples_cannot_be_listed(pool: ToyPool) -> None:
    sampler = (await things_of(pool, "alice")).sampler
    eve, alice = await pool.principal("eve"), await pool.principal()
    for call in (
        pool.service.join_sampler(eve, sampler),
        pool.service.finished_samples(eve, sampler, 0, 0, 0.0),
    ):
        assert (await refusal(call)).code is Code.NOT_FOUND
    assert await pool.service.join_sampler(alice, sampler)
    assert await pool.service.finished_samples(alice, sampler, 0, 0, 0.0)


async def test_anothers_checkpoint_cannot_be_loaded_sampled_or_trained_from(pool: ToyPool) -> None:
    path = (await things_of(pool, "alice")).checkpoint
    mine = await pool.adapter("eve")
    session = mine.partition(":")[0]
    eve = await pool.principal("eve")
    for call in (
        pool.adapter("eve", from_path=path),
        pool.sampler(session, "eve", model_path=path),
        pool.service.load_state(eve, training_pb2.LoadStateRequest(adapter_id=mine, seq=1, path=path)),
    ):
        assert (await refusal(call)).code is Code.NOT_FOUND


async def test_a_wait_that_names_one_foreign_operation_is_refused(pool: ToyPool) -> None:
    alices, eves = await things_of(pool, "alice"), await things_of(pool, "eve")
    request = ops_pb.WaitOperationsRequest(names=[eves.operation, alices.operation])
    wait = pool.service.wait_operations(await pool.principal("eve"), request)
    assert (await refusal(anext(wait))).code is Code.NOT_FOUND


async def test_anothers_results_are_neither_returned_together_nor_measured(pool: ToyPool) -> None:
    alices = await things_of(pool, "alice")
    eve, alice = await pool.principal("eve"), await pool.principal("alice")
    target, _, seq = alices.operation.rpartition(":")
    assert pool.core.admission.result_bytes(alice.tenant_id, target, int(seq)) > 0
    assert pool.core.admission.result_bytes(eve.tenant_id, target, int(seq)) == 0
    with pool.core.responses.room(eve.tenant_id) as room:
        call = pool.service.finished_operations(eve, [alices.operation], room, is_poll=False)
        assert (await refusal(call)).code is Code.NOT_FOUND


async def test_lists_have_only_the_callers_resources(pool: ToyPool) -> None:
    alices, eves = await things_of(pool, "alice"), await things_of(pool, "eve")
    eve = await pool.principal("eve")
    sessions = (await pool.service.list_sessions(eve, sessions_pb2.ListSessionsRequest())).sessions
    adapters = (await pool.service.list_adapters(eve, adapters_pb2.ListAdaptersRequest())).adapters
    everything = checkpoints_pb2.ListCheckpointsRequest()
    of_alice = checkpoints_pb2.ListCheckpointsRequest(adapter_id=alices.adapter)
    checkpoints = (await pool.service.list_checkpoints(eve, everything)).checkpoints
    foreign = (await pool.service.list_checkpoints(eve, of_alice)).checkpoints
    assert [each.session_id for each in sessions] == [eves.session]
    assert [each.adapter_id for each in adapters] == [eves.adapter]
    assert [each.path for each in checkpoints] == [eves.checkpoint]
    assert list(foreign) == []


async def test_pool_status_and_cycles_show_others_only_as_counts(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        key, _ = await pool.coordinator.authenticator.create_key("boss", role=Role.ADMIN)
        boss = pool.coordinator.authenticator.authenticate(key)
        eve = await pool.principal("eve")
        watches = {who: pool.service.watch_cycles(who, pool_pb2.WatchCyclesRequest()) for who in (eve, boss)}
        firsts = {who: asyncio.create_task(anext(watch)) for who, watch in watches.items()}
        await asyncio.sleep(0)
        alices = await things_of(pool, "alice")
        mine = await pool.adapter("eve")
        await pool.wait(await pool.forward_backward(mine, 1, 4, tenant="eve"), tenant="eve")
        seen = {who: (await first).cycle for who, first in firsts.items()}
        for watch in watches.values():
            await watch.aclose()
        status = {
            who: await pool.service.get_pool_status(who, pool_pb2.GetPoolStatusRequest(num_cycles=100))
            for who in (eve, boss)
        }
        usage = (await pool.service.get_usage(eve, pool_pb2.GetUsageRequest())).rows
    entries = [entry for cycle in [seen[eve], *status[eve].cycles] for entry in cycle.entries]
    assert {(entry.tenant, entry.adapter_id) for entry in entries} == {("", ""), ("eve", mine)}
    for cycle in status[eve].cycles:
        [whole] = [each for each in status[boss].cycles if each.cycle_id == cycle.cycle_id]
        of_others = [entry for entry in whole.entries if entry.tenant != "eve"]
        hidden = [entry for entry in cycle.entries if not entry.tenant]
        assert len(hidden) == len({entry.tenant for entry in of_others})
        assert sum(entry.num_tokens for entry in hidden) == sum(entry.num_tokens for entry in of_others)
        assert sum(entry.num_operations for entry in hidden) == sum(entry.num_operations for entry in of_others)
        assert not any(entry.worker_id or entry.is_step for entry in hidden)
    for secret in (alices.session, "alice"):
        assert secret not in str(status[eve])
        assert secret not in str(seen[eve])
    [worker], [whole] = status[eve].workers, status[boss].workers
    assert (worker.num_adapters, worker.pid, worker.node) == (1, 0, "")
    assert (whole.num_adapters, whole.pid > 0, bool(whole.node)) == (2, True, True)
    assert {entry.tenant for entry in seen[boss].entries} == {"alice"}
    assert {entry.tenant for cycle in status[boss].cycles for entry in cycle.entries} == {"alice", "eve"}
    assert {row.tenant for row in usage} == {"eve"}


async def test_a_member_sees_other_tenants_of_a_cycle_as_their_number_and_totals_only(pool: ToyPool) -> None:
    parts = (("eve", "e1", 1), ("alice", "a1", 20), ("alice", "a2", 300), ("bob", "b1", 4000))
    ids = {name: (await pool.principal(name)).tenant_id for name, _, _ in parts}
    entries = [
        pool_pb2.CycleEntry(
            adapter_id=adapter,
            tenant=ids[name],
            worker_id="w",
            num_operations=number,
            num_tokens=number,
            is_step=True,
        )
        for name, adapter, number in parts
    ]
    pool.coordinator.core.journal.publish(pool_pb2.Cycle(cycle_id=1, entries=entries))
    eve = await pool.principal("eve")
    [cycle] = (await pool.service.get_pool_status(eve, pool_pb2.GetPoolStatusRequest())).cycles
    mine, all_others, second = cycle.entries
    assert (mine.tenant, mine.adapter_id, mine.worker_id, mine.num_tokens) == ("eve", "e1", "w", 1)
    assert all_others == pool_pb2.CycleEntry(num_operations=4320, num_tokens=4320)
    assert second == pool_pb2.CycleEntry(), "alice and bob are two"


async def test_a_name_that_is_almost_that_of_an_operation_is_not_found(pool: ToyPool) -> None:
    """Otherwise a wait could end although the operation has not finished."""
    adapter, principal = await pool.adapter(), await pool.principal()
    pool.hold()
    name = await pool.optim_step(adapter, 1)
    for other in (f"{adapter}:01", f"{adapter}:+1", f"{adapter}:１", f"{adapter}: 1", f"{adapter}:", ":1", "", "1"):
        wait = pool.service.wait_operations(principal, ops_pb.WaitOperationsRequest(names=[other]))
        assert (await refusal(anext(wait))).code is Code.NOT_FOUND
    await pool.release()
    await pool.wait(name)
