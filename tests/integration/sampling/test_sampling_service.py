"""Sampling over the service: tokens depend on the logged request alone."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.fleet.fleet import VERSIONS_MAX
from coordinator.operations import in_flight
from coordinator.service import sampling
from coordinator.storage.access.audit import Act
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.rows import UnfetchedOperation
from coordinator.storage.sqlite import DiskFullError
from tests.support.adapter_logs import spec_named
from tests.support.faults import HELD_S_MAX, held
from tests.support.toy_engine import toy_bytes
from tests.support.toy_pool import FakeTime, ToyPool, fail_appends, refusal, running_pool, sample_request, tokens_of
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2
from workers.contract.messages import SampleRequest
from workers.pool.local import LocalPool

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED
QUEUED, RUNNING = ops_pb.OPERATION_STATE_QUEUED, ops_pb.OPERATION_STATE_RUNNING


async def trained_sampler(pool: ToyPool) -> str:
    """Return an unnamed sampler of an adapter after one step."""
    adapter = await pool.adapter()
    await pool.forward_backward(adapter, 1, 5)
    await pool.optim_step(adapter, 2)
    return (await pool.publish(adapter, 3)).save_weights_for_sampler.sampler_id


async def stream(pool: ToyPool, request: sampling_pb2.SampleRequest) -> tuple[dict[int, list[int]], ops_pb.Operation]:
    tokens: dict[int, list[int]] = {}
    async for event in pool.service.stream_sample(
        await pool.principal(), sampling_pb2.StreamSampleRequest(request=request)
    ):
        if event.HasField("operation"):
            return tokens, event.operation
        tokens.setdefault(event.token.sequence_index, []).append(event.token.token)
    raise AssertionError("the stream has no end")


async def test_an_adapter_that_waits_for_the_room_of_a_version_runs_when_its_last_sample_ends(tmp_path: Path) -> None:
    copy_bytes = toy_bytes(spec_named("a"))
    async with running_pool(tmp_path, engine_values=[{"host_bytes_max": copy_bytes}]) as pool:
        sampler, worker = await trained_sampler(pool), pool.core.fleet.worker("w0")
        [log] = pool.core.registry.logs.values()
        pool.engines["w0"][-1].may_decode = False
        await pool.sample(sampler, 1)
        await until(pool.versions_on)
        name = await pool.forward_backward(await pool.adapter("bob"), 1, 5, tenant="bob")
        await until(lambda: not log.home and worker.lacks_room)
        await pool.release()
        [done] = await asyncio.wait_for(pool.wait(name, tenant="bob"), 60)
    assert done.state == SUCCEEDED


async def test_a_missing_seed_is_drawn_logged_and_used_again_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        name = await pool.sample(sampler, 1)
        logged = sampling_pb2.SampleRequest.FromString(pool.store.operations.payload(sampler, 1))
        other = await pool.sample(sampler, 2)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        first, second = await pool.wait(name, other)
        [again] = await pool.wait(await pool.sample(sampler, 3, seed=logged.params.seed))
    assert logged.params.HasField("seed")
    assert tokens_of(first) == tokens_of(again) != tokens_of(second)


async def test_a_repeated_request_without_a_seed_is_the_same_request(pool: ToyPool) -> None:
    sampler, principal = await pool.sampler(await pool.session()), await pool.principal()
    request = sample_request(sampler, 0)
    request.request_id = "r"
    first, again = [(await pool.service.sample(principal, request)).operation.name for _ in range(2)]
    await pool.wait(first)
    later = (await pool.service.sample(principal, request)).operation
    request.params.max_tokens = 3
    refused = await refusal(pool.service.sample(principal, request))
    assert first == again == later.name
    assert later.state == SUCCEEDED
    assert refused.code is Code.ALREADY_EXISTS


async def test_a_stream_has_every_token_once_and_ends_with_the_operation(pool: ToyPool) -> None:
    sampler = await pool.sampler(await pool.session())
    streamed, operation = await stream(pool, sample_request(sampler, 1, num_samples=3, max_tokens=20))
    nothing, again = await stream(pool, sample_request(sampler, 1, num_samples=3, max_tokens=20))
    assert not pool.core.samples.streams.has_listener(operation.name)
    assert [streamed[index] for index in range(3)] == tokens_of(operation)
    assert (nothing, again) == ({}, operation)


async def test_tokens_that_a_lost_worker_has_streamed_are_not_streamed_again(pool: ToyPool) -> None:
    sampler, principal = await pool.sampler(await pool.session()), await pool.principal()
    engine = pool.engines["w0"][-1]
    step, num_steps = engine.decode_step, 0

    def three_steps() -> Any:
        nonlocal num_steps
        num_steps += 1
        drawn = step()
        engine.may_decode = num_steps < 3
        return drawn

    engine.decode_step = three_steps  # type: ignore[method-assign]
    request = sampling_pb2.StreamSampleRequest(request=sample_request(sampler, 1, seed=3, max_tokens=10))
    events = pool.service.stream_sample(principal, request)
    tokens = [(await anext(events)).token.token for _ in range(3)]
    await pool.kill_worker()
    *rest, last = [event async for event in events]
    tokens += [event.token.token for event in rest]
    assert len(pool.engines["w0"]) == 2
    assert [tokens] == tokens_of(last.operation)


async def test_samples_of_a_lost_worker_run_again_and_give_the_same_tokens(pool: ToyPool) -> None:
    sampler = await trained_sampler(pool)
    expected = await pool.wait(*[await pool.sample(sampler, seq, seed=seq) for seq in range(1, 5)])
    pool.hold()
    names = [await pool.sample(sampler, 10 + seq, seed=seq) for seq in range(1, 5)]
    pool.engines["w0"][-1].may_run.set()
    await pool.kill_worker()
    again = await pool.wait(*names)
    assert [tokens_of(each) for each in again] == [tokens_of(each) for each in expected]


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_cancelled_sample_ends_whether_it_is_queued_or_decoded(tmp_path: Path, is_running: bool) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=1) as pool:
        sampler, principal = await pool.sampler(await pool.session()), await pool.principal()
        pool.hold()
        names = [await pool.sample(sampler, 1), await pool.sample(sampler, 2)]
        victim, other = names if is_running else reversed(names)
        requests = [ops_pb.GetOperationRequest(name=name) for name in names]
        states = [(await pool.service.get_operation(principal, each)).operation.state for each in requests]
        assert states == [RUNNING, QUEUED]
        for _ in range(2):
            await pool.cancel(victim)
        [cancelled] = await asyncio.wait_for(pool.wait(victim), 60)
        await pool.release()
        [finished] = await pool.wait(other)
        unchanged = await pool.cancel(other)
    assert (cancelled.state, cancelled.error.code) == (FAILED, 1)
    assert finished == unchanged
    assert finished.state == SUCCEEDED


async def test_a_cancelled_sample_ends_with_the_loss_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever behind a tenant that is being deleted, whose samples do not start."""

    async def no_cancellation(_: LocalPool, worker_id: str, op_id: str) -> None:
        """The worker does not get to it."""

    monkeypatch.setattr(LocalPool, "cancel_sample", no_cancellation)
    async with running_pool(tmp_path, time=FakeTime()) as pool:  # a worker restarts only when the time advances
        name = await pool.sample(await pool.sampler(await pool.session()), 1, max_tokens=60)
        pool.hold()
        await until(lambda: pool.samples_on() == [name])
        await pool.cancel(name)
        pool.lose_worker()
        [cancelled] = await asyncio.wait_for(pool.wait(name), 60)
        assert (cancelled.state, cancelled.error.code) == (FAILED, 1)
        await pool.release()


