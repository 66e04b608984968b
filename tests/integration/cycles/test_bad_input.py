"""Invalid calls: each is refused with a clear error, and the adapter continues without loss."""

import asyncio
import errno
import math
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.config import Limits
from coordinator.base.errors import Code, Quota, ServiceError, unavailable
from coordinator.base.tenant_limits import TenantLimits
from coordinator.storage.disk import RealDisk
from tests.support.faults import failing
from tests.support.toy_pool import ToyPool, pass_request, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    history_pb2,
    sampling_pb2,
    sessions_pb2,
)
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import AdapterState

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


async def test_a_bad_pass_is_refused_with_a_clear_error_and_the_adapter_continues(pool: ToyPool) -> None:
    adapter, principal = await pool.adapter(), await pool.principal()
    before = await pool.wait(await pool.forward_backward(adapter, 1, 3), await pool.optim_step(adapter, 2))
    chain = pool.chain(adapter)
    bad = pass_request(adapter, 3, [3])
    bad.ClearField("data")
    for _ in range(2):
        error = await refusal(pool.service.forward_backward(principal, bad))
        assert error.code is Code.INVALID_ARGUMENT
        assert "data is empty" in error.message
        assert error.retry_delay_s is None
    closed, *after = await pool.wait(
        await pool.optim_step(adapter, 4),
        await pool.forward_backward(adapter, 5, 3),
        await pool.optim_step(adapter, 6),
    )
    recorded = (await pool.service.get_operation(principal, ops_pb.GetOperationRequest(name=f"{adapter}:3"))).operation
    assert pool.chain(adapter) != chain
    assert "data is empty" in recorded.error.message
    assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"
    assert [each.state for each in (*before, *after)] == [SUCCEEDED] * 4


async def test_a_refusal_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        bad = pass_request(adapter, 1, [3])
        bad.ClearField("data")
        first = await refusal(pool.service.forward_backward(await pool.principal(), bad))
        other = await pool.optim_step(adapter, 2)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        again = await refusal(pool.service.forward_backward(await pool.principal(), bad))
        closed, fine = await pool.wait(other, await pool.optim_step(adapter, 3))
        changed = await refusal(pool.forward_backward(adapter, 1, 3))
    assert (first.code, first.message) == (again.code, again.message)
    assert changed.code is Code.ALREADY_EXISTS
    assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"
    assert fine.state == SUCCEEDED


@pytest.mark.parametrize(
    ("values", "code", "expected"),
    [
        ({"base_model": "gpt"}, Code.NOT_FOUND, "it serves: toy"),
        ({"base_model": ""}, Code.INVALID_ARGUMENT, "name one of toy"),
        ({"rank": 3}, Code.INVALID_ARGUMENT, "use one of 1, 2, 4, 8, 16, 32"),
        ({"rank": 64}, Code.INVALID_ARGUMENT, "use one of 1, 2, 4, 8, 16, 32"),
        ({"rank": -8}, Code.INVALID_ARGUMENT, "rank -8 is not allowed"),
        ({"alpha": 0.0}, Code.INVALID_ARGUMENT, "alpha"),
        ({"alpha": math.nan}, Code.INVALID_ARGUMENT, "alpha"),
        ({"alpha": 1e7}, Code.INVALID_ARGUMENT, "at most 1e+06, not 10000000"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, Code.INVALID_ARGUMENT, "set at least one"),
        ({"index": -1}, Code.INVALID_ARGUMENT, "index"),
        ({"index": 2**31 - 1}, Code.INVALID_ARGUMENT, "index"),
        ({"from_path": "tinker://x/weights/y"}, Code.NOT_FOUND, "no checkpoint"),
        ({"user_metadata": {"k": "v" * 20_000}}, Code.INVALID_ARGUMENT, "at most 16384"),
    ],
)
async def test_an_adapter_with_invalid_settings_is_refused(
    values: dict[str, Any], code: Code, expected: str, pool: ToyPool
) -> None:
    error = await refusal(pool.adapter(**values))
    assert (error.code, expected in error.message) == (code, True), error.message
    assert (await pool.adapter()).endswith(":train:0")


