"""An empty database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.storage.store import Store
from tests.support.database import open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(tmp_path / "log.db")
    yield store
    await store.close()