async def test_a_sampler_names_its_checkpoint_and_base_model(pool: ToyPool) -> None:
    path = (await pool.save(await pool.adapter(), 1, "first")).save_state.path
    sampler_id = await pool.sampler(await pool.session(), model_path=path)
    request = sampling_pb2.GetSamplerRequest(sampler_id=sampler_id)
    sampler = (await pool.service.get_sampler(await pool.principal(), request)).sampler
    assert (sampler.model_path, sampler.base_model) == (path, "toy")


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_sample_of_a_deleted_checkpoint_fails_with_the_reason_and_blocks_no_other(
    tmp_path: Path, is_loaded: bool
) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=2) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "first")).save_state.path
        session = adapter.partition(":")[0]
        sampler, base = await pool.sampler(session, model_path=path), await pool.sampler(session)
        if is_loaded:
            [before] = await pool.wait(await pool.sample(sampler, 9))
            assert before.state == SUCCEEDED
        await pool.delete_checkpoint(path)
        names = [await pool.sample(sampler, 1, num_samples=5), await pool.sample(base, 1, num_samples=2)]
        gone, fine = await asyncio.wait_for(pool.wait(*names), 60)
    assert (gone.state, gone.error.code) == (FAILED, 5)
    assert "was deleted" in gone.error.message
    assert fine.state == SUCCEEDED


