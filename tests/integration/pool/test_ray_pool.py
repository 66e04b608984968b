"""The pool on a real Ray, with toy engines in real processes: messages, lost workers, a stop that leaves nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import ray

from tests.support.batches import OWNER, batch, request
from tests.support.toy_engine import KILL_TOKEN
from workers.contract.messages import SampleEvent, SampleRequest, SampleResult, SamplerVersion, TokenEvent, WorkerInfo
from workers.contract.protocols import PoolStartError, WorkerLost
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool
from workers.pool.processes import MARK_VARIABLE
from workers.pool.ray_pool import RayPool

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SECRET_VARIABLE = "TINKERPOOL_TEST_RUN"
OTHERS: set[int] = set()
NOTICED_S = 5.0
"""Seconds within which a lost worker must be detected; Ray takes milliseconds on an idle machine."""


def pool_config(*models: PoolModel, **values: Any) -> PoolConfig:
    settings: dict[str, Any] = {
        "engine": "tests.support.toy_engine:toy_factory",
        "num_slots": 5,
        "start_timeout_s": 60.0,
    }
    return PoolConfig(models=models or (PoolModel(name="toy", path="toy"),), **(settings | values))


def environment(pid: int) -> list[str]:
    """Return the variables of a process; none if it has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return []


def children_with_the_secret() -> set[int]:
    """Return every process with the secret of this test run in its environment, also orphaned ones."""
    secret = os.environ.get(SECRET_VARIABLE)
    pids = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return {pid for pid in pids if secret and f"{SECRET_VARIABLE}={secret}" in environment(pid)}


@pytest.fixture(scope="module", autouse=True)
def others() -> None:
    """Record processes of earlier tests that are not Ray: Python's resource tracker."""
    os.environ[SECRET_VARIABLE] = secrets.token_hex(16)
    OTHERS.update(children_with_the_secret())


def ray_processes() -> set[int]:
    """Return every process of this test run's Ray; all inherit the run's secret."""
    return children_with_the_secret() - OTHERS


async def all_ended(timeout_s: float = 30.0) -> bool:
    for _ in range(int(timeout_s / 0.1)):
        if not ray_processes():
            return True
        await asyncio.sleep(0.1)
    return False


# The tests that start a Ray of their own come first: a process can have one Ray at a time.


