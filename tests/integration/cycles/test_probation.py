"""A tenant whose operations kill workers again and again: from its first kill on, only itself pays for them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.base.errors import Code
from coordinator.scheduling import probation
from coordinator.tenants.principals import Role
from tests.support.toy_engine import KILL_TOKEN, ToyEngine
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2, probation_pb2
from workers.contract.messages import Batch, BatchResult, OptimStepItem, PassItem, SampleEvent

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED
NUM_KILLS = 4


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[PassItem]]:
    """The passes of each batch that any worker was sent, in order; short back-offs."""
    monkeypatch.setattr(probation, "BACKOFF_S", 0.02)
    found: list[list[PassItem]] = []
    run = ToyEngine.run

    def note(self: ToyEngine, batch: Batch) -> BatchResult:
        if items := [item for item in batch.items if isinstance(item, PassItem)]:
            found.append(items)
        return run(self, batch)

    monkeypatch.setattr(ToyEngine, "run", note)
    return found


async def train(pool: ToyPool, adapter: str, tenant: str, is_over: asyncio.Event) -> int:
    """Take steps one after another until the event is set; return the number of operations, which all succeed."""
    seq = 0
    while not is_over.is_set():
        names = [await pool.forward_backward(adapter, seq + 1, *LENGTHS, tenant=tenant)]
        names.append(await pool.optim_step(adapter, seq + 2, tenant=tenant))
        assert [each.state for each in await pool.wait(*names, tenant=tenant)] == [SUCCEEDED] * 2
        seq += 2
    return seq


async def kill(pool: ToyPool, adapter: str, seq: int) -> ops_pb.Operation:
    """Submit a poison of the tenant mallory, and a step behind it; return the poison when both have failed."""
    name = await pool.forward_backward(adapter, seq, 4, tenant="mallory", token=KILL_TOKEN)
    step = await pool.optim_step(adapter, seq + 1, tenant="mallory")
    [done, closed] = await asyncio.wait_for(pool.wait(name, step, tenant="mallory"), 60)
    assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"
    return done


async def num_engines(pool: ToyPool) -> int:
    """Return the number of engines so far, once every worker is live."""
    await until(lambda: not pool.core.fleet.has_lost("toy"))
    return sum(len(engines) for engines in pool.engines.values())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_repeat_poisoner_runs_solo_while_a_neighbour_steps_on_with_equal_bits(
    tmp_path: Path, passes: list[list[PassItem]], num_workers: int
) -> None:
    async with running_pool(tmp_path, num_workers=num_workers) as pool:
        poisoner, neighbour = await pool.adapter("mallory"), await pool.adapter("bob")
        is_over = asyncio.Event()
        training = asyncio.create_task(train(pool, neighbour, "bob", is_over))
        first = await kill(pool, poisoner, 1)
        spec = pool.spec_of(neighbour)
        num_before = await num_engines(pool)
        passes.clear()
        killed = [await kill(pool, poisoner, seq) for seq in range(3, 3 + 2 * NUM_KILLS, 2)]
        is_over.set()
        num_seqs = await asyncio.wait_for(training, 60)
        num_lost = await num_engines(pool) - num_before
        chain = pool.chain(neighbour)
    assert [each.error.reason for each in (first, *killed)] == ["WORKER_DIED"] * (1 + NUM_KILLS)
    assert all("run solo" in each.error.message for each in (first, *killed))
    assert num_lost == 2 * NUM_KILLS, "a poison of a tenant on probation costs its two solo runs"
    tenants = [{item.adapter_id for item in items} for items in passes]
    assert all(each in ({poisoner}, {neighbour}) for each in tenants)
    assert tenants.count({poisoner}) == 2 * NUM_KILLS
    of_neighbour = [(item.seq, item.chunk_index) for items in passes for item in items if item.adapter_id == neighbour]
    if num_workers == 2:
        assert len(of_neighbour) == len(set(of_neighbour)), "no pass of the neighbour is lost or replayed"
    assert chain == expected_chain(spec, [((seq,), seq + 1) for seq in range(1, num_seqs, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("killer", ["step", "install"])
async def test_a_step_or_an_install_that_kills_loses_no_other_tenants_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[list[PassItem]], killer: str
) -> None:
    run = ToyEngine.run
    bad: list[str] = []

    def run_or_crash(self: ToyEngine, batch: Batch) -> BatchResult:
        steps = {item.adapter_id for item in batch.items if isinstance(item, OptimStepItem)}
        installs = {install.spec.adapter_id for install in batch.installs}
        if not (steps if killer == "step" else installs).isdisjoint(bad):
            raise RuntimeError(f"a poison {killer}")
        return run(self, batch)

    monkeypatch.setattr(ToyEngine, "run", run_or_crash)
    async with running_pool(tmp_path, num_workers=2) as pool:
        bad.append(await pool.adapter("mallory"))
        neighbour, is_over = await pool.adapter("bob"), asyncio.Event()
        training = asyncio.create_task(train(pool, neighbour, "bob", is_over))
        reasons = []
        for seq in (1, 3, 5):
            names = [await pool.forward_backward(bad[0], seq, 4, tenant="mallory")]
            names.append(await pool.optim_step(bad[0], seq + 1, tenant="mallory"))
            done = await asyncio.wait_for(pool.wait(*names, tenant="mallory"), 60)
            reasons.append([each.error.reason for each in done])
            if seq == 1:
                passes.clear()
        is_over.set()
        await asyncio.wait_for(training, 60)
    assert reasons == [["", "WORKER_DIED"] if killer == "step" else ["WORKER_DIED", "GRADIENT_WINDOW_CLOSED"]] * 3
    of_neighbour = [(item.seq, item.chunk_index) for items in passes for item in items if item.adapter_id == neighbour]
    assert len(of_neighbour) == len(set(of_neighbour)), "no pass of the neighbour is lost or replayed"


@pytest.mark.slow
async def test_samples_of_a_poisoner_run_solo_and_those_of_a_neighbour_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[list[PassItem]]
) -> None:
    decode_step, killed = ToyEngine.decode_step, []

    def decode_or_crash(self: ToyEngine) -> Sequence[SampleEvent]:
        seeds = [sequence.request.params.seed for sequence in self._running]
        if 13 in seeds:
            killed.append(seeds)
            raise RuntimeError("a poison sample")
        return decode_step(self)

    monkeypatch.setattr(ToyEngine, "decode_step", decode_or_crash)
    async with running_pool(tmp_path, num_workers=2) as pool:
        bad = await pool.sampler(await pool.session("mallory"), "mallory")
        good = await pool.sampler(await pool.session("bob"), "bob")
        adapter = await pool.adapter("bob")
        for number in range(4):
            names = [await pool.sample(good, 4 * number + each, "bob", seed=each) for each in range(1, 5)]
            step = await pool.forward_backward(adapter, number + 1, 4, tenant="bob")
            poison = await pool.sample(bad, 2 * number + 1, "mallory", seed=13)
            clean = await pool.sample(bad, 2 * number + 2, "mallory", seed=1)
            done = await asyncio.wait_for(pool.wait(*names, step, tenant="bob"), 60)
            assert [each.state for each in done] == [SUCCEEDED] * 5
            [failed, done_too] = await asyncio.wait_for(pool.wait(poison, clean, tenant="mallory"), 60)
            assert (failed.error.reason, done_too.state) == ("WORKER_DIED", SUCCEEDED)
            if number == 0:
                killed.clear()
    assert killed == [[13]] * 6, "two solo runs of each later poison"


async def test_a_probation_outlives_a_crash_of_the_coordinator(tmp_path: Path, passes: list[list[PassItem]]) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        await kill(pool, await pool.adapter("mallory"), 1)
    passes.clear()
    async with running_pool(tmp_path, num_workers=2) as pool:
        [tenant] = pool.core.probation.tenants()
        await pool.take_over("mallory")
        neighbour = await pool.adapter("bob")
        [poisoner] = [name for name in pool.core.registry.logs if name != neighbour]
        name = await pool.forward_backward(neighbour, 1, 4, tenant="bob")
        failed = await kill(pool, poisoner, 3)
        [done] = await pool.wait(name, tenant="bob")
        standing = pool.core.probation.standing(tenant)
    assert (failed.error.reason, done.state) == ("WORKER_DIED", SUCCEEDED)
    assert standing is not None
    assert standing.num_kills == 2
    assert all(len({item.adapter_id for item in items}) == 1 for items in passes)


async def test_a_tenant_on_probation_is_not_stopped(tmp_path: Path, passes: list[list[PassItem]]) -> None:
    """Its steps, saves, loads and samples from the saved weights run, one operation in a batch."""
    async with running_pool(tmp_path, num_workers=2) as pool:
        adapter, spec_chain = await pool.adapter("mallory"), []
        await kill(pool, adapter, 1)
        names = [await pool.forward_backward(adapter, seq, *LENGTHS, tenant="mallory") for seq in (3, 4)]
        names.append(await pool.optim_step(adapter, 5, tenant="mallory"))
        done = await asyncio.wait_for(pool.wait(*names, tenant="mallory"), 60)
        spec_chain = [pool.chain(adapter), expected_chain(pool.spec_of(adapter), [((3, 4), 5)])]
        batches = [batch for engines in pool.engines.values() for engine in engines for batch in engine.batches]
    assert [each.state for each in done] == [SUCCEEDED] * 3
    assert spec_chain[0] == spec_chain[1]
    assert all(len({item.op_id for item in batch.items}) <= 1 for batch in batches)


async def test_a_tenant_is_told_why_its_operations_wait_until_an_administrator_releases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probation, "BACKOFF_S", 3600.0)
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter("mallory"), await pool.principal("mallory")
        await kill(pool, adapter, 1)
        name = await pool.forward_backward(adapter, 3, 4, tenant="mallory")
        asked = ops_pb.GetOperationRequest(name=name)
        queued = (await pool.service.get_operation(principal, asked)).operation
        assert queued.state == ops_pb.OPERATION_STATE_QUEUED
        assert queued.queue_reason.startswith(
            f"{adapter}:1 ended its worker, so all operations of this tenant run solo"
        )
        of_neighbour = await pool.forward_backward(await pool.adapter("bob"), 1, 4, tenant="bob")
        [done] = await asyncio.wait_for(pool.wait(of_neighbour, tenant="bob"), 60)
        assert (done.state, done.queue_reason) == (SUCCEEDED, "")
        assert (await refusal(pool.service.queue_reason(await pool.principal("bob"), name))).code is Code.NOT_FOUND

        status, admin = pool_pb2.GetPoolStatusRequest(), replace(await pool.principal("root"), role=Role.ADMIN)
        shown = {
            who.tenant_name: list((await pool.service.get_pool_status(who, status)).probations)
            for who in (principal, await pool.principal("bob"), admin)
        }
        assert shown["bob"] == []
        for [each] in (shown["mallory"], shown["root"]):
            assert (each.tenant, each.num_kills, each.operation) == ("mallory", 1, f"{adapter}:1")
            assert 1700 < each.backoff_seconds <= 1800

        await pool.service.release_tenant(admin, probation_pb2.ReleaseTenantRequest(tenant="mallory"))
        [done] = await asyncio.wait_for(pool.wait(name, tenant="mallory"), 60)
        assert done.state == SUCCEEDED
        [entry] = pool.store.audit.newest(1, act="tenant.release")
        assert (entry.tenant, entry.subject) == ("root", "mallory")
        missing = probation_pb2.ReleaseTenantRequest(tenant="nobody")
        assert (await refusal(pool.service.release_tenant(admin, missing))).reason == "NOT_FOUND"
    async with running_pool(tmp_path) as pool:
        assert pool.core.probation.tenants() == []
