"""Sessions over the service: idempotent creation, heartbeats, and expiry in service time alone."""

import asyncio
from pathlib import Path

import pytest

from coordinator.errors import Code, ServiceError
from tests.support.toy_pool import FakeTime, ToyPool, running_pool
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sessions_pb2

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


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


async def test_one_request_id_makes_one_session_per_tenant(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.principal()
        ids = await asyncio.gather(*(create(pool, "r") for _ in range(4)))
        assert len(set(ids)) == 1
        assert len({ids[0], await create(pool, "q"), await create(pool, "r", "bob")}) == 3
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await create(pool, "r") == ids[0]


async def test_a_call_that_goes_away_leaves_a_session_that_works(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.principal()
        call = asyncio.create_task(create(pool, "r"))
        for _ in range(3):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()
        await heartbeat(pool, await create(pool, "r"))


async def test_a_session_lists_what_was_made_in_it(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        session = adapter.partition(":")[0]
        sampler = await pool.sampler(session)
        request = sessions_pb2.GetSessionRequest(session_id=session)
        got = (await pool.service.get_session(await pool.principal(), request)).session
    assert (list(got.adapter_ids), list(got.sampler_ids)) == ([adapter], [sampler])


async def test_a_silent_session_expires_after_its_time_and_a_heard_one_does_not(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0) as pool:
        silent, heard = await create(pool, "a"), await create(pool, "b")
        took = 0.0
        while await is_live(pool, silent):
            took += 5
            assert took < 100
            await time.advance(5)
            await heartbeat(pool, heard)
            await asyncio.sleep(0.002)
        assert 60 < took <= 80
        assert await is_live(pool, heard)
        listed = await pool.service.list_sessions(await pool.principal(), sessions_pb2.ListSessionsRequest())
        assert [each.session_id for each in listed.sessions] == [heard]
        with pytest.raises(ServiceError) as raised:
            await heartbeat(pool, silent)
        assert (raised.value.code, raised.value.reason) == (Code.FAILED_PRECONDITION, "SESSION_ENDED")


async def test_neither_downtime_nor_a_jump_of_the_wall_clock_ages_a_session(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0) as pool:
        session = await create(pool, "a")
        time.wall_offset += 86_400
        await time.advance(30)
        assert await is_live(pool, session)
    later = FakeTime(now=5e6)
    async with running_pool(tmp_path, time=later, session_timeout_s=60.0) as pool:
        await pool.take_over()
        await later.advance(30)
        await heartbeat(pool, session)


async def test_a_finished_session_is_over_and_its_training_state_stays(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        session = adapter.partition(":")[0]
        for _ in range(2):
            await pool.service.finish_session(principal, sessions_pb2.FinishSessionRequest(session_id=session))
        assert not await is_live(pool, session)
        for call in (heartbeat(pool, session), pool.sampler(session)):
            with pytest.raises(ServiceError) as raised:
                await call
            assert raised.value.reason == "SESSION_ENDED"
        [trained] = await pool.wait(await pool.forward_backward(adapter, 1, 4))
    assert trained.state == SUCCEEDED
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert not await is_live(pool, session)
        assert (await pool.wait(await pool.optim_step(adapter, 2)))[0].state == SUCCEEDED


async def test_training_keeps_a_session_alive_without_heartbeats(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0, linger_s=0.0) as pool:
        adapter = await pool.adapter()
        for seq in range(1, 5):
            await time.advance(40)
            await asyncio.sleep(0.002)
            await pool.wait(await pool.optim_step(adapter, seq))
        await heartbeat(pool, adapter.partition(":")[0])
