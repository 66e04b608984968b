"""A pool that joins a Ray cluster of two nodes, both on this machine, and loses one of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from coordinator.cli.options import RAY_FILE
from tests.support.batches import OWNER, batch, request
from tests.support.serving import TOY_ON_RAY, Terminal
from tests.support.toy_engine import ToyEngine
from workers.contract.messages import ErrorCode, WorkerInfo
from workers.contract.protocols import Engine, EngineFactory, Owner, PoolFailed, PoolStartError, TakenOver, WorkerLost
from workers.contract.settings import EngineSettings, PoolConfig, PoolModel
from workers.pool import ray_head, ray_nodes, ray_starts
from workers.pool.processes import MARK_VARIABLE, Process, find_marked, kill_marked
from workers.pool.ray_nodes import Node
from workers.pool.ray_pool import RayPool
from workers.pool.version import running_version

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""A variable that a private pool of an earlier test has set in this process."""
NOTICED_S = 10.0
"""Seconds within which a lost worker must be detected: about 1 s, or 3 s if its node's Ray is lost too."""
REPLACED_S = 40.0
"""Seconds within which it must run on another node: 1.5 s on idle cores."""
ENDED_S = 20.0
"""Seconds within which a process must end."""
HEALTH_CHECK_MS = 20_000
"""Interval of Ray's checks, slower than its default, with which it would declare the node lost after only 12 s."""


