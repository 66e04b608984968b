"""Clean stops under load: no operation is lost, and the next epoch replays nothing."""

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest

from coordinator.base.errors import ServiceError
from coordinator.cycle.commit import Cycle
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import Batch, BatchResult, OptimStepItem, PassItem

NUM_STOPS = 50


def applied(pool: ToyPool) -> Counter[tuple[str, int, int]]:
    """Count how often each chunk and each step was applied in this epoch."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for engines in pool.engines.values():
        for item in (item for engine in engines for batch in engine.batches for item in batch.items):
            if isinstance(item, PassItem):
                counts[item.adapter_id, item.seq, item.chunk_index] += 1
            elif isinstance(item, OptimStepItem):
                counts[item.adapter_id, item.seq, 0] += 1
    return counts


@pytest.mark.slow
async def test_fifty_stops_under_load_lose_nothing_and_the_next_start_replays_nothing(tmp_path: Path) -> None:
    """Stops come in the middle of requests and gradient windows, and while a snapshot is being written."""
    chance = random.Random(3)
    counts: Counter[tuple[str, int, int]] = Counter()
    acknowledged: list[str] = []
    next_seq = 1
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
    for _ in range(NUM_STOPS):
        async with running_pool(tmp_path, cycle_tokens_max=16, seconds_per_batch=0.002, replay_s_max=1e-4) as pool:
            await pool.take_over()
            for _ in range(chance.randrange(1, 6)):
                with contextlib.suppress(ServiceError):  # the pool is stopping
                    is_step = next_seq % 3 == 0
                    submit = pool.optim_step(adapter, next_seq) if is_step else None
                    acknowledged.append(await (submit or pool.forward_backward(adapter, next_seq, *LENGTHS)))
                    next_seq += 1
            await asyncio.sleep(chance.random() * 0.03)
        counts += applied(pool)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        while (next_seq - 1) % 3:
            is_step = next_seq % 3 == 0
            submit = pool.optim_step(adapter, next_seq) if is_step else None
            acknowledged.append(await (submit or pool.forward_backward(adapter, next_seq, *LENGTHS)))
            next_seq += 1
        operations = await pool.wait(*acknowledged)
        chain = pool.chain(adapter)
    counts += applied(pool)
    assert {each.state for each in operations} == {ops_pb.OPERATION_STATE_SUCCEEDED}
    assert len(operations) == next_seq - 1
    assert chain == expected_chain(spec, [((seq, seq + 1), seq + 2) for seq in range(1, next_seq, 3)])
    assert set(counts.values()) == {1}, [item for item, count in counts.items() if count > 1]


async def test_a_stop_in_a_closed_gradient_window_keeps_it_closed_without_a_replay(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2))
        chain = pool.chain(adapter)
        await pool.wait(await pool.forward_backward(adapter, 3, 5))
        await pool.wait(await pool.forward_backward(adapter, 4, 5, token=POISON_TOKEN))
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        closed = await pool.wait(await pool.forward_backward(adapter, 5, 5), await pool.optim_step(adapter, 6))
        assert [each.error.reason for each in closed] == ["GRADIENT_WINDOW_CLOSED"] * 2
        assert "not finite" in closed[0].error.message, "it names the first failure"
        [forward] = await pool.wait(await pool.forward_backward(adapter, 7, 5))
        assert forward.state == ops_pb.OPERATION_STATE_SUCCEEDED
        assert pool.chain(adapter) == chain
        assert set(applied(pool)) == {(adapter, 7, 0)}


async def test_an_outcome_decided_while_the_last_cycle_commits_is_in_the_log_before_the_snapshot(
    tmp_path: Path,
) -> None:
    """Otherwise the next epoch applies a step to the failed gradient."""
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        loop = pool.core.loops["toy"]
        await pool.wait(await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2))
        snapshot = loop._snapshot
        late: list[str] = []

        async def submit_late(cycle: Cycle, lost: frozenset[str]) -> None:
            if not late:
                late.append(await pool.optim_step(adapter, 4))
                loop.planning.ready.stop()
            await snapshot(cycle, lost)

        loop._snapshot = submit_late  # type: ignore[method-assign]
        await pool.wait(await pool.forward_backward(adapter, 3, 5, token=POISON_TOKEN))
        await until(lambda: late)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        [step] = await pool.wait(late[0])
    assert step.error.reason == "GRADIENT_WINDOW_CLOSED"


async def test_a_stop_past_its_time_limit_runs_no_batch_beside_the_last_cycle(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=16, seconds_per_batch=0.01, stop_s_max=0.02) as pool:
        adapters = [await pool.adapter() for _ in range(12)]
        core, num_running, most = pool.core, 0, 0
        run = core.pool.run

        async def counting(worker_id: str, batch: Batch) -> BatchResult:
            nonlocal num_running, most
            num_running += 1
            most = max(most, num_running)
            try:
                return await run(worker_id, batch)
            finally:
                num_running -= 1

        core.pool.run = counting  # type: ignore[method-assign]
        for adapter in adapters:
            await pool.wait(await pool.forward_backward(adapter, 1, 5))
        for adapter in adapters[:2]:
            await pool.forward_backward(adapter, 2, *[16] * 40)
        await asyncio.sleep(0.05)
        await pool.coordinator.stop()
    assert most == 1
