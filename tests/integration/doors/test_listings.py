"""Lists of thousands of rows with as much metadata as a row may have, at every door and by the official commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from coordinator.operations.registry import adapter_of_row
from coordinator.service import listings
from coordinator.service.listings import PAGE_BYTES_MAX, SLICE_ROWS
from coordinator.storage.sqlite import Connection
from tests.support.doors.sdk import LEAKS
from tests.support.served_pool import ServedPool, restartable_pool
from tinkerpool.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
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
OF_TENANTS = ["sessions", "adapters", "checkpoints"]
"""Tables whose rows belong to rows of the one before."""
INSERTS = {
    "sessions": "(session_id, tenant_id, user_metadata, created_at) VALUES (:name, :tenant, :metadata, :at)",
    "adapters": "(adapter_id, tenant_id, session_id, payload, base_model, rank, alpha, seed, train_attn, train_mlp,"
    " train_unembed, user_metadata, created_at)"
    " VALUES (:name || ':train:0', :tenant, :name, x'', 'toy', 8, 32, 1, 1, 1, 1, :metadata, :at)",
    "checkpoints": "(path, tenant_id, adapter_id, kind, folder, size_bytes, sha256, seq, base_model, rank, fingerprint,"
    " user_metadata, created_at) VALUES ('tinker://' || :name || ':train:0/weights/c', :tenant, :name || ':train:0',"
    " 'weights', 'none', 1, '', 1, 'toy', 8, '', :metadata, :at)",
    "api_keys": "(key_id, tenant_id, secret_sha256, role, created_at) VALUES (:name, :tenant, x'', 'member', :at)",
    "tenants": "(tenant_id, name, created_at) VALUES (:name, :name, :at)",
}
"""What follows the table's name, by table."""
LISTS: dict[str, tuple[Any, str, Any, str]] = {
    "sessions": (sessions_pb2_grpc.SessionServiceStub, "ListSessions", sessions_pb2.ListSessionsRequest, "session_id"),
    "adapters": (adapters_pb2_grpc.AdapterServiceStub, "ListAdapters", adapters_pb2.ListAdaptersRequest, "adapter_id"),
    "checkpoints": (
        checkpoints_pb2_grpc.CheckpointServiceStub,
        "ListCheckpoints",
        checkpoints_pb2.ListCheckpointsRequest,
        "path",
    ),
    "api_keys": (admin_pb2_grpc.AdminServiceStub, "ListApiKeys", admin_pb2.ListApiKeysRequest, "key_id"),
    "tenants": (admin_pb2_grpc.AdminServiceStub, "ListTenants", admin_pb2.ListTenantsRequest, "name"),
}
"""The stub, its method, the request and the field with an item's id, by table."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=0.5) as pool:
        pool.key("alice")
        pool.run(fill(pool))
        yield pool


def put(db: Connection, table: str, name: str, tenant_id: str, created_at: float, metadata: str = "{}") -> None:
    """Insert a row of a tenant. An adapter is that of the session of this name."""
    values = {"name": name, "tenant": tenant_id, "at": created_at, "metadata": metadata}
    db.execute(f"INSERT INTO {table} {INSERTS[table]}", values)


async def fill(pool: ServedPool) -> None:
    """Give alice two thousand sessions, adapters and checkpoints. By rows: as calls they would take minutes."""
    names = {f"s{number}": float(number) for number in range(NUM_ROWS)}
    for table in OF_TENANTS:
        await put_all(pool, table, "alice", names, METADATA)


async def put_all(
    pool: ServedPool, table: str, tenant: str, created_at: Mapping[str, float], metadata: str = "{}"
) -> None:
    """Insert rows of a tenant, by name."""
    store, registry = pool.pool.store, pool.pool.core.registry
    row = store.tenants.named(tenant)
    assert row is not None
    tenant_id = row.tenant_id

    def write(db: Connection) -> None:
        for name, at in created_at.items():
            put(db, table, name, tenant_id, at, metadata)

    await store.database.write(write)
    for adapter in store.adapters.not_deleted() if table == "adapters" else []:
        if registry.get(adapter.adapter_id) is None:
            registry.add(adapter_of_row(adapter))


def pages(pool: ServedPool, table: str, key: str, **wanted: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the pages of a list over gRPC, each with the ids of its items."""
    stub, method, request_type, id_field = LISTS[table]
    request = request_type(**wanted)
    with grpc.insecure_channel(urlsplit(pool.url).netloc) as channel:
        while True:
            page = getattr(stub(channel), method)(request, metadata=[("authorization", f"Bearer {key}")])
            yield page, [getattr(item, id_field) for item in getattr(page, table)]
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


@pytest.mark.parametrize("table", OF_TENANTS)
def test_pages_of_large_rows_are_bounded_by_bytes_and_their_tokens_reach_every_row_once(
    pool: ServedPool, table: str
) -> None:
    found: list[str] = []
    for page, ids in pages(pool, table, pool.key("alice"), page_size=1000):
        assert page.ByteSize() < PAGE_BYTES_MAX + SLICE_ROWS * ROW_BYTES
        assert page.total_size == NUM_ROWS
        found += ids
    numbers = [int(each.removeprefix("tinker://").partition(":")[0][1:]) for each in found]
    assert numbers == list(range(NUM_ROWS))[::-1]


@pytest.mark.parametrize("table", LISTS)
def test_rows_that_are_deleted_or_created_between_two_pages_shift_no_other_row(pool: ServedPool, table: str) -> None:
    """Six rows were created at the same moment; they are the first of the list."""
    tenant = f"bob-{table}"
    key = pool.key(tenant)
    if table not in OF_TENANTS:
        key = pool.run(pool.coordinator.new_admin_key())

    def create(names: list[str], at: float) -> None:
        for each in OF_TENANTS[: OF_TENANTS.index(table) + 1] if table in OF_TENANTS else [table]:
            pool.run(put_all(pool, each, tenant, dict.fromkeys(names, at)))

    async def delete(first: str, second: str) -> None:
        sql = f"DELETE FROM {table} WHERE {LISTS[table][3]} IN (?, ?)"
        await pool.pool.store.database.execute(sql, (first, second))

    create([f"A{number}-{table}" for number in range(6)], 2e9)
    [(_, before)] = pages(pool, table, key, page_size=1000)
    walk = pages(pool, table, key, page_size=2)
    first, found = next(walk)
    pool.run(delete(*found))
    found += next(walk)[1]
    create([f"0-{table}"], 3e9)
    for _, ids in walk:
        found += ids
    assert found == before
    [(_, after)] = pages(pool, table, key, page_size=1000)
    assert after[1:] == before[2:]
    [(_, rest)] = pages(pool, table, key, page_size=1000, page_token=first.next_page_token, skip=1)
    assert rest == before[3:], "a skip counts from the token's place"
    [(_, rest)] = pages(pool, table, key, page_size=1000, page_token="2", skip=1)
    assert rest == after[3:], "a token of an older pool is a number of rows"


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