async def test_an_adapter_is_created_once_per_index_and_request_id(pool: ToyPool) -> None:
    principal, session = await pool.principal(), await pool.session()

    async def create(**values: Any) -> str:
        request = adapters_pb2.CreateAdapterRequest(session_id=session, base_model="toy", **values)
        return str((await pool.service.create_adapter(principal, request)).adapter.adapter_id)

    same = await asyncio.gather(*(create(index=3, rank=8) for _ in range(3)))
    by_id = await asyncio.gather(*(create(request_id="r", rank=8) for _ in range(3)))
    assert len(set(same)) == len(set(by_id)) == 1
    assert (await refusal(create(index=3, rank=16))).reason == "ADAPTER_EXISTS"
    assert (await refusal(create(request_id="r", rank=16))).reason == "ADAPTER_EXISTS"
    assert (await refusal(create(index=9, request_id="r", rank=8))).reason == "REQUEST_ID_TAKEN"
    await pool.delete_adapter(same[0])
    assert (await refusal(create(index=3, rank=8))).reason == "ADAPTER_DELETED"


async def test_the_adapter_quota_is_per_tenant_and_a_deletion_frees_it(tmp_path: Path) -> None:
    async with running_pool(tmp_path, tenant_limits=TenantLimits(adapters_max=2)) as pool:
        adapters = [await pool.adapter() for _ in range(2)]
        error = await refusal(pool.adapter())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ADAPTER_QUOTA")
        assert (error.quota, error.retry_delay_s) == (Quota("adapters of yours", 2, 2), None)
        await pool.adapter("bob")
        await pool.delete_adapter(adapters[0])
        await pool.adapter()


async def test_adapters_that_are_created_at_the_same_time_never_exceed_the_ceiling(tmp_path: Path) -> None:
    async with running_pool(tmp_path, tenant_limits=TenantLimits(adapters_max=3)) as pool:
        made = await asyncio.gather(*(pool.adapter() for _ in range(8)), return_exceptions=True)
        refused = [each for each in made if isinstance(each, ServiceError)]
        assert {each.reason for each in refused} == {"ADAPTER_QUOTA"}
        assert len(made) - len(refused) == 3
        await pool.delete_adapter(next(each for each in made if isinstance(each, str)))
        await pool.adapter()
        assert (await refusal(pool.adapter())).reason == "ADAPTER_QUOTA", "refused calls took nothing"


async def test_sessions_that_are_created_at_the_same_time_never_exceed_the_ceiling(tmp_path: Path) -> None:
    async with running_pool(tmp_path, tenant_limits=TenantLimits(sessions_max=10)) as pool:
        alice = await pool.principal()
        first = sessions_pb2.CreateSessionRequest(request_id="first")
        session = (await pool.service.create_session(alice, first)).session.session_id
        made = await asyncio.gather(*(pool.session() for _ in range(50)), return_exceptions=True)
        refused = [each for each in made if isinstance(each, ServiceError)]
        assert len(made) - len(refused) == 9
        assert {(each.reason, each.code, each.quota, each.retry_delay_s) for each in refused} == {
            ("SESSION_QUOTA", Code.FAILED_PRECONDITION, Quota("live sessions of yours", 10, 10), None)
        }
        again = await pool.service.create_session(alice, first)
        assert again.session.session_id == session, "a repeat needs no room"
        await pool.session("bob")
        for _ in range(2):
            await pool.service.finish_session(alice, sessions_pb2.FinishSessionRequest(session_id=session))
        await pool.session()
        assert (await refusal(pool.session())).reason == "SESSION_QUOTA", "a session that ends twice frees one place"


async def test_repeats_of_one_request_at_the_last_place_get_the_same_session(tmp_path: Path) -> None:
    async with running_pool(tmp_path, tenant_limits=TenantLimits(sessions_max=1)) as pool:
        alice, request = await pool.principal(), sessions_pb2.CreateSessionRequest(request_id="r")
        made = await asyncio.gather(*(pool.service.create_session(alice, request) for _ in range(5)))
        assert len({each.session.session_id for each in made}) == 1
        assert (await refusal(pool.session())).reason == "SESSION_QUOTA"
        assert not pool.service._creating  # private: memory that is never freed is visible nowhere else


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, "exactly one"), ({"base_model": "toy", "model_path": "tinker://x"}, "exactly one"), ({"index": -1}, "index")],
)
async def test_a_sampler_without_exactly_one_model_or_with_a_negative_index_is_refused(
    values: dict[str, Any], expected: str, pool: ToyPool
) -> None:
    values = ({"base_model": "toy"} if "index" in values else {}) | values
    request = sampling_pb2.CreateSamplerRequest(session_id=await pool.session(), **values)
    error = await refusal(pool.service.create_sampler(await pool.principal(), request))
    assert error.code is Code.INVALID_ARGUMENT
    assert expected in error.message


