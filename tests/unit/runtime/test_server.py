"""The composition root, with a toy engine: keys, ready files, signals and failed starts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig, ServerConfig
from coordinator.server import LOCAL_KEY_NOTE, Server, StartError
from tests.support.toy_engine import ToyEngine
from tinkerpool.credentials import Credentials, credentials_file, read_credentials, write_credentials
from tinkerpool.serving import READY_FILE, Serving, running_pid
from tinkerpool.v1 import pool_pb2, pool_pb2_grpc
from workers.contract.protocols import Owner
from workers.pool.local import LocalPool

pytestmark = pytest.mark.usefixtures("default_sighup")


@dataclass
class Running:
    """A server in this process, and the lines that it printed."""

    server: Server
    task: asyncio.Task[None]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKERPOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "pool"


def make(data_dir: Path, lines: list[str], **options: Any) -> Server:
    config = ServerConfig(
        coordinator=CoordinatorConfig(data_dir=data_dir),
        grpc=GrpcConfig(port=options.pop("port", 0)),
        **options,
    )
    return Server(config, LocalPool({"w0": ToyEngine}), lines.append)


@pytest.fixture
async def start(data_dir: Path) -> AsyncIterator[Start]:
    tasks: list[asyncio.Task[None]] = []

    async def start_one(**options: Any) -> Running:
        lines: list[str] = []
        server = make(options.pop("data_dir", data_dir), lines, **options)
        running = Running(server, asyncio.create_task(server.run()), lines)
        tasks.append(running.task)
        async with asyncio.timeout(60):
            while not any("ready" in line for line in lines):
                if running.task.done():
                    await running.task
                await asyncio.sleep(0.01)
        return running

    yield start_one
    for task in tasks:
        if not task.done():
            await end(task)


async def end(task: asyncio.Task[None], signum: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)
    async with asyncio.timeout(60):
        await task


async def status(url: str, api_key: str) -> pool_pb2.GetPoolStatusResponse:
    async with grpc.aio.insecure_channel(url.removeprefix("http://")) as channel:
        stub = pool_pb2_grpc.PoolServiceStub(channel)
        metadata = (("authorization", f"Bearer {api_key}"),)
        return await stub.GetPoolStatus(pool_pb2.GetPoolStatusRequest(), metadata=metadata)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def stored() -> Credentials:
    credentials = read_credentials()
    assert credentials is not None
    return credentials


async def test_the_first_start_writes_a_key_for_this_user_only_and_its_hash_to_the_data_directory(
    start: Start, data_dir: Path
) -> None:
    running = await start()
    assert stored().url == running.url
    assert stat.S_IMODE(credentials_file().stat().st_mode) == 0o600
    assert len((await status(stored().url, stored().api_key)).workers) == 1
    secret = stored().api_key.split("_", 2)[2].encode()  # the secret may have a "_" of its own
    files = files_below(data_dir)
    assert files
    assert not any(secret in path.read_bytes() for path in files)
    assert not any(secret.decode() in line for line in running.lines)
    assert any(str(credentials_file()) in line for line in running.lines)


async def test_the_settings_of_the_tinker_sdk_are_printed_and_the_key_only_on_a_terminal(
    start: Start, data_dir: Path
) -> None:
    running = await start(http=HttpConfig(port=0))
    serving = Serving.read(data_dir / READY_FILE)
    assert serving is not None
    assert any(f"TINKER_BASE_URL={serving.http_url} " in line for line in running.lines)
    assert any(f"OPENAI_BASE_URL={serving.http_url}/v1 " in line for line in running.lines)
    assert not any(stored().api_key in line for line in running.lines)
    async with httpx.AsyncClient(base_url=serving.http_url, headers={"x-api-key": f"tml-{stored().api_key}"}) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        models = (await http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert [model["model_name"] for model in models] == ["toy"]
    await end(running.task)
    shown = await start(http=HttpConfig(port=0), is_key_shown=True)
    assert any(line.endswith(f"TINKER_API_KEY=tml-{stored().api_key}") for line in shown.lines)


async def test_a_later_start_keeps_the_key_and_updates_the_address(start: Start) -> None:
    first = await start()
    key = stored().api_key
    assert any(LOCAL_KEY_NOTE in line for line in first.lines)
    await end(first.task)
    second = await start()
    assert second.url != first.url
    assert (stored().url, stored().api_key, stored().note) == (second.url, key, LOCAL_KEY_NOTE)
    assert any(str(credentials_file()) in line and "key create" in line for line in second.lines)
    assert (await status(second.url, key)).epoch == 2


@pytest.mark.slow
async def test_a_lost_key_is_reported_and_replaced_only_on_request(start: Start) -> None:
    await end((await start()).task)
    elsewhere = Credentials(url="http://elsewhere:1", api_key="tp_of_another_pool")
    credentials_file().unlink()
    write_credentials(elsewhere)
    running = await start()
    assert any("--new-key" in line for line in running.lines)
    assert stored() == elsewhere
    await end(running.task)
    running = await start(is_new_key_wanted=True)
    assert (await status(running.url, stored().api_key)).epoch == 3
    assert credentials_file().with_name("credentials.1.json").exists()


@pytest.mark.slow
async def test_two_pools_of_one_user_keep_their_own_keys(start: Start, tmp_path: Path) -> None:
    keys = []
    for name in ("a", "b", "a", "b"):
        running = await start(data_dir=tmp_path / name)
        keys.append(stored().api_key)
        assert (await status(stored().url, stored().api_key)).epoch == len(keys) // 2 + len(keys) % 2
        await end(running.task)
    assert keys[:2] == keys[2:]


async def test_the_ready_files_exist_exactly_while_the_pool_serves(
    start: Start, data_dir: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "deep" / "ready.json"
    running = await start(ready_file=ready_file)
    for path in (ready_file, data_dir / READY_FILE):
        serving = Serving.read(path)
        assert serving is not None
        assert (serving.url, serving.pid, serving.models) == (running.url, os.getpid(), ("toy",))
    assert running_pid(data_dir) == os.getpid()
    await end(running.task)
    assert not ready_file.exists()
    assert not (data_dir / READY_FILE).exists()
    assert running_pid(data_dir) is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_stops_the_pool_and_waiting_clients_get_unavailable(
    start: Start, signum: signal.Signals
) -> None:
    running = await start()
    async with grpc.aio.insecure_channel(running.url.removeprefix("http://")) as channel:
        stub: Any = pool_pb2_grpc.PoolServiceStub(channel)
        metadata = (("authorization", f"Bearer {stored().api_key}"),)
        call = stub.WatchCycles(pool_pb2.WatchCyclesRequest(), metadata=metadata)
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.1)
        await end(running.task, signum)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert running.lines[-1] == "Stopped."


async def test_an_ignored_sighup_stays_ignored_as_nohup_wants_it(start: Start) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    running = await start()
    os.kill(os.getpid(), signal.SIGHUP)
    assert len((await status(running.url, stored().api_key)).workers) == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    await end(running.task)


async def test_a_second_pool_on_the_same_data_is_refused_and_the_first_serves_on(start: Start, data_dir: Path) -> None:
    running = await start()
    with pytest.raises(StartError, match=f"process {os.getpid()}"):
        await make(data_dir, []).run()
    assert Serving.read(data_dir / READY_FILE) is not None
    assert len((await status(running.url, stored().api_key)).workers) == 1
    running.task.cancel()  # the second server, in the same process, removed the signal handlers
    await asyncio.gather(running.task, return_exceptions=True)


async def test_a_database_that_is_missing_beside_its_folders_is_reported(start: Start, data_dir: Path) -> None:
    running = await start()
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)
    (data_dir / "tinkerpool.db").unlink()
    before = files_below(data_dir)
    with pytest.raises(StartError, match=r"tinkerpool\.db is missing .*tinkerpool restore"):
        await make(data_dir, []).run()
    assert files_below(data_dir) == before


async def test_a_port_in_use_is_reported_before_anything_is_started(data_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=str(port)):
            await make(data_dir, [], port=port).run()
    assert not files_below(data_dir)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_during_the_start_stops_the_pool_and_all_but_sigterm_do_for_good(
    data_dir: Path, signum: signal.Signals
) -> None:
    stops: list[bool] = []

    class SlowPool(LocalPool):
        async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
            os.kill(os.getpid(), signum)
            await asyncio.sleep(60)

        async def stop(self, *, is_final: bool = False) -> None:
            stops.append(is_final)

    config = ServerConfig(coordinator=CoordinatorConfig(data_dir=data_dir), grpc=GrpcConfig(port=0))
    async with asyncio.timeout(60):
        await Server(config, SlowPool({"w0": ToyEngine}), lambda line: None).run()
    assert running_pid(data_dir) is None
    assert stops == [signum != signal.SIGTERM]


async def test_the_cause_of_a_failed_start_is_reported(data_dir: Path) -> None:
    class BrokenPool(LocalPool):
        async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
            raise OSError("no such model")

    config = ServerConfig(coordinator=CoordinatorConfig(data_dir=data_dir), grpc=GrpcConfig(port=0))
    with pytest.raises(StartError, match="cannot start: no such model"):
        await Server(config, BrokenPool({"w0": ToyEngine}), lambda line: None).run()
    assert running_pid(data_dir) is None


async def test_a_fatal_error_ends_the_pool_with_that_error(start: Start) -> None:
    running = await start()
    # private: a fatal error cannot be caused on demand
    running.server._coordinator.core.failure.report(OSError("the disk is gone"))
    async with asyncio.timeout(60):
        with pytest.raises(OSError, match="the disk is gone"):
            await running.task
