"""Requests that exceed the memory of every worker are refused before they are logged; the error says what would fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from tests.support.toy_pool import ToyPool, running_pool, sample_request
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2
from workers.contract.capacity import what_is_too_large
from workers.contract.messages import SampleRequest, WorkerInfo


def fitting(*num_tokens: int | None) -> list[dict[str, Any]]:
    """Return settings of engines that report these numbers of fitting tokens."""
    return [{"fitting_tokens": each} for each in num_tokens]


def cache_blocks(*num_blocks: int) -> list[dict[str, Any]]:
    """Return settings of engines that report these numbers of cache blocks for keys and values."""
    return [{"num_cache_blocks": each} for each in num_blocks]


async def refusal(pool: ToyPool, adapter: str, seq: int, *lengths: int) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        await pool.forward_backward(adapter, seq, *lengths)
    assert (raised.value.code, raised.value.reason) == (Code.INVALID_ARGUMENT, "NO_MEMORY")
    assert raised.value.retry_delay_s is None
    return raised.value


async def test_a_sequence_that_does_not_fit_is_refused_with_the_length_that_does(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=fitting(None, 20)) as pool:
        adapter = await pool.adapter()
        error = await refusal(pool, adapter, 1, 3, 21)
        assert "data[1] has 21 tokens" in error.message
        assert "at most 20" in error.message
        again = await pool.forward_backward(adapter, 1, 3, 21)
        [recorded, *after] = await pool.wait(
            again, await pool.optim_step(adapter, 2), await pool.forward_backward(adapter, 3, 20)
        )
    assert recorded.error.message == error.message
    assert after[0].error.reason == "GRADIENT_WINDOW_CLOSED"
    assert after[1].state == ops_pb.OPERATION_STATE_SUCCEEDED


async def test_short_sequences_of_one_chunk_are_refused_if_the_chunk_does_not_fit(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=fitting(10)) as pool:
        adapter = await pool.adapter()
        error = await refusal(pool, adapter, 1, 5, 5, 5)  # a chunk has 16 tokens
        assert "data[0] to data[2] run together and have 15 tokens" in error.message
        assert "requests of at most 10 tokens" in error.message
        _, fits = await pool.wait(await pool.optim_step(adapter, 2), await pool.forward_backward(adapter, 3, 5, 5))
    assert fits.state == ops_pb.OPERATION_STATE_SUCCEEDED


async def sample_refusal(pool: ToyPool, request: sampling_pb2.SampleRequest) -> str:
    with pytest.raises(ServiceError) as raised:
        await pool.service.sample(await pool.principal(), request)
    assert (raised.value.code, raised.value.reason) == (Code.INVALID_ARGUMENT, "NO_MEMORY")
    return raised.value.message


async def test_a_sample_that_can_never_fit_is_refused_before_it_is_logged_with_the_length_that_would_fit(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, engine_values=cache_blocks(1)) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        message = await sample_refusal(pool, sample_request(sampler, 1, max_tokens=2))
        assert message == what_is_too_large(3, 2, 1), "the worker's message"
        assert "max_tokens may be at most 1" in message
        assert await sample_refusal(pool, sample_request(sampler, 1, max_tokens=0)) == what_is_too_large(3, 61, 1)
        request = sampling_pb2.StreamSampleRequest(request=sample_request(sampler, 1, max_tokens=2))
        stream = pool.service.stream_sample(await pool.principal(), request)
        with pytest.raises(ServiceError, match="max_tokens may be at most 1"):
            await anext(stream)
        core = pool.core
        assert (core.samples.num_samples, len(core.in_flight)) == (0, 0)
        assert core.store.operations.last_seq(sampler) == 0
        await pool.release()
        [operation] = await pool.wait(await pool.sample(sampler, 1, max_tokens=1))
    assert operation.state == ops_pb.OPERATION_STATE_SUCCEEDED


async def test_a_sample_runs_on_a_worker_with_enough_memory(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=cache_blocks(1, 2, 1)) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        large = [await pool.sample(sampler, seq) for seq in range(1, 7)]
        small = [await pool.sample(sampler, seq, max_tokens=1) for seq in range(7, 9)]
        running = [pool.samples_on(worker_id) for worker_id in pool.engines]
        await pool.release()
        await pool.wait(*large, *small)
    assert running == [small[:1], large, small[1:]]


async def test_a_logged_sample_runs_after_a_restart_that_would_refuse_it_as_a_new_one(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=cache_blocks(2)) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        name = await pool.sample(sampler, 1, seed=5)
    async with running_pool(tmp_path, engine_values=cache_blocks(1)) as pool:
        await pool.take_over()
        [operation] = await pool.wait(name)  # a toy engine refuses nothing; a real worker fails the sample
        assert operation.state == ops_pb.OPERATION_STATE_SUCCEEDED
        assert await pool.sample(sampler, 1, seed=5) == name
        await sample_refusal(pool, sample_request(sampler, 2, seed=5))


@pytest.mark.parametrize("reason", ["late", "drained", "lost"])
async def test_a_sample_waits_for_the_only_worker_with_enough_memory_and_others_do_not_wait_for_it(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, is_back = cache_blocks(1, 2), asyncio.Event()
    async with running_pool(tmp_path, engine_values=values, ping_interval_s=60.0) as pool:
        fleet, replace, start = pool.core.fleet, pool.core.pool.replace, pool.core.pool.start_sample
        sent_to: dict[str, str] = {}

        async def replaced(worker_id: str) -> WorkerInfo:
            await is_back.wait()
            return await replace(worker_id)

        async def started(worker_id: str, request: SampleRequest) -> None:
            sent_to[request.op_id] = worker_id
            await start(worker_id, request)

        monkeypatch.setattr(pool.core.pool, "replace", replaced)
        monkeypatch.setattr(pool.core.pool, "start_sample", started)
        sampler, others = await pool.sampler(await pool.session()), await pool.sampler(await pool.session("bob"), "bob")
        pool.hold()
        large = [await pool.sample(sampler, 1)] if reason == "lost" else []
        if reason == "lost":
            await until(lambda: large[0] not in fleet.worker("w1").unsent)
            pool.lose_worker("w1")  # the sample is quarantined
        elif reason == "late":
            fleet.be_late(fleet.worker("w1"), is_late=True)
        else:
            fleet.drain("w1", is_ending=False)
        large.append(await pool.sample(sampler, 2))
        assert not any(pool.core.samples.is_running(each) for each in large)
        await pool.release()
        small = await pool.sample(others, 1, "bob", max_tokens=1)
        step = await pool.forward_backward(await pool.adapter("bob"), 1, 5, tenant="bob")
        done = await asyncio.wait_for(pool.wait(small, step, tenant="bob"), 60)
        assert {each.state for each in done} == {ops_pb.OPERATION_STATE_SUCCEEDED}
        assert not any(pool.core.samples.is_running(each) for each in large)
        if reason == "lost":
            is_back.set()
        elif reason == "late":
            fleet.be_late(fleet.worker("w1"), is_late=False)
        else:
            fleet.undrain("w1")
        done = await asyncio.wait_for(pool.wait(*large), 60)
        assert {each.state for each in done} == {ops_pb.OPERATION_STATE_SUCCEEDED}
        assert {sent_to[each] for each in large} == {"w1"}


async def test_a_sample_ends_elsewhere_when_the_only_worker_with_enough_memory_is_drained_for_good(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, engine_values=cache_blocks(1, 2), ping_interval_s=60.0) as pool:
        worker = pool.core.fleet.worker("w1")
        sampler = await pool.sampler(await pool.session())
        pool.core.fleet.be_late(worker, is_late=True)
        name = await pool.sample(sampler, 1)
        assert not pool.core.samples.is_running(name)
        await asyncio.wait_for(pool.core.supervisor.remove("w1"), 60)
        await asyncio.wait_for(pool.wait(name), 60)  # a toy engine refuses nothing; a real worker fails the sample
        assert not worker.is_live
