"""Which pool a command means: one rule, the same options and the same message for every command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime.data_dir import DataDirLock
from tests.support.command_line import Run
from tests.support.doors.certificates import make_certificate
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tinkerpool.cli.app import EPILOG, command_line
from tinkerpool.cli.finding import OPTIONS_HELP, find_place, find_target
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import (
    Certificate,
    ClientCertificate,
    Credentials,
    credentials_file,
    home,
    write_credentials,
)
from tinkerpool.serving import READY_FILE, Serving, running_pid
from tinkerpool.v1 import admin_pb2

NONE = {"models", "serve", "up", "restore", "pools", "use", "version"}
"""They make a pool, or mean no single one."""
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
TAKE_AWAY = (
    ("key", "rotate"),
    ("key", "revoke", "k"),
    ("tenant", "suspend", "bob"),
    ("tenant", "delete", "bob", "--yes"),
    ("adapter", "delete", "a", "--yes"),
    ("checkpoint", "delete", "tinker://a:train:0/weights/x", "--yes"),
)
"""They must not take something away from a pool that the user did not mean."""

Fail = Callable[..., str]
Say = Callable[..., tuple[str, str]]
Holds = Callable[[Path], DataDirLock]


@pytest.fixture
def fail(run: Run) -> Fail:
    """Run a command that fails; return its message."""

    def run_one(*arguments: str) -> str:
        done = run(*arguments)
        assert done.code == 1
        return done.err

    return run_one


@pytest.fixture
def say(run: Run) -> Say:
    """Run a command that succeeds; return what it prints, and its notes."""

    def run_one(*arguments: str) -> tuple[str, str]:
        done = run(*arguments)
        assert done.code == 0, done.err
        return done.out, done.err

    return run_one


@pytest.fixture
def run_pool() -> Iterator[Holds]:
    """Hold the lock of a data directory, as a coordinator does."""
    held: list[DataDirLock] = []

    def hold(data_dir: Path) -> DataDirLock:
        held.append(DataDirLock(data_dir))
        return held[-1]

    yield hold
    for lock in held:
        lock.release()


@pytest.fixture
def pools(tmp_path: Path) -> tuple[Path, Path]:
    """Data directories of two pools that were started on this machine: the last one is the second."""
    found = tmp_path / "first", tmp_path / "second"
    for number, data_dir in enumerate(found, 1):
        data_dir.mkdir()
        url = f"http://127.0.0.1:{number}"
        write_credentials(Credentials(url=url, api_key=f"tp_{number}", data_dir=str(data_dir)))
        Serving(url=url, pid=1, data_dir=str(data_dir), models=("toy",)).write(data_dir / READY_FILE)
    return found


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command with its name."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        for name, child in children.items():
            yield from walk(child, f"{path} {name}".strip())
        if not children:
            yield path, command

    yield from walk(command_line(), "")


def test_every_command_takes_the_same_options_that_name_a_pool_and_explains_them_in_one_place() -> None:
    named = {option.split()[0]: text for option, text in OPTIONS_HELP.items()}
    assert named.keys() == {"--data-dir", "--url", "--api-key", "--client-certificate", "--client-key"}
    assert all(option in EPILOG and text in EPILOG for option, text in OPTIONS_HELP.items())
    found = dict(commands())
    assert found.keys() > FILES | NONE
    for name in found.keys() - NONE:
        options = {param.opts[0]: param for param in found[name].params}
        if name in FILES:
            assert named["--data-dir"] in options["--data-dir"].help
            assert not options.keys() & (named.keys() - {"--data-dir"})
        else:
            assert {option: options[option].help for option in named} == named
            assert all(options[option].hidden for option in named), "they are not repeated for each command"
            assert f"Which pool: {', '.join(named)}; see tinkerpool --help." in found[name].help


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
    pools: tuple[Path, Path], run_pool: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pools
    run_pool(first)
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://elsewhere:7600")
    found = find_target(first, "", "")
    assert (found.url, found.api_key, found.is_key_stored) == ("http://127.0.0.1:1", "tp_1", True)
    monkeypatch.chdir(first.parent)
    assert find_target(Path("first"), "", "").api_key == "tp_1"
    monkeypatch.setenv("TINKERPOOL_API_KEY", "tp_given")
    assert find_target(first, "", "").api_key == "tp_given"


def test_a_command_shows_a_clients_certificate_from_its_options_or_the_environment(
    pools: tuple[Path, Path], run_pool: Holds, monkeypatch: pytest.MonkeyPatch, fail: Fail
) -> None:
    first, second = pools
    run_pool(first)
    run_pool(second)
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
    assert "me.key is a client's key: give its certificate, too" in fail("status", "--client-key", "me.key")


def test_a_command_calls_a_pool_that_requires_a_certificate(tmp_path: Path, fail: Fail, say: Say) -> None:
    cert, key = make_certificate(tmp_path)
    service = FakeService(list_api_keys=admin_pb2.ListApiKeysResponse())
    with open_door(service, tls_cert=cert, tls_key=key, tls_client_ca=cert) as url:
        write_credentials(Credentials(url=url, api_key=KEY, certificate=Certificate(path=str(cert))))
        assert "(commands: --client-certificate, --client-key)" in fail("key", "list")
        options = ["--client-certificate", str(cert), "--client-key", str(key)]
        listed = json.loads(say("key", "list", "--json", *options)[0])
    assert listed == {"api_keys": [], "next_page_token": "", "total_size": 0}


def test_the_key_of_another_pool_is_not_sent_to_a_data_directory_without_one(
    pools: tuple[Path, Path], run_pool: Holds, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    run_pool(other)
    Serving(url="http://127.0.0.1:1", pid=1, data_dir=str(other), models=()).write(other / READY_FILE)
    with pytest.raises(CliError, match=r"no API key for the pool on .*other"):
        find_target(other, "", "")


def test_the_same_message_says_for_every_command_that_no_pool_was_started_here(fail: Fail) -> None:
    messages = {fail(*command) for command in (*CALLS, *ON_FILES)}
    assert len(messages) == 1
    [message] = messages
    assert f"there is no pool on {home() / 'pool'} (the default data directory; no pool was started on" in message
    assert "start it with `tinkerpool up`" in message
    assert "--data-dir" in message


@pytest.mark.parametrize("option", [True, False])
def test_the_same_message_says_for_every_command_that_the_pool_does_not_run(
    fail: Fail, pools: tuple[Path, Path], option: bool
) -> None:
    _, second = pools
    (second / READY_FILE).unlink()
    named = ("--data-dir", str(second)) if option else ()
    messages = {fail(*command, *named) for command in (*CALLS, ("down",))}
    [message] = messages
    assert f"on {second} ({'--data-dir' if option else 'the pool in use on this machine'}" in message
    assert f"start it with `tinkerpool up --data-dir {second}`" in message


def test_a_command_calls_the_pool_in_use_if_it_runs_whatever_else_does(
    pools: tuple[Path, Path], run_pool: Holds
) -> None:
    first, second = pools
    for data_dir in (first, second):
        run_pool(data_dir)
    assert find_target(None, "", "", falls_back=True).url == "http://127.0.0.1:2"
    assert find_place(None, falls_back=True).data_dir == second


def test_commands_call_another_pool_only_if_the_pool_in_use_does_not_run_and_say_so(
    pools: tuple[Path, Path], run_pool: Holds, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pools
    run_pool(first)
    found = find_target(None, "", "", falls_back=True)
    assert (found.url, found.api_key, found.is_key_stored) == ("http://127.0.0.1:1", "tp_1", True)
    note = capsys.readouterr().err
    assert note == (
        f"Note: the pool in use, on {second}, does not run: using the one at http://127.0.0.1:1, on {first} "
        f"(`tinkerpool use {first}` chooses it).\n"
    )
    held = run_pool(second)
    assert find_target(None, "", "", falls_back=True).api_key == "tp_2"
    held.release()
    (first / READY_FILE).unlink()  # it is still starting
    with pytest.raises(CliError, match=f"no pool is running at http://127.0.0.1:2 on {second}"):
        find_target(None, "", "", falls_back=True)


def test_a_pool_that_is_named_by_option_environment_or_key_is_never_replaced(
    pools: tuple[Path, Path], run_pool: Holds, monkeypatch: pytest.MonkeyPatch, fail: Fail
) -> None:
    first, second = pools
    run_pool(first)
    for data_dir, key, source in ((second, "", "--data-dir"), (None, "tp_given", "the pool in use")):
        with pytest.raises(CliError, match=rf"on {second} \({source}"):
            find_target(data_dir, "", key, falls_back=True)
    assert find_target(None, "http://127.0.0.1:2", "", falls_back=True).api_key == "tp_2"
    with monkeypatch.context() as patch:
        patch.setenv("TINKERPOOL_API_KEY", "tp_given")
        with pytest.raises(CliError, match=rf"on {second} \(the pool in use"):
            find_target(None, "", "", falls_back=True)
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://127.0.0.1:2")
    assert find_target(None, "", "", falls_back=True).url == "http://127.0.0.1:2"
    assert f"no pool is running on {second} (--data-dir)" in fail("status", "--data-dir", str(second))


def test_no_command_sends_the_key_of_a_stopped_pool_to_who_has_its_address_now(
    tmp_path: Path, run_pool: Holds, fail: Fail
) -> None:
    service = FakeService()
    with open_door(service) as url:
        for name in ("running", "stopped"):
            (tmp_path / name).mkdir()
            write_credentials(Credentials(url=url, api_key=KEY, data_dir=str(tmp_path / name)))
            Serving(url=url, pid=os.getpid(), data_dir=str(tmp_path / name), models=()).write(
                tmp_path / name / READY_FILE  # a killed pool leaves it
            )
        lock, stopped = run_pool(tmp_path / "running"), tmp_path / "stopped"
        for taking_away in TAKE_AWAY:
            assert f"no pool is running at {url} on {stopped} (the pool in use" in fail(*taking_away)
        lock.release()
        for calling in CALLS:
            assert f"on {stopped} (the pool in use" in fail(*calling)
            assert f"no pool is running on {stopped} (--data-dir)" in fail(*calling, "--data-dir", str(stopped))
    assert service.calls == []


@pytest.mark.parametrize("command", [("down",), *TAKE_AWAY])
def test_what_stops_or_takes_away_never_falls_back_and_says_what_runs_and_how_to_name_it(
    pools: tuple[Path, Path], run_pool: Holds, fail: Fail, command: tuple[str, ...]
) -> None:
    first, second = pools
    held = run_pool(first)
    message = fail(*command)
    assert f"no pool is running at http://127.0.0.1:2 on {second} (the pool in use" in message
    assert f"name one that runs: --data-dir {first} (http://127.0.0.1:1); `tinkerpool use DIR` chooses it" in message
    assert message.count("\n") == 1
    assert running_pid(first) == os.getpid()
    held.release()


def test_files_are_those_of_the_pool_in_use_also_if_another_one_runs(
    pools: tuple[Path, Path], run_pool: Holds, fail: Fail
) -> None:
    first, second = pools
    run_pool(first)
    assert f"there is no log at {second}" in fail("logs")
    assert find_place(None).data_dir == second


def test_two_pools_that_had_the_same_address_have_their_own_keys(tmp_path: Path, run_pool: Holds) -> None:
    url = "http://127.0.0.1:7600"
    for name in ("running", "last"):
        (tmp_path / name).mkdir()
        write_credentials(Credentials(url=url, api_key=f"tp_{name}", data_dir=str(tmp_path / name)))
    assert find_target(None, url, "").api_key == "tp_last"
    run_pool(tmp_path / "running")
    assert find_target(None, url, "").api_key == "tp_running"


def test_pools_lists_the_known_pools_and_use_chooses_one(
    pools: tuple[Path, Path], run_pool: Holds, say: Say, fail: Fail
) -> None:
    first, second = pools
    run_pool(first)
    (second / READY_FILE).unlink()
    write_credentials(Credentials(url="http://127.0.0.1:3", api_key="tp_3", data_dir="/no/such/folder"))
    write_credentials(Credentials(url="http://127.0.0.1:2", api_key="tp_2", data_dir=str(second)))

    def listed() -> list[tuple[Any, ...]]:
        found = json.loads(say("pools", "--json")[0])["pools"]
        return [(each["url"], each["data_dir"], each["state"], each["models"], each["is_in_use"]) for each in found]

    nothing: list[str] = []
    one = ("http://127.0.0.1:1", str(first), "running", ["toy"])
    two = ("http://127.0.0.1:2", str(second), "stopped", nothing)
    gone = ("http://127.0.0.1:3", "/no/such/folder", "deleted", nothing)
    assert listed() == [(*two, True), (*gone, False), (*one, False)]
    rows = [line.split() for line in say("pools")[0].splitlines()[2:]]
    assert rows[0] == ["*", "stopped", "http://127.0.0.1:2", str(second)]
    assert rows[2] == ["running", "http://127.0.0.1:1", str(first), "toy"]

    out, err = say("use", str(first))
    assert (f"http://127.0.0.1:1, on {first}" in out, err) == (True, "")
    assert sorted(listed()) == sorted([(*two, False), (*gone, False), (*one, True)])
    assert find_place(None).data_dir == first
    out, err = say("use", "127.0.0.1:2")
    assert f"start it with `tinkerpool up --data-dir {second}`" in err
    assert find_place(None).data_dir == second
    assert f"know no pool elsewhere: give one of these: {second}" in fail("use", "elsewhere")


def test_pools_and_use_say_what_to_do_before_the_first_start(say: Say, fail: Fail) -> None:
    assert "`tinkerpool up` starts one" in say("pools")[0]
    assert json.loads(say("pools", "--json")[0]) == {"pools": []}
    assert "start one with `tinkerpool up`" in fail("use", "pool")


def test_commands_on_files_refuse_a_pool_that_is_not_of_this_machine(
    fail: Fail, pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://elsewhere:7600")
    for command in ON_FILES:
        message = fail(*command)
        assert "http://elsewhere:7600 (TINKERPOOL_BASE_URL) is not known on this machine: give --data-dir" in message


def test_the_data_directory_of_another_user_is_told_from_one_without_a_pool(
    fail: Fail, pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # patched, because root may read everything
    for command in (("status",), *ON_FILES):
        assert "is another user's: run the command as that user" in fail(*command, "--data-dir", str(pools[0]))


def test_a_rotated_key_replaces_that_of_its_own_pool_and_not_of_the_last_one(
    tmp_path: Path, run_pool: Holds, say: Say
) -> None:
    service = FakeService(
        rotate_api_key=admin_pb2.RotateApiKeyResponse(
            key="tp_111111111111_new", replaced=admin_pb2.ApiKey(key_id="000000000000", is_revoked=True)
        )
    )
    with open_door(service) as url:
        data_dir = tmp_path / "pool"
        data_dir.mkdir()
        run_pool(data_dir)
        write_credentials(Credentials(url=url, api_key=KEY, data_dir=str(data_dir)))
        Serving(url=url, pid=os.getpid(), data_dir=str(data_dir), models=()).write(data_dir / READY_FILE)
        write_credentials(last := Credentials(url="http://elsewhere:1", api_key="tp_last"))
        say("key", "rotate", "--data-dir", str(data_dir))
    assert find_target(data_dir, "", "").api_key == "tp_111111111111_new"
    assert find_target(None, "", "").api_key == last.api_key
    assert credentials_file().exists()