async def test_a_sampler_is_created_once_per_index_and_request_id(pool: ToyPool) -> None:
    session = await pool.session()
    by_index = await asyncio.gather(*(pool.sampler(session, index=0) for _ in range(3)))
    by_id = await asyncio.gather(*(pool.sampler(session, request_id="r") for _ in range(3)))
    assert len(set(by_index)) == len(set(by_id)) == 1
    assert (await refusal(pool.sampler(session, index=7, request_id="r"))).reason == "REQUEST_ID_TAKEN"


@pytest.mark.parametrize(
    "token",
    [
        *(
            "x",
            "-1",
            "9" * 16,
            "9" * 100_000,
            "１０",
            "1e3",
            "1.0:",
            ":s",
            "1.0",
            "s:1.0",
            "1.0:s\0",
            "1.0:s\n",
            "1.0: ",
            "1.0:é",
        ),
        *("nan:s", "inf:s", "-inf:s", "1e999:s", "1e+999:s", "0x1p0:s", "1_0.0:s", " 1.0:s", "１.0:s"),
        *("9" * 400 + ":s", "1.0:" + "s" * 257, "1.0:" + "s" * 100_000),
    ],
)
async def test_an_invented_page_token_is_refused(token: str, pool: ToyPool) -> None:
    principal = await pool.administrator()
    for method, request in (
        ("list_api_keys", admin_pb2.ListApiKeysRequest(page_token=token)),
        ("list_tenants", admin_pb2.ListTenantsRequest(page_token=token)),
        ("list_audit_entries", admin_pb2.ListAuditEntriesRequest(page_token=token)),
        ("list_history", history_pb2.ListHistoryRequest(target_id="s:train:0", page_token=token)),
        ("list_sessions", sessions_pb2.ListSessionsRequest(page_token=token)),
        ("list_adapters", adapters_pb2.ListAdaptersRequest(page_token=token)),
        ("list_checkpoints", checkpoints_pb2.ListCheckpointsRequest(page_token=token)),
    ):
        refused = await refusal(getattr(pool.service, method)(principal, request))
        assert refused.code is Code.INVALID_ARGUMENT
        assert "send the next_page_token of the page before" in refused.message
        assert len(refused.message) < 400


async def test_waiting_for_no_too_many_or_unknown_operations_is_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path, limits=Limits(wait_names_max=3)) as pool:
        principal, adapter = await pool.principal(), await pool.adapter()
        for names, code in (([], Code.INVALID_ARGUMENT), (["x"] * 4, Code.INVALID_ARGUMENT), (["x"], Code.NOT_FOUND)):
            wait = pool.service.wait_operations(principal, ops_pb.WaitOperationsRequest(names=names))
            assert (await refusal(anext(wait))).code is code
        name = await pool.optim_step(adapter, 1)
        assert len(await pool.wait(name)) == 1


