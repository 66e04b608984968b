"""`serve`, `up`, `down` and `logs` as processes, with a toy engine: output, exit codes and files."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.base_models import resolve_model
from coordinator.cli import process
from coordinator.cli.process import running_pid
from coordinator.serving import READY_FILE
from tests.support.doors.certificates import make_certificate
from tests.support.serving import ROOT, TOY, Terminal
from tinkerpool.credentials import FILE_NAME
from workers.contract.settings import SHIPPED_MODELS_DIR

pytestmark = pytest.mark.slow


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "home")
    yield terminal
    if running_pid(terminal.data_dir) is not None:
        terminal.run("down")


def test_up_starts_a_pool_that_status_finds_and_down_stops(terminal: Terminal) -> None:
    up = terminal.run("up", *TOY)
    assert up.returncode == 0, up.stderr
    assert "tinkerpool is ready at http://127.0.0.1:" in up.stdout
    assert "import tinkerpool" in up.stdout

    status = terminal.run("status")
    assert status.returncode == 0, status.stderr
    assert "w0" in status.stdout

    again = terminal.run("up", *TOY)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "a pool is already running at http://127.0.0.1:" in again.stderr

    log = terminal.run("logs")
    assert "tinkerpool is ready at" in log.stdout
    key = json.loads((terminal.home / FILE_NAME).read_text())["api_key"]
    assert key not in log.stdout + up.stdout + up.stderr

    down = terminal.run("down")
    assert (down.returncode, down.stdout.startswith("Stopped")) == (0, True), down.stderr
    assert running_pid(terminal.data_dir) is None
    assert terminal.run("logs", "-n", "1").stdout == "Stopped.\n"

    assert terminal.run("status").stderr.startswith("Error: no pool is running at http://127.0.0.1:")
    down = terminal.run("down")
    assert down.returncode == 1
    assert down.stderr == f"Error: no pool is running on {terminal.data_dir}; `tinkerpool up` starts one\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_exit_code_0_after_a_signal(terminal: Terminal, signum: signal.Signals) -> None:
    with terminal.serve(*TOY) as (process, serving):
        assert serving.pid == process.pid
        assert terminal.run("usage").stdout == "Nothing has been used yet.\n"
        process.send_signal(signum)
        assert process.wait(20) == 0
    lines = (terminal.home / "serve.out").read_text().splitlines()
    assert lines[-1] == "Stopped."
    assert f"tinkerpool is ready at {serving.url}" in lines
    assert not (terminal.data_dir / READY_FILE).exists()


def test_up_prints_the_cause_if_a_pool_does_not_start(terminal: Terminal) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        up = terminal.run("up", *TOY, "--port", port)
    assert up.returncode == 1
    assert f"cannot listen on port {port}" in up.stderr
    assert "Traceback" not in up.stderr


@pytest.mark.parametrize(
    ("command", "options", "sentence"),
    [
        ("up", ["--model", "no-such-model"], "no model 'no-such-model': give a Hugging Face directory that exists"),
        ("serve", ["--model", "no-such-model"], "no model 'no-such-model': give a Hugging Face directory that exists"),
        ("serve", ["--model", "tests"], "tests is no model directory: there is no config.json in it"),
        ("serve", ["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, and without TLS"),
        ("serve", ["--cycle-tokens", "0"], "--cycle-tokens takes a whole number from 1 up, or auto; got '0'"),
        ("serve", ["--cycle-tokens", "many"], "--cycle-tokens takes a whole number from 1 up, or auto; got 'many'"),
        ("serve", ["--tls-cert", "x"], "TLS needs both a certificate and its key"),
        ("serve", ["--model", "a=kjv-2m", "--model", "a=kjv-2m"], "each model needs a name of its own"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence_before_anything_starts(
    terminal: Terminal, command: str, options: list[str], sentence: str
) -> None:
    done = terminal.run(command, *TOY, *options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not terminal.data_dir.exists()


def test_a_new_tenants_key_is_accepted_until_it_is_revoked(terminal: Terminal) -> None:
    with terminal.serve(*TOY):
        key = terminal.run("key", "create", "alice").stdout.strip()
        assert terminal.run("usage", TINKERPOOL_API_KEY=key).returncode == 0
        refused = terminal.run("key", "list", TINKERPOOL_API_KEY=key)
        assert (refused.returncode, "needs an administrator's key" in refused.stderr) == (1, True)
        assert [line.split()[1] for line in terminal.run("key", "list").stdout.splitlines()[2:]] == ["default", "alice"]
        assert terminal.run("key", "revoke", key).returncode == 0
        refused = terminal.run("usage", TINKERPOOL_API_KEY=key)
        assert (refused.returncode, "refused the API key" in refused.stderr) == (1, True)
        last = terminal.run("key", "revoke", json.loads((terminal.home / FILE_NAME).read_text())["api_key"])
        assert (last.returncode, "the last administrator's key" in last.stderr) == (1, True)
    log = (terminal.home / "serve.out").read_text()
    assert key.split("_", 2)[2] not in log  # the secret may have a "_" of its own


def test_watch_ends_quietly_at_ctrl_c(terminal: Terminal) -> None:
    with terminal.serve(*TOY):
        watch = subprocess.Popen(
            [sys.executable, "-m", "tinkerpool.cli", "watch"],
            env=terminal.environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watch.stderr is not None
        assert watch.stderr.readline().startswith("Watching http://127.0.0.1:")
        watch.send_signal(signal.SIGINT)
        assert (watch.wait(20), watch.stderr.read()) == (0, "\n")
        watch.stderr.close()


def test_a_pool_with_tls_serves_clients_that_trust_its_certificate(terminal: Terminal, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with terminal.serve(*TOY, "--tls-cert", str(cert), "--tls-key", str(key)) as (_, serving):
        assert serving.url.startswith("https://127.0.0.1:")
        status = terminal.run("status")
        assert status.returncode == 1
        assert f"the certificate of {serving.url} is not trusted on this machine" in status.stderr
        status = terminal.run("status", GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=str(cert))
        assert status.returncode == 0, status.stderr


def test_logs_follow_prints_new_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.data_dir.mkdir(parents=True)
    log = terminal.data_dir / process.LOG_FILE
    log.write_text("one\ntwo\nthree\n")
    # `tail` sleeps when it has read all lines: the next line is written then
    monkeypatch.setattr(time, "sleep", lambda _: log.write_text(log.read_text() + "four\n"))
    lines = process.tail(terminal.data_dir, 2, follow=True)
    assert [next(lines) for _ in range(3)] == ["two\n", "three\n", "four\n"]
    assert "there is no log at" in terminal.run("logs", "--data-dir", str(terminal.home / "other")).stderr


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
