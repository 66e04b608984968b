"""Checks of the data directory and of usage after the kills: no operation is lost or applied twice.

Every check raises Violation with the difference. `results.py` checks the operations' results.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from scripts.reliability.chaos.pool import CALL_TIMEOUT_S, ServedPool, Violation
from scripts.reliability.chaos.results import check_equal
from scripts.reliability.chaos.steps import last_checkpoint
from scripts.reliability.chaos.tenants import Journal
from tinkerpool.v1 import adapters_pb2, adapters_pb2_grpc


def check_adapter(pool: ServedPool, key: str, journal: Journal) -> None:
    """Check that the adapter has applied exactly the operations of the tenant's journal."""
    request = adapters_pb2.GetAdapterRequest(adapter_id=journal.adapter_id)
    stub = adapters_pb2_grpc.AdapterServiceStub(pool.channel())
    adapter = stub.GetAdapter(request, metadata=pool.metadata(key), timeout=CALL_TIMEOUT_S).adapter
    if adapter.next_seq != journal.next_seq:
        raise Violation(f"{adapter.adapter_id} has next_seq {adapter.next_seq}, but its journal has {journal.next_seq}")
    if adapter.applied_seq != adapter.next_seq - 1:
        raise Violation(
            f"{adapter.adapter_id} has applied only {adapter.applied_seq} of {adapter.next_seq - 1} operations"
        )


def state_files(pool: ServedPool, journal: Journal) -> dict[str, str]:
    """Return the SHA-256 of each file of the tenant's last checkpoint, weights and moments among them."""
    return checkpoint_files(
        pool.data_dir, f"tinker://{journal.adapter_id}/weights/{last_checkpoint(len(journal.lines))}"
    )


def checkpoint_files(data_dir: Path, path: str) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint. Raises Violation if it is missing."""
    with closing(_database(data_dir)) as db:
        row = db.execute("SELECT folder FROM checkpoints WHERE path = ?", (path,)).fetchone()
    if row is None:
        raise Violation(f"{path} is missing")
    folder = data_dir / "checkpoints" / row[0]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def check_same_state(tenant: str, disturbed: Mapping[str, str], undisturbed: Mapping[str, str]) -> None:
    """Check that weights and moments have the same bits as in a run without kills."""
    assert {"adapter_model.safetensors", "optimizer.safetensors"} <= undisturbed.keys()
    check_equal(undisturbed, disturbed, f"{tenant}'s state differs from a run without kills")


def check_store(data_dir: Path) -> None:
    """Check a stopped pool: the database is intact, every operation has finished, and rows and folders match."""
    with closing(_database(data_dir)) as db:
        if (found := db.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise Violation(f"the database is damaged: {found}")
        unfinished = [
            f"{r[0]}:{r[1]}" for r in db.execute("SELECT target_id, seq FROM operations WHERE outcome_bytes IS NULL")
        ]
        if unfinished:
            raise Violation(f"{len(unfinished)} operations are not finished, for example {unfinished[0]}")
        for name, rows in (
            ("checkpoints", "checkpoints"),
            ("snapshots", "snapshots"),
            ("samplers", "samplers JOIN sessions USING (session_id) WHERE ended_at IS NULL AND folder != ''"),
        ):
            known = {row[0] for row in db.execute(f"SELECT folder FROM {rows}")}
            present = {folder.name for folder in (data_dir / name).iterdir()}
            if known != present:
                raise Violation(f"{name}: missing {sorted(known - present)}, without a row {sorted(present - known)}")


NO_OPERATIONS = ("install", "copy", "export")
"""Kinds of usage that are no operations."""


def usage_of(pool: ServedPool) -> Counter[tuple[str, str, str]]:
    """Return operations and tokens charged, by tenant and kind. Kills cause more installs, and may lose exports."""
    charged: Counter[tuple[str, str, str]] = Counter()
    for row in pool.usage_rows():
        if row.kind in NO_OPERATIONS:
            continue
        charged[row.tenant, row.kind, "operations"] = row.num_operations
        charged[row.tenant, row.kind, "tokens"] = row.num_tokens
    return charged


def check_same_usage(disturbed: Counter[tuple[str, str, str]], undisturbed: Counter[tuple[str, str, str]]) -> None:
    """Check that each tenant was charged as in a run without kills."""
    check_equal(
        {" ".join(key): str(n) for key, n in undisturbed.items()},
        {" ".join(key): str(n) for key, n in disturbed.items()},
        "charges differ from a run without kills",
    )


def _database(data_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{data_dir / 'tinkerpool.db'}?mode=ro", uri=True)
