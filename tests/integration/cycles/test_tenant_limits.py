"""Limits of tenants through the use cases of a running pool: they hold at once, and say what frees or raises them."""

import asyncio
import itertools
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, Quota, ServiceError
from tests.support.toy_engine import toy_model_info
from tests.support.toy_pool import LENGTHS, FakeTime, ToyPool, refusal, running_pool
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    sampling_pb2,
    sessions_pb2,
)
from workers.contract.adapted_modules import AdaptedModule

RESERVED = 4 * 3 * 8 * 6
"""Bytes that a save of the toy's rank 8 reserves: weights and two moments."""
PATHS = ("weights/a", "sampler_weights/b", "weights/c")


def linears_of_experts(name: str) -> Iterator[AdaptedModule]:
    """Yield the linears of a layer's 128 experts, hidden size 2048, inner size 768."""
    for leaf in ("w1", "w3"):
        yield AdaptedModule(name=f"{name}.{leaf}", kind="mlp", d_in=2048, d_out=768, num_Bs=128)
    yield AdaptedModule(name=f"{name}.w2", kind="mlp", d_in=768, d_out=2048, num_As=128)


async def set_limits(pool: ToyPool, tenant: str, **limits: object) -> None:
    await pool.principal(tenant)
    texts = {name: str(value) for name, value in limits.items()}
    request = limits_pb2.SetTenantLimitsRequest(tenant=tenant, limits=texts)
    await pool.service.set_tenant_limits(await pool.administrator(), request)


async def used(pool: ToyPool, tenant: str = "alice") -> dict[str, int]:
    """Return what a tenant sees in use of its limits."""
    response = await pool.service.get_tenant_limits(await pool.principal(tenant), limits_pb2.GetTenantLimitsRequest())
    assert response.tenant == tenant
    return {each.name: each.usage for each in response.limits if each.HasField("usage")}


def stored(pool: ToyPool) -> int:
    """Return the bytes of the checkpoints that alice has or is saving."""
    tenant_id = pool.tenant_id("alice")
    return pool.checkpoint_bytes(tenant_id) + pool.core.in_flight.claimed(tenant_id).num_bytes


