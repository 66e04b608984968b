import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.runtime.data_dir import DataDirLock
from tests.support.logs import logged_by
from tinkerpool import ServiceClient, errors
from tinkerpool.client.calls.transport import Endpoint
from tinkerpool.credentials import (
    Certificate,
    Credentials,
    credentials_file,
    kept_credentials,
    parse_target,
    read_credentials,
    write_credentials,
)
from tinkerpool.pools import find_service
from tinkerpool.serving import READY_FILE, Serving


def found(base_url: str | None = None, api_key: str | None = None) -> tuple[str, str]:
    service = find_service(base_url, api_key)
    return service.url, service.api_key


MINE = Credentials(url="http://127.0.0.1:7600", api_key="tp_mine")


def test_credentials_are_read_back_and_only_their_owner_may_read_them() -> None:
    assert read_credentials() is None
    path = write_credentials(MINE)
    assert read_credentials() == MINE
    assert path == credentials_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_writing_a_key_keeps_the_key_of_another_pool() -> None:
    for number in range(3):
        write_credentials(Credentials(url="http://elsewhere", api_key=f"tp_{number}"))
    write_credentials(MINE)
    kept = sorted(path.name for path in credentials_file().parent.iterdir())
    assert kept == ["credentials.1.json", "credentials.2.json", "credentials.3.json", "credentials.json"]


def test_the_same_key_at_a_new_address_replaces_the_old() -> None:
    write_credentials(Credentials(url="http://127.0.0.1:1", api_key=MINE.api_key))
    write_credentials(MINE)
    assert [path.name for path in credentials_file().parent.iterdir()] == ["credentials.json"]


def test_a_restored_pool_leaves_the_entry_of_its_source_with_the_same_key_and_a_moved_one_does_not(
    tmp_path: Path,
) -> None:
    source, restored = (
        Credentials(url=f"http://127.0.0.1:{port}", api_key="tp_1", data_dir=str(tmp_path / name))
        for port, name in enumerate(("source", "restored"), start=1)
    )
    Path(source.data_dir).mkdir()
    for credentials in (source, restored, source, restored):
        write_credentials(credentials)
    assert list(kept_credentials()) == [restored, source]
    Path(source.data_dir).rmdir()
    write_credentials(restored)
    assert list(kept_credentials()) == [restored]


def test_switching_between_pools_keeps_one_copy_of_each_key() -> None:
    other = Credentials(url="http://elsewhere", api_key="tp_other")
    for credentials in (MINE, other, MINE, other, MINE):
        write_credentials(credentials)
        assert read_credentials() == credentials
    assert list(kept_credentials()) == [MINE, other]
    assert len(list(credentials_file().parent.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"url": "x"}', "\xff"])
def test_the_error_for_a_malformed_credentials_file_names_the_file(content: str) -> None:
    credentials_file().parent.mkdir()
    credentials_file().write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"credentials\.json"):
        read_credentials()


def test_arguments_override_the_environment_and_that_overrides_the_credentials_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_credentials(Credentials(url="http://127.0.0.1:7777", api_key="stored"))
    assert found() == ("http://127.0.0.1:7777", "stored")
    monkeypatch.setenv("TINKERPOOL_BASE_URL", "http://127.0.0.1:8888")
    monkeypatch.setenv("TINKERPOOL_API_KEY", "environment")
    assert found() == ("http://127.0.0.1:8888", "environment")
    assert found("host:1", "argument") == ("host:1", "argument")


def test_a_key_from_the_credentials_file_is_sent_to_its_own_pool_only() -> None:
    with pytest.raises(errors.ConfigurationError, match="no API key for"):
        find_service(None, None)
    write_credentials(Credentials(url="http://127.0.0.1:7777", api_key="stored"))
    assert found("127.0.0.1:7777", None) == ("127.0.0.1:7777", "stored")
    with pytest.raises(errors.ConfigurationError, match="no API key for http://elsewhere:7777"):
        find_service("http://elsewhere:7777", None)


