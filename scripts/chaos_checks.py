"""What must be true after `chaos.py` has killed: nothing lost, nothing twice, nothing else than without a kill.

Every check raises Violation with what differs. Reads results over stubs, straight from the contract, and states from
the data directory.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc

from chaos_journal import Journal
from chaos_pool import ServedPool, Violation
from chaos_steps import last_checkpoint
from chaos_tenants import operation_digest
from tinkerpool.client import methods
from tinkerpool.names import operation_name
from tinkerpool.v1 import adapters_pb2, operations_pb2

NAMES_MAX = 1000
"""Operations in one stream, and calls under way at a time."""
SHOWN_MAX = 3
"""Differences that a report names."""
FETCH_TIMEOUT_S = 120.0


def operation_names(pool: ServedPool, key: str, journal: Journal) -> list[str]:
    """All operations of a tenant; none is there that its journal does not know, and none is missing."""
    request = adapters_pb2.GetAdapterRequest(adapter_id=journal.adapter_id)
    call = pool.channel().unary_unary(
        methods.GET_ADAPTER.path,
        request_serializer=adapters_pb2.GetAdapterRequest.SerializeToString,
        response_deserializer=adapters_pb2.GetAdapterResponse.FromString,
    )
    adapter = call(request, metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S).adapter
    if adapter.next_seq != journal.next_seq:
        raise Violation(f"{adapter.adapter_id} goes on with {adapter.next_seq}, its journal with {journal.next_seq}")
    if adapter.applied_seq != adapter.next_seq - 1:
        raise Violation(f"of {adapter.adapter_id} only {adapter.applied_seq} of {adapter.next_seq - 1} are applied")
    trained = [operation_name(journal.adapter_id, seq) for seq in range(1, journal.next_seq)]
    known = [name for line in journal.lines for name, _ in line.results]
    return trained + [name for name in known if not name.startswith(f"{journal.adapter_id}:")]


def fetch_each(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes that GetOperation answers with, by name."""
    call: Any = pool.channel().unary_unary(
        methods.GET_OPERATION.path,
        request_serializer=operations_pb2.GetOperationRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for some in _slices(names):
        futures = {
            name: call.future(
                operations_pb2.GetOperationRequest(name=name), metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S
            )
            for name in some
        }
        for name, future in futures.items():
            try:
                fetched[name] = future.result()
            except grpc.RpcError as error:
                raise Violation(f"{name} cannot be fetched: {error}") from None
    return fetched


def fetch_streamed(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes that WaitOperations answers with, by name: the field is the same as GetOperation's."""
    call: Any = pool.channel().unary_stream(
        methods.WAIT_OPERATIONS.path,
        request_serializer=operations_pb2.WaitOperationsRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for some in _slices(names):
        request = operations_pb2.WaitOperationsRequest(names=some)
        try:
            for response in call(request, metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S):
                fetched[operations_pb2.WaitOperationsResponse.FromString(response).operation.name] = response
        except grpc.RpcError as error:
            raise Violation(f"WaitOperations did not give all of {len(some)} operations: {error}") from None
    return fetched


def check_same_bytes(first: Mapping[str, bytes], again: Mapping[str, bytes], what: str) -> None:
    """A result never changes."""
    _check_equal({n: hashlib.sha256(b).hexdigest() for n, b in first.items()},
                 {n: hashlib.sha256(b).hexdigest() for n, b in again.items()},
                 f"{what}: other bytes than before")  # fmt: skip


def check_results(journal: Journal, fetched: Mapping[str, bytes]) -> dict[str, str]:
    """Every operation has succeeded, and with what its client saw. Returns digests by name."""
    digests: dict[str, str] = {}
    for name, response in fetched.items():
        operation = operations_pb2.GetOperationResponse.FromString(response).operation
        if operation.state != operations_pb2.OPERATION_STATE_SUCCEEDED:
            raise Violation(f"{name} has not succeeded: {operation}")
        digests[name] = operation_digest(operation)
    seen = {name: digest for line in journal.lines for name, digest in line.results if digest}
    _check_equal(seen, {name: digests[name] for name in seen}, "the service gives another result than its client saw")
    return digests


def check_same_run(journal: Journal, digests: Mapping[str, str], other: Journal, others: Mapping[str, str]) -> None:
    """Both runs of a tenant had the same results, operation by operation."""

    def by_place(of: Journal, found: Mapping[str, str]) -> dict[str, str]:
        places = {
            operation_name("seq", seq): found[operation_name(of.adapter_id, seq)] for seq in range(1, of.next_seq)
        }
        for line in of.lines:
            for index, (name, digest) in enumerate(line.results):
                places[f"step {line.step}, result {index}"] = digest or found[name]
        return places

    _check_equal(by_place(other, others), by_place(journal, digests), "other results than without kills")


def state_files(pool: ServedPool, journal: Journal) -> dict[str, str]:
    """SHA-256 of each file of the tenant's last checkpoint: weights, moments, and what else is in its folder."""
    path = f"tinker://{journal.adapter_id}/weights/{last_checkpoint(len(journal.lines))}"
    with closing(_database(pool.data_dir)) as db:
        row = db.execute("SELECT folder FROM checkpoints WHERE path = ?", (path,)).fetchone()
    if row is None:
        raise Violation(f"{path} is gone")
    folder = pool.data_dir / "checkpoints" / row[0]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def check_same_state(tenant: str, disturbed: Mapping[str, str], undisturbed: Mapping[str, str]) -> None:
    """Weights and moments end bit for bit as without kills."""
    assert {"adapter_model.safetensors", "optimizer.safetensors"} <= undisturbed.keys()
    _check_equal(undisturbed, disturbed, f"{tenant}'s state differs from that without kills")


def check_store(data_dir: Path) -> None:
    """The database of a stopped pool is whole, everything in it is done, and the folders are those that it knows."""
    with closing(_database(data_dir)) as db:
        if (found := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise Violation(f"the database is damaged: {found}")
        unfinished = [
            f"{r[0]}:{r[1]}" for r in db.execute("SELECT target_id, seq FROM operations WHERE outcome IS NULL")
        ]
        if unfinished:
            raise Violation(f"{len(unfinished)} operations are not finished, {unfinished[0]} among them")
        for name, rows in (
            ("checkpoints", "checkpoints"),
            ("snapshots", "snapshots"),
            ("samplers", "samplers JOIN sessions USING (session_id) WHERE ended_at IS NULL AND folder != ''"),
        ):
            known = {row[0] for row in db.execute(f"SELECT folder FROM {rows}")}
            present = {folder.name for folder in (data_dir / name).iterdir()}
            if known != present:
                raise Violation(f"{name}: missing {sorted(known - present)}, without a row {sorted(present - known)}")


def usage_of(pool: ServedPool) -> Counter[tuple[str, str, str]]:
    """Operations and tokens charged, by tenant and kind."""
    charged: Counter[tuple[str, str, str]] = Counter()
    for row in pool.usage():
        charged[row.tenant, row.kind, "operations"] = row.num_operations
        charged[row.tenant, row.kind, "tokens"] = row.num_tokens
    return charged


def check_same_usage(disturbed: Counter[tuple[str, str, str]], undisturbed: Counter[tuple[str, str, str]]) -> None:
    """Nobody was charged twice, or not at all."""
    _check_equal(
        {" ".join(key): str(n) for key, n in undisturbed.items()},
        {" ".join(key): str(n) for key, n in disturbed.items()},
        "charged otherwise than without kills",
    )


def _check_equal(expected: Mapping[str, str], found: Mapping[str, str], what: str) -> None:
    wrong = [name for name in expected if found.get(name) != expected[name]]
    wrong += [name for name in found if name not in expected]
    if wrong:
        shown = "; ".join(
            f"{name}: {found.get(name, 'nothing')[:16]}, expected {expected.get(name, 'nothing')[:16]}"
            for name in wrong[:SHOWN_MAX]
        )
        raise Violation(f"{what} ({len(wrong)} of {len(expected)}): {shown}")


def _slices(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + NAMES_MAX] for start in range(0, len(names), NAMES_MAX))


def _database(data_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{data_dir / 'tinkerpool.db'}?mode=ro", uri=True)
