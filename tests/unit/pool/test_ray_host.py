"""A private Ray's file is read back, or ignored if malformed; a Ray that cannot be had is a sentence, at once.

What a start that is interrupted or fails leaves in a cluster.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import ray

from tests.support.batches import OWNER
from tests.support.toy_engine import toy_model_info
from tests.support.waiting import until
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import PoolStartError
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool import ray_head, ray_host, ray_pool, ray_starts
from workers.pool.factory import check_host
from workers.pool.ray_host import Belongings, RayHost
from workers.pool.ray_pool import RayPool
from workers.pool.version import running_version

MODELS = (PoolModel(name="m", path="m", num_workers=2),)


def test_belongings_are_read_as_they_were_written(tmp_path: Path) -> None:
    belongings = Belongings(mark="0a1b", folder="/tmp/tinkerpool-1234")
    belongings.write(tmp_path / "ray.json")
    assert Belongings.read(tmp_path / "ray.json") == belongings
    assert [path.name for path in tmp_path.iterdir()] == ["ray.json"]
    assert Belongings.read(tmp_path / "other.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"mark": "0a1b", "fol',
        "[]",
        '{"mark": "0a1b"}',
        '{"mark": "", "folder": null}',
        '{"mark": "0a1b", "folder": "/home/somebody"}',
    ],
)
def test_malformed_file_removes_no_process_or_folder(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ray.json"
    path.write_text(text)
    assert Belongings.read(path) is None
    assert "cannot be read, so nothing is removed" in caplog.text


async def test_a_cluster_address_where_nothing_listens_fails_at_once_and_says_how_to_start_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        host = RayHost(PoolConfig(kind="ray", models=MODELS, ray_address=address), lambda: None)
        with pytest.raises(PoolStartError, match=rf"no Ray listens at {address} .*`ray start --head --port="):
            await host.start()
        await host.stop()
        with pytest.raises(ConnectionError, match="no Ray listens at ray://"):
            await ray_head.check_head(f"ray://{address}")


async def test_a_server_that_never_replies_is_no_ray_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "CONNECT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ConnectionError, match=r"no Ray listens at .*\(no reply in 0.05 s\)"):
            await ray_head.check_head(f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv(ray_head.TLS_VARIABLE, "1")
        await ray_head.check_head(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_a_server_of_another_protocol_is_no_ray_at_once(reply: bytes) -> None:
    def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        with pytest.raises(ConnectionError, match=r"does not speak gRPC|reset"):
            await ray_head.check_head(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_server_of_grpc_and_an_address_that_is_rays_to_resolve_are_left_to_ray() -> None:
    await ray_head.check_head("auto")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await ray_head.check_head(f"127.0.0.1:{port}")
    await server.stop(0)


async def test_a_host_without_a_raylet_is_told_so_and_the_head_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(ray_host, "find_node_ids", set)  # this machine may have raylets of other tests
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    host = RayHost(PoolConfig(kind="ray", models=MODELS, ray_address=address), lambda: None)
    with pytest.raises(PoolStartError, match=rf"no raylet runs on it: .*`ray start --address={address} --num-cpus=0`"):
        await host.start()
    await host.stop()
    await server.stop(0)


@pytest.mark.parametrize(("reconnect", "refused_s_max"), [(None, 10.0), ("60", 10.0), ("62", 57.0), ("600", 595.0)])
def test_a_head_may_refuse_for_longer_if_the_operator_expects_it_back(
    reconnect: str | None, refused_s_max: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ray_head.RECONNECT_VARIABLE, raising=False)
    if reconnect is not None:
        monkeypatch.setenv(ray_head.RECONNECT_VARIABLE, reconnect)
    assert ray_head.refused_s_max() == refused_s_max


def test_a_head_that_is_silent_does_not_refuse() -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as silent:
        bound.bind(("127.0.0.1", 0))
        assert ray_head.is_refused(f"127.0.0.1:{bound.getsockname()[1]}")
        assert not ray_head.is_refused(f"127.0.0.1:{silent.getsockname()[1]}")


def test_the_models_and_gpus_of_a_cluster_are_not_looked_for_on_this_machine() -> None:
    config = PoolConfig(models=(PoolModel(name="big", path="nobody/nothing"),), device="cuda", num_gpus=1.0)
    with pytest.raises(PoolStartError, match="nobody/nothing is not in this machine's hub cache"):
        check_host(config)
    check_host(replace(config, ray_address="head:6379"))


@dataclass
class LeftActor:
    """The handle of a worker that an earlier coordinator has left in a cluster."""

    worker_id: str
    is_loaded: bool
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append(method)
            if method == "events":
                return self._no_events()
            reply: Future[Any] = Future()
            if method == "adopt":
                reply.set_result(True)
            elif method == "start" and self.is_loaded:
                reply.set_result(self._info(*arguments))
            return SimpleNamespace(future=lambda: reply)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

    def _info(self, incarnation: str) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=incarnation,
            model=toy_model_info(),
            pid=1,
            node="",
            num_slots=1,
            device="cpu",
            version=running_version(),
        )

    async def _no_events(self) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


class JoinedRay:
    """Stands in for `RayHost`: a cluster that this process has joined."""

    def __init__(self, *_: Any) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("end", "keeps", "ended"),
    [
        ("SIGTERM", True, set()),
        ("SIGTERM", False, {"w0", "w1"}),
        ("SIGINT", True, {"w0", "w1"}),
        ("time-out", True, {"w1"}),
        ("time-out", False, {"w0", "w1"}),
    ],
)
async def test_a_start_that_does_not_end_keeps_the_workers_that_it_has_adopted_if_a_stop_would(
    end: str, keeps: bool, ended: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"w0-left": LeftActor("w0", is_loaded=True), "w1-left": LeftActor("w1", is_loaded=False)}
    killed: list[str] = []

    def list_named(*, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": f"tinkerpool-{OWNER.pool_id}"} for name in left]

    # Patched: a cluster takes seconds to start, and its workers cannot be stopped while they load.
    monkeypatch.setattr(ray_pool, "RayHost", JoinedRay)
    monkeypatch.setattr(ray_starts, "Nodes", Mock)
    monkeypatch.setattr(ray_starts, "list_named_actors", list_named)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: left[name])
    monkeypatch.setattr(ray, "kill", lambda actor, *, no_restart: killed.append(actor.worker_id))
    config = PoolConfig(
        models=(PoolModel(name="warm", path="m"), PoolModel(name="loading", path="m")),
        ray_address="head:6379",
        keep_workers=keeps,
        start_timeout_s=0.1 if end == "time-out" else 600.0,
    )
    pool = RayPool(config)
    start = asyncio.create_task(pool.start(OWNER))
    await until(lambda: "events" in left["w0-left"].calls and "start" in left["w1-left"].calls)
    if end == "time-out":
        with pytest.raises(PoolStartError, match=r"w1 \(loading\) cannot start: it was not ready"):
            await start
    else:
        start.cancel()
        with suppress(asyncio.CancelledError):
            await start
    await pool.stop(is_final=end == "SIGINT")
    assert set(killed) == ended
