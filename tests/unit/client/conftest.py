"""A client over a fake pool, and a home directory per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doors.fake_transport import FakePool
from tinkerpool import ServiceClient


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def service(pool: FakePool) -> Iterator[ServiceClient]:
    with ServiceClient(transport=pool) as service:
        yield service


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERPOOL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKERPOOL_BASE_URL", raising=False)
    monkeypatch.delenv("TINKERPOOL_API_KEY", raising=False)
