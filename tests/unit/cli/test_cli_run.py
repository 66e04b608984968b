"""`serve`, `up`, `down` and `logs` as processes, with a toy engine: output, exit codes and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.base_models import resolve_model
from coordinator.cli import process
from scripts.pool_process import ROOT
from tests.support.command_line import Done
from tests.support.doors.certificates import make_certificate
from tests.support.serving import TOY, TOY_ON_RAY, Terminal
from tinkerpool.cli.main import main
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import FILE_NAME
from tinkerpool.serving import READY_FILE, running_pid
from workers.contract.settings import SHIPPED_MODELS_DIR

pytestmark = pytest.mark.slow


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "home")
    yield terminal
    for folder in terminal.home.glob("*/"):
        if running_pid(folder) is not None:
            terminal.run("down", "--data-dir", str(folder))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal beside which one pool runs, for the tests of the group `cli_run`."""
    terminal = Terminal(tmp_path_factory.mktemp("served") / "home")
    with terminal.serve(*TOY):
        yield terminal


Here = Callable[..., Done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run a command in this process, with this home; a process takes longer to start than most commands."""

    def run(home: Path, *arguments: str, **variables: str) -> Done:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKERPOOL_")}
        with monkeypatch.context() as patch:
            # Not the environment of the C library: a change can crash threads that read it, such as those of gRPC.
            patch.setattr(os, "environ", kept | {"TINKERPOOL_HOME": str(home), **variables})
            patch.setattr(sys, "argv", ["tinkerpool", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        assert isinstance(ended.value.code, int | None)
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run


def test_every_command_finds_the_pool_that_up_started_on_a_data_directory_of_its_own(
    terminal: Terminal, here: Here, tmp_path: Path
) -> None:
    data_dir = terminal.home / "a pool"
    up = terminal.run("up", *TOY, "--data-dir", str(data_dir))
    assert up.returncode == 0, up.stderr
    assert "tinkerpool is ready at http://127.0.0.1:" in up.stdout
    assert "import tinkerpool" in up.stdout
    assert f"tinkerpool down --data-dir '{data_dir}'" in up.stdout

    status = here(terminal.home, "status")
    assert status.code == 0, status.err
    assert "w0" in status.out
    for named in ((), ("--data-dir", str(data_dir))):
        for command in (("usage",), ("key", "list"), ("doctor",), ("logs",)):
            done = here(terminal.home, *command, *named)
            assert done.code == 0, done.err
    assert here(terminal.home, "backup", str(tmp_path / "backup")).code == 0

    again = here(terminal.home, "up", *TOY, "--data-dir", str(data_dir))
    assert (again.code, again.err.count("\n")) == (1, 1)
    assert "a pool is already running at http://127.0.0.1:" in again.err

    log = here(terminal.home, "logs").out
    assert "tinkerpool is ready at" in log
    key = json.loads((terminal.home / FILE_NAME).read_text())["api_key"]
    assert key not in log + up.stdout + up.stderr

    down = here(terminal.home, "down")
    assert (down.code, down.out.startswith("Stopped")) == (0, True), down.err
    assert running_pid(data_dir) is None
    assert here(terminal.home, "logs", "-n", "1").out == "Stopped.\n"
    refused = [here(terminal.home, command) for command in ("status", "down")]
    assert refused[0] == refused[1]
    assert refused[0].code == 1
    assert f"start it with `tinkerpool up --data-dir '{data_dir}'`" in refused[0].err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_exit_code_0_after_a_signal(terminal: Terminal, here: Here, signum: signal.Signals) -> None:
    with terminal.serve(*TOY) as (process, serving):
        assert serving.pid == process.pid
        assert here(terminal.home, "usage").out.startswith("Nothing has been used yet.\n")
        process.send_signal(signum)
        assert process.wait(60) == 0
    lines = terminal.log.read_text().splitlines()
    assert lines[-1] == "Stopped."
    assert f"tinkerpool is ready at {serving.url}" in lines
    assert not (terminal.data_dir / READY_FILE).exists()


@contextlib.contextmanager
def at_a_terminal(terminal: Terminal, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `tinkerpool serve` at a pseudoterminal. Yields the pool, which is ready, and the terminal's own end."""
    ours, its = pty.openpty()
    ready_file = terminal.home / "ready.json"
    with subprocess.Popen(
        [sys.executable, "-m", "tinkerpool.cli", "serve", *options, "--ready-file", str(ready_file)],
        env=terminal.environment,
        cwd=ROOT,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    ) as pool:
        os.close(its)
        os.set_blocking(ours, False)
        try:
            while not ready_file.exists():
                with contextlib.suppress(BlockingIOError):
                    os.read(ours, 1 << 16)
                assert pool.poll() is None
                time.sleep(process.POLL_S)
            yield pool, ours
        finally:
            pool.kill()


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("options", [TOY, pytest.param(TOY_ON_RAY, marks=[pytest.mark.ray, pytest.mark.long])])
def test_a_closed_terminal_stops_the_pool_in_order_and_nothing_is_left_to_replay(
    terminal: Terminal, options: tuple[str, ...]
) -> None:
    with at_a_terminal(terminal, *options) as (pool, ours):
        terminal.train()
        os.close(ours)
        for _ in range(2):  # the shell sends one, the kernel another one
            os.killpg(pool.pid, signal.SIGHUP)
        assert pool.wait(60) == 0
    assert not (terminal.data_dir / READY_FILE).exists()
    with contextlib.closing(sqlite3.connect(terminal.data_dir / "tinkerpool.db")) as database:
        [operations] = database.execute("SELECT COUNT(*) FROM operations").fetchone()
        [not_in_a_snapshot] = database.execute("SELECT COUNT(*) FROM payloads").fetchone()
    assert (operations, not_in_a_snapshot) == (2, 0)


def test_up_prints_the_cause_if_a_pool_does_not_start(terminal: Terminal) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        up = terminal.run("up", *TOY, "--port", port)
    assert up.returncode == 1
    assert f"cannot listen on port {port}" in up.stderr
    assert "Traceback" not in up.stderr


def processes_of(terminal: Terminal) -> set[int]:
    """Return the processes that were started from a terminal and have not ended."""
    mark, found = f"TINKERPOOL_HOME={terminal.home}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


@contextlib.contextmanager
def waiting_up(terminal: Terminal) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run an `up` that waits for a cluster whose head never replies; yield it, and the pool that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        up = subprocess.Popen(
            [sys.executable, "-m", "tinkerpool.cli", "up", *TOY_ON_RAY, "--ray-address", address],
            env=terminal.environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert up.stderr is not None
        with up.stderr:
            silent.settimeout(60)
            with silent.accept()[0]:
                [pool] = processes_of(terminal) - {up.pid}
                yield up, pool


def test_up_on_a_cluster_address_where_nothing_listens_says_so_and_leaves_no_process(terminal: Terminal) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        up = terminal.run("up", *TOY_ON_RAY, "--ray-address", address)
    assert up.returncode == 1
    assert f"no Ray listens at {address}" in up.stderr
    assert "`ray start --head --port=" in up.stderr
    assert not processes_of(terminal)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_up_that_is_interrupted_while_it_waits_leaves_no_process(terminal: Terminal, signum: signal.Signals) -> None:
    with waiting_up(terminal) as (up, _):
        up.send_signal(signum)
        assert (up.wait(60), up.stderr and up.stderr.read()) == (
            1,
            "Error: interrupted: the pool that was starting was stopped\n",
        )
    assert not processes_of(terminal)


def test_a_second_ctrl_c_ends_a_pool_that_does_not_stop(terminal: Terminal) -> None:
    with waiting_up(terminal) as (up, pool):
        os.kill(pool, signal.SIGSTOP)
        up.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            up.wait(3 * process.POLL_S)
        up.send_signal(signal.SIGINT)
        assert up.wait(process.STOP_TIMEOUT_S / 2) == 1
    assert not processes_of(terminal)


STOPS_SLOWLY = """
import asyncio, sys
from pathlib import Path
from coordinator.runtime.data_dir import DataDirLock
from coordinator.server import _Stopping

async def serve():
    lock, stopping = DataDirLock(Path(sys.argv[1])), _Stopping()
    with stopping.signals():
        print("ready", flush=True)
        await stopping.wait()
        print("stopping", flush=True)
        await asyncio.sleep(1.0)
        print("clean", flush=True)
    lock.release()

asyncio.run(serve())
"""
"""A pool's process, as far as its signals and its lock go."""


def test_a_repeated_down_waits_for_the_clean_stop_that_the_first_one_began(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPS_SLOWLY, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout is not None
        assert pool.stdout.readline() == "ready\n"
        with pytest.raises(CliError, match="has not stopped after 0 s"):
            process.stop(tmp_path, 0.3)
        ended = threading.Thread(target=pool.wait)  # a zombie would look alive
        ended.start()
        assert process.stop(tmp_path, 60.0) == pool.pid
        ended.join()
        assert (pool.returncode, pool.stdout.read()) == (0, "stopping\nclean\n")


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_that_closes_during_a_stop_does_not_kill_the_pool(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-c", STOPS_SLOWLY, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout is not None
        assert pool.stdout.readline() == "ready\n"
        pool.send_signal(signum)
        assert pool.stdout.readline() == "stopping\n"
        pool.send_signal(signal.SIGHUP)
        assert (pool.wait(60), pool.stdout.read()) == (0, "clean\n")


@pytest.mark.parametrize(
    ("command", "options", "sentence"),
    [
        ("up", ["--model", "no-such-model"], "no model 'no-such-model': give a Hugging Face directory that exists"),
        ("serve", ["--model", "no-such-model"], "no model 'no-such-model': give a Hugging Face directory that exists"),
        ("serve", ["--model", "tests"], "tests is no model directory: there is no config.json in it"),
        ("serve", ["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, and without TLS"),
        ("serve", ["--cycle-tokens", "0"], "--cycle-tokens takes a whole number from 1 up, or auto; got '0'"),
        ("serve", ["--disk-free-min", "much"], "--disk-free-min: it takes a whole number, 0 or more; KiB, MiB, GiB"),
        ("serve", ["--cycle-tokens", "many"], "--cycle-tokens takes a whole number from 1 up, or auto; got 'many'"),
        ("serve", ["--otlp-endpoint", "localhost:4318"], "the OTLP endpoint must be http:// or https:// with a host"),
        ("serve", ["--tls-cert", "x"], "TLS needs both a certificate and its key"),
        ("serve", ["--model", "a=kjv-2m", "--model", "a=kjv-2m"], "each model needs a name of its own"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence_before_anything_starts(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: list[str], sentence: str
) -> None:
    # Patched, so that a command which is not refused fails here instead of running a pool.
    monkeypatch.setattr(asyncio, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    code, _, error = here(tmp_path, command, *TOY, *options)
    assert code == 1
    assert error.startswith(f"Error: {sentence}"), error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_start_lacks_is_refused_in_one_sentence_before_anything_starts(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "file").write_text("x")
    model = tmp_path / "model"
    shutil.copytree(SHIPPED_MODELS_DIR / "kjv-2m", model)
    (model / "tokenizer.json").unlink()
    missing = tmp_path / "no.pem"
    home, before = tmp_path / "home", sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        cases = (
            (["--data-dir", str(tmp_path / "file")], f"{tmp_path / 'file'} is a file, and the data directory a folder"),
            (["--data-dir", str(tmp_path / "file" / "pool")], f"{tmp_path / 'file'} is a file, and the data directory"),
            (["--port", port], f"cannot listen on port {port} of 127.0.0.1: address already in use"),
            (["--http-port", port], f"cannot listen on port {port} of 127.0.0.1: address already in use"),
            (["--tls-cert", str(missing), "--tls-key", str(missing)], f"cannot read {missing}: no such file"),
            (["--model", str(model)], f"{model} is no complete model directory: there is no tokenizer"),
            (["--model", "nobody/nothing"], "the model nobody/nothing is not in this machine's hub cache"),
            (["--device", "cuda"], "workers on cuda need a GPU: "),
            (["--otlp-endpoint", "http://localhost:4318"], "traces need more than a pool"),
        )
        monkeypatch.delitem(sys.modules, "coordinator.observe.traces", raising=False)
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # installed where tests run
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there is a GPU
        for command in ("up", "serve"):
            for options, sentence in cases:
                code, out, error = here(home, command, *TOY, *options)
                assert (code, out, error.count("\n")) == (1, "", 1), error
                assert error.startswith(f"Error: {sentence}"), error
    monkeypatch.setattr(os, "access", lambda *_: False)  # patched, because root may write everywhere
    assert f"Error: this user may not write to {tmp_path}" in here(home, "up", *TOY).err
    assert sorted(tmp_path.rglob("*")) == before


def test_up_says_each_stage_with_its_time_also_in_a_pipe(terminal: Terminal) -> None:
    up = terminal.run("up", *TOY, "--log-level", "error")
    assert up.returncode == 0, up.stderr
    first, *lines = up.stdout.splitlines()
    assert first == f"Starting a pool: kjv-2m on 1 worker (local); data in {terminal.data_dir}"
    stages = [re.fullmatch(r" *(\d+\.\d) s  (.*)", line) for line in lines[:5]]
    assert [stage[2] for stage in stages if stage] == [
        "loading libraries",
        "opening the data",
        "loading the base models of w0",
        "recovering what was acknowledged",
        "ready",
    ]
    times = [float(stage[1]) for stage in stages if stage]
    assert times == sorted(times)
    assert "\x1b" not in up.stdout + up.stderr


@pytest.mark.long
def test_after_the_second_pool_goes_down_commands_and_programs_use_the_first_until_it_comes_back(
    terminal: Terminal, here: Here
) -> None:
    first, second = terminal.home / "first", terminal.home / "second"
    program = "import tinkerpool; print(tinkerpool.ServiceClient().get_server_capabilities().version)"
    for data_dir in (first, second):
        up = terminal.run("up", *TOY, "--data-dir", str(data_dir))
        assert up.returncode == 0, up.stderr
    down = here(terminal.home, "down")
    assert down.out.startswith("Stopped")
    assert f"on {first}. Commands and programs that name no pool mean it" in " ".join(down.err.split())

    status = here(terminal.home, "status")
    assert status.code == 0, status.err
    assert status.err.startswith(
        f"Note: the pool in use, on {second}, does not run: using the one at http://127.0.0.1:"
    )
    ran = terminal.python("-c", program)
    assert ran.returncode == 0, ran.stderr
    assert f"the pool in use, on {second}, does not run" in ran.stderr
    refused = here(terminal.home, "down")
    assert (refused.code, f"name one that runs: --data-dir {first}" in refused.err) == (1, True)
    assert running_pid(first) is not None

    assert terminal.run("up", *TOY, "--data-dir", str(second)).returncode == 0
    status = here(terminal.home, "status")
    assert (status.code, status.err) == (0, "")
    assert here(terminal.home, "use", str(first)).code == 0
    assert here(terminal.home, "down").code == 0
    assert (running_pid(first), running_pid(second) is None) == (None, False)


@pytest.mark.xdist_group("cli_run")
def test_a_new_tenants_key_is_accepted_until_it_is_revoked(served: Terminal, here: Here) -> None:
    key = here(served.home, "key", "create", "alice").out.strip()
    assert here(served.home, "usage", TINKERPOOL_API_KEY=key).code == 0
    refused = here(served.home, "key", "list", TINKERPOOL_API_KEY=key)
    assert (refused.code, "needs an administrator's key" in refused.err) == (1, True)
    tenants = [line.split()[1] for line in here(served.home, "key", "list").out.splitlines()[2:]]
    assert tenants == ["alice", "default"], "the newest first"
    assert here(served.home, "key", "revoke", key).code == 0
    refused = here(served.home, "usage", TINKERPOOL_API_KEY=key)
    assert (refused.code, "refused the API key" in refused.err) == (1, True)
    last = here(served.home, "key", "revoke", json.loads((served.home / FILE_NAME).read_text())["api_key"])
    assert (last.code, "no administrator's key" in last.err) == (1, True)
    log = served.log.read_text()
    assert key.split("_", 2)[2] not in log  # the secret may have a "_" of its own


@pytest.mark.xdist_group("cli_run")
def test_the_pools_own_key_is_rotated_where_the_pool_wrote_it_and_a_tenant_comes_and_goes(
    served: Terminal, here: Here
) -> None:
    file = served.home / FILE_NAME
    old = json.loads(file.read_text())
    assert here(served.home, "key", "rotate", "--grace", "0").code == 0
    new = json.loads(file.read_text())
    assert (new["url"], new["note"]) == (old["url"], old["note"])
    assert new["api_key"] != old["api_key"]
    assert here(served.home, "usage", TINKERPOOL_API_KEY=old["api_key"]).code == 1
    key = here(served.home, "key", "create", "carol", "--role", "read-only", "--expires", "1h").out.strip()
    assert here(served.home, "checkpoint", "list", TINKERPOOL_API_KEY=key).code == 0
    assert here(served.home, "tenant", "suspend", "carol", "--reason", "a test").code == 0
    refused = here(served.home, "checkpoint", "list", TINKERPOOL_API_KEY=key)
    assert (refused.code, "suspended (a test)" in refused.err) == (1, True)
    assert here(served.home, "tenant", "resume", "carol").code == 0
    assert here(served.home, "checkpoint", "list", TINKERPOOL_API_KEY=key).code == 0
    assert here(served.home, "tenant", "delete", "carol", "--yes").code == 0
    refused = here(served.home, "checkpoint", "list", TINKERPOOL_API_KEY=key)
    assert (refused.code, "is being deleted" in refused.err) == (1, True)
    audit = here(served.home, "audit", "--subject", "carol", "--act", "tenant").out
    assert all(f"tenant.{act}" in audit for act in ("create", "suspend", "resume", "delete")), audit


@pytest.mark.xdist_group("cli_run")
def test_watch_ends_quietly_at_ctrl_c(served: Terminal) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "tinkerpool.cli", "watch"],
        env=served.environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stderr is not None
    assert watch.stderr.readline().startswith("Watching http://127.0.0.1:")
    watch.send_signal(signal.SIGINT)
    assert (watch.wait(60), watch.stderr.read()) == (0, "\n")
    watch.stderr.close()


def test_programs_and_commands_on_the_machine_of_a_pool_with_tls_need_no_option(
    terminal: Terminal, here: Here, tmp_path: Path
) -> None:
    cert, key = make_certificate(tmp_path, "DNS:pool.example.org")
    with terminal.serve(*TOY, "--tls-cert", str(cert), "--tls-key", str(key)) as (_, serving):
        assert serving.url.startswith("https://127.0.0.1:")
        for named in ((), ("--data-dir", str(terminal.data_dir)), ("--url", serving.url)):
            status = here(terminal.home, "status", *named)
            assert status.code == 0, status.err
        program = "import tinkerpool; print(tinkerpool.ServiceClient().get_server_capabilities().version)"
        assert terminal.python("-c", program).returncode == 0
        stranger = here(tmp_path / "elsewhere", "status", "--url", serving.url, "--api-key", "tp_x")
        assert stranger.code == 1
        assert f"the certificate of {serving.url} is not trusted on this machine" in stranger.err


def test_logs_follow_prints_new_lines(terminal: Terminal, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.data_dir.mkdir(parents=True)
    log = terminal.data_dir / process.LOG_FILE
    log.write_text("one\ntwo\nthree\n")
    # `tail` sleeps when it has read all lines: the next line is written then
    monkeypatch.setattr(time, "sleep", lambda _: log.write_text(log.read_text() + "four\n"))
    lines = process.tail(terminal.data_dir, 2, follow=True)
    assert [next(lines) for _ in range(3)] == ["two\n", "three\n", "four\n"]
    assert "there is no log at" in here(terminal.home, "logs", "--data-dir", str(terminal.home)).err


def test_a_model_has_the_operators_name_or_that_of_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder), 2).name == "Tiny-1B"
    assert resolve_model(f"mine={folder}", 1).name == "mine"
    assert resolve_model(f"mine={folder}", 1).path == str(folder)
    shipped = resolve_model("kjv-2m", 1)
    assert (shipped.name, shipped.path) == ("kjv-2m", str(SHIPPED_MODELS_DIR / "kjv-2m"))
    assert resolve_model("Qwen/Qwen3-0.6B", 1).path == "Qwen/Qwen3-0.6B"
