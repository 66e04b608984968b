"""A pool of the shipped model for most modules here; some have one of toy engines instead."""

from collections.abc import Iterator

import pytest

from tests.support.served_pool import ServedPool, shipped_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool
