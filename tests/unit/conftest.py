"""An empty database, the API keys in it, and the default reaction to a closed terminal."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.storage.store import Store
from coordinator.tenants.accounts import Accounts
from coordinator.tenants.keys import Authenticator
from tests.support.database import open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(tmp_path / "log.db")
    yield store
    await store.close()


@pytest.fixture
def keys(store: Store) -> Authenticator:
    return Authenticator(store, Accounts(store, lambda: 1.0), lambda: 1.0)


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Let SIGHUP end this process and those that it starts. One that was started with nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
