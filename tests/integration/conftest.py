"""The pool of most tests here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.toy_pool import ToyPool, running_pool


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[ToyPool]:
    """A coordinator with one toy worker; its data directory is the test's `tmp_path`."""
    async with running_pool(tmp_path) as pool:
        yield pool