@dataclass(frozen=True)
class Cluster:
    address: str
    head: str
    """The mark of the first node's processes."""
    second: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(f"127.0.0.1:{free_port()}", head=secrets.token_hex(8), second=secrets.token_hex(8))
    folder = tempfile.mkdtemp(prefix="tp-", dir="/tmp")  # a short path, because it contains Ray's sockets
    try:
        port, client_port = cluster.address.rpartition(":")[2], str(free_port())
        ports = ["--port", port, "--ray-client-server-port", client_port]
        start_node(cluster.head, "--head", *ports, "--temp-dir", folder, "--include-dashboard=false", "--no-monitor")
        start_node(cluster.second, "--address", cluster.address)
        yield cluster
    finally:
        for mark in (cluster.second, cluster.head):
            kill_marked(mark, 10.0)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(mark: str, *options: str) -> None:
    """Start a node with one CPU by `ray start`. Its processes outlive the command and have the mark."""
    size = ["--num-cpus", "1", "--object-store-memory", "80000000", "--dashboard-agent-listen-port", "0"]
    size += ["--include-log-monitor=false"]
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *size],
        env={
            **os.environ,
            MARK_VARIABLE: mark,
            LOOPBACK_ONLY: "1",
            "RAY_health_check_period_ms": str(HEALTH_CHECK_MS),
            "SPT_NOENV": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def drain_node(cluster: Cluster, node_id: str, *, seconds: int) -> None:
    """Let Ray announce that a node is preempted."""
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "preempted"]
    options = ["--address", cluster.address, "--node-id", node_id, "--deadline-remaining-seconds", str(seconds)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *reason, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def new_pool(cluster: Cluster, *, num_workers: int, **settings: Any) -> RayPool:
    return RayPool(
        PoolConfig(
            **{"engine": "tests.support.toy_engine:toy_factory"} | settings,
            models=(PoolModel(name="toy", path="toy", num_workers=num_workers),),
            num_cpus=0.5,
            start_timeout_s=60.0,
            ray_address=cluster.address,
        )
    )


@contextlib.contextmanager
def marked(mark: str) -> Iterator[list[Process]]:
    """Hold the processes of a node."""
    found = find_marked(mark)
    try:
        yield found
    finally:
        for process in found:
            process.close()


def is_on(mark: str, info: WorkerInfo) -> bool:
    """Return whether a worker's process has a node's mark. Both nodes have the same address."""
    with marked(mark) as found:
        return info.pid in {process.pid for process in found}


@pytest.mark.long
def test_serve_joins_a_cluster_with_nothing_but_its_token(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv(LOOPBACK_ONLY, raising=False)
    terminal = Terminal(tmp_path / "home")
    with terminal.serve(*TOY_ON_RAY, "--ray-address", cluster.address):
        assert not (terminal.data_dir / RAY_FILE).exists(), "a joined cluster is not the pool's to end"
        terminal.train()


@pytest.mark.long
async def test_a_waiting_worker_gets_a_node_that_accepts_connections_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    async def not_at_first(_: Node) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 2  # of the two nodes

    monkeypatch.setattr(ray_nodes, "_is_reachable", not_at_first)  # no link can be cut here
    monkeypatch.setattr(ray_starts, "PLACED_S", 0.5)
    pool = new_pool(cluster, num_workers=1)
    try:
        async with asyncio.timeout(REPLACED_S):  # and the worker has a minute
            await pool.start(OWNER)
        assert num_asked >= 4
    finally:
        await pool.stop()


def has_ended(pid: int, timeout_s: float = ENDED_S) -> bool:
    """Wait for the end of a process on this machine; return whether it came."""
    process = Process.hold(pid)
    if process is None:
        return True
    try:
        return process.has_ended(timeout_s)
    finally:
        process.close()


async def test_workers_that_a_stop_keeps_serve_the_next_coordinator_without_loading(cluster: Cluster) -> None:
    settings = {"keep_workers": True}
    first, second = (new_pool(cluster, num_workers=2, **settings) for _ in range(2))
    try:
        await first.start(OWNER)
        before = {info.worker_id: info for info in first.workers()}
        await first.run("w0", batch(1))
        await first.start_sample("w1", request("endless", max_tokens=10**9))
        await first.stop()
        await second.start(replace(OWNER, epoch=2))
        after = {info.worker_id: info for info in second.workers()}
        assert {info.pid for info in after.values()} == {info.pid for info in before.values()}
        assert all(after[worker_id].incarnation != before[worker_id].incarnation for worker_id in before)
        stale = await second.run("w0", batch(2))  # of epoch 1
        assert [result.error and result.error.code for result in stale.results] == [ErrorCode.OUT_OF_ORDER]
        fresh = await second.run("w0", replace(batch(3), epoch=2))
        assert fresh.incarnation == after["w0"].incarnation
        assert [result.error for result in fresh.results] == [None]
        await second.start_sample("w1", request("mine", max_tokens=1))
        assert (await anext(second.sample_events("w1"))).op_id == "mine", "samples of the last coordinator are dropped"
        await second.remove("w1")
        assert has_ended(after["w1"].pid)
    finally:
        await first.stop(is_final=True)
        await second.stop(is_final=True)
    assert has_ended(after["w0"].pid), "no worker outlives a stop that is final"


async def test_a_node_that_lacks_a_model_is_named_and_another_one_tried(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "the first node lacks the model"
    marker.touch()
    pool = new_pool(cluster, num_workers=1, engine="tests.integration.pool.test_ray_cluster:engine_of_some_nodes")
    pool._engines["w0"] = replace(pool._engines["w0"], model_path=str(marker))  # private: it is not a file of a model
    try:
        await pool.start(OWNER)
        [info] = pool.workers()
        lacking = marker.read_text()
        assert info.node_id != lacking, "both nodes have the same address"
        assert f"worker w0 cannot run on {info.node}: no model on {lacking}; another node is tried" in caplog.text
    finally:
        await pool.stop(is_final=True)


def engine_of_some_nodes(settings: EngineSettings) -> EngineFactory:
    """Return a factory of toy engines, which fails on the node where it is called first."""

    def make(incarnation: str) -> Engine:
        marker, node_id = Path(settings.model_path), ray.get_runtime_context().get_node_id()
        if not marker.read_text():
            marker.write_text(node_id)
        if marker.read_text() == node_id:
            raise OSError(f"no model on {node_id}")
        return ToyEngine(incarnation, name="toy")

    return make


@pytest.mark.long
async def test_a_coordinator_whose_workers_were_taken_over_ends_none_of_them(cluster: Cluster) -> None:
    pool = new_pool(cluster, num_workers=1)
    try:
        await pool.start(OWNER)
        [info] = pool.workers()
        actor = ray.get_actor(info.incarnation, f"tinkerpool-{OWNER.pool_id}")
        for epoch, notices in ((2, "by a call"), (4, "by its events")):
            terms, version = pool._starts.terms("w0"), running_version()  # private: there is one pool in a process
            assert ray.get(actor.adopt.remote(terms, version, epoch, f"w0-of-another-{epoch}"))
            if notices == "by its events":
                await asyncio.wait_for(pool._incarnation("w0")._ended, 30)
            with pytest.raises(TakenOver, match="another coordinator has taken over w0-"):
                await pool.ping("w0")
            with pytest.raises(TakenOver):
                await anext(aiter(pool.sample_events("w0")))
            await pool.stop(is_final=True)
            assert not has_ended(info.pid, 1.0)
            await pool.start(replace(OWNER, epoch=epoch + 1))
            assert [each.pid for each in pool.workers()] == [info.pid]
    finally:
        await pool.stop(is_final=True)


@pytest.mark.long
@pytest.mark.parametrize("difference", ["settings", "code", "owner"])
async def test_only_workers_of_equal_settings_and_code_are_adopted(
    cluster: Cluster, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_pool(cluster, num_workers=1, keep_workers=True)
    second = new_pool(cluster, num_workers=1, num_slots=5 if difference == "settings" else 0)
    try:
        await first.start(OWNER)
        [left] = first.workers()
        await first.stop()
        if difference == "code":
            monkeypatch.setattr(ray_starts, "running_version", lambda: "of yesterday")
            with pytest.raises(
                PoolStartError, match=r"on .*: it would run tinkerpool .*, and the coordinator runs of yesterday"
            ):
                await second.start(OWNER)
        else:
            await second.start(OWNER if difference == "settings" else Owner(pool_id="fedcba9876543210", epoch=1))
            [new] = second.workers()
            assert new.pid != left.pid
        if difference == "owner":
            await second.stop()
            assert not has_ended(left.pid, 0.0), "a pool ends no worker of another one"
            await first.start(OWNER)
            await first.stop(is_final=True)
        assert has_ended(left.pid)
    finally:
        await first.stop(is_final=True)
        await second.stop(is_final=True)


@pytest.mark.long
async def test_a_worker_that_hears_from_no_coordinator_ends_when_its_lease_does(cluster: Cluster) -> None:
    pool = new_pool(cluster, num_workers=1, keep_workers=True, lease_s=2.0)
    try:
        await pool.start(OWNER)
        [info] = pool.workers()
        for _ in range(6):
            await asyncio.sleep(0.5)
            await pool.ping("w0")  # renews it
        await pool.stop()
        assert has_ended(info.pid)
    finally:
        await pool.stop(is_final=True)


def test_workers_of_serve_outlive_a_kill_and_with_keep_workers_sigterm_but_no_down(
    cluster: Cluster, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path / "home")
    options = [*TOY_ON_RAY, "--ray-address", cluster.address, "--keep-workers"]
    num_lines = 0
    for last_end, end in ((None, "SIGTERM"), ("SIGTERM", "killed"), ("killed", "down")):
        with terminal.serve(*options) as (process, _):
            terminal.train()
            with terminal.client() as service:
                status = service.create_rest_client().get_pool_status(num_cycles=1).result(30)
            if end == "killed":
                process.kill()
            elif end == "SIGTERM":
                process.terminate()
            else:
                assert terminal.run("down").returncode == 0
            process.wait(ENDED_S)
        lines = terminal.log.read_text().splitlines()
        text, num_lines = "\n".join(lines[num_lines:]), len(lines)
        is_adopted = "was left by the last coordinator and goes on as" in text
        assert is_adopted == (last_end in ("SIGTERM", "killed"))
        assert ("loading kjv-2m" in text) != is_adopted
        [worker] = status.workers
        if end == "down":
            assert has_ended(worker.pid)
        else:
            assert not has_ended(worker.pid, 0.0)


async def test_worker_of_a_lost_node_is_replaced_on_another_before_ray_declares_the_node_lost(cluster: Cluster) -> None:
    pool = new_pool(cluster, num_workers=2)
    try:
        await pool.start(OWNER)
        [old] = [info for info in pool.workers() if is_on(cluster.second, info)]
        [other] = [info for info in pool.workers() if is_on(cluster.head, info)]
        assert (await pool.run(old.worker_id, batch(1))).incarnation == old.incarnation
        kill_marked(cluster.second, 10.0)
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(WorkerLost):
                await pool.ping(old.worker_id)
        assert all(node["Alive"] for node in ray.nodes()), (
            "Ray has declared the node lost already, so the test shows nothing"
        )
        for info in (old, other):  # Ray alternates between nodes, so it would place one of them on the lost node
            async with asyncio.timeout(REPLACED_S):
                new = await pool.replace(info.worker_id)
            assert is_on(cluster.head, new)
            assert (await pool.run(info.worker_id, batch(2))).incarnation == new.incarnation
    finally:
        await pool.stop()
    with marked(cluster.head) as left:
        assert left, "a pool that leaves a cluster does not end it"


@pytest.mark.long
async def test_a_worker_on_a_node_that_ray_drains_is_named_and_its_next_incarnation_starts_elsewhere(
    cluster: Cluster,
) -> None:
    with marked(cluster.second) as found:
        is_killed = not found
    if is_killed:  # by an earlier test
        start_node(cluster.second, "--address", cluster.address)
    pool = new_pool(cluster, num_workers=2)
    try:
        await pool.start(OWNER)
        assert await pool.leaving() == {}
        [old] = [info for info in pool.workers() if is_on(cluster.second, info)]
        [other] = [info for info in pool.workers() if is_on(cluster.head, info)]
        drain_node(cluster, old.node_id, seconds=30)
        [(worker_id, left_s)] = (await pool.leaving()).items()
        assert worker_id == old.worker_id
        assert 0.0 < left_s <= 30.0
        async with asyncio.timeout(REPLACED_S):
            await pool.prepare(old.worker_id)
        assert (await pool.run(old.worker_id, batch(1))).incarnation == old.incarnation, "it works on"
        new = await pool.replace(old.worker_id)
        assert is_on(cluster.head, new)
        assert (await pool.run(old.worker_id, batch(2))).incarnation == new.incarnation
        assert await pool.leaving() == {}
        again = await pool.replace(other.worker_id)  # Ray alternates between nodes
        assert is_on(cluster.head, again), "nothing is placed on a node that is drained"
    finally:
        await pool.stop()
        kill_marked(cluster.second, 10.0)


@pytest.mark.long
async def test_pool_fails_for_good_when_the_head_refuses_connections_for_too_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_head, "REFUSED_S", 1.0)
    pool = new_pool(cluster, num_workers=1)
    try:
        await pool.start(OWNER)
        with marked(cluster.head) as found:
            [gcs] = [process for process in found if process.name == "gcs_server"]
            gcs.kill()
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(WorkerLost, match=r"the head of Ray's cluster, .*, has refused connections"):
                await anext(aiter(pool.sample_events("w0")))
        with pytest.raises(PoolFailed, match="has refused connections for 1 s"):
            await pool.replace("w0")
    finally:
        await pool.stop()