def test_the_newest_key_of_an_address_is_used_also_if_another_pool_was_started_last() -> None:
    for number in (1, 2):
        path = write_credentials(Credentials(url="http://127.0.0.1:7777", api_key=f"tp_{number}"))
        os.utime(path, (number, number))
    write_credentials(Credentials(url="http://elsewhere", api_key="tp_last"))
    assert found("127.0.0.1:7777") == ("127.0.0.1:7777", "tp_2")
    assert found() == ("http://elsewhere", "tp_last")


def test_the_certificate_in_the_credentials_file_is_for_its_own_pool_only() -> None:
    known = Credentials(url="https://127.0.0.1:7777", api_key="stored", certificate=Certificate(path="/cert.pem"))
    write_credentials(known)
    assert read_credentials() == known
    assert find_service(None, None) == known
    assert find_service("https://127.0.0.1:7777", "given").certificate == known.certificate
    assert find_service("https://127.0.0.1:7778", "given").certificate is None


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://host:1", ("host:1", False)),
        ("http://host", ("host:7600", False)),
        ("host:1", ("host:1", False)),
        ("host", ("host:7600", False)),
        ("https://host", ("host:443", True)),
        ("https://host:1/", ("host:1", True)),
        ("http://[::1]:1", ("[::1]:1", False)),
    ],
)
def test_addresses_are_parsed(url: str, target: tuple[str, bool]) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["", "ftp://host", "http://host:port", "http://", "http://host/path", "host:99999"])
def test_a_malformed_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"http://127\.0\.0\.1:7600"):
        parse_target(url)


@pytest.fixture
def two_pools(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Data directories of two pools; the second is in use, and only the first runs."""
    found = tmp_path / "first", tmp_path / "second"
    for number, data_dir in enumerate(found, 1):
        data_dir.mkdir()
        url = f"http://127.0.0.1:{number}"
        write_credentials(Credentials(url=url, api_key=f"tp_{number}", data_dir=str(data_dir)))
        Serving(url=url, pid=1, data_dir=str(data_dir), models=()).write(data_dir / READY_FILE)
    lock = DataDirLock(found[0])
    yield found
    lock.release()


def test_a_program_calls_another_pool_if_the_one_in_use_does_not_run_with_its_key_and_a_warning(
    two_pools: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_pools
    assert found() == ("http://127.0.0.1:1", "tp_1")
    [warning] = logged_by("tinkerpool", caplog)
    assert f"the pool in use, on {second}, does not run: using the one at http://127.0.0.1:1, on {first}" in warning


def test_an_address_without_a_key_is_told_the_pools_that_run_here(two_pools: tuple[Path, Path]) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"name a pool of this machine: http://127\.0\.0\.1:1;"):
        find_service("http://127.0.0.1:3", None)


def test_a_program_that_names_a_pool_or_gives_a_key_gets_no_other_pool(
    two_pools: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    second = "http://127.0.0.1:2"
    assert found(second) == (second, "tp_2")
    assert found(None, "given") == (second, "given")
    for name, value, key in (("BASE_URL", second, "tp_2"), ("API_KEY", "given", "given")):
        with monkeypatch.context() as patch:
            patch.setenv(f"TINKERPOOL_{name}", value)
            assert found() == (second, key)
    assert not logged_by("tinkerpool", caplog)


def test_a_running_program_keeps_its_pool_when_another_one_is_chosen(two_pools: tuple[Path, Path]) -> None:
    endpoint = Endpoint.find()
    with ServiceClient() as client:
        lock = DataDirLock(two_pools[1])
        assert found() == ("http://127.0.0.1:2", "tp_2"), "the pool in use wins as soon as it runs"
        assert "127.0.0.1:1" in repr(client)
        assert (endpoint.base_url, endpoint.api_key) == ("http://127.0.0.1:1", "tp_1")
        lock.release()
