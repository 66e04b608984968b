"""From the log back to memory: queues, unfinished samples and fair-share counters, as the last coordinator left them.

Reads only. An adapter's queue holds everything after its snapshot; what had finished there is run again, silently, when
the adapter is next installed, and what had not is run for the first time.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.admission import operation_of_row
from coordinator.operations.chunks import cut_chunks
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.payloads import decode_pass
from coordinator.scheduling.planner import FairState, Share
from coordinator.storage.database import Row
from coordinator.storage.store import Store
from workers.contract.messages import AdapterSpec


def adapter_of_row(row: Row) -> AdapterQueue:
    """An adapter without its operations."""
    return AdapterQueue(
        tenant_id=row["tenant_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        spec=spec_of_row(row),
    )


def spec_of_row(row: Row) -> AdapterSpec:
    """What makes the adapter."""
    return AdapterSpec(
        adapter_id=row["adapter_id"],
        rank=row["rank"],
        alpha=row["alpha"],
        seed=row["seed"],
        train_attn=bool(row["train_attn"]),
        train_mlp=bool(row["train_mlp"]),
        train_unembed=bool(row["train_unembed"]),
    )


def load_adapters(store: Store, unwritten: Collection[str]) -> list[AdapterQueue]:
    """Every adapter that is not deleted, with its operations since its snapshot.

    `unwritten`: the saves whose weights are in no file, and have to be made again.
    """
    snapshots = {row["adapter_id"]: row for row in store.read("SELECT adapter_id, seq, window_error FROM snapshots")}
    adapters = []
    for row in store.read("SELECT * FROM adapters WHERE deleted_at IS NULL ORDER BY created_at, adapter_id"):
        adapter = adapter_of_row(row)
        if (snapshot := snapshots.get(adapter.adapter_id)) is not None:
            adapter.covered(snapshot["seq"], bytes(snapshot["window_error"]), 0.0)
        last = store.read_one("SELECT MAX(seq) AS seq FROM operations WHERE target_id = ?", (adapter.adapter_id,))
        adapter.next_seq = max((last["seq"] if last else None) or 0, adapter.snapshot_seq) + 1
        rows = store.read(
            "SELECT * FROM operations WHERE target_id = ? AND seq > ? ORDER BY seq",
            (adapter.adapter_id, adapter.snapshot_seq),
        )
        for operation_row in rows:
            operation = _operation(operation_row)
            operation.is_underived = operation.name in unwritten
            adapter.add(operation)
        adapters.append(adapter)
    return adapters


def load_samples(store: Store) -> list[Operation]:
    """Sample operations that had not finished."""
    rows = store.read("SELECT * FROM operations WHERE outcome IS NULL AND kind = 'sample' ORDER BY target_id, seq")
    return [_operation(row) for row in rows]


def load_fair_state(store: Store) -> FairState:
    """Every tenant's weight and counter."""
    rows = store.read("SELECT tenant_id, weight, virtual_tokens FROM tenants")
    shares = {r["tenant_id"]: Share(weight=r["weight"], virtual_tokens=r["virtual_tokens"]) for r in rows}
    return FairState(shares=shares)


def _operation(row: Row) -> Operation:
    operation = operation_of_row(row)
    if operation.is_final:
        operation.retire()
    if row["body"] is None or operation.is_failed:
        return operation
    if not operation.is_final:
        operation.body = bytes(row["body"])
    if operation.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
        lengths = decode_pass(bytes(row["body"])).lengths
        operation.chunks = cut_chunks(lengths, operation.chunk_tokens)
    return operation