async def test_model_that_cannot_be_loaded_fails_the_start_with_its_cause_and_leaves_no_process() -> None:
    pool = RayPool(pool_config(PoolModel(name="toy", path="toy"), PoolModel(name="gone", path="missing")))
    with pytest.raises(PoolStartError, match=r"worker w1 \(gone\) cannot start: there is no model in missing"):
        await pool.start(OWNER)
    assert pool.workers() == ()
    await pool.stop()
    assert await all_ended()


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        pytest.param(
            {"num_gpus": 1000.0, "device": "cuda"},
            "1 x 1000 GPUs are asked for, and Ray sees 0 .* leave it out to run",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"num_cpus": 1000.0},
            "too few for workers .1 in all. with 1000 CPUs and 0 GPUs claimed for each",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_machine_too_small_for_the_workers_fails_the_start_at_once(claim: dict[str, Any], message: str) -> None:
    pool = RayPool(pool_config(**claim))
    with pytest.raises(PoolStartError, match=message):
        await pool.start(OWNER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[RayPool]:
    models = (
        PoolModel(name="toy", path="toy", num_workers=2),
        PoolModel(name="slow", path='{"seconds_per_batch": 1.0}', num_workers=2),
    )
    pool = make_pool(pool_config(*models, num_threads=3))
    assert isinstance(pool, RayPool)
    await pool.start(OWNER)
    try:
        yield pool
    finally:
        await pool.stop()


def worker(pool: RayPool, worker_id: str) -> WorkerInfo:
    return next(info for info in pool.workers() if info.worker_id == worker_id)


async def lost_within(seconds: float, call: Awaitable[object]) -> str:
    with pytest.raises(WorkerLost) as caught:
        await asyncio.wait_for(call, seconds)
    return str(caught.value)


async def events_until_result(pool: RayPool, worker_id: str) -> list[SampleEvent]:
    events: list[SampleEvent] = []
    async for event in pool.sample_events(worker_id):
        events.append(event)
        if isinstance(event, SampleResult):
            break
    return events


async def test_every_worker_is_a_process_of_its_own_with_its_own_model(pool: RayPool) -> None:
    infos = pool.workers()
    assert [(info.worker_id, info.model.name) for info in infos] == [
        ("w0", "toy"),
        ("w1", "toy"),
        ("w2", "slow"),
        ("w3", "slow"),
    ]
    assert len({info.pid for info in infos} | {os.getpid()}) == 5
    assert len({info.incarnation for info in infos}) == 4
    assert {info.num_slots for info in infos} == {5}
    assert {info.node for info in infos} == {ray.util.get_node_ip_address()}


async def test_mark_of_ray_is_in_its_workers_and_not_left_in_the_environment_of_this_process(pool: RayPool) -> None:
    assert f"{MARK_VARIABLE}=" in "\n".join(environment(worker(pool, "w0").pid))
    assert MARK_VARIABLE not in os.environ


async def test_thread_settings_are_in_the_environment_of_the_process(pool: RayPool) -> None:
    variables = environment(worker(pool, "w0").pid)
    threads = {"OMP_NUM_THREADS=3", "MKL_NUM_THREADS=3", "GOMP_SPINCOUNT=10000"}
    assert threads | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY=512"} <= set(variables)


async def test_batch_result_names_the_incarnation_that_ran_it(pool: RayPool) -> None:
    result = await pool.run("w0", batch(7))
    assert (result.cycle_id, result.incarnation) == (7, worker(pool, "w0").incarnation)
    assert result.results[0].error is None
    assert result.results[0].logprobs[0].dtype == "float32"


async def test_workers_run_at_the_same_time(pool: RayPool) -> None:
    await asyncio.gather(pool.ping("w2"), pool.ping("w3"))
    stopped = worker(pool, "w2").pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        running = asyncio.create_task(pool.run("w2", batch(1)))
        await asyncio.sleep(0)  # the batch is submitted before the other worker's
        await asyncio.wait_for(pool.run("w3", batch(1)), 60)
        assert not running.done()
    finally:
        os.kill(stopped, signal.SIGCONT)
    await running


async def test_ping_returns_during_a_running_batch(pool: RayPool) -> None:
    running = asyncio.create_task(pool.run("w2", batch(2)))
    await asyncio.sleep(0.05)
    await pool.ping("w2")
    assert not running.done()
    await running


class SlowToUnpack:
    """A sample request that takes long to unpickle, as a large one does."""

    def __init__(self, op_id: str, seconds: float) -> None:
        self._parts = (op_id, seconds)
        self.version = SamplerVersion(key="")
        self.states = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack_slowly, self._parts


def unpack_slowly(op_id: str, seconds: float) -> SampleRequest:
    time.sleep(seconds)
    return request(op_id, max_tokens=1)


async def test_ping_returns_while_a_sample_request_is_unpickled(pool: RayPool) -> None:
    handing_over = asyncio.create_task(pool.start_sample("w0", cast("SampleRequest", SlowToUnpack("large", 2.0))))
    await asyncio.sleep(0.1)
    await pool.ping("w0")
    assert not handing_over.done()
    await handing_over


async def test_sampled_tokens_stream_and_the_result_repeats_them(pool: RayPool) -> None:
    await pool.start_sample("w1", request("s", max_tokens=5))
    *tokens, result = await asyncio.wait_for(events_until_result(pool, "w1"), 60)
    assert isinstance(result, SampleResult)
    assert [event.token for event in tokens if isinstance(event, TokenEvent)] == result.sequences[0].tokens.tolist()
    assert len(tokens) == 5


async def test_cancelled_sample_ends_with_an_error(pool: RayPool) -> None:
    await pool.start_sample("w1", request("long", max_tokens=10_000_000))
    await pool.cancel_sample("w1", "long")
    result = (await asyncio.wait_for(events_until_result(pool, "w1"), 60))[-1]
    assert isinstance(result, SampleResult)
    assert result.error is not None


async def test_killed_worker_fails_every_call_until_it_is_replaced(pool: RayPool) -> None:
    old = worker(pool, "w2")
    running = asyncio.create_task(pool.run("w2", batch(3)))
    stream = asyncio.ensure_future(anext(aiter(pool.sample_events("w2"))))
    await asyncio.sleep(0.1)
    os.kill(old.pid, signal.SIGKILL)
    for waiting in (running, stream, pool.ping("w2"), pool.start_sample("w2", request("s", 1))):
        assert old.incarnation in await lost_within(NOTICED_S, waiting)
    assert worker(pool, "w2") == old
    await pool.ping("w3")
    new = await pool.replace("w2")
    assert worker(pool, "w2") == new
    assert new.incarnation != old.incarnation
    assert new.pid != old.pid
    assert (await pool.run("w2", batch(4))).incarnation == new.incarnation


async def test_hanging_worker_is_killed_and_replaced_and_its_running_batch_is_lost(pool: RayPool) -> None:
    old = worker(pool, "w3")
    running = asyncio.create_task(pool.run("w3", batch(5)))
    await asyncio.sleep(0.1)
    os.kill(old.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.ping("w3"), 0.5)
    replacing = asyncio.create_task(pool.replace("w3"))
    assert "replaced" in await lost_within(NOTICED_S, running)
    new = await replacing
    assert old.pid not in ray_processes()
    assert (await pool.run("w3", batch(6))).incarnation == new.incarnation


async def test_worker_that_is_added_runs_and_its_process_ends_when_it_is_removed(pool: RayPool) -> None:
    added = await pool.add("toy")
    assert (added.worker_id, added.model.name) == ("w4", "toy")
    assert (await pool.run("w4", batch(8))).incarnation == added.incarnation
    stream = asyncio.ensure_future(anext(aiter(pool.sample_events("w4"))))
    await asyncio.sleep(0)
    await pool.remove("w4")
    assert "removed" in await lost_within(NOTICED_S, stream)
    assert added.pid not in ray_processes()
    assert [info.worker_id for info in pool.workers()] == ["w0", "w1", "w2", "w3"]


async def test_engine_that_raises_loses_its_worker(pool: RayPool) -> None:
    old = worker(pool, "w1")
    assert "toy token" in await lost_within(NOTICED_S, pool.run("w1", batch(0, token=KILL_TOKEN)))
    await lost_within(NOTICED_S, pool.ping("w1"))
    await lost_within(NOTICED_S, anext(aiter(pool.sample_events("w1"))))
    assert (await pool.replace("w1")).incarnation != old.incarnation


async def test_call_that_times_out_does_not_affect_the_next_call(pool: RayPool) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.run("w3", batch(8)), 0.05)
    assert (await pool.run("w3", batch(9))).cycle_id == 9


