"""An empty database, and the API keys in it."""

from collections.abc import AsyncIterator
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