async def test_a_limit_holds_at_once_and_after_a_restart_and_names_the_command_that_raises_it(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.adapter()
        await set_limits(pool, "alice", adapters_max=1)
        error = await refusal(pool.adapter())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ADAPTER_QUOTA")
        assert "tinkerpool tenant limit alice adapters_max=NUMBER" in error.message
        await pool.adapter("bob")
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        assert (await refusal(pool.adapter())).reason == "ADAPTER_QUOTA"
        await set_limits(pool, "alice", adapters_max="")
        await pool.adapter()


async def test_an_adapter_larger_than_any_workers_memory_is_refused_at_its_creation_with_the_rank_that_fits(
    tmp_path: Path,
) -> None:
    """A copy of the toy's rank 8 takes 768 bytes, and one of rank 16 twice as many."""
    async with running_pool(tmp_path, engine_values=[{"host_bytes_max": 500}, {"host_bytes_max": 1000}]) as pool:
        await pool.adapter(rank=8)
        error = await refusal(pool.adapter(rank=16, train_unembed=False))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE")
        assert (
            "take a rank of at most 8 or train_mlp=False, or ask for workers with more --host-memory" in error.message
        )
        error = await refusal(pool.adapter(rank=16, train_mlp=False))
        assert "take a rank of at most 8, or ask" in error.message
        await pool.adapter(rank=16, train_mlp=False, train_attn=False)


async def test_an_adapter_of_experts_that_is_too_large_is_refused_at_its_creation_with_the_rank_that_fits(
    tmp_path: Path,
) -> None:
    """With the experts of Qwen3-30B-A3B, whose adapter of rank 32 takes 7.4 GB, each expert's factors among them."""
    names = (f"model.layers.{layer}.mlp.experts" for layer in range(48))
    modules = [*toy_model_info().modules, *itertools.chain.from_iterable(map(linears_of_experts, names))]
    values = {"host_bytes_max": 4_000_000_000, "modules": modules}
    async with running_pool(tmp_path, engine_values=[values]) as pool:
        error = await refusal(pool.adapter(rank=32))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE")
        assert "an adapter of rank 32 of these modules of toy takes 7,399 MB in a worker" in error.message
        assert "take a rank of at most 16 or train_mlp=False, or ask" in error.message
        await pool.adapter(rank=16)
        await pool.adapter(rank=32, train_mlp=False)


async def test_an_adapter_that_fits_no_bank_of_a_gpu_is_refused_at_its_creation(tmp_path: Path) -> None:
    """The limit of a worker is the smaller one of its host memory and its bank."""
    limits = [{"host_bytes_max": 10_000, "bank_bytes_max": 1000}, {"host_bytes_max": 500, "bank_bytes_max": 10_000}]
    async with running_pool(tmp_path, engine_values=limits) as pool:
        await pool.adapter(rank=8)
        error = await refusal(pool.adapter(rank=16))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE")
        assert "take a rank of at most 8" in error.message
        assert "ask for workers with more --host-memory and larger GPUs" in error.message


async def test_operations_that_were_accepted_run_after_a_restart_with_lower_limits(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.submit(adapter, seq) for seq in range(1, 7)]
        assert (await used(pool))["queued_operations_max"] == 6
        await set_limits(pool, "alice", queued_operations_max=1, queued_bytes_max=1, adapters_max=0)
        assert (await refusal(pool.submit(adapter, 8))).reason == "QUEUE_FULL"
        await pool.release()
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        done = await pool.wait(*names)
        assert not any(operation.HasField("error") for operation in done)
        await pool.wait(await pool.submit(adapter, 7))


async def test_a_member_sees_its_own_limits_and_use_and_no_other_tenants(pool: ToyPool) -> None:
    await pool.adapter("alice")
    await pool.adapter("alice")
    assert await used(pool) == {
        "sessions_max": 2,
        "adapters_max": 2,
        "queued_operations_max": 0,
        "queued_bytes_max": 0,
        "streams_max": 0,
        "samples_max": 0,
        "samplers_max": 0,
        "checkpoints_max": 0,
        "stored_bytes_max": pool.core.holdings.num_bytes(pool.tenant_id("alice")),
        "tokens_per_month": 0,
    }
    bob, others = await pool.principal("bob"), limits_pb2.GetTenantLimitsRequest(tenant="alice")
    unknown = limits_pb2.GetTenantLimitsRequest(tenant="nobody")
    errors = [await refusal(pool.service.get_tenant_limits(bob, request)) for request in (others, unknown)]
    assert {(error.code, error.reason) for error in errors} == {(Code.NOT_FOUND, "NOT_FOUND")}
    assert (await pool.service.get_tenant_limits(await pool.administrator(), others)).tenant == "alice"


async def refused_outcome(pool: ToyPool, call: Awaitable[Any], reason: str) -> None:
    """Check that a call is refused for good, and that the refusal is the outcome at its sequence number."""
    error = await refusal(call)
    assert (error.code, error.reason, error.retry_delay_s) == (Code.FAILED_PRECONDITION, reason, None)
    assert "tinkerpool tenant limit alice" in error.message
    [outcome] = await pool.wait(error.operation)
    assert (outcome.error.reason, outcome.error.code) == (reason, Code.FAILED_PRECONDITION)


async def test_saves_that_are_queued_together_never_exceed_the_ceiling_of_checkpoints(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await set_limits(pool, "alice", checkpoints_max=2)
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.submit_save(adapter, 1, "a"), await pool.submit_publish(adapter, 2, "b")]
        await refused_outcome_at(pool.submit_save(adapter, 3, "c"), "CHECKPOINT_QUOTA")
        await pool.release()
        first, second = await pool.wait(*names)
        await pool.written()
        await refused_outcome(pool, pool.submit_save(adapter, 4, "d"), "CHECKPOINT_QUOTA")
        await pool.wait(await pool.submit_save(adapter, 5, "a", overwrite=True))
        assert (await used(pool))["checkpoints_max"] == 2, "what is overwritten does not count twice"
        await pool.delete_checkpoint(second.save_weights_for_sampler.path)
        [again] = await pool.wait(await pool.submit_save(adapter, 6, "d"))
        assert again.save_state.path
        await set_limits(pool, "alice", checkpoints_max=0)
        await pool.delete_checkpoint(first.save_state.path)
        assert (await used(pool))["checkpoints_max"] == 1
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await used(pool))["checkpoints_max"] == 1
        await pool.delete_checkpoint(again.save_state.path)
        assert (await used(pool))["checkpoints_max"] == 0


