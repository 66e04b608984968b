"""A real coordinator over toy engines, without transport and model: cycles, order, idempotency, failures, recovery."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest

from coordinator.service import pool as pool_service
from coordinator.storage.rows import TenantRow
from tests.support.toy_engine import digest, item_digest
from tests.support.toy_pool import FakeTime, ToyPool, datum, expected_chain, fail_appends, refusal, running_pool
from tinkerpool.v1 import adapters_pb2, pool_pb2, training_pb2, types_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import OptimStepItem, PassItem

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


async def test_a_train_step_is_two_operations_in_one_cycle(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    request = training_pb2.TrainStepRequest(
        adapter_id=adapter, seq=1, data=[datum(5)], loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
    )
    response = await pool.service.train_step(await pool.principal(), request)
    operations = await pool.wait(response.forward_backward.name, response.optim_step.name)
    assert [o.seq for o in operations] == [1, 2]
    assert operations[0].cycle_id == operations[1].cycle_id


async def test_a_batch_names_the_adapters_whose_passes_wait_for_the_next_cycle(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=8) as pool:
        tenants = [f"t{number}" for number in range(3)]
        adapters = {tenant: await pool.adapter(tenant) for tenant in tenants}
        for tenant in tenants:  # installs each adapter
            await pool.wait(await pool.forward_backward(adapters[tenant], 1, 6, tenant=tenant), tenant=tenant)
        pool.hold()
        names = {tenant: await pool.forward_backward(adapters[tenant], 2, 6, tenant=tenant) for tenant in tenants}
        await pool.release()
        for tenant in tenants:
            await pool.wait(names[tenant], tenant=tenant)
        batches = pool.engines["w0"][0].batches[-3:]
    first, second, third = (tuple(item.adapter_id for item in batch.items) for batch in batches)
    assert {*first, *second, *third} == set(adapters.values())
    assert [batch.expected for batch in batches] == [(), third, ()]


async def test_operations_run_in_order_of_seq_in_whatever_order_they_arrive(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    late = [await pool.optim_step(adapter, 4), await pool.forward_backward(adapter, 3, 5, 6)]
    late.append(await pool.optim_step(adapter, 2))
    await asyncio.sleep(0.02)
    assert not pool.engines["w0"][-1].batches
    first = await pool.forward_backward(adapter, 1, 5)
    operations = await pool.wait(first, *late)
    assert all(o.state == SUCCEEDED for o in operations)
    items = [item for batch in pool.engines["w0"][-1].batches for item in batch.items]
    assert [item.seq for item in items] == [1, 2, 3, 4]


async def test_a_repeated_operation_is_the_same_operation_and_applied_once(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    names = await asyncio.gather(*(pool.forward_backward(adapter, 1, 5) for _ in range(5)))
    [first] = await pool.wait(names[0])
    await pool.wait(await pool.optim_step(adapter, 2))
    assert set(names) == {first.name}
    assert await pool.forward_backward(adapter, 1, 5) == first.name
    [again] = await pool.wait(first.name)
    items = [item for batch in pool.engines["w0"][-1].batches for item in batch.items]
    assert again == first
    assert [item.seq for item in items] == [1, 2]


async def test_a_large_request_runs_over_several_cycles_and_its_step_in_that_of_the_last_chunk(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=16) as pool:
        adapter, small = await pool.adapter(), await pool.adapter("bob")
        large = await asyncio.gather(pool.forward_backward(adapter, 1, *[8] * 10), pool.optim_step(adapter, 2))
        little = await pool.forward_backward(small, 1, 4, tenant="bob")
        [small_one] = await pool.wait(little, tenant="bob")
        forward_backward, step = await pool.wait(*large)
        chunks = [
            i for b in pool.engines["w0"][-1].batches for i in b.items if isinstance(i, PassItem) and i.num_chunks > 1
        ]
    assert [c.chunk_index for c in chunks] == [0, 1, 2, 3, 4]
    assert len(forward_backward.forward_backward.logprobs) == 10
    assert small_one.cycle_id < forward_backward.cycle_id == step.cycle_id


async def test_restarts_complete_acknowledged_operations_and_rebuild_the_same_state(tmp_path: Path) -> None:
    """Stops come in the middle of gradient windows; the final chain is that of an undisturbed engine."""
    names: list[str] = []
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
    for seqs in (range(1, 3), range(3, 5), range(5, 6), range(6, 10), range(10, 12)):
        async with running_pool(tmp_path) as pool:
            await pool.take_over()
            names += [await pool.submit(adapter, seq) for seq in seqs]
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        operations = await pool.wait(*names, await pool.submit(adapter, 12))
        chain = pool.chain(adapter)
    assert [o.state for o in operations] == [SUCCEEDED] * 12
    assert chain == expected_chain(spec, [((step - 2, step - 1), step) for step in (3, 6, 9, 12)])


async def test_a_lost_worker_is_replaced_and_its_adapters_end_in_the_same_state(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
    names.append(await pool.forward_backward(adapter, 3, 5))
    await pool.wait(*names)
    engine = pool.engines["w0"][-1]
    before = (engine.adapters[adapter].chain, engine.adapters[adapter].gradient)
    await pool.kill_worker("w0")
    [step] = await pool.wait(await pool.optim_step(adapter, 4))
    replaced = pool.engines["w0"][-1]
    replayed = [item.seq for b in replaced.batches for item in b.items]
    assert step.state == SUCCEEDED
    assert replaced is not engine
    assert replayed == [1, 2, 3, 4]
    [*_, step_item] = [i for b in replaced.batches for i in b.items if isinstance(i, OptimStepItem)]
    assert replaced.adapters[adapter].chain == digest(before[0], before[1], item_digest(step_item))


async def test_a_lost_worker_does_not_affect_adapters_on_other_workers(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        victim, neighbour = await pool.adapter(), await pool.adapter("bob")
        names = await asyncio.gather(
            pool.forward_backward(victim, 1, 5), pool.forward_backward(neighbour, 1, 5, tenant="bob")
        )
        await pool.wait(names[0])
        await pool.wait(names[1], tenant="bob")
        homes = {a: pool.log_of(a).home for a in (victim, neighbour)}
        assert homes[victim] != homes[neighbour]
        pool.lose_worker(homes[victim])
        done = await pool.wait(await pool.optim_step(neighbour, 2, tenant="bob"), tenant="bob")
    assert done[0].state == SUCCEEDED
    assert len(pool.engines[homes[neighbour]]) == 1


async def next_seq(pool: ToyPool, adapter_id: str) -> int:
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
    return int((await pool.service.get_adapter(await pool.principal(), request)).adapter.next_seq)


async def test_an_adapter_goes_on_behind_missing_seqs_that_are_lost_after_the_gap_timeout(tmp_path: Path) -> None:
    async with running_pool(tmp_path, gap_timeout_s=0.05, sweep_interval_s=0.02) as pool:
        adapter = await pool.adapter()
        behind = await pool.wait(await pool.optim_step(adapter, 2), await pool.optim_step(adapter, 5))
        assert [(each.state, each.error.reason) for each in behind] == [(FAILED, "SEQ_LOST")] * 2
        assert await next_seq(pool, adapter) == 6
        together = await pool.wait(await pool.forward_backward(adapter, 6, 5), await pool.optim_step(adapter, 7))
        assert [each.state for each in together] == [SUCCEEDED] * 2
        for late in (
            pool.forward_backward(adapter, 1, 5),
            pool.optim_step(adapter, 3),
            pool.forward_backward(adapter, 4),
        ):
            refused = await refusal(late)
            assert (refused.reason, refused.metadata) == ("SEQ_TAKEN", {"expected_seq": "8"})
            assert "did not arrive in time" in refused.message
            assert "get_training_client" in refused.message
        lost = await pool.wait(*(f"{adapter}:{seq}" for seq in (1, 3, 4)))
        assert [(each.state, each.error.reason) for each in lost] == [(FAILED, "SEQ_LOST")] * 3
        assert len(pool.core.in_flight) == 0
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await next_seq(pool, adapter) == 8
        [step] = await pool.wait(await pool.optim_step(adapter, 8))
        assert step.state == SUCCEEDED
        assert (await refusal(pool.forward_backward(adapter, 1, 5))).reason == "SEQ_TAKEN"
        assert pool.log_of(adapter).committed_seq == 8


async def test_a_crash_before_lost_seqs_are_recorded_leaves_an_adapter_that_goes_on(tmp_path: Path) -> None:
    """The crash comes when the failures behind the gap are stored, and before the next sweep."""
    time = FakeTime()
    async with running_pool(tmp_path, time=time, gap_timeout_s=60.0, is_crash=True) as pool:
        adapter = await pool.adapter()
        name = await pool.optim_step(adapter, 2)
        await time.until(lambda: pool.core.in_flight.get(name) is None)
        assert list(pool.log_of(adapter).operations) == [2]
    async with running_pool(tmp_path, sweep_interval_s=0.02) as pool:
        await pool.take_over()
        lost, step = await pool.wait(name, await pool.optim_step(adapter, await next_seq(pool, adapter)))
        assert (lost.error.reason, step.state) == ("SEQ_LOST", SUCCEEDED)


async def test_a_lost_seq_closes_a_window_with_gradient_up_to_the_step_behind_it(tmp_path: Path) -> None:
    """The lost request may have been the other half of the gradient."""
    async with running_pool(tmp_path, gap_timeout_s=0.05, sweep_interval_s=0.02) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        first, save = await pool.submit(adapter, 1), await pool.submit_save(adapter, 3, "behind")
        assert [each.error.reason for each in await pool.wait(first, save)] == ["", "SEQ_LOST"]
        outcomes = await pool.wait(*[await pool.submit(adapter, seq) for seq in range(4, 10)])
        chain = pool.chain(adapter)
    assert [each.error.reason for each in outcomes] == [*["GRADIENT_WINDOW_CLOSED"] * 3, "", "", ""]
    assert chain == expected_chain(spec, [((7, 8), 9)])


async def test_a_lost_seq_that_cannot_be_recorded_is_recorded_by_a_later_sweep(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, gap_timeout_s=60.0) as pool:
        adapter = await pool.adapter()
        name = await pool.optim_step(adapter, 2)
        await time.until(lambda: pool.core.in_flight.get(name) is None)
        with pytest.MonkeyPatch.context() as patch:
            fail_appends(patch, pool.store, 1)
            await time.until(lambda: pool.log_of(adapter).has_lost_append)
        assert pool.log_of(adapter).committed_seq == 0
        await time.until(lambda: pool.log_of(adapter).committed_seq == 2)


async def test_the_last_cycles_are_shown_in_slices_up_to_a_size_with_each_tenant_looked_up_once(
    pool: ToyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boss, tenant = await pool.administrator(), await pool.principal()
    entries = [pool_pb2.CycleEntry(tenant=tenant.tenant_id, adapter_id=f"a{number}") for number in range(50)]
    pool.core.journal.recent.extend(pool_pb2.Cycle(cycle_id=number, entries=entries) for number in range(1, 201))
    looked_up, find = list[str](), pool.core.store.tenants.get

    def get(tenant_id: str) -> TenantRow | None:
        looked_up.append(tenant_id)
        return find(tenant_id)

    monkeypatch.setattr(pool.core.store.tenants, "get", get)
    reading = asyncio.create_task(pool.service.get_pool_status(boss, pool_pb2.GetPoolStatusRequest(num_cycles=200)))
    num_slices = 0
    while not reading.done():
        num_slices += 1
        await asyncio.sleep(0)
    cycles = (await reading).cycles
    assert num_slices >= 200 * 50 // pool_service.CYCLES_SLICE_ENTRIES
    assert [cycle.cycle_id for cycle in cycles] == list(range(1, 201))
    assert {entry.tenant for cycle in cycles for entry in cycle.entries} == {"alice"}
    assert looked_up == [tenant.tenant_id]
    monkeypatch.setattr(pool_service, "PAGE_BYTES_MAX", 20 * cycles[-1].ByteSize())
    monkeypatch.setattr(pool_service, "CYCLES_SLICE_ENTRIES", 1)
    newest = await pool.service.get_pool_status(boss, pool_pb2.GetPoolStatusRequest(num_cycles=200))
    assert [cycle.cycle_id for cycle in newest.cycles] == list(range(181, 201))


async def test_a_cycle_is_made_once_for_all_streams_of_a_tenant_and_of_administrators(
    pool: ToyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boss, alice, bob = await pool.administrator(), await pool.principal(), await pool.principal("bob")
    make = Mock(wraps=pool_service._shown)
    monkeypatch.setattr(pool_service, "_shown", make)
    watchers = [boss, boss, alice, alice, alice, bob]
    streams = [pool.service.watch_cycles(each, pool_pb2.WatchCyclesRequest()) for each in watchers]
    for cycle_id in (1, 2):
        reading = asyncio.gather(*(anext(each) for each in streams))
        await asyncio.sleep(0.01)
        entries = [pool_pb2.CycleEntry(tenant=pool.tenant_id(), adapter_id="a")]
        pool.core.journal.publish(pool_pb2.Cycle(cycle_id=cycle_id, entries=entries))
        cycles = [response.cycle for response in await reading]
        assert [cycle.cycle_id for cycle in cycles] == [cycle_id] * 6
        assert [cycle.entries[0].tenant for cycle in cycles] == ["alice"] * 5 + [""]
        assert make.call_count == 3 * cycle_id
    for stream in streams:
        await stream.aclose()
    assert not pool.coordinator.service._sights
