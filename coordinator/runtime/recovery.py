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
from coordinator.storage.rows import AdapterRow, OperationRow
from coordinator.storage.store import Store
from workers.contract.messages import AdapterSpec


def adapter_of_row(row: AdapterRow) -> AdapterQueue:
    """An adapter without its operations."""
    return AdapterQueue(
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        base_model=row.base_model,
        spec=spec_of_row(row),
    )


def spec_of_row(row: AdapterRow) -> AdapterSpec:
    """What makes the adapter."""
    return AdapterSpec(
        adapter_id=row.adapter_id,
        rank=row.rank,
        alpha=row.alpha,
        seed=row.seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )


def load_adapters(store: Store, unwritten: Collection[str]) -> list[AdapterQueue]:
    """Every adapter that is not deleted, with its operations since its snapshot.

    `unwritten`: the saves whose weights are in no file, and have to be made again.
    """
    snapshots = {snapshot.adapter_id: snapshot for snapshot in store.snapshots.all()}
    adapters = []
    for row in store.adapters.not_deleted():
        adapter = adapter_of_row(row)
        if (snapshot := snapshots.get(adapter.adapter_id)) is not None:
            adapter.covered(snapshot.seq, snapshot.window_error, 0.0)
        adapter.next_seq = max(store.operations.last_seq(adapter.adapter_id), adapter.snapshot_seq) + 1
        for operation_row, payload in store.operations.since(adapter.adapter_id, adapter.snapshot_seq):
            operation = _operation(operation_row, payload)
            operation.is_underived = operation.name in unwritten
            adapter.add(operation)
        adapters.append(adapter)
    return adapters


def load_samples(store: Store) -> list[Operation]:
    """Sample operations that had not finished."""
    return [_operation(row, payload) for row, payload in store.operations.unfinished_samples()]


def load_fair_state(store: Store) -> FairState:
    """Every tenant's weight and counter."""
    shares = {t.tenant_id: Share(weight=t.weight, virtual_tokens=t.virtual_tokens) for t in store.tenants.all()}
    return FairState(shares=shares)


def _operation(row: OperationRow, payload: bytes | None) -> Operation:
    operation = operation_of_row(row)
    if operation.is_final:
        operation.retire()
    if payload is None or operation.is_failed:
        return operation
    if not operation.is_final:
        operation.body = payload
    if operation.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
        lengths = decode_pass(payload).lengths
        operation.chunks = cut_chunks(lengths, operation.chunk_tokens)
    return operation