async def test_unknown_worker_is_lost(pool: RayPool) -> None:
    await lost_within(NOTICED_S, pool.run("w9", batch(0)))


async def test_second_pool_in_a_process_is_refused_and_the_first_keeps_running(pool: RayPool) -> None:
    second = RayPool(pool_config())
    with pytest.raises(PoolStartError, match="one pool at a time"):
        await second.start(OWNER)
    await pool.ping("w0")


async def test_worker_without_room_fails_with_its_claim_and_the_free_resources(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        config = dataclasses.replace(pool._starts._config, device="cuda", num_gpus=1000.0, start_timeout_s=1.0)
        patch.setattr(pool._starts, "_config", config)
        with pytest.raises(
            WorkerLost, match=r"1 CPUs and 1000 GPUs claimed for each worker, .* CPUs free, .* GPUs free"
        ):
            await pool.replace("w0")
    await lost_within(NOTICED_S, pool.ping("w0"))
    await pool.replace("w0")
    await pool.ping("w0")


async def test_stopped_pool_leaves_no_process_not_even_a_hanging_one(pool: RayPool) -> None:
    assert {info.pid for info in pool.workers()} < ray_processes()
    os.kill(worker(pool, "w1").pid, signal.SIGSTOP)
    await pool.stop()
    await pool.stop()
    assert pool.workers() == ()
    await lost_within(NOTICED_S, pool.run("w0", batch(0)))
    assert await all_ended()
