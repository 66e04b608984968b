"""A pool of toy engines for the modules here that need no other one."""

from collections.abc import Iterator

import pytest

from tests.support.served_pool import ServedPool, restartable_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=0.5) as pool:
        yield pool