async def test_a_sample_whose_weights_cannot_be_read_frees_its_slots_for_queued_samples(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=2) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "first")).save_state.path
        session = adapter.partition(":")[0]
        sampler, base = await pool.sampler(session, model_path=path), await pool.sampler(session)
        may_read = threading.Event()

        def read(*_: object) -> None:
            may_read.wait(60)
            raise ServiceError(Code.DATA_LOSS, "CHECKSUM_MISMATCH", "damaged")

        pool.folders.checkpoints.read = read  # type: ignore[method-assign,assignment]
        names = [await pool.sample(sampler, 1, num_samples=5), await pool.sample(base, 1, num_samples=2)]
        may_read.set()
        damaged, fine = await asyncio.wait_for(pool.wait(*names), 60)
    assert damaged.error.code == 15
    assert fine.state == SUCCEEDED


async def test_a_sample_whose_worker_is_lost_before_its_start_is_started_once_on_the_replacement(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    path = (await pool.save(adapter, 1, "first")).save_state.path
    sampler = await pool.sampler(adapter.partition(":")[0], model_path=path)
    with (
        held(pool.folders.checkpoints, "read") as reads,
        mock.patch.object(pool.core.pool, "start_sample", wraps=pool.core.pool.start_sample) as start_sample,
    ):
        name = await pool.sample(sampler, 1)
        await pool.kill_worker()
        await until(lambda: len(pool.engines["w0"]) == 2)
        reads.may_go.set()
        [operation] = await asyncio.wait_for(pool.wait(name), 60)
    assert operation.state == SUCCEEDED
    assert start_sample.call_count == 1


async def test_a_worker_holds_a_bounded_number_of_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERSIONS_MAX > 3
    monkeypatch.setattr("coordinator.fleet.fleet.VERSIONS_MAX", 3)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        samplers = [(await pool.publish(adapter, seq)).save_weights_for_sampler.sampler_id for seq in range(1, 9)]
        await pool.publish(adapter, 9, "taken")
        clash = await pool.publish(adapter, 10, "taken")
        await pool.wait(await pool.forward_backward(adapter, 11, 3))
        engine = pool.engines["w0"][-1]
        assert clash.error.reason == "CHECKPOINT_EXISTS"
        assert set(engine.versions) == pool.versions_on()
        assert len(engine.versions) == 3
        names = [await pool.sample(sampler, 1, seed=1) for sampler in samplers]
        assert all(each.state == SUCCEEDED for each in await pool.wait(*names))
        await pool.wait(await pool.forward_backward(adapter, 12, 3))
        assert set(engine.versions) == pool.versions_on()


async def test_a_worker_that_only_samples_drops_versions_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.fleet.fleet.VERSIONS_MAX", 3)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        samplers = [(await pool.publish(adapter, seq)).save_weights_for_sampler.sampler_id for seq in range(1, 9)]
        await pool.written()
        engine = pool.engines["w0"][-1]
        num_batches = len(engine.batches)
        for number, sampler in enumerate(samplers * 2):
            [operation] = await pool.wait(await pool.sample(sampler, 1 + number // len(samplers)))
            assert operation.state == SUCCEEDED
            assert len(engine.versions) <= 3
        assert len(engine.batches) == num_batches


async def test_a_sample_whose_call_is_cancelled_while_it_is_logged_completes(pool: ToyPool) -> None:
    sampler = await pool.sampler(await pool.session())
    call = asyncio.create_task(pool.sample(sampler, 1, seed=1))
    for _ in range(3):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    [operation] = await asyncio.wait_for(pool.wait(await pool.sample(sampler, 1, seed=1)), 60)
    assert operation.state == SUCCEEDED


async def test_a_stream_whose_call_is_cancelled_while_its_sample_is_logged_counts_no_unread_tokens(
    pool: ToyPool,
) -> None:
    sampler, may_commit = await pool.sampler(await pool.session()), threading.Event()
    pool.store.database.write(lambda db: may_commit.wait(HELD_S_MAX))
    try:
        call = asyncio.create_task(stream(pool, sample_request(sampler, 1, max_tokens=20)))
        await until(lambda: pool.core.in_flight.get(f"{sampler}:1"))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    finally:
        may_commit.set()
    [finished] = await asyncio.wait_for(pool.wait(f"{sampler}:1"), 60)
    assert finished.state == SUCCEEDED
    assert not pool.core.samples.streams._unread  # private: a count that is never given back is visible nowhere else


async def test_a_sample_that_is_cancelled_while_it_is_logged_ends_once_it_is_durable(pool: ToyPool) -> None:
    sampler, may_commit = await pool.sampler(await pool.session()), threading.Event()
    pool.store.database.write(lambda db: may_commit.wait(HELD_S_MAX))
    try:
        call = asyncio.create_task(pool.sample(sampler, 1))
        await until(lambda: pool.core.in_flight.get(f"{sampler}:1"))
        assert (await pool.cancel(f"{sampler}:1")).state == QUEUED
        assert not call.done()
    finally:
        may_commit.set()
    [cancelled] = await asyncio.wait_for(pool.wait(await call), 60)
    assert (cancelled.state, cancelled.error.reason) == (FAILED, "CANCELLED")
    assert pool.core.samples.num_samples == 0


async def test_many_unfetched_samples_are_read_from_the_store_in_parts(
    monkeypatch: pytest.MonkeyPatch, pool: ToyPool
) -> None:
    monkeypatch.setattr(in_flight, "REPORTED_MAX", 2)  # the real bound is too large for a test
    monkeypatch.setattr(sampling, "REPORTED_MAX", 2)
    sampler, sizes = await pool.sampler(await pool.session()), list[int]()
    unfetched = pool.store.operations.unfetched

    def read(*arguments: Any) -> list[UnfetchedOperation]:
        rows = unfetched(*arguments)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(pool.store.operations, "unfetched", read)
    for seq in range(1, 6):
        await pool.sample(sampler, seq)
    await until(lambda: not pool.core.samples.num_samples)
    principal, cursor, names = await pool.principal(), 0, list[str]()
    while len(names) < 5:
        found, cursor = await pool.service.finished_samples(principal, sampler, 0, cursor, 0.0)
        names += [each.name for each in found]
    assert names == [f"{sampler}:{seq}" for seq in range(1, 6)]
    assert sizes == [2, 2, 1]


async def test_a_sample_whose_session_ends_while_it_is_logged_ends_too(pool: ToyPool) -> None:
    session, may_commit = await pool.session(), threading.Event()
    sampler = await pool.sampler(session)
    pool.store.database.write(lambda db: may_commit.wait(HELD_S_MAX))
    try:
        call = asyncio.create_task(pool.sample(sampler, 1))
        await until(lambda: pool.core.in_flight.get(f"{sampler}:1"))
        end = asyncio.create_task(pool.finish_session(session))
        await asyncio.sleep(0.01)
    finally:
        may_commit.set()
    await end
    [ended] = await asyncio.wait_for(pool.wait(await call), 60)
    assert (ended.state, ended.error.reason) == (FAILED, "CANCELLED")


async def test_a_sample_whose_append_failed_does_not_run_and_can_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, pool: ToyPool
) -> None:
    sampler = await pool.sampler(await pool.session())
    with monkeypatch.context() as patch:
        fail_appends(patch, pool.store, 1)
        with pytest.raises(ServiceError, match="nothing was accepted"):
            await pool.sample(sampler, 1)
    assert pool.core.samples.num_samples == 0
    [operation] = await pool.wait(await pool.sample(sampler, 1))
    assert operation.state == SUCCEEDED


def note_starts(pool: ToyPool) -> list[SampleRequest]:
    """Return a list that collects the requests that the worker receives from now on."""
    engine, started = pool.engines["w0"][-1], list[SampleRequest]()
    start_sample = engine.start_sample

    def start(request: SampleRequest) -> None:
        started.append(request)
        start_sample(request)

    engine.start_sample = start  # type: ignore[method-assign]
    return started


async def test_prompts_of_different_tenants_have_different_cache_scopes(pool: ToyPool) -> None:
    started = note_starts(pool)
    for tenant in ("alice", "alice", "bob"):
        sampler = await pool.sampler(await pool.session(tenant), tenant=tenant)
        await pool.wait(await pool.sample(sampler, 1, tenant=tenant), tenant=tenant)
    first, second, other = (request.scope for request in started)
    assert first == second != other


async def test_a_new_tenants_sample_starts_before_the_queued_ones_of_a_tenant_with_a_hundred(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=4) as pool:  # too few to leave some free
        busy = await pool.sampler(await pool.session("busy"), tenant="busy")
        small = await pool.sampler(await pool.session("small"), tenant="small")
        started = note_starts(pool)
        pool.hold()
        names = [await pool.sample(busy, seq, tenant="busy", max_tokens=60) for seq in range(1, 101)]
        name = await pool.sample(small, 1, tenant="small")
        await pool.release()
        await pool.wait(*names, tenant="busy")
        await pool.wait(name, tenant="small")
    position = [request.op_id for request in started].index(name)
    assert position == 4, "only the four running samples started before it"


async def test_one_tenant_leaves_slots_for_which_others_need_not_wait(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=16) as pool:
        samplers = {name: await pool.sampler(await pool.session(name), tenant=name) for name in ("busy", "bob", "eve")}
        pool.hold()
        many = [await pool.sample(samplers["busy"], seq, tenant="busy") for seq in range(1, 21)]
        assert pool.samples_on() == many[:14], "an eighth of the slots is free"
        few = {name: await pool.sample(samplers[name], 1, tenant=name) for name in ("bob", "eve")}
        assert pool.samples_on() == [*many[:14], *few.values()]
        await pool.release()
        await pool.wait(*many, tenant="busy")
        for tenant, name in few.items():
            await pool.wait(name, tenant=tenant)


async def test_a_request_of_many_samples_leaves_slots_for_other_tenants_on_its_worker(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=8) as pool:
        busy = await pool.sampler(await pool.session("busy"), tenant="busy")
        small = await pool.sampler(await pool.session("small"), tenant="small")
        pool.hold()
        many = await pool.sample(busy, 1, tenant="busy", num_samples=1024, max_tokens=2)
        few = [await pool.sample(small, seq, tenant="small", num_samples=2) for seq in range(1, 5)]
        assert pool.samples_on() == [many, *few[:3]], (
            "the large request counts as a quarter of the 8 slots, three small ones fill the rest"
        )
        await pool.release()
        [large] = await pool.wait(many, tenant="busy")
        others = await pool.wait(*few, tenant="small")
    assert len(large.sample.sequences) == 1024
    assert {each.state for each in (large, *others)} == {SUCCEEDED}


async def test_tenants_with_small_and_with_large_requests_get_equal_shares_of_tokens(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=1) as pool:
        busy = await pool.sampler(await pool.session("busy"), tenant="busy")
        small = await pool.sampler(await pool.session("small"), tenant="small")
        started = note_starts(pool)
        pool.hold()
        large = [await pool.sample(busy, seq, tenant="busy", max_tokens=57) for seq in range(1, 6)]
        names = [await pool.sample(small, seq, tenant="small", max_tokens=3) for seq in range(1, 41)]
        await pool.release()
        await pool.wait(*large, tenant="busy")
        await pool.wait(*names, tenant="small")
    first, *runs = "".join("L" if request.op_id in large else "s" for request in started).split("L")
    assert first == ""  # the first request starts at once
    assert [len(run) for run in runs[:2]] == [15, 15]  # 4 tokens each: 2 of the 3 prompt tokens are cached


async def test_a_batch_carries_the_share_of_time_for_sampling_by_the_weights_of_the_tenants(tmp_path: Path) -> None:
    tenants = ("alice", "bob", "carol")
    async with running_pool(tmp_path) as pool:
        for tenant in tenants:
            await pool.principal(tenant)
        for tenant, weight in (("bob", "3"), ("carol", "40")):
            tenant_id = (await pool.principal(tenant)).tenant_id
            act = Act(at=0.0, act="tenant.limit", subject=tenant)
            await pool.core.quotas.change(tenant_id, {"weight": weight}, act)
    async with running_pool(tmp_path) as pool:
        await pool.take_over(*tenants)
        adapter, engine = await pool.adapter(), pool.engines["w0"][-1]
        engine.may_decode = False

        async def share(seq: int, *sampling: str) -> float:
            """Return the share of a batch in which alice trains while these tenants sample as well."""
            for tenant in sampling:
                sampler = await pool.sampler(await pool.session(tenant), tenant=tenant)
                await pool.sample(sampler, 1, tenant=tenant)
            name = await pool.forward_backward(adapter, seq, 3)
            await pool.wait(name)
            [batch] = [batch for batch in engine.batches if any(item.op_id == name for item in batch.items)]
            return batch.decode_share

        assert await share(1) == 0.5  # no tenant samples yet
        assert await share(2, "alice") == 0.5  # alice counts on both sides
        assert await share(3, "bob") == pytest.approx(4 / 5)
        assert await share(4, "bob") == pytest.approx(4 / 5)  # a tenant's weight counts once, not for each request
        assert await share(5, "carol") == 0.9  # training keeps at least a tenth
        await pool.release()


async def test_a_tenant_whose_pass_waits_for_the_next_cycle_counts_as_one_that_trains(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=16) as pool:
        adapters, engine = {name: await pool.adapter(name) for name in ("alice", "bob")}, pool.engines["w0"][-1]
        sampler = await pool.sampler(await pool.session("carol"), tenant="carol")
        pool.hold()
        first = await pool.forward_backward(adapters["alice"], 1, 16)
        await until(lambda: pool.core.fleet.worker("w0").training)
        second = await pool.forward_backward(adapters["alice"], 2, 16)
        other = await pool.forward_backward(adapters["bob"], 1, 16, tenant="bob")
        await pool.sample(sampler, 1, tenant="carol")
        await until(pool.samples_on)
        engine.may_run.set()
        await pool.wait(first, second)
        await pool.wait(other, tenant="bob")
        shares = [batch.decode_share for batch in engine.batches if batch.items]
        await pool.release()
    assert shares == [0.5, pytest.approx(1 / 3), 0.5], "two tenants are ready when the second batch is planned"


async def test_a_sampler_index_that_a_running_unnamed_save_has_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle's commit inserts the sampler of the save; another sampler with this name would fail the commit."""
    monkeypatch.setattr(
        "coordinator.checkpoints.published_weights.HELD_BYTES_MAX", 0
    )  # so that the commit waits for the file
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        session = adapter.partition(":")[0]
        with held(pool.folders.samplers, "write") as writes:
            name = await pool.submit_publish(adapter, 1)
            await writes.until_begun()
            refused = await refusal(pool.sampler(session, index=0))
        [saved] = await pool.wait(name)
        assert pool.coordinator.health()
    assert refused.code is Code.ALREADY_EXISTS
    assert saved.save_weights_for_sampler.sampler_id == f"{session}:sample:0"


async def test_the_end_of_a_session_deletes_its_samplers_and_their_files(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0) as pool:
        sampler = await trained_sampler(pool)
        await pool.written()
        pool.hold()
        name = await pool.sample(sampler, 1)
        assert len(list((tmp_path / "samplers").iterdir())) == 1
        waiting = asyncio.create_task(pool.wait(name))
        await time.until(waiting.done)
        [cancelled] = await waiting
        assert cancelled.error.code == 1
        assert (await refusal(pool.sample(sampler, 2))).reason == "SESSION_ENDED"
        await time.until(lambda: not list((tmp_path / "samplers").iterdir()))
        await pool.release()


async def test_cancelling_a_sample_that_waits_for_its_commit_after_its_worker_is_lost_keeps_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its session keeps the result too."""
    monkeypatch.setattr("coordinator.storage.cycles.RETRY_S", 0.001)
    async with running_pool(tmp_path, time=FakeTime()) as pool:  # a worker restarts only when the time advances
        session, core = await pool.session(), pool.core
        sampler, is_decided = await pool.sampler(session), asyncio.Event()

        async def full(_: CycleCommit) -> frozenset[str]:
            is_decided.set()
            raise DiskFullError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(core.store.cycles, "commit", full)
            name = await pool.sample(sampler, 1)
            await asyncio.wait_for(is_decided.wait(), 60)
            pool.lose_worker()
            await pool.cancel(name)
            await pool.finish_session(session)
        [operation] = await asyncio.wait_for(pool.wait(name), 60)
    assert operation.state == SUCCEEDED


async def test_a_stop_ends_streams_and_the_sample_completes_after_the_next_start(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        request = sample_request(sampler, 1, seed=4)
        streaming = asyncio.create_task(stream(pool, request))
        name = await pool.sample(sampler, 1, seed=4)
        pool.engines["w0"][-1].may_run.set()
        await pool.coordinator.stop()
        assert (await refusal(asyncio.wait_for(streaming, 60))).code is Code.UNAVAILABLE
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        [operation] = await pool.wait(name)
    assert operation.state == SUCCEEDED
