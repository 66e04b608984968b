"""Which pool a command means: one rule, the same options and the same message for every command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from coordinator.base.config import GrpcConfig
from tests.support.doors.certificates import make_certificate
from tests.support.doors.door_thread import open_door
from tests.support.doors.fake_service import KEY, FakeService
from tinkerpool.cli.app import build
from tinkerpool.cli.finding import DataDirOption, KeyOption, UrlOption, find_place, find_target
from tinkerpool.cli.main import main
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import (
    Certificate,
    ClientCertificate,
    Credentials,
    credentials_file,
    home,
    write_credentials,
)
from tinkerpool.serving import READY_FILE, Serving
from tinkerpool.v1 import admin_pb2

START = {"serve", "up", "restore"}
"""They make a pool, and find none."""
FILES = {"down", "logs", "backup", "doctor"}
"""They need a data directory; all others call a pool."""
CALLS = (
    ("status",),
    ("watch",),
    ("usage",),
    ("audit",),
    ("adapter", "list"),
    ("checkpoint", "list"),
    ("key", "list"),
    ("tenant", "list"),
)
ON_FILES = (("down",), ("logs",), ("doctor",), ("backup", "new"))

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERPOOL_HOME", str(tmp_path / "home"))
    for name in ("TINKERPOOL_BASE_URL", "TINKERPOOL_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that fails; return its message."""

    def run_one(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tinkerpool", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        return capsys.readouterr().err

    return run_one


@pytest.fixture
def pools(tmp_path: Path) -> tuple[Path, Path]:
    """Data directories of two pools that were started on this machine: the last one is the second."""
    found = tmp_path / "first", tmp_path / "second"
    for number, data_dir in enumerate(found, 1):
        data_dir.mkdir()
        url = f"http://127.0.0.1:{number}"
        write_credentials(Credentials(url=url, api_key=f"tp_{number}", data_dir=str(data_dir)))
        Serving(url=url, pid=1, data_dir=str(data_dir), models=()).write(data_dir / READY_FILE)
    return found


def commands() -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield each command with the help text of each of its options."""

    def walk(command: object, path: str) -> Iterator[tuple[str, dict[str, str | None]]]:
        children = getattr(command, "commands", {})
        for name, child in children.items():
            yield from walk(child, f"{path} {name}".strip())
        if not children:
            yield path, {param.opts[0]: getattr(param, "help", None) for param in command.params}  # type: ignore[attr-defined]

    yield from walk(typer.main.get_command(build()), "")


def test_every_command_has_the_same_options_that_name_a_pool() -> None:
    def help_of(option: object) -> str:
        return str(option.__metadata__[0].help)  # type: ignore[attr-defined]

    named = {"--data-dir": help_of(DataDirOption), "--url": help_of(UrlOption), "--api-key": help_of(KeyOption)}
    found = dict(commands())
    assert found.keys() > FILES | START
    for name in found.keys() - START - {"version"}:
        wanted = {"--data-dir"} if name in FILES else named.keys()
        assert {option: found[name].get(option) for option in wanted} == {option: named[option] for option in wanted}


def test_the_first_of_option_variable_memory_and_default_names_the_pool(
    pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pools
    place = find_place(None)
    assert (place.data_dir, place.url) == (second, "http://127.0.0.1:2")
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "127.0.0.1:1")
    assert find_place(None).data_dir == first
    assert find_place(None, "http://127.0.0.1:2").data_dir == second
    assert find_place(second).data_dir == second
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://elsewhere:7600")
    assert find_place(None).data_dir is None
    monkeypatch.delenv("TINKERPOOL_BASE_URL")
    for file in home().iterdir():
        file.unlink()
    assert find_place(None).data_dir == home() / "pool"
    with pytest.raises(CliError, match="give one of them"):
        find_place(first, "http://127.0.0.1:1")


def test_a_data_directory_has_its_own_address_and_key(
    pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pools
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://elsewhere:7600")
    found = find_target(first, "", "")
    assert (found.url, found.api_key, found.is_key_stored) == ("http://127.0.0.1:1", "tp_1", True)
    monkeypatch.chdir(first.parent)
    assert find_target(Path("first"), "", "").api_key == "tp_1"
    monkeypatch.setenv("TINKERPOOL_API_KEY", "tp_given")
    assert find_target(first, "", "").api_key == "tp_given"


def test_a_command_shows_a_clients_certificate_from_its_options_or_the_environment(
    pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    first, _ = pools
    for data_dir in (first, None):
        assert find_target(data_dir, "", "").client_certificate is None
        given = find_target(data_dir, "", "", Path("me.pem"), Path("me.key")).client_certificate
        assert given == ClientCertificate(path="me.pem", key_path="me.key")
    monkeypatch.setenv("TINKERPOOL_CLIENT_CERTIFICATE", "both.pem")
    both = ClientCertificate(path="both.pem", key_path="both.pem")
    assert find_target(first, "", "").client_certificate == both
    assert find_target(first, "", "", Path("me.pem")).client_certificate == ClientCertificate(
        path="me.pem", key_path="me.pem"
    )
    assert "me.key is a client's key: give its certificate, too" in run("status", "--client-key", "me.key")


def test_a_command_calls_a_pool_that_requires_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    cert, key = make_certificate(tmp_path)
    service = FakeService(list_api_keys=admin_pb2.ListApiKeysResponse())
    with open_door(service, GrpcConfig(port=0, tls_cert=cert, tls_key=key, tls_client_ca=cert)) as url:
        write_credentials(Credentials(url=url, api_key=KEY, certificate=Certificate(path=str(cert))))
        assert "(commands: --client-certificate, --client-key)" in run("key", "list")
        options = ["--client-certificate", str(cert), "--client-key", str(key)]
        monkeypatch.setattr(sys, "argv", ["tinkerpool", "key", "list", "--json", *options])
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code, json.loads(capsys.readouterr().out)) == (
        0,
        {"api_keys": [], "next_page_token": "", "total_size": 0},
    )


def test_the_key_of_another_pool_is_not_sent_to_a_data_directory_without_one(
    pools: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    Serving(url="http://127.0.0.1:1", pid=1, data_dir=str(other), models=()).write(other / READY_FILE)
    with pytest.raises(CliError, match=r"no API key for the pool on .*other"):
        find_target(other, "", "")


def test_the_same_message_says_for_every_command_that_no_pool_was_started_here(run: Run) -> None:
    messages = {run(*command) for command in (*CALLS, *ON_FILES)}
    assert len(messages) == 1
    [message] = messages
    assert f"there is no pool on {home() / 'pool'} (the default data directory; no pool was started on" in message
    assert "start it with `tinkerpool up`" in message
    assert "--data-dir" in message


@pytest.mark.parametrize("option", [True, False])
def test_the_same_message_says_for_every_command_that_the_pool_does_not_run(
    run: Run, pools: tuple[Path, Path], option: bool
) -> None:
    _, second = pools
    (second / READY_FILE).unlink()
    named = ("--data-dir", str(second)) if option else ()
    messages = {run(*command, *named) for command in (*CALLS, ("down",))}
    [message] = messages
    assert f"on {second} ({'--data-dir' if option else 'the pool that was started last on this machine'}" in message
    assert f"start it with `tinkerpool up --data-dir {second}`" in message


def test_commands_on_files_refuse_a_pool_that_is_not_of_this_machine(
    run: Run, pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://elsewhere:7600")
    for command in ON_FILES:
        message = run(*command)
        assert "http://elsewhere:7600 (TINKERPOOL_BASE_URL) is not known on this machine: give --data-dir" in message


def test_the_data_directory_of_another_user_is_told_from_one_without_a_pool(
    run: Run, pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # patched, because root may read everything
    for command in (("status",), *ON_FILES):
        assert "is another user's: run the command as that user" in run(*command, "--data-dir", str(pools[0]))


def test_a_rotated_key_replaces_that_of_its_own_pool_and_not_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = FakeService(
        rotate_api_key=admin_pb2.RotateApiKeyResponse(
            key="tp_111111111111_new", replaced=admin_pb2.ApiKey(key_id="000000000000", is_revoked=True)
        )
    )
    with open_door(service) as url:
        data_dir = tmp_path / "pool"
        write_credentials(Credentials(url=url, api_key=KEY, data_dir=str(data_dir)))
        Serving(url=url, pid=os.getpid(), data_dir=str(data_dir), models=()).write(data_dir / READY_FILE)
        write_credentials(last := Credentials(url="http://elsewhere:1", api_key="tp_last"))
        monkeypatch.setattr(sys, "argv", ["tinkerpool", "key", "rotate", "--data-dir", str(data_dir)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    assert find_target(data_dir, "", "").api_key == "tp_111111111111_new"
    assert find_target(None, "", "").api_key == last.api_key
    assert credentials_file().exists()