async def test_deleting_an_adapter_fails_its_queued_operations_and_keeps_its_results(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    [done] = await pool.wait(await pool.forward_backward(adapter, 1, 3))
    pool.hold()
    running = await pool.forward_backward(adapter, 2, 3)
    queued, behind_gap = await pool.optim_step(adapter, 3), await pool.optim_step(adapter, 9)
    deletions = [asyncio.create_task(pool.delete_adapter(adapter)) for _ in range(2)]
    await asyncio.sleep(0)
    deletions[0].cancel()  # a cancelled call does not stop the deletion
    await pool.release()
    operations = await asyncio.wait_for(pool.wait(running, queued, behind_gap), 60)
    await deletions[1]
    await pool.delete_adapter(adapter)
    [still] = await pool.wait(done.name)
    assert (await refusal(pool.optim_step(adapter, 4))).code is Code.NOT_FOUND
    assert pool.coordinator.health()
    assert len(pool.core.in_flight) == 0
    assert still == done
    assert [each.error.reason for each in operations[1:]] == ["ADAPTER_DELETED"] * 2


async def test_cancelling_a_queued_pass_closes_its_gradient_window_and_a_running_pass_is_not_cancelled(
    pool: ToyPool,
) -> None:
    adapter = await pool.adapter()
    pool.hold()
    first = await pool.forward_backward(adapter, 1, 3)
    await asyncio.sleep(0)
    log = pool.log_of(adapter)
    assert log.copy.is_running(log.operations[1])
    names = [first, await pool.forward_backward(adapter, 2, 3), await pool.optim_step(adapter, 3)]
    for name in (names[0], names[1], names[1]):
        await pool.cancel(name)
    await pool.release()
    operations = await pool.wait(*names, await pool.optim_step(adapter, 4))
    assert [each.error.reason for each in operations] == ["", "CANCELLED", "GRADIENT_WINDOW_CLOSED", ""]


async def test_an_operation_acknowledged_during_the_deletion_of_its_adapter_gets_an_outcome(pool: ToyPool) -> None:
    """In every order of the two calls: the submission comes 0 to 5 iterations of the event loop later."""
    acknowledged: list[str] = []

    async def submit(adapter: str, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        acknowledged.append(await pool.optim_step(adapter, 1))

    for num_turns in range(6):
        adapter = await pool.adapter()
        deletion = pool.delete_adapter(adapter)
        results: Any = await asyncio.gather(deletion, submit(adapter, num_turns), return_exceptions=True)
        deleted, refused = results
        assert deleted is None
        assert refused is None or (isinstance(refused, ServiceError) and refused.code is Code.NOT_FOUND)
    assert 0 < len(acknowledged) < 6
    assert len(await asyncio.wait_for(pool.wait(*acknowledged), 60)) == len(acknowledged)
    assert len(pool.core.in_flight) == 0


async def test_an_adapter_that_cannot_be_read_now_waits_alone_and_runs_when_its_delay_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = ("alice", "bob", "carol")
    async with running_pool(tmp_path) as pool:
        adapters = {tenant: await pool.adapter(tenant) for tenant in tenants}
        for tenant, adapter in adapters.items():
            await pool.wait(await pool.forward_backward(adapter, 1, 3, tenant=tenant), tenant=tenant)
    async with running_pool(tmp_path) as pool:
        await pool.take_over(*tenants)
        read, owners = pool.folders.snapshots.read, {}
        for tenant, adapter in adapters.items():
            row = pool.store.snapshots.get(adapter)
            assert row is not None
            owners[row.folder] = tenant
        delays_s, failed = {"alice": [30.0], "carol": [0.2]}, []

        def busy(folder: str, sha256: str) -> AdapterState:
            if delays_s.get(owners[folder]):
                failed.append(owners[folder])
                raise unavailable("STORAGE_BUSY", "busy", retry_delay_s=delays_s[owners[folder]].pop())
            return read(folder, sha256)

        monkeypatch.setattr(pool.folders.snapshots, "read", busy)
        await pool.forward_backward(adapters["alice"], 2, 3)
        await until(lambda: failed == ["alice"])
        for tenant in ("bob", "carol"):
            other = await pool.forward_backward(adapters[tenant], 2, 3, tenant=tenant)
            [done] = await asyncio.wait_for(pool.wait(other, tenant=tenant), 60)
            assert done.state == SUCCEEDED
        assert failed == ["alice", "carol"]
        assert not pool.log_of(adapters["alice"]).operations[2].is_final


@pytest.mark.slow
async def test_a_snapshot_whose_reads_fail_for_a_while_fails_no_operation(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 3), await pool.optim_step(adapter, 2))
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        with failing(RealDisk, "read", OSError(errno.EMFILE, "Too many open files"), times=2) as failed:
            after = await pool.wait(await pool.forward_backward(adapter, 3, 3), await pool.optim_step(adapter, 4))
        assert [each.state for each in after] == [SUCCEEDED] * 2
    assert len(failed) == 2
