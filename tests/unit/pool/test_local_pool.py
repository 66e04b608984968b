"""The pool in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.batches import OWNER, batch, request
from tests.support.toy_engine import KILL_TOKEN, ToyEngine
from tests.support.waiting import until
from workers.contract.messages import SampleEvent, SampleResult, TokenEvent
from workers.contract.protocols import EngineFactory, Pool, PoolStartError, WorkerLost
from workers.contract.settings import EngineSettings, PoolConfig, PoolModel
from workers.pool.environment import ALLOCATOR_VARIABLES, ray_environment, worker_environment, worker_of
from workers.pool.factory import make_pool
from workers.pool.local import LocalPool

TOY_FACTORY = "tests.support.toy_engine:toy_factory"


@asynccontextmanager
async def started(pool: Pool) -> AsyncIterator[Pool]:
    await pool.start(OWNER)
    try:
        yield pool
    finally:
        await pool.stop()


def toy_pool(num_workers: int = 2) -> LocalPool:
    return LocalPool({f"w{index}": ToyEngine for index in range(num_workers)}, num_slots=3)


async def test_workers_are_listed_in_order_with_an_incarnation_each() -> None:
    async with started(toy_pool()) as pool:
        first, second = pool.workers()
        assert (first.worker_id, second.worker_id) == ("w0", "w1")
        assert first.incarnation != second.incarnation
        assert (first.model.name, first.num_slots, first.device) == ("toy", 3, "cpu")
    assert pool.workers() == ()


async def test_results_name_the_incarnation_that_ran_the_batch() -> None:
    async with started(toy_pool()) as pool:
        for worker in pool.workers():
            result = await pool.run(worker.worker_id, batch(7))
            assert (result.cycle_id, result.incarnation) == (7, worker.incarnation)
            assert result.results[0].error is None


async def test_sampled_tokens_stream_and_the_result_repeats_them() -> None:
    async with started(toy_pool(1)) as pool:
        await pool.start_sample("w0", request("s", max_tokens=5))
        events: list[SampleEvent] = []
        async for event in pool.sample_events("w0"):
            events.append(event)
            if isinstance(event, SampleResult):
                break
    *tokens, result = events
    assert isinstance(result, SampleResult)
    assert [event.token for event in tokens if isinstance(event, TokenEvent)] == result.sequences[0].tokens.tolist()
    assert len(tokens) == 5


async def test_failed_engine_is_lost_with_its_reason_until_it_is_replaced_by_an_empty_one() -> None:
    async with started(toy_pool()) as pool:
        stream = asyncio.ensure_future(anext(aiter(pool.sample_events("w0"))))
        old = pool.workers()[0]
        with pytest.raises(WorkerLost):
            await pool.run("w0", batch(0, token=KILL_TOKEN))
        for lost in (pool.run("w0", batch(1)), pool.start_sample("w0", request("s", 1)), pool.ping("w0"), stream):
            with pytest.raises(WorkerLost, match="the engine failed: killed by a toy token"):
                await lost
        await pool.ping("w1")
        assert pool.workers()[0] == old
        new = await pool.replace("w0")
        assert new.worker_id == "w0"
        assert new.incarnation != old.incarnation
        assert pool.workers()[0] == new
        assert (await pool.run("w0", batch(2))).incarnation == new.incarnation


async def test_replacing_a_healthy_worker_ends_its_stream() -> None:
    async with started(toy_pool(1)) as pool:
        stream = asyncio.ensure_future(anext(aiter(pool.sample_events("w0"))))
        await asyncio.sleep(0)
        await pool.replace("w0")
        with pytest.raises(WorkerLost):
            await stream


async def test_error_of_a_worker_that_cannot_start_names_it_and_the_cause() -> None:
    def broken(incarnation: str) -> ToyEngine:
        raise OSError("no model there")

    pool = LocalPool({"w0": ToyEngine, "w1": broken})
    with pytest.raises(PoolStartError, match=r"w1.*no model there"):
        await pool.start(OWNER)
    assert pool.workers() == ()


async def test_an_interrupted_start_leaves_no_thread_that_makes_an_engine() -> None:
    threads: list[threading.Thread] = []

    def slow(incarnation: str) -> ToyEngine:
        threads.append(threading.current_thread())
        time.sleep(0.5)
        return ToyEngine(incarnation)

    pool = LocalPool({"w0": ToyEngine, "w1": slow})
    start = asyncio.create_task(pool.start(OWNER))
    await until(lambda: bool(threads))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await pool.stop()
    assert not any(thread.is_alive() for thread in threads)


async def test_unknown_worker_is_lost() -> None:
    async with started(toy_pool()) as pool:
        with pytest.raises(WorkerLost):
            await pool.run("w9", batch(0))


async def test_config_gives_each_model_its_own_workers_by_import_string() -> None:
    models = (
        PoolModel(name="small", path="toy", num_workers=2),
        PoolModel(name="slow", path=json.dumps({"seconds_per_batch": 0.01})),
    )
    config = PoolConfig(kind="local", models=models, engine=TOY_FACTORY, num_slots=5)
    async with started(make_pool(config)) as pool:
        names = [(worker.worker_id, worker.model.name, worker.num_slots) for worker in pool.workers()]
        assert names == [("w0", "small", 5), ("w1", "small", 5), ("w2", "slow", 5)]
        assert (await pool.run("w2", batch(0))).wall_s >= 0.01


async def test_workers_on_gpus_take_turns_in_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, EngineSettings] = {}

    def recording(settings: EngineSettings) -> EngineFactory:
        def make(incarnation: str) -> ToyEngine:
            own[worker_of(incarnation)] = settings
            return ToyEngine(incarnation)

        return make

    chosen = Mock()
    monkeypatch.setattr("tests.support.toy_engine.toy_factory", recording)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", chosen)
    models = (PoolModel(name="toy", path="toy", num_workers=4),)
    config = PoolConfig(kind="local", device="cuda", models=models, engine=TOY_FACTORY)
    async with started(make_pool(config)) as pool:
        await pool.add("toy")
    on = {worker_id: (settings.device, settings.memory_share) for worker_id, settings in own.items()}
    first, others = {"w0": ("cuda:0", 0.5), "w1": ("cuda:1", 1.0)}, {"w2": ("cuda:2", 1.0), "w3": ("cuda:0", 0.5)}
    assert on == first | others | {"w4": ("cuda:1", 0.5)}
    assert sorted(call.args for call in chosen.mock_calls) == [(0,), (0,), (1,), (1,), (2,)]


def test_blocks_of_a_gpus_memory_grow_in_place_unless_the_operator_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = ALLOCATOR_VARIABLES
    for name in (new, old):
        monkeypatch.delenv(name, raising=False)
    on_gpu = EngineSettings(model_path="toy", device="cuda:1")
    assert worker_environment(on_gpu)[new] == "expandable_segments:True"
    assert new not in worker_environment(EngineSettings(model_path="toy"))
    monkeypatch.setenv(old, "max_split_size_mb:64")
    assert new not in worker_environment(on_gpu)


def test_ray_token_is_used_with_a_cluster_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    cluster = PoolConfig(models=(PoolModel(name="toy", path="toy"),), ray_address="10.0.0.1:6379")
    assert "RAY_AUTH_MODE" not in ray_environment(cluster)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert ray_environment(cluster)["RAY_AUTH_MODE"] == "token"


def test_a_private_ray_asks_for_a_token_and_listens_on_the_loopback_whatever_tokens_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    environment = ray_environment(PoolConfig(models=(PoolModel(name="toy", path="toy"),)))
    assert (environment["RAY_AUTH_MODE"], environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("token", "0")
