"""Operations and adapter logs from the rows of the operation log. Pure; does not read the database."""

from __future__ import annotations

from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Acceptance, Kind, Operation, OutcomeState
from coordinator.payloads.chunks import cut_chunks
from coordinator.payloads.passes import decode_pass
from coordinator.storage.rows import AdapterRow, OperationRow
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import AdapterSpec


def operation_of_row(row: OperationRow) -> Operation:
    """Return an operation as the store has it, without its payload."""
    if row.outcome is None:
        state = OutcomeState.UNDECIDED
    else:
        state = OutcomeState.COMMITTED if row.outcome else OutcomeState.DROPPED
    return Operation(
        tenant_id=row.tenant_id,
        target_id=row.target_id,
        seq=row.seq,
        kind=Kind(row.kind),
        payload=b"",
        payload_hash=row.payload_hash,
        request_id=row.request_id or "",
        chunk_tokens=row.chunk_tokens,
        num_bytes=row.num_bytes,
        append_id=row.append_id,
        acceptance=Acceptance.DURABLE,
        outcome_state=state,
        outcome=ops_pb.Operation.FromString(row.outcome) if row.outcome is not None else None,
    )


def restored_operation(row: OperationRow, payload: bytes | None, *, must_rematerialize: bool = False) -> Operation:
    """Return an operation for an adapter log: with its payload if it is undecided, with its chunks if it may run."""
    operation = operation_of_row(row)
    if operation.is_committed and not operation.is_dropped:
        operation.retire()
    operation.must_rematerialize = must_rematerialize
    if payload is None or operation.is_failed:
        return operation
    if not operation.is_final:
        operation.payload = payload
    if operation.kind.is_pass:
        operation.chunks = cut_chunks(decode_pass(payload).lengths, operation.chunk_tokens)
    return operation


def adapter_of_row(row: AdapterRow) -> AdapterLog:
    """Return an adapter without its operations."""
    return AdapterLog(
        tenant_id=row.tenant_id, session_id=row.session_id, base_model=row.base_model, spec=spec_of_row(row)
    )


def spec_of_row(row: AdapterRow) -> AdapterSpec:
    """Return the adapter's spec."""
    return AdapterSpec(
        adapter_id=row.adapter_id,
        rank=row.rank,
        alpha=row.alpha,
        seed=row.seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )
