"""What one tenant queues has a budget: of a cycle's time, for saves and loads, and of the coordinator's memory."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coordinator.checkpoints import snapshots
from coordinator.checkpoints.states import SNAPSHOT_WRITERS, States
from coordinator.cycle import items, phases
from coordinator.cycle.commit import Cycle
from coordinator.operations import in_flight
from coordinator.payloads import passes
from coordinator.runtime.core import FILE_TURNS
from coordinator.scheduling.planner import PassPlan, Planning
from coordinator.scheduling.worker_memory import WorkerMemory
from coordinator.service import training
from coordinator.storage.folders import StateFiles
from coordinator.storage.sent_files import Blocks, Piece, Sent
from tests.support.faults import held
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import FakeTime, expected_chain, running_pool
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import AdapterCosts, AdapterState, Batch, BatchResult

NUM_SAVES = 200
RATE = 1000.0
"""Tokens that a second counts as."""
T = TypeVar("T")


def slow_down(monkeypatch: pytest.MonkeyPatch, clock: FakeTime, *names: str, owner: type = StateFiles) -> None:
    """Let each access to a state file take a second: each call of these methods."""

    def slow(name: str) -> None:
        method = getattr(owner, name)

        def run(*args: Any) -> Any:
            clock.now += 1.0
            return method(*args)

        monkeypatch.setattr(owner, name, run)

    for name in names:
        slow(name)


@pytest.mark.slow
async def test_hundreds_of_saves_of_one_tenant_do_not_delay_a_neighbours_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save takes longer than the budget of a cycle, which therefore has one."""
    clock = FakeTime()
    slow_down(monkeypatch, clock, "write")
    async with running_pool(tmp_path, time=clock, linger_s=0.0, replay_s_max=1e6) as pool:
        hostile, neighbour = await pool.adapter(), await pool.adapter("bob")
        pool.hold()
        saves = [await pool.submit_save(hostile, seq, f"s{seq}") for seq in range(1, NUM_SAVES + 1)]
        steps = [await pool.forward_backward(neighbour, 1, 5, tenant="bob")]
        steps.append(await pool.optim_step(neighbour, 2, tenant="bob"))
        await pool.release()
        stepped = await pool.wait(*steps, tenant="bob")
        done = await pool.wait(*saves)
        assert {each.state for each in done} == {ops_pb.OPERATION_STATE_SUCCEEDED}
    assert [each.cycle_id for each in stepped] == [2, 2], "the cycle after the one that was running"
    assert [each.cycle_id for each in done] == list(range(1, NUM_SAVES + 1))


async def test_saves_loads_installs_exports_and_copies_are_charged_the_seconds_that_they_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each access to a state file takes a second; a pass of five tokens has another cost."""
    clock = FakeTime()
    async with running_pool(tmp_path, time=clock, linger_s=0.0, replay_s_max=1e6) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        planning, tenant = pool.core.loops["toy"].planning, (await pool.principal()).tenant_id

        monkeypatch.setattr(planning, "_tokens_per_s", lambda: RATE)  # private: the real one is measured

        def counter() -> float:
            return planning.counters(frozenset({tenant})).get(tenant, 0.0)

        async def done(submitting: Awaitable[str]) -> ops_pb.Operation:
            return (await pool.wait(await submitting))[0]

        async def seconds(call: Awaitable[T]) -> tuple[T, float]:
            before = counter()
            result = await call
            return result, (counter() - before) / RATE

        slow_down(monkeypatch, clock, "read", "write")
        saved, saving_s = await seconds(pool.save(adapter, 2, "s"))
        path = saved.save_state.path
        loaded, loading_s = await seconds(done(pool.load_state(adapter, 3, path)))
        copy, copying_s = await seconds(pool.adapter(base_model="", rank=0, from_path=path, with_optimizer=True))
        passed, installing_s = await seconds(done(pool.forward_backward(copy, 1, 5)))
        slow_down(monkeypatch, clock, "read", owner=Blocks)
        _, exporting_s = await seconds(pool.export(path))
    assert {each.state for each in (saved, loaded, passed)} == {ops_pb.OPERATION_STATE_SUCCEEDED}
    assert saving_s == pytest.approx(1.0, abs=0.1)
    assert loading_s == pytest.approx(2.0, abs=0.1), "it is read, and written as the snapshot behind it"
    assert copying_s == pytest.approx(2.0, abs=0.1)
    assert installing_s == pytest.approx(1.0, abs=0.1)
    assert exporting_s == 3.0, "the facts of the state and two files are read once"


async def test_a_chunk_is_charged_with_its_item_and_what_no_worker_ran_is_taken_back(tmp_path: Path) -> None:
    costs = AdapterCosts(item_tokens=100.0)
    async with running_pool(tmp_path, time=FakeTime(), linger_s=0.0, engine_values=[{"costs": costs}]) as pool:
        adapter, tenant = await pool.adapter(), (await pool.principal()).tenant_id

        async def charged(submitting: Awaitable[str]) -> float:
            before = pool.core.loops["toy"].planning.counters(frozenset({tenant})).get(tenant, 0.0)
            await pool.wait(await submitting)
            stored = pool.store.tenants.get(tenant)
            assert stored is not None
            assert stored.virtual_tokens == pool.core.loops["toy"].planning.counters(frozenset({tenant}))[tenant]
            return stored.virtual_tokens - before

        assert await charged(pool.forward_backward(adapter, 1, 5)) == 105.0
        assert await charged(pool.forward_backward(adapter, 2, 12, 12)) == 224.0, "two chunks"
        assert await charged(pool.forward_backward(adapter, 3, 5, token=POISON_TOKEN)) == 0.0


async def test_the_rest_of_a_cycle_is_charged_to_its_adapters_in_equal_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes six seconds here; one tenant has two adapters in the cycle, another one has one."""
    clock = FakeTime()
    async with running_pool(tmp_path, time=clock, linger_s=0.0) as pool:
        adapters = [await pool.adapter("alice"), await pool.adapter("alice"), await pool.adapter("bob")]
        planning, plan = pool.core.loops["toy"].planning, Planning.plan
        monkeypatch.setattr(planning, "_tokens_per_s", lambda: RATE)  # private: the real one is measured

        def slow_plan(self: Planning, now: float) -> PassPlan:
            clock.now += 6.0
            return plan(self, now)

        pool.hold()
        before = await pool.forward_backward(await pool.adapter("carol"), 1, 5, tenant="carol")
        monkeypatch.setattr(Planning, "plan", slow_plan)
        owners = ("alice", "alice", "bob")
        names = [await pool.forward_backward(each, 1, 5, tenant=t) for each, t in zip(adapters, owners, strict=True)]
        await pool.release()
        await pool.wait(before, tenant="carol")
        cycles = {(await pool.wait(name, tenant=t))[0].cycle_id for name, t in zip(names, owners, strict=True)}
        tenants = [(await pool.principal(name)).tenant_id for name in ("alice", "bob")]
        counters = planning.counters(frozenset(tenants))
    assert len(cycles) == 1
    lift = 5.0  # to the counter of the tenant before them
    assert [counters[tenant] - lift for tenant in tenants] == [10 + 4 * RATE, 5 + 2 * RATE]


async def test_the_time_that_sending_results_takes_from_snapshots_is_charged_to_the_cycles_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice's adapter is snapshotted behind a cycle of Bob's: first at once, then with 3 s beside the worker."""
    clock = FakeTime()
    async with running_pool(tmp_path, time=clock, linger_s=0.0) as pool:
        loop, logs = pool.core.loops["toy"], pool.core.registry.logs
        alices, bobs = await pool.adapter("alice"), await pool.adapter("bob")
        for adapter_id, tenant in ((alices, "alice"), (bobs, "bob")):
            await pool.wait(await pool.forward_backward(adapter_id, 1, 5, tenant=tenant), tenant=tenant)
        await loop.until_idle()
        monkeypatch.setattr(loop.planning, "_tokens_per_s", lambda: RATE)  # private: the real one is measured
        run, tenants = pool.core.pool.run, [pool.tenant_id("alice"), pool.tenant_id("bob")]

        async def delayed(worker_id: str, batch: Batch) -> BatchResult:
            clock.now += 3.0
            return await run(worker_id, batch)

        cycle = Cycle(0, 0.0, 0.0, entries={bobs: pool_pb2.CycleEntry(adapter_id=bobs, tenant=tenants[1])})
        take = loop._phases.take_snapshots  # private: which cycle is before it varies else
        await take(cycle, [logs[alices]])
        await loop._snapshots.finish()
        monkeypatch.setattr(pool.core.pool, "run", delayed)
        before = loop.planning.counters(frozenset(tenants))
        await take(cycle, [logs[alices]])
        after = loop.planning.counters(frozenset(tenants))
    assert [after[each] - before[each] for each in tenants] == pytest.approx([0.0, 3.0 * RATE], abs=0.01 * RATE)


async def test_saves_and_loads_of_one_adapter_keep_their_order_over_many_cycles(tmp_path: Path) -> None:
    async with running_pool(tmp_path, linger_s=0.0) as pool:
        adapter = await pool.adapter()
        first, at_start = await pool.save(adapter, 1, "start"), pool.chain(adapter)
        names = []
        for seq in range(2, 22, 4):
            names.append(await pool.forward_backward(adapter, seq, 5))
            names.append(await pool.optim_step(adapter, seq + 1))
            names.append(await pool.submit_save(adapter, seq + 2, f"s{seq}"))
            names.append(await pool.load_state(adapter, seq + 3, first.save_state.path))
        done = await pool.wait(*names)
        assert {each.state for each in done} == {ops_pb.OPERATION_STATE_SUCCEEDED}
        assert pool.chain(adapter) == at_start


async def test_the_copies_that_one_phase_sends_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pool(tmp_path) as pool:
        adapters = [await pool.adapter() for _ in range(6)]
        await pool.wait(*[await pool.forward_backward(adapter, 1, 5) for adapter in adapters])
        await pool.wait(*[await pool.optim_step(adapter, 2) for adapter in adapters])
    monkeypatch.setattr("coordinator.cycle.phases.INSTALL_BYTES_MAX", 1)  # the toys' states have a few bytes
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        pool.hold()
        steps = [await pool.forward_backward(adapter, 3, 5) for adapter in adapters[:3]]
        saves = [await pool.submit_save(adapter, 3, "s") for adapter in adapters[3:]]
        await pool.release()
        await pool.wait(*steps, *saves)
        num_installs = [len(batch.installs) for batch in pool.engines["w0"][-1].batches]
    assert (sum(num_installs), max(num_installs)) == (len(adapters), 1)


async def test_the_checkpoint_of_a_load_is_read_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    read = StateFiles.read

    def recorded(self: StateFiles, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return read(self, *args)

    monkeypatch.setattr(StateFiles, "read", recorded)  # the real read: only its thread is recorded
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        saved = await pool.save(adapter, 1, "start")
        await pool.wait(await pool.load_state(adapter, 2, saved.save_state.path))
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("limit", ["AT_ONCE", "AT_ONCE_BYTES"])
async def test_the_snapshots_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    numbers, num_writing, most = [], 0, 8
    write = States.write_snapshot
    monkeypatch.setattr(WorkerMemory, "size_of", lambda *_: 100)
    monkeypatch.setattr(AdapterState, "num_bytes", 100)
    monkeypatch.setattr(snapshots, limit, most if limit == "AT_ONCE" else 100 * most)

    async def counted(self: States, *args: Any) -> Any:
        nonlocal num_writing
        num_writing += 1
        numbers.append(num_writing)
        try:
            return await write(self, *args)
        finally:
            num_writing -= 1

    monkeypatch.setattr(States, "write_snapshot", counted)  # the real write: only counted
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapters = [await pool.adapter() for _ in range(3 * most)]
        pool.hold()
        steps = [await pool.forward_backward(adapter, 1, 5) for adapter in adapters]
        await pool.release()
        await pool.wait(*steps)
    assert most / 2 < max(numbers) <= most
    assert len(numbers) >= len(adapters)


async def test_snapshots_that_take_long_to_write_leave_threads_to_others(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(SNAPSHOT_WRITERS + 1))
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapters, other = [await pool.adapter() for _ in range(2 * SNAPSHOT_WRITERS)], await pool.adapter("bob")
        with held(pool.folders.snapshots, "write"):
            await pool.wait(*[await pool.forward_backward(adapter, 1, 5) for adapter in adapters])
            await pool.wait(await pool.forward_backward(other, 1, 5, tenant="bob"), tenant="bob")
            saved = await pool.save(other, 2, "s", "bob")
            assert saved.state == ops_pb.OPERATION_STATE_SUCCEEDED
            assert not any(map(pool.store.snapshots.get, adapters)), "no write has ended"
        await pool.written()
        assert all(map(pool.store.snapshots.get, adapters))


async def test_a_few_threads_serve_all_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, lock, num_reading = [], threading.Lock(), 0
    made = Sent.pieces

    def counted(self: Sent, *args: Any) -> Iterator[Piece]:
        nonlocal num_reading
        pieces = made(self, *args)
        while True:
            with lock:
                num_reading += 1
                numbers.append(num_reading)
            time.sleep(0.005)  # so that reads of several exports overlap if they may
            piece = next(pieces, None)
            with lock:
                num_reading -= 1
            if piece is None:
                return
            yield piece

    monkeypatch.setattr(Sent, "pieces", counted)  # the real pieces: only counted
    async with running_pool(tmp_path) as pool:
        saved = await pool.save(await pool.adapter(), 1, "s")
        exports = await asyncio.gather(*[pool.export(saved.save_state.path) for _ in range(20)])
    assert all(export == exports[0] for export in exports)
    assert max(numbers) == FILE_TURNS


async def test_requests_that_do_not_fit_into_memory_are_read_from_the_log_and_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 1)
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        pool.hold()
        queued = [await pool.submit(adapter, seq) for seq in range(1, 7)]
        assert [len(each.payload) for each in pool.core.in_flight.all() if each.kind.is_pass] == [0, 0, 0, 0]
        await pool.release()
        await pool.wait(*queued)
        chain = pool.chain(adapter)
    assert chain == expected_chain(spec, [((1, 2), 3), ((4, 5), 6)])
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.submit(adapter, 7))
        assert pool.log_of(adapter).next_seq == 8


async def test_a_large_request_is_decoded_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 1)  # so that it is decoded again when it runs
    threads: dict[str, list[threading.Thread]] = {}
    for module in (passes, items):
        monkeypatch.setattr(module, "INLINE_BYTES_MAX", 500)
    for module, name in ((training, "canonical_pass"), (items, "decode_pass")):
        # the real function: only its thread is recorded
        monkeypatch.setattr(module, name, in_recorded_thread(getattr(module, name), threads.setdefault(name, [])))
    async with running_pool(tmp_path, cycle_tokens_max=512) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 3))
        done = await pool.wait(await pool.forward_backward(adapter, 2, *[16] * 20))
    assert done[0].num_tokens == 320
    for small, large in threads.values():
        assert small is threading.main_thread()
        assert large is not threading.main_thread()


async def test_large_requests_beyond_the_limit_of_a_pass_are_decoded_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES_MAX", 1)  # so that they are decoded when they run
    monkeypatch.setattr(items, "INLINE_BYTES_MAX", 500)
    monkeypatch.setattr(phases, "DECODED_BYTES_MAX", 1)
    async with running_pool(tmp_path, cycle_tokens_max=4096) as pool:
        adapters = [await pool.adapter() for _ in range(3)]
        names = await asyncio.gather(*(pool.forward_backward(adapter, 1, *[16] * 20) for adapter in adapters))
        done = await pool.wait(*names)
    assert len({each.cycle_id for each in done}) == len(adapters)


def in_recorded_thread(function: Callable[..., Any], threads: list[threading.Thread]) -> Callable[..., Any]:
    """Return the function, which adds its thread to the list at each call."""

    def run(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args)

    return run
