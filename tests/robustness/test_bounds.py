"""Bounds: the size of the operation log over a long run, and the length of a replay."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.database import query
from tests.support.memory import num_entries
from tests.support.toy_pool import LENGTHS, ToyPool, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import PassItem

NUM_ADAPTERS = 10


async def train(pool: ToyPool, adapters: Sequence[str], first_step: int, num_steps: int) -> None:
    """Train every adapter for this number of steps, with ten steps of each in flight at once."""
    for start in range(first_step, first_step + num_steps, 10):
        names = []
        for step in range(start, start + 10):
            names += [pool.forward_backward(adapter, 2 * step + 1, 16, 16, 16, 16) for adapter in adapters]
            names += [pool.optim_step(adapter, 2 * step + 2) for adapter in adapters]
        done = await pool.wait(*await asyncio.gather(*names))
        assert all(each.state == ops_pb.OPERATION_STATE_SUCCEEDED for each in done)


def log_bytes(data_dir: Path) -> int:
    """Return the size of the database with its write-ahead log."""
    return sum(path.stat().st_size for path in data_dir.glob("tinkerpool.db*"))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1_100, pytest.param(6_000, marks=pytest.mark.long)])
async def test_the_log_of_a_thousand_steps_and_more_is_as_small_as_after_the_first_thousand(
    num_steps: int, tmp_path: Path
) -> None:
    """Payloads are dropped when a snapshot covers them; results are dropped some time after they were fetched."""
    async with running_pool(
        tmp_path, replay_s_max=0.01, fetched_retention_s=0.1, sweep_interval_s=0.1, cycle_tokens_max=10_000
    ) as pool:
        adapters = [await pool.adapter() for _ in range(NUM_ADAPTERS)]
        logs = [pool.log_of(adapter) for adapter in adapters]
        sizes: list[int] = []
        for start in range(0, num_steps // NUM_ADAPTERS, 50):
            await train(pool, adapters, start, 50)
            await asyncio.sleep(0.3)  # longer than the retention of results and the interval of sweeps
            sizes.append(log_bytes(tmp_path))
        await pool.written()
        [num_rows] = query(tmp_path, "SELECT COUNT(*) FROM operations")[0]
        [num_payloads] = query(tmp_path, "SELECT COUNT(*) FROM payloads")[0]
    assert max(sizes[1:]) <= 1.5 * sizes[1], sizes
    assert num_rows < num_steps
    assert num_payloads < num_steps
    assert sum(len(log.operations) for log in logs) < num_steps


async def live_and_end(pool: ToyPool, *, has_work: bool) -> None:
    """Create a session with an adapter and a sampler, perhaps train and sample, then end it and delete the adapter."""
    adapter = await pool.adapter()
    sampler = await pool.sampler(adapter.partition(":")[0])
    if has_work:
        await pool.service.finished_samples(await pool.principal(), sampler, 0, 0, 0.0)
        names = [await pool.forward_backward(adapter, 1, 4), await pool.sample(sampler, 1)]
        names.append(await pool.submit_publish(adapter, 2))
        await until(lambda: not any(pool.core.in_flight.get(name) for name in names))
    await pool.finish_session(adapter)
    await pool.delete_adapter(adapter)


async def settled_entries(pool: ToyPool) -> int:
    """Return the pool's collected entries between two sweeps, without the batches that its toy engines remember."""
    for engines in pool.engines.values():
        for engine in engines:
            engine.batches.clear()
    counts = []
    for _ in range(20):
        counts.append(num_entries(pool.core))
        await asyncio.sleep(0.02)  # a sweep holds the rows that it deletes
    return min(counts)


@pytest.mark.slow
async def test_memory_and_rows_are_bounded_over_thousands_of_sessions(tmp_path: Path) -> None:
    retention: dict[str, Any] = {"ended_retention_s": 0.0, "fetched_retention_s": 0.0, "result_retention_s": 0.0}
    tables = ("sessions", "adapters", "samplers", "operations", "snapshots", "checkpoints", "plans")
    async with running_pool(tmp_path, sweep_interval_s=0.05, **retention) as pool:
        await pool.principal()

        def num_rows() -> list[int]:
            return [pool.store.database.read(f"SELECT COUNT(*) FROM {table}")[0][0] for table in tables]

        num_entries_after = []
        for _ in range(4):
            await asyncio.gather(*(live_and_end(pool, has_work=number % 10 == 0) for number in range(500)))
            await pool.written()
            await until(lambda: num_rows()[:4] == [0, 0, 0, 0])
            num_entries_after.append(await settled_entries(pool))
        assert num_rows() == [0] * len(tables)
    growth = num_entries_after[-1] - num_entries_after[1]
    assert growth < 300, f"{growth} entries are left of 1,000 sessions: {num_entries_after}"


@pytest.mark.slow
@pytest.mark.parametrize("has_steps", [True, False])
async def test_a_replay_never_takes_longer_than_configured_even_in_a_gradient_window_without_a_step(
    tmp_path: Path, *, has_steps: bool
) -> None:
    """Toy engines report a microsecond per token: `replay_s_max` is the time of 30 of the 180 requests of a worker."""
    tokens = sum(LENGTHS)
    replay_s_max = 30 * tokens * 1e-6
    async with running_pool(tmp_path, num_workers=2, replay_s_max=replay_s_max) as pool:
        adapters = [await pool.adapter() for _ in range(6)]
        for seq in range(1, 61):
            names = []
            for adapter in adapters:
                is_step = has_steps and seq % 4 == 0
                submit = pool.optim_step(adapter, seq) if is_step else pool.forward_backward(adapter, seq, *LENGTHS)
                names.append(await submit)
            await pool.wait(*names)
            await pool.written()
        before = {worker_id: len(engines[-1].batches) for worker_id, engines in pool.engines.items()}
        assert all(num_batches > 0 for num_batches in before.values())
        await pool.kill_worker("w0")
        await pool.kill_worker("w1")
        await pool.wait(*[await pool.forward_backward(adapter, 61, *LENGTHS) for adapter in adapters])
        batches = [batch for engines in pool.engines.values() for batch in engines[-1].batches]
        items = [item for batch in batches for item in batch.items if isinstance(item, PassItem)]
        replayed = sum(len(datum.tokens) for item in items for datum in item.data if item.seq <= 60)
        assert replayed * 1e-6 <= 2 * replay_s_max + 6 * tokens * 1e-6, (
            "one request per adapter may be newer than its snapshot"
        )
