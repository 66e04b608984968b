"""Sessions over the service: idempotent creation, heartbeats, and expiry by the monotonic clock of the service."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.sampling.sample import Sample
from tests.support.faults import held_task
from tests.support.toy_pool import FakeTime, ToyPool, refusal, running_pool
from tests.support.waiting import until
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


class _CountedDict(dict[str, Sample]):
    """Counts the passes over its values."""

    num_passes = 0

    def values(self) -> Any:
        self.num_passes += 1
        return super().values()


async def heartbeat(pool: ToyPool, session_id: str) -> None:
    await pool.service.heartbeat(await pool.principal(), sessions_pb2.HeartbeatRequest(session_id=session_id))


async def is_live(pool: ToyPool, session_id: str) -> bool:
    request = sessions_pb2.GetSessionRequest(session_id=session_id)
    return bool((await pool.service.get_session(await pool.principal(), request)).session.is_live)


async def create(pool: ToyPool, request_id: str, tenant: str = "alice") -> str:
    request = sessions_pb2.CreateSessionRequest(request_id=request_id, user_metadata={"host": "laptop"})
    response = await pool.service.create_session(await pool.principal(tenant), request)
    assert response.session.is_live
    assert dict(response.session.user_metadata) == {"host": "laptop"}
    return str(response.session.session_id)


async def test_one_request_id_creates_one_session_per_tenant(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.principal()
        ids = await asyncio.gather(*(create(pool, "r") for _ in range(4)))
        assert len(set(ids)) == 1
        assert len({ids[0], await create(pool, "q"), await create(pool, "r", "bob")}) == 3
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await create(pool, "r") == ids[0]


async def test_a_cancelled_creation_leaves_a_session_that_works(pool: ToyPool) -> None:
    await pool.principal()
    call = asyncio.create_task(create(pool, "r"))
    for _ in range(3):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    await heartbeat(pool, await create(pool, "r"))


async def test_a_session_lists_its_adapters_and_samplers(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    session = adapter.partition(":")[0]
    sampler = await pool.sampler(session)
    request = sessions_pb2.GetSessionRequest(session_id=session)
    got = (await pool.service.get_session(await pool.principal(), request)).session
    assert (list(got.adapter_ids), list(got.sampler_ids)) == ([adapter], [sampler])


async def test_a_session_without_heartbeats_expires_after_its_timeout_and_one_with_them_does_not(
    tmp_path: Path,
) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0) as pool:
        silent, heard = await create(pool, "a"), await create(pool, "b")
        num_asleep, took = len(time.sleepers), 0.0
        while await is_live(pool, silent):
            took += 5
            assert took < 100
            await time.advance(5)
            await heartbeat(pool, heard)
            await until(lambda: len(time.sleepers) >= num_asleep)  # until the sweep and its commit are over
        assert 60 < took <= 80
        assert await is_live(pool, heard)
        listed = await pool.service.list_sessions(await pool.principal(), sessions_pb2.ListSessionsRequest())
        assert [each.session_id for each in listed.sessions] == [heard]
        refused = await refusal(heartbeat(pool, silent))
        assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "SESSION_ENDED")


async def test_a_finished_session_ends_and_its_adapters_can_still_train(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        session = adapter.partition(":")[0]
        for _ in range(2):
            await pool.finish_session(session)
        assert not await is_live(pool, session)
        for call in (heartbeat(pool, session), pool.sampler(session)):
            assert (await refusal(call)).reason == "SESSION_ENDED"
        [trained] = await pool.wait(await pool.forward_backward(adapter, 1, 4))
    assert trained.state == SUCCEEDED
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert not await is_live(pool, session)
        assert (await pool.wait(await pool.optim_step(adapter, 2)))[0].state == SUCCEEDED


async def test_a_late_call_is_told_that_its_session_has_ended_until_its_rows_are_deleted(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, ended_retention_s=60.0) as pool:
        session, with_adapter = await create(pool, "r"), await create(pool, "q")
        principal = await pool.principal()
        request = adapters_pb2.CreateAdapterRequest(session_id=with_adapter, base_model="toy", rank=8, index=0)
        adapter = (await pool.service.create_adapter(principal, request)).adapter.adapter_id
        for each in (session, with_adapter):
            await pool.finish_session(each)
        num_asleep = len(time.sleepers)
        for _ in range(10):
            await time.advance(5)
            await until(lambda: len(time.sleepers) >= num_asleep)  # until the sweep and its commits are over
        assert (await refusal(heartbeat(pool, session))).reason == "SESSION_ENDED"
        await time.until(lambda: pool.store.sessions.of_tenant(principal.tenant_id, session) is None)
        unknown = await refusal(heartbeat(pool, session))
        assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "SESSION_UNKNOWN")
        assert (await refusal(heartbeat(pool, with_adapter))).reason == "SESSION_ENDED"
        await pool.delete_adapter(adapter)
        await time.until(lambda: pool.store.sessions.of_tenant(principal.tenant_id, with_adapter) is None)
        assert await create(pool, "r") not in (session, with_adapter)


async def test_the_number_of_an_adapter_whose_row_is_deleted_is_never_given_again(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, ended_retention_s=60.0, session_timeout_s=1e6) as pool:
        principal, session = await pool.principal(), await create(pool, "r")

        async def create_adapter(**values: Any) -> str:
            request = adapters_pb2.CreateAdapterRequest(session_id=session, base_model="toy", rank=8, **values)
            return str((await pool.service.create_adapter(principal, request)).adapter.adapter_id)

        gone = await create_adapter(index=3)
        await pool.delete_adapter(gone)
        await time.until(lambda: pool.store.adapters.get(gone) is None)
        assert (await refusal(create_adapter(index=3))).reason == "ADAPTER_DELETED"
        assert (await refusal(pool.delete_adapter(gone))).code is Code.NOT_FOUND
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        principal = await pool.principal()
        assert (await refusal(create_adapter(index=3))).reason == "ADAPTER_DELETED"
        assert await create_adapter(request_id="a") == f"{session}:train:4"


async def test_nothing_gets_a_number_behind_the_highest_that_an_id_can_hold(pool: ToyPool) -> None:
    session_id = await pool.session()

    async def create(**values: Any) -> str:
        request = adapters_pb2.CreateAdapterRequest(session_id=session_id, base_model="toy", rank=8, **values)
        return str((await pool.service.create_adapter(await pool.principal(), request)).adapter.adapter_id)

    adapter = await create(index=names.INDEX_MAX)
    await pool.sampler(session_id, index=names.INDEX_MAX)
    refused = [await refusal(call) for call in (create(), pool.sampler(session_id))]
    assert [each.code for each in refused] == [Code.INVALID_ARGUMENT] * 2
    assert ["is the highest number" in each.message for each in refused] == [True, True]
    saved = await pool.publish(adapter, 1)
    assert (saved.state, "is the highest number" in saved.error.message) == (ops_pb.OPERATION_STATE_FAILED, True)
    assert await pool.sampler(session_id, index=7) == names.sampler_id(session_id, 7)


async def test_training_keeps_a_session_alive_without_heartbeats(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0, linger_s=0.0) as pool:
        adapter = await pool.adapter()
        for seq in range(1, 5):
            await time.advance(40)
            await asyncio.sleep(0.002)
            await pool.wait(await pool.optim_step(adapter, seq))
        await heartbeat(pool, adapter.partition(":")[0])


async def test_a_session_ends_with_the_samples_of_all_its_samplers_in_one_pass_over_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=1) as pool:
        ended, kept = await pool.session(), await pool.session()
        pool.hold()
        names = {
            session: [
                await pool.sample(await pool.sampler(session, index=index), 1, max_tokens=2) for index in range(3)
            ]
            for session in (kept, ended)
        }
        samples = _CountedDict(pool.core.samples._samples)
        monkeypatch.setattr(pool.core.samples, "_samples", samples)
        request = sessions_pb2.FinishSessionRequest(session_id=ended)
        await pool.service.finish_session(await pool.principal(), request)
        assert samples.num_passes == 1
        await pool.release()
        assert [each.error.code for each in await pool.wait(*names[ended])] == [Code.CANCELLED] * 3
        assert [each.state for each in await pool.wait(*names[kept])] == [SUCCEEDED] * 3


async def test_a_session_created_again_while_it_ends_does_not_become_live(pool: ToyPool) -> None:
    """Its sampler indices would start at 0 again, and the commit of a save with a used index would fail."""
    principal, session, store = await pool.principal(), await create(pool, "r"), pool.store
    request = adapters_pb2.CreateAdapterRequest(session_id=session, base_model="toy", rank=8, index=0)
    adapter = (await pool.service.create_adapter(principal, request)).adapter.adapter_id
    assert (await pool.publish(adapter, 1)).state == SUCCEEDED
    with held_task(store.sessions, "end") as ends:
        finishing = asyncio.create_task(pool.finish_session(session))
        await ends.until_begun()
        assert await create(pool, "r") == session
        [refused] = await asyncio.gather(heartbeat(pool, session), return_exceptions=True)
        ends.may_go.set()
        await finishing
    again = sessions_pb2.CreateSessionRequest(request_id="r", user_metadata={"host": "laptop"})
    ended = (await pool.service.create_session(principal, again)).session
    assert (ended.session_id, ended.is_live) == (session, False)
    unnamed = await asyncio.wait_for(pool.publish(adapter, 2), 60)
    assert pool.coordinator.health()
    assert isinstance(refused, ServiceError)
    assert refused.reason == "SESSION_ENDED"
    assert unnamed.error.reason == "SESSION_ENDED"


async def test_a_concurrent_sampler_creation_and_unnamed_save_never_get_the_same_index(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    session = adapter.partition(":")[0]
    with held_task(pool.store.samplers, "insert") as inserts:
        creating = asyncio.create_task(pool.sampler(session, index=5))
        await inserts.until_begun()
        refused, kept = await pool.wait(
            await pool.submit_publish(adapter, 1, sampler_index=5), await pool.optim_step(adapter, 2)
        )
    assert refused.error.reason == "SAMPLER_EXISTS"
    assert kept.state == SUCCEEDED
    assert await creating == f"{session}:sample:5"
    [saved] = await pool.wait(await pool.submit_publish(adapter, 3, sampler_index=6))
    assert saved.save_weights_for_sampler.sampler_id.endswith(":sample:6")
    with pytest.raises(ServiceError, match="created before"):
        await pool.sampler(session, index=6)


async def test_a_sampler_that_cannot_be_stored_fails_only_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path) as pool:
        core = pool.core
        adapter, other = await pool.adapter(), await pool.adapter()
        await pool.sampler(adapter.partition(":")[0], index=5)
        monkeypatch.setattr(core.sessions, "take_sampler_index", lambda *_: 5)  # as if two saves raced for it
        pool.hold()
        held = await pool.forward_backward(other, 1, 3)
        names = [await pool.submit_publish(adapter, 1, sampler_index=5)]
        names += [await pool.optim_step(each, 2) for each in (other, adapter)]
        await pool.release()
        refused, *kept = await pool.wait(*names, held)
        assert refused.error.reason == "SAMPLER_EXISTS"
        assert [each.state for each in kept] == [SUCCEEDED] * 3
        assert core.is_healthy()
        assert list((tmp_path / "samplers").iterdir()) == []
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await pool.wait(names[0]))[0].error.reason == "SAMPLER_EXISTS"
