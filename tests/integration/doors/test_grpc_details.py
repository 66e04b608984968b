"""What clients in the field need of gRPC itself, tried with Node's library: `tests/support/doors/checks.mjs`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.config import GrpcConfig
from coordinator.doors.grpc.intake import SMALL_BYTES_MAX
from coordinator.doors.rpcs import SERVICES
from tests.support.doors import node
from tests.support.served_pool import ServedPool
from tinkerpool.v1 import limits_pb2, training_pb2

pytestmark = pytest.mark.slow

CHECKS = node.ROOT / "tests" / "support" / "doors" / "checks.mjs"
CHECK_TIMEOUT_S = 120
LIMIT = GrpcConfig().message_bytes_max


class Check:
    """A running check."""

    def __init__(self, folder: Path, pool: ServedPool, name: str, argument: str, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["node", folder / "checks.mjs", name, argument],
            env=dict(node.environment(pool)) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str, *, errors: bool = False, times: int = 1) -> None:
        """Read the output up to the line that is the nth with this text."""
        stream = self._process.stderr if errors else self._process.stdout
        assert stream is not None
        seen = []
        for line in stream:
            seen.append(line)
            times -= text in line
            if not times:
                return
        raise AssertionError(f"no more line with {text!r} came:\n{''.join(seen[-20:])}")

    def found(self) -> Any:
        """Return what the check found."""
        output, errors = self._process.communicate(timeout=CHECK_TIMEOUT_S)
        assert self._process.returncode == 0, errors
        return json.loads(output.splitlines()[-1])

    def end(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()
        self._process.communicate()


Start = Callable[..., Check]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node") / "checks"
    node.install(folder)
    shutil.copy(CHECKS, folder)
    return folder


@pytest.fixture
def start(folder: Path, pool: ServedPool) -> Iterator[Start]:
    """Return a function that starts a check."""
    checks: list[Check] = []

    def start_one(name: str, argument: str = "", **variables: str) -> Check:
        checks.append(Check(folder, pool, name, argument, variables))
        return checks[-1]

    yield start_one
    for check in checks:
        check.end()


@pytest.fixture
def adapter(pool: ServedPool) -> str:
    """Return a new adapter. Its second operation is accepted, and cannot run before the first."""
    adapter = pool.run(pool.pool.adapter())
    pool.run(pool.pool.optim_step(adapter, 2))
    return adapter


def finish(pool: ServedPool, adapter: str) -> None:
    """Send the first operation of an adapter, so that the second runs, too."""
    pool.run(pool.pool.optim_step(adapter, 1))


async def num_streams(pool: ServedPool) -> int:
    """Return how many calls of the tenant wait or stream."""
    toy = pool.pool
    response = await toy.service.get_tenant_limits(await toy.principal(), limits_pb2.GetTenantLimitsRequest())
    [limit] = [limit for limit in response.limits if limit.name == "streams_max"]
    return int(limit.usage)


def wait_for_streams(pool: ServedPool, number: int) -> None:
    """Wait until this many calls of the tenant wait or stream."""

    async def is_reached() -> None:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            while await num_streams(pool) != number:  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(0.01)

    pool.run(is_reached())


def test_a_client_may_ping_as_often_as_it_likes_while_it_waits(pool: ServedPool, adapter: str, start: Start) -> None:
    check = start("keepalive", f"{adapter}:2", GRPC_TRACE="keepalive", GRPC_VERBOSITY="DEBUG")
    check.wait_for("Received ping response", errors=True, times=30)
    finish(pool, adapter)
    assert check.found() == {"code": "OK"}


def test_the_pool_ends_a_call_at_its_deadline_by_itself(pool: ServedPool, adapter: str, start: Start) -> None:
    assert start("deadline", f"{adapter}:2").found() == {"status": "4", "reset": 0}
    wait_for_streams(pool, 0)


def test_a_client_sees_its_deadline(pool: ServedPool, adapter: str, start: Start) -> None:
    assert start("client_deadline", f"{adapter}:2").found()["code"] == "DEADLINE_EXCEEDED"
    wait_for_streams(pool, 0)


def test_requests_may_be_compressed_and_responses_are_not(start: Start) -> None:
    found = start("gzip").found()
    assert found["library"]["sessionId"]
    assert found["sent"] == {"status": "0", "isCompressed": False}
    assert "gzip" in found["accepts"]


@pytest.mark.parametrize("times", [1, 16])
def test_a_compressed_request_is_measured_unpacked(times: int, start: Start) -> None:
    found = start("bomb", str(times * LIMIT + 1)).found()
    assert found["code"] == "RESOURCE_EXHAUSTED"
    assert "larger than max" in found["details"]


def test_an_error_about_a_size_says_the_limit(start: Start) -> None:
    found = start("sizes", str(LIMIT + 4)).found()
    assert found["large"]["code"] == "RESOURCE_EXHAUSTED"
    assert str(LIMIT) in found["large"]["details"]
    assert found["small"]["code"] == "INVALID_ARGUMENT"
    assert str(SMALL_BYTES_MAX) in found["small"]["details"]
    assert found["response"]["code"] == "RESOURCE_EXHAUSTED"
    assert "10" in found["response"]["details"]


def test_reflection_lists_services_and_their_methods(start: Start) -> None:
    found = start("reflection", "tinkerpool.v1.TrainingService").found()
    names = {service.full_name for service in SERVICES}
    assert names <= set(found["services"])
    assert set(found["methods"]) >= {
        method.name for method in training_pb2.DESCRIPTOR.services_by_name["TrainingService"].methods
    }
    assert found["unknown"] == 5  # NOT_FOUND
    assert found["newer"] == "UNIMPLEMENTED", "tools then use v1alpha"


def test_a_client_reconnects_by_itself_after_the_pool_has_stopped(pool: ServedPool, adapter: str, start: Start) -> None:
    check = start("goaway", f"{adapter}:2")
    wait_for_streams(pool, 1)
    pool.stop()
    pool.start()
    pool.run(pool.pool.take_over())
    finish(pool, adapter)
    assert check.found() == {"goaway": 0, "code": "UNAVAILABLE", "finished": [f"{adapter}:2"]}


def test_health_is_known_by_the_name_of_a_service_and_watched(pool: ServedPool, start: Start) -> None:
    names = ["", *(service.full_name for service in SERVICES)]
    check = start("health", ",".join(names))
    check.wait_for("watching")
    pool.stop()
    pool.start()
    found = check.found()
    assert found == {"statuses": [1] * len(names), "unknown": "NOT_FOUND", "watched": [1, 2], "code": "UNAVAILABLE"}
