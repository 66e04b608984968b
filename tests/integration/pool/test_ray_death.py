"""A crash of a private Ray: every worker is lost at once, the first replacement restarts Ray, and nothing is left.

Beside the pool itself, one served pool shows what its users see of hanging workers and of such a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.cli.options import RAY_FILE
from tests.support.batches import OWNER, batch
from tests.support.serving import TOY_ON_RAY, Terminal
from tests.support.waiting import wait_until
from tinkerpool import types
from tinkerpool.serving import Serving
from workers.contract.protocols import WorkerLost
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.processes import find_marked
from workers.pool.ray_host import Belongings
from workers.pool.ray_pool import RayPool

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NOTICED_S = 2.0
"""Seconds within which a crash of Ray must be detected; it takes a tenth of a second."""
RECOVERED_S = 60.0
"""Seconds within which every worker must run again: 6 s on idle cores, 12 s if the GCS server crashed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayPool]:
    config = PoolConfig(
        models=(
            PoolModel(name="toy", path="toy", num_workers=2),
            PoolModel(name="slow", path='{"seconds_per_batch": 60.0}'),
        ),
        engine="tests.support.toy_engine:toy_factory",
        num_cpus=0.5,
        start_timeout_s=60.0,
        owner_file=tmp_path_factory.mktemp("owner") / "ray.json",
    )
    pool = RayPool(config)
    await pool.start(OWNER)
    try:
        yield pool
    finally:
        await pool.stop()


def belongings(owner_file: Path | None) -> Belongings:
    assert owner_file is not None
    found = Belongings.read(owner_file)
    assert found is not None
    return found


def kill(of: Belongings, name: str) -> None:
    """Kill the one process with this name."""
    found = find_marked(of.mark)
    [victim] = [process for process in found if process.name == name]
    victim.kill()
    for process in found:
        process.close()


def is_gone(of: Belongings) -> bool:
    found = find_marked(of.mark)
    for process in found:
        process.close()
    return not found and not Path(str(of.folder)).exists()


def successor(of: Belongings, owner_file: Path) -> Belongings:
    """Wait for the next Ray; return its belongings."""
    deadline = time.monotonic() + RECOVERED_S
    while (found := Belongings.read(owner_file)) is None or found.mark == of.mark:
        assert time.monotonic() < deadline, "Ray was not started again"
        time.sleep(0.1)
    return found


async def lost(call: Any) -> str:
    with pytest.raises(WorkerLost) as caught:
        await call
    return str(caught.value)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_crashed_ray_loses_every_worker_at_once_and_is_restarted_once_also_after_a_failed_restart(
    pool: RayPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("no room for Ray")

    def init_late(**options: Any) -> None:
        monkeypatch.setattr(ray, "init", real_init)
        ray.init(**options)
        abandoned.append(belongings(pool._config.owner_file))
        raise TimeoutError("Ray was too slow")

    real_init, abandoned = ray.init, list[Belongings]()
    caplog.set_level(logging.WARNING)
    old, old_infos = belongings(pool._config.owner_file), pool.workers()
    running = asyncio.create_task(pool.run("w2", batch(1)))
    stream = asyncio.ensure_future(anext(aiter(pool.sample_events("w0"))))
    await asyncio.sleep(0.5)
    kill(old, "raylet")
    async with asyncio.timeout(NOTICED_S):
        for call in (running, stream):
            assert "its raylet ended" in await lost(call)
    assert "its raylet ended" in await lost(pool.ping("w1"))
    assert pool.workers() == old_infos
    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", init)
        assert "Ray does not start: no room for Ray" in await lost(pool.replace("w0"))
        assert "Ray does not start: no room for Ray" in await lost(pool.replace("w1"))
    assert pool.workers() == old_infos
    monkeypatch.setattr(ray, "init", init_late)
    async with asyncio.timeout(RECOVERED_S):
        infos = [*await asyncio.gather(pool.replace("w0"), pool.replace("w1"))]
        await lost(pool.ping("w2"))  # runs only after a replacement of its own
        infos.append(await pool.replace("w2"))
    await pool.ping("w2")
    assert pool.workers() == tuple(infos)
    assert not {info.incarnation for info in infos} & {info.incarnation for info in old_infos}
    assert (await pool.run("w0", batch(2))).incarnation == infos[0].incarnation
    assert sum(record.message == "Ray was started again" for record in caplog.records) == 1
    assert "Ray has not started and is started once more: Ray was too slow" in caplog.text
    assert is_gone(old)
    assert all(map(is_gone, abandoned))
    assert belongings(pool._config.owner_file).mark not in {old.mark, abandoned[0].mark}


Served = tuple[Terminal, subprocess.Popen[bytes], Serving]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A served pool, which the last test stops."""
    terminal = Terminal(tmp_path_factory.mktemp("served") / "home")
    with terminal.serve(*TOY_ON_RAY, "--workers", "2", timeout_s=90) as (process, serving):
        yield terminal, process, serving


def health_of(serving: Serving) -> Callable[[], bool]:
    channel = grpc.insecure_channel(serving.url.removeprefix("http://"))
    stub: Any = health_pb2_grpc.HealthStub(channel)

    def is_serving() -> bool:
        response = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    return is_serving


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_health_is_not_serving_within_ten_seconds_after_all_workers_hang_and_serving_after_their_replacement(
    served: Served,
) -> None:
    """The running operation completes on the replacements."""
    terminal, _, serving = served
    health = health_of(serving)
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
    with terminal.client() as service:
        training = service.create_lora_training_client(rank=8).result()
        training.train_step([datum], "cross_entropy").result(60)
        assert health()
        status = service.create_rest_client().get_pool_status(num_cycles=1).result(30)
        pids = [worker.pid for worker in status.workers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        running = training.forward_backward([datum], "cross_entropy")
        assert wait_until(lambda: not health(), 10.0) < 10.0
        wait_until(health, 30.0)
        running.result(30)
        training.optim_step(types.AdamParams()).result(60)
        training.train_step([datum], "cross_entropy").result(60)
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_served_pool_recovers_from_a_crash_of_ray_and_still_stops_at_a_signal(served: Served) -> None:
    terminal, process, _ = served
    terminal.train(RECOVERED_S)
    old = belongings(terminal.data_dir / RAY_FILE)
    kill(old, "gcs_server")
    new = successor(old, terminal.data_dir / RAY_FILE)
    terminal.train(RECOVERED_S)
    process.terminate()
    assert process.wait(30) == 0
    assert terminal.log.read_text().endswith("Stopped.\n")
    assert is_gone(old)
    assert is_gone(new)
