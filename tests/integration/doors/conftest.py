"""Calls by hand of the Tinker protocol, to the pool of the module's own fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.doors.sdk import Wire, collect_leaks
from tests.support.restartable_pool import RestartablePool


@pytest.fixture(scope="module", autouse=True)
def leaks_end_with_their_module() -> Iterator[None]:
    """Otherwise a later test, of any module, would fail for them."""
    yield
    collect_leaks()


@pytest.fixture
def wire(pool: RestartablePool) -> Iterator[Callable[[str], Wire]]:
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
