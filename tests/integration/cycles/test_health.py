"""Liveness and readiness of a pool over HTTP, as a supervisor of processes and a load balancer ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.coordinator import FAILED
from coordinator.cycle.dispatch import Dispatch
from coordinator.runtime import supervision
from tests.support.doors.open_doors import http_door
from tests.support.toy_pool import ToyPool, running_pool
from tests.support.waiting import until

ALIVE = (200, {"status": "ok"})
READY = (200, {"status": "ready"})


def not_ready(reason: str) -> tuple[int, dict[str, str]]:
    return 503, {"status": "not ready", "reason": reason}


class Asked:
    """The answers of a pool's HTTP door to callers without a key."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def liveness(self) -> tuple[int, dict[str, str]]:
        return await self._get("/healthz")

    async def readiness(self) -> tuple[int, dict[str, str]]:
        return await self._get("/readyz")

    async def _get(self, path: str) -> tuple[int, dict[str, str]]:
        response = await self._client.get(path)
        return response.status_code, response.json()


@asynccontextmanager
async def asked(pool: ToyPool) -> AsyncIterator[Asked]:
    async with http_door(pool.coordinator) as door, httpx.AsyncClient(base_url=door.url) as client:
        yield Asked(client)


async def test_without_workers_a_pool_is_alive_and_ready_again_when_one_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S", 1.0)
    async with running_pool(tmp_path) as pool, asked(pool) as answers:
        assert (await answers.liveness(), await answers.readiness()) == (ALIVE, READY)
        pool.core.fleet.note_loss("w0")  # so that its replacement waits for a second
        pool.lose_worker()
        await until(lambda: not pool.coordinator.health())
        reason = "a base model has no live worker: operations wait until one has started"
        assert (await answers.liveness(), await answers.readiness()) == (ALIVE, not_ready(reason))
        await until(pool.coordinator.health)
        assert await answers.readiness() == READY


async def test_a_pool_whose_cycle_is_overdue_is_alive_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path) as pool, asked(pool) as answers:
        # Patched: the deadline of a real batch is eight seconds away at least.
        monkeypatch.setattr(Dispatch, "is_overdue", True)
        reason = "the cycle of a base model is overdue: operations wait until its workers reply or are replaced"
        assert (await answers.liveness(), await answers.readiness()) == (ALIVE, not_ready(reason))


async def test_a_pool_on_a_full_disk_is_alive_and_says_what_it_needs(tmp_path: Path) -> None:
    async with running_pool(tmp_path, disk_free_bytes_min=1 << 60) as pool, asked(pool) as answers:
        assert await answers.liveness() == ALIVE
        status, body = await answers.readiness()
        assert status == 503
        assert "MB free: new work is taken from" in body["reason"]


async def test_a_pool_that_must_end_is_not_alive(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, asked(pool) as answers:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
        pool.engines["w0"][-1]._epoch += 1  # as a later coordinator's
        await pool.submit(adapter, 2)
        await until(lambda: pool.coordinator.has_failed)
        assert await answers.liveness() == (503, {"status": "failed", "reason": FAILED})
        assert await answers.readiness() == not_ready(FAILED)