async def test_a_save_whose_overwritten_checkpoint_is_deleted_while_it_waits_takes_its_place_itself(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        saved = [(await pool.save(adapter, seq, name)).save_state for seq, name in ((1, "a"), (2, "b"))]
        await set_limits(pool, "alice", checkpoints_max=2)
        pool.hold()
        names = [await pool.submit_save(adapter, seq, name, overwrite=True) for seq, name in ((3, "a"), (4, "b"))]
        assert (await used(pool))["checkpoints_max"] == 2, "what will be overwritten does not count twice"
        for each in saved:
            await pool.delete_checkpoint(each.path)
        assert ((await used(pool))["checkpoints_max"], stored(pool)) == (2, 2 * RESERVED)
        await refused_outcome_at(pool.submit_save(adapter, 5, "c"), "CHECKPOINT_QUOTA")
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        pool.hold()
        assert (await used(pool))["checkpoints_max"] == 2, "the claims are the same after a crash"
        await pool.release()
        assert not any(operation.HasField("error") for operation in await pool.wait(*names))
        assert (await used(pool))["checkpoints_max"] == len(pool.store.checkpoints.of_tenant(pool.tenant_id())) == 2


async def shared(pool: ToyPool) -> str:
    """Return the path of a public checkpoint of bob."""
    source: str = (await pool.save(await pool.adapter("bob"), 1, "shared", tenant="bob")).save_state.path
    await pool.set_access(source, is_public=True, tenant="bob")
    return source


async def copy_of(pool: ToyPool, source: str, request_id: str = "copy") -> checkpoints_pb2.Checkpoint:
    request = checkpoints_pb2.CopyCheckpointRequest(path=source, request_id=request_id)
    response: checkpoints_pb2.CopyCheckpointResponse = await pool.service.copy_checkpoint(
        await pool.principal(), request
    )
    return response.checkpoint


async def test_copies_at_the_same_time_never_exceed_a_ceiling_and_a_repeat_of_one_is_not_refused(pool: ToyPool) -> None:
    source = await shared(pool)
    await set_limits(pool, "alice", checkpoints_max=1)
    calls = (copy_of(pool, source, request_id) for request_id in ("a", "a", "b", "b"))
    first, again, *refused = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, checkpoints_pb2.Checkpoint)
    assert again == first
    assert [each.reason for each in refused if isinstance(each, ServiceError)] == ["CHECKPOINT_QUOTA"] * 2
    now = await used(pool)
    assert (now["sessions_max"], now["adapters_max"], now["checkpoints_max"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"checkpoints_max": 0}, "CHECKPOINT_QUOTA"),
        ({"adapters_max": 0}, "ADAPTER_QUOTA"),
        ({"stored_bytes_max": RESERVED + RESERVED // 2}, "STORAGE_QUOTA"),
        ({"ranks": "16"}, "RANK_NOT_PERMITTED"),
    ],
)
async def test_a_copy_that_is_refused_leaves_no_session(limits: dict[str, object], reason: str, pool: ToyPool) -> None:
    source = await shared(pool)
    await set_limits(pool, "alice", **limits)
    assert (await refusal(copy_of(pool, source))).reason == reason
    assert (await used(pool))["sessions_max"] == 0


async def test_a_copy_above_a_ceiling_leaves_no_adapter_and_can_be_repeated(pool: ToyPool) -> None:
    source = await shared(pool)
    own = (await pool.save(await pool.adapter(), 1, "own")).save_state.path
    adapters = list(pool.core.registry.logs)

    async def copy() -> checkpoints_pb2.Checkpoint:
        return await copy_of(pool, source)

    await set_limits(pool, "alice", checkpoints_max=1)
    assert (await refusal(copy())).reason == "CHECKPOINT_QUOTA"
    assert list(pool.core.registry.logs) == adapters
    enough_for_the_adapter = (await used(pool))["stored_bytes_max"] + RESERVED + RESERVED // 2
    await set_limits(pool, "alice", checkpoints_max=2, stored_bytes_max=enough_for_the_adapter)
    assert (await refusal(copy())).reason == "STORAGE_QUOTA"
    assert list(pool.core.registry.logs) == adapters
    await set_limits(pool, "alice", checkpoints_max=1, stored_bytes_max="")
    await pool.delete_checkpoint(own)
    copied = await copy()
    assert copied.path.endswith("/shared")
    assert await copy() == copied, "a repeat needs no room"


async def refused_outcome_at(call: Awaitable[Any], reason: str) -> None:
    """Check that a call is refused for good while the pool is held; its outcome waits for those before it."""
    error = await refusal(call)
    assert (error.code, error.reason, bool(error.operation)) == (Code.FAILED_PRECONDITION, reason, True)


async def test_stored_bytes_are_those_of_the_rows_and_a_save_reserves_what_it_will_add(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    pool.hold()
    name = await pool.submit_save(adapter, 1, "a")
    assert stored(pool) == RESERVED
    others = (await used(pool))["stored_bytes_max"] - RESERVED
    await set_limits(pool, "alice", stored_bytes_max=others + 2 * RESERVED - 1)
    await refused_outcome_at(pool.submit_save(adapter, 2, "b"), "STORAGE_QUOTA")
    await pool.release()
    await pool.wait(name)
    await set_limits(pool, "alice", stored_bytes_max="")
    await pool.wait(await pool.submit_publish(adapter, 3, "b"), await pool.submit_save(adapter, 4, "c"))
    await pool.wait(await pool.submit_save(adapter, 5, "c", overwrite=True))
    await pool.written()
    rows = [pool.store.checkpoints.by_path(f"tinker://{adapter}/{each}") for each in PATHS]
    sizes = [row.size_bytes for row in rows if row is not None]
    assert len(sizes) == len(PATHS)
    assert stored(pool) == sum(sizes)
    for path in PATHS:
        await pool.delete_checkpoint(f"tinker://{adapter}/{path}")
    assert stored(pool) == 0


async def trained(pool: ToyPool, adapter: str, seq: int) -> list[operations_pb2.Operation]:
    return await pool.wait(await pool.forward_backward(adapter, seq, *LENGTHS))


async def test_everything_that_a_tenant_stores_counts_and_above_its_limit_only_growth_is_refused(pool: ToyPool) -> None:
    principal = await pool.principal("alice")
    notes = {"notes": "x" * 1000}

    async def grown_by(call: Awaitable[Any]) -> tuple[Any, int]:
        before = (await used(pool))["stored_bytes_max"]
        return await call, (await used(pool))["stored_bytes_max"] - before

    session, added = await grown_by(
        pool.service.create_session(principal, sessions_pb2.CreateSessionRequest(user_metadata=notes))
    )
    assert 1000 < added < 1500
    adapter, added = await grown_by(pool.adapter("alice"))
    state_bytes = pool.core.holdings.state_bytes(pool.spec_of(adapter), "toy")
    assert state_bytes < added < state_bytes + 1500
    [done], added = await grown_by(trained(pool, adapter, 1))
    assert added > done.ByteSize() > 0
    saved, added = await grown_by(pool.publish(adapter, 2))
    weights_bytes = pool.core.holdings.weights_bytes(pool.spec_of(adapter), "toy")
    assert added > weights_bytes > 0

    await set_limits(pool, "alice", stored_bytes_max=(await used(pool))["stored_bytes_max"])
    refused = [
        pool.service.create_session(principal, sessions_pb2.CreateSessionRequest(user_metadata=notes)),
        pool.adapter("alice"),
        pool.forward_backward(adapter, 3, *LENGTHS),
    ]
    assert [(await refusal(call)).reason for call in refused] == ["STORAGE_QUOTA"] * 3
    assert [each.name for each in await pool.wait(saved.name)] == [saved.name]
    request = sessions_pb2.FinishSessionRequest(session_id=session.session.session_id)
    await pool.service.finish_session(principal, request)
    await set_limits(pool, "alice", stored_bytes_max="")
    await pool.adapter("alice")


async def test_saves_that_overwrite_each_other_in_one_cycle_and_deletions_meanwhile_count_once(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    path = f"tinker://{adapter}/weights/c"
    await pool.delete_checkpoint((await pool.save(adapter, 1, "warm")).save_state.path)  # its cost is known now
    for first_seq in (2, 5):
        pool.hold()
        await pool.optim_step(adapter, first_seq)
        names = [await pool.submit_save(adapter, first_seq + i, "c", overwrite=True) for i in (1, 2)]
        if first_seq > 2:
            await pool.delete_checkpoint(path)
        await pool.release()
        first, second = await pool.wait(*names)
        assert first.cycle_id == second.cycle_id
        row = pool.store.checkpoints.by_path(path)
        assert row is not None
        now = await used(pool)
        assert (now["checkpoints_max"], stored(pool)) == (1, row.size_bytes)


async def test_samplers_count_from_the_save_on_until_their_session_ends(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await set_limits(pool, "alice", samplers_max=3)
        adapter = await pool.adapter()
        await pool.sampler(adapter.partition(":")[0])
        other = await pool.session()
        pool.hold()
        name = await pool.submit_publish(adapter, 1)
        await pool.sampler(other)
        error = await refusal(pool.sampler(other))
        assert (error.reason, error.retry_delay_s) == ("SAMPLER_QUOTA", None)
        await refused_outcome_at(pool.submit_publish(adapter, 2), "SAMPLER_QUOTA")
        await pool.release()
        await pool.wait(name)
        await pool.written()
        assert (await used(pool))["samplers_max"] == 3
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await used(pool))["samplers_max"] == 3
        await pool.finish_session(other)
        await pool.sampler(await pool.session())
        await pool.finish_session(adapter)
        assert (await used(pool))["samplers_max"] == 1


async def test_samplers_that_are_created_at_the_same_time_never_exceed_the_ceiling(pool: ToyPool) -> None:
    await set_limits(pool, "alice", samplers_max=3)
    sessions = [await pool.session() for _ in range(6)]
    made = await asyncio.gather(*(pool.sampler(session) for session in sessions), return_exceptions=True)
    refused = [each for each in made if isinstance(each, ServiceError)]
    assert (len(refused), {each.reason for each in refused}) == (3, {"SAMPLER_QUOTA"})
    again = sampling_pb2.CreateSamplerRequest(session_id=sessions[0], base_model="toy", index=5)
    assert (await refusal(pool.service.create_sampler(await pool.principal(), again))).reason == "SAMPLER_QUOTA"


async def test_samples_above_those_in_flight_are_refused_with_a_delay(pool: ToyPool) -> None:
    await set_limits(pool, "alice", samples_max=4)
    sampler = await pool.sampler(await pool.session())
    pool.hold()
    names = [await pool.sample(sampler, 1, num_samples=3)]
    error = await refusal(pool.sample(sampler, 2, num_samples=2))
    assert (error.code, error.reason, error.retry_delay_s) == (Code.RESOURCE_EXHAUSTED, "SAMPLES_FULL", 1.0)
    assert error.quota == Quota("unfinished samples of yours", 3, 4)
    names.append(await pool.sample(sampler, 2, num_samples=1))
    bobs = await pool.sampler(await pool.session("bob"), tenant="bob")
    await pool.sample(bobs, 1, tenant="bob", num_samples=5)
    await pool.release()
    await pool.wait(*names)
    assert (await used(pool))["samples_max"] == 0
    [large] = await pool.wait(await pool.sample(sampler, 3, num_samples=5))
    assert len(large.sample.sequences) == 5, "a larger request than the ceiling is accepted alone"


async def test_streams_above_the_ceiling_are_refused_with_a_delay_and_a_closed_one_makes_room(pool: ToyPool) -> None:
    await set_limits(pool, "alice", streams_max=2)
    alice, bob = await pool.principal(), await pool.principal("bob")
    adapter = await pool.adapter()
    pool.hold()
    name = await pool.submit(adapter, 1)
    request = operations_pb2.WaitOperationsRequest(names=[name])
    watch = pool.service.watch_cycles(alice, pool_pb2.WatchCyclesRequest())
    waiting = asyncio.create_task(anext(pool.service.wait_operations(alice, request)))
    watching = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    assert (await used(pool))["streams_max"] == 2
    error = await refusal(anext(pool.service.wait_operations(alice, request)))
    assert (error.code, error.reason, error.retry_delay_s) == (Code.RESOURCE_EXHAUSTED, "STREAMS_FULL", 1.0)
    others = asyncio.create_task(anext(pool.service.watch_cycles(bob, pool_pb2.WatchCyclesRequest())))
    room = pool.core.responses.room(alice.tenant_id)
    poll = asyncio.create_task(pool.service.finished_operations(alice, [name], room, is_poll=True))
    await asyncio.sleep(0)
    assert not poll.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await watch.aclose()
    again = asyncio.create_task(anext(pool.service.wait_operations(alice, request)))
    await pool.release()
    for task in (waiting, again, poll, others):
        await task
    assert (await used(pool))["streams_max"] <= 2


async def test_claims_of_unfinished_saves_are_counted_again_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.submit_save(adapter, 1, "a"), await pool.submit_publish(adapter, 2)]
        assert stored(pool) == RESERVED + pool.core.holdings.weights_bytes(pool.spec_of(adapter), "toy")
        before = await used(pool)
    async with running_pool(tmp_path) as pool:
        assert pool.core.ceilings.checkpoints.used(only_tenant(pool)) == before["checkpoints_max"] == 1
        assert pool.core.ceilings.samplers.used(only_tenant(pool)) == before["samplers_max"] == 1
        await pool.take_over()
        await pool.wait(*names)
        after = await used(pool)
        assert (after["checkpoints_max"], after["samplers_max"]) == (1, 1)


def only_tenant(pool: ToyPool) -> str:
    [row] = pool.store.tenants.all()
    return row.tenant_id


async def test_a_budget_is_never_exceeded_and_is_the_same_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        await set_limits(pool, "alice", tokens_per_month=30)
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 10))
        pool.hold()
        name = await pool.forward_backward(adapter, 2, 8)
        sampler = await pool.sampler(adapter.partition(":")[0])
        sample = await pool.sample(sampler, 1, num_samples=1, max_tokens=5)
        assert (await used(pool))["tokens_per_month"] == 10 + 8 + 3 + 5
        await refused_outcome_at(pool.forward_backward(adapter, 3, 5), "TOKEN_BUDGET")
        error = await refusal(pool.sample(sampler, 2, num_samples=1, max_tokens=2))
        assert (error.code, error.reason, error.retry_delay_s) == (Code.FAILED_PRECONDITION, "TOKEN_BUDGET", None)
        last = await pool.sample(sampler, 2, num_samples=1, max_tokens=1)
        await pool.release()
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(name, sample, last)
        assert (await used(pool))["tokens_per_month"] == 30
        await pool.wait(await pool.optim_step(adapter, 4))
        await refused_outcome(pool, pool.forward_backward(adapter, 5, 1), "TOKEN_BUDGET")
        await set_limits(pool, "alice", tokens_per_month="unlimited")
        [done] = await pool.wait(await pool.sample(sampler, 3, num_samples=1, max_tokens=1))
        assert done.num_tokens == 4


async def test_a_rate_of_tokens_delays_passes_and_samples_and_no_step_or_save(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    sampler = await pool.sampler(adapter.partition(":")[0])
    await set_limits(pool, "alice", tokens_per_s=0.2)
    names = [await pool.forward_backward(adapter, 1, 20)]
    for call in (pool.forward_backward(adapter, 2, 1), pool.sample(sampler, 1)):
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert error.retry_delay_s is not None
        assert error.retry_delay_s > 80
    names += [await pool.optim_step(adapter, 2), await pool.submit_save(adapter, 3, "a")]
    assert not any(operation.HasField("error") for operation in await pool.wait(*names))


async def test_creations_draw_from_the_rate_of_operations_and_repeats_heartbeats_and_deletions_do_not(
    tmp_path: Path,
) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time) as pool:
        alice, service = await pool.principal(), pool.service
        await set_limits(pool, "alice", operations_per_s=0.3)  # three at once
        first = sessions_pb2.CreateSessionRequest(request_id="first")
        session_id = (await service.create_session(alice, first)).session.session_id
        adapter = adapters_pb2.CreateAdapterRequest(session_id=session_id, base_model="toy", rank=8, request_id="a")
        adapter_id = (await service.create_adapter(alice, adapter)).adapter.adapter_id
        sampler = sampling_pb2.CreateSamplerRequest(session_id=session_id, base_model="toy", index=0)
        await service.create_sampler(alice, sampler)
        later = (
            (service.create_session, sessions_pb2.CreateSessionRequest(request_id="second")),
            (
                service.create_adapter,
                adapters_pb2.CreateAdapterRequest(session_id=session_id, base_model="toy", rank=8),
            ),
            (
                service.create_sampler,
                sampling_pb2.CreateSamplerRequest(session_id=session_id, base_model="toy", index=1),
            ),
        )
        for call, request in later:
            error = await refusal(call(alice, request))
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
            assert error.retry_delay_s == pytest.approx(1 / 0.3, abs=1e-3)  # whole milliseconds
        repeats = (
            (service.create_session, first),
            (service.create_adapter, adapter),
            (service.create_sampler, sampler),
        )
        for call, request in repeats:
            await call(alice, request)
        await service.heartbeat(alice, sessions_pb2.HeartbeatRequest(session_id=session_id))
        now = await used(pool)
        assert (now["sessions_max"], now["adapters_max"], now["samplers_max"]) == (1, 1, 1), "a refusal takes no room"
        await set_limits(pool, "alice", operations_per_s="")
        time.now += 1.0
        second, next_adapter, _ = [await call(alice, request) for call, request in later]
        assert next_adapter.adapter.adapter_id == f"{session_id}:train:1", "a refusal takes no number"
        await set_limits(pool, "alice", operations_per_s=0.001, adapters_max=2)
        error = await refusal(service.create_adapter(alice, later[1][1]))
        assert (error.reason, error.retry_delay_s) == ("ADAPTER_QUOTA", None), "waiting would not clear it"
        await service.delete_adapter(alice, adapters_pb2.DeleteAdapterRequest(adapter_id=adapter_id))
        await pool.finish_session(second.session.session_id)


async def test_only_permitted_base_models_and_ranks_are_used_for_something_new(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    await set_limits(pool, "alice", base_models="another", ranks="4,16")
    for call in (pool.adapter(), pool.sampler(adapter.partition(":")[0])):
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "BASE_MODEL_NOT_PERMITTED")
        assert "tinkerpool tenant limit alice base_models=toy,..." in error.message
    await set_limits(pool, "alice", base_models="another, toy")
    error = await refusal(pool.adapter(rank=8))
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "RANK_NOT_PERMITTED")
    await pool.adapter(rank=16)
    await pool.adapter("bob")
    await pool.wait(await pool.submit(adapter, 1))
