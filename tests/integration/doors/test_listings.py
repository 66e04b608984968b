"""Lists of thousands of rows with as much metadata as a row may have, at every door and by the official commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from coordinator.operations.registry import adapter_of_row
from coordinator.service import listings
from coordinator.service.listings import PAGE_BYTES_MAX, SLICE_ROWS
from coordinator.storage.sqlite import Connection
from tests.support.doors.sdk import LEAKS
from tests.support.served_pool import ServedPool, restartable_pool
from tinkerpool.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    checkpoints_pb2,
    checkpoints_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)

pytestmark = [LEAKS, pytest.mark.slow]
NUM_ROWS = 2000
METADATA = json.dumps({"notes": "x" * 16_000})
ROW_BYTES = 17_000
"""Above the bytes of a message of such a row."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=0.5) as pool:
        pool.key("alice")
        pool.run(fill(pool))
        yield pool


async def fill(pool: ServedPool) -> None:
    """Give alice two thousand sessions, adapters and checkpoints. By rows: as calls they would take minutes."""
    store = pool.pool.store
    tenant = store.tenants.named("alice")
    assert tenant is not None
    tenant_id = tenant.tenant_id

    def write(db: Connection) -> None:
        for number in range(NUM_ROWS):
            db.execute(
                "INSERT INTO sessions (session_id, tenant_id, user_metadata, created_at) VALUES (?, ?, ?, ?)",
                (f"s{number}", tenant_id, METADATA, number),
            )
            db.execute(
                "INSERT INTO adapters (adapter_id, tenant_id, session_id, payload, base_model, rank, alpha, seed,"
                " train_attn, train_mlp, train_unembed, user_metadata, created_at)"
                " VALUES (?, ?, ?, x'', 'toy', 8, 32, 1, 1, 1, 1, ?, ?)",
                (f"s{number}:train:0", tenant_id, f"s{number}", METADATA, number),
            )
            db.execute(
                "INSERT INTO checkpoints (path, tenant_id, adapter_id, kind, folder, size_bytes, sha256, seq,"
                " base_model, rank, fingerprint, user_metadata, created_at)"
                " VALUES (?, ?, ?, 'weights', 'none', 1, '', 1, 'toy', 8, '', ?, ?)",
                (f"tinker://s{number}:train:0/weights/c", tenant_id, f"s{number}:train:0", METADATA, number),
            )

    await store.database.write(write)
    for row in store.adapters.not_deleted():
        pool.pool.core.registry.add(adapter_of_row(row))


def pages(pool: ServedPool, service: str, method: str, request: Message) -> Iterator[Any]:
    """Yield the pages of a list over gRPC."""
    stubs: Any = {
        "sessions": sessions_pb2_grpc.SessionServiceStub,
        "adapters": adapters_pb2_grpc.AdapterServiceStub,
        "checkpoints": checkpoints_pb2_grpc.CheckpointServiceStub,
    }
    key = [("authorization", f"Bearer {pool.key('alice')}")]
    with grpc.insecure_channel(urlsplit(pool.url).netloc) as channel:
        while True:
            page = getattr(stubs[service](channel), method)(request, metadata=key)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("service", "method", "request_type", "id_field"),
    [
        ("sessions", "ListSessions", sessions_pb2.ListSessionsRequest, "session_id"),
        ("adapters", "ListAdapters", adapters_pb2.ListAdaptersRequest, "adapter_id"),
        ("checkpoints", "ListCheckpoints", checkpoints_pb2.ListCheckpointsRequest, "path"),
    ],
)
def test_pages_of_large_rows_are_bounded_by_bytes_and_their_tokens_reach_every_row_once(
    pool: ServedPool, service: str, method: str, request_type: Any, id_field: str
) -> None:
    found: list[str] = []
    for page in pages(pool, service, method, request_type(page_size=1000)):
        assert page.ByteSize() < PAGE_BYTES_MAX + SLICE_ROWS * ROW_BYTES
        assert page.total_size == NUM_ROWS
        found += [getattr(each, id_field) for each in getattr(page, service)]
    numbers = [int(each.removeprefix("tinker://").partition(":")[0][1:]) for each in found]
    assert numbers == list(range(NUM_ROWS))[::-1]


@pytest.mark.parametrize("command", [["checkpoint", "list"], pytest.param(["run", "list"], marks=pytest.mark.long)])
def test_the_official_command_line_lists_every_large_row(pool: ServedPool, command: list[str]) -> None:
    """It takes a page with fewer rows than it asked for as the last one."""
    environment = os.environ | {"TINKER_BASE_URL": pool.http_url, "TINKER_API_KEY": f"tml-{pool.key('alice')}"}
    # A process of its own: in this one the SDK would go on to call the pool of an earlier test.
    listed = subprocess.run(
        [sys.executable, "-m", "tinker.cli", "--format", "json", *command, "--limit", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    body = json.loads(listed.stdout)
    assert len(next(rows for rows in body.values() if isinstance(rows, list))) == NUM_ROWS


def test_models_are_listed_beside_thousands_of_large_checkpoints(pool: ServedPool) -> None:
    headers = {"authorization": f"Bearer {pool.key('alice')}"}
    listed = httpx.get(f"{pool.http_url}/v1/models", headers=headers, timeout=60).json()["data"]
    assert len(listed) == 1 + 2 * 1000


def test_lists_of_clients_that_have_left_are_not_made(pool: ServedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    make = listings.Listed.slices

    async def counted(self: Any) -> Any:
        nonlocal num_made
        async for each in make(self):
            num_made += 1
            yield each

    monkeypatch.setattr(listings.Listed, "slices", counted)
    host, _, port = urlsplit(pool.http_url).netloc.partition(":")
    for _ in range(30):
        with socket.create_connection((host, int(port))) as connection:
            head = f"GET /api/v1/checkpoints?limit=1000 HTTP/1.1\r\nhost: x\r\nx-api-key: {pool.key('alice')}\r\n\r\n"
            connection.sendall(head.encode())
    previous = -1
    while previous != num_made:
        previous = num_made
        time.sleep(1.0)
    assert num_made < 30 * 1000 / SLICE_ROWS / 4
