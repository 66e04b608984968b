"""A pool of toy engines for modules that need no other one, and calls by hand of the Tinker protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.doors.sdk import Wire, collect_leaks
from tests.support.served_pool import ServedPool, restartable_pool


@pytest.fixture(scope="module", autouse=True)
def leaks_end_with_their_module() -> Iterator[None]:
    """Otherwise a later test, of any module, would fail for them."""
    yield
    collect_leaks()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=0.5) as pool:
        yield pool


@pytest.fixture
def wire(pool: ServedPool) -> Iterator[Callable[[str], Wire]]:
    """Return a function that connects a tenant to the pool."""
    with ExitStack() as connections:

        def connect(tenant: str) -> Wire:
            wired = Wire(pool.http_url, pool.key(tenant))
            connections.callback(wired.close)
            return wired

        yield connect


@pytest.fixture
def wired(wire: Callable[[str], Wire]) -> Wire:
    """Return the calls of the tenant whose key is `pool.key()`."""
    return wire("alice")
