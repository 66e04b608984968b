"""Outcomes of operations from workers' results and errors, and operations to and from the rows of the operation log.

Pure: does not depend on order, time or the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coordinator.base.errors import Code, ServiceError
from coordinator.operations.operation import Acceptance, Kind, Operation, OutcomeState, Usage
from coordinator.payloads.passes import cut_chunks, decode_pass, serialize
from coordinator.payloads.samples import DecodedSample
from coordinator.storage.rows import DecidedOperation, NewOperation, OperationRow
from tinkerpool import names
from tinkerpool.convert import to_tensor
from tinkerpool.metrics import merge_metrics
from tinkerpool.v1 import checkpoints_pb2, training_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import (
    ErrorCode,
    ItemError,
    ItemResult,
    SampleResult,
    StopReason,
    TokenLogprobs,
)


def fill_pass(operation: Operation, parts: Sequence[ItemResult], usage: Usage, cycle_id: int) -> None:
    """Decide a forward or forward_backward whose chunks have all succeeded with these results."""
    result = operation.succeed(cycle_id, usage).forward_backward
    for part in parts:
        result.logprobs.extend(to_tensor(logprobs) for logprobs in part.logprobs)
    metrics = merge_metrics([part.metrics for part in parts], [part.num_tokens for part in parts], keep_partial=True)
    for key, value in metrics.items():
        result.metrics[key] = value
    result.metrics["tokens:sum"] = float(operation.num_tokens)
    result.metrics["clock_cycle:unique"] = float(cycle_id)


def fill_step(operation: Operation, result: ItemResult, usage: Usage, cycle_id: int) -> None:
    """Decide an optim_step that has succeeded."""
    metrics = operation.succeed(cycle_id, usage).optim_step.metrics
    for key, value in result.metrics.items():
        metrics[key] = value
    metrics["clock_cycle:unique"] = float(cycle_id)


def fill_load(operation: Operation, usage: Usage, cycle_id: int) -> None:
    """Decide a load_state that has succeeded."""
    path = training_pb2.LoadStateRequest.FromString(operation.payload).path
    operation.succeed(cycle_id, usage).load_state.path = path


def fill_sample(operation: Operation, asked: DecodedSample, result: SampleResult, usage: Usage) -> None:
    """Decide a sample: succeeded, with a worker's result."""
    sample = operation.succeed(0, usage).sample
    sample.note = asked.note
    for sequence in result.sequences:
        added = sample.sequences.add(
            tokens=to_tensor(sequence.tokens),
            logprobs=to_tensor(sequence.logprobs),
            stop_reason=_STOP_REASONS[sequence.stop_reason],
        )
        if sequence.topk is not None:
            added.topk.CopyFrom(_token_logprobs(sequence.topk))
    if result.prompt_logprobs is not None:
        sample.prompt_logprobs.CopyFrom(to_tensor(result.prompt_logprobs))
    if result.topk_prompt is not None:
        sample.topk_prompt.CopyFrom(_token_logprobs(result.topk_prompt))
    if result.prompt_target_logprobs is not None:
        assert asked.prompt_targets is not None
        # NaN where no token was named: 0 would be a possible log-probability.
        logprobs = np.where(asked.prompt_targets < 0, np.float32(np.nan), result.prompt_target_logprobs)
        sample.prompt_target_logprobs.CopyFrom(to_tensor(logprobs))
    if result.prompt_alt_tokens is not None:
        sample.prompt_alt_tokens.CopyFrom(_token_logprobs(result.prompt_alt_tokens))
    sample.num_cached_prompt_tokens = result.num_cached_tokens


_STOP_REASONS = {
    StopReason.STOP: ops_pb.STOP_REASON_STOP,
    StopReason.LENGTH: ops_pb.STOP_REASON_LENGTH,
}


def _token_logprobs(found: TokenLogprobs) -> ops_pb.TokenLogprobs:
    return ops_pb.TokenLogprobs(token_ids=to_tensor(found.token_ids), logprobs=to_tensor(found.logprobs))


def save_request(
    operation: Operation,
) -> checkpoints_pb2.SaveStateRequest | checkpoints_pb2.SaveWeightsForSamplerRequest:
    """Return the request of a save."""
    if operation.kind is Kind.SAVE_STATE:
        return checkpoints_pb2.SaveStateRequest.FromString(operation.payload)
    return checkpoints_pb2.SaveWeightsForSamplerRequest.FromString(operation.payload)


def save_path(operation: Operation, name: str) -> names.CheckpointPath:
    """Return the path of a named save."""
    request = save_request(operation)
    if isinstance(request, checkpoints_pb2.SaveStateRequest):
        kind = names.TRAINING
    else:
        kind = names.EXTERNAL if request.for_export else names.SAMPLER
    return names.CheckpointPath(operation.target_id, kind, name)


def service_error(error: ServiceError) -> ops_pb.OperationError:
    """Return a refusal as the outcome of an operation."""
    return ops_pb.OperationError(code=error.code, reason=error.reason, message=error.message)


def worker_died(operation: Operation) -> ops_pb.OperationError:
    """Return the error of a poison operation: it ended its worker whenever it ran."""
    return ops_pb.OperationError(
        code=Code.INTERNAL,
        reason="WORKER_DIED",
        message=f"{operation.name} ended its worker each time that it ran, the last times solo: it does not fit into "
        "memory, takes far too long, or triggers a fault of the engine; send less at once",
    )


_CODES = {
    ErrorCode.INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
    ErrorCode.NON_FINITE: Code.FAILED_PRECONDITION,
    ErrorCode.OUT_OF_MEMORY: Code.RESOURCE_EXHAUSTED,
    ErrorCode.DATA_LOSS: Code.DATA_LOSS,
    ErrorCode.OUT_OF_ORDER: Code.ABORTED,
    ErrorCode.CANCELLED: Code.CANCELLED,
    ErrorCode.INTERNAL: Code.INTERNAL,
}


def item_error(error: ItemError) -> ops_pb.OperationError:
    """Return a worker's error as users see it."""
    return ops_pb.OperationError(code=_CODES[error.code], reason=error.code.name, message=error.message)


def new_row(operation: Operation) -> NewOperation:
    """Return an operation as the log appends it; a refused one with its outcome."""
    return NewOperation(
        target_id=operation.target_id,
        seq=operation.seq,
        append_id=operation.append_id,
        tenant_id=operation.tenant_id,
        kind=operation.kind.value,
        request_id=operation.request_id or None,
        payload=operation.payload,
        payload_hash=operation.payload_hash,
        chunk_tokens=operation.chunk_tokens,
        outcome=serialize(operation.outcome) if operation.outcome is not None else None,
        is_failed=operation.is_failed,
    )


def decided_row(operation: Operation) -> DecidedOperation:
    """Return a decided operation as a commit stores it."""
    outcome = operation.outcome
    assert outcome is not None
    return DecidedOperation(
        target_id=operation.target_id,
        seq=operation.seq,
        append_id=operation.append_id,
        tenant_id=operation.tenant_id,
        kind=operation.kind.value,
        outcome=serialize(outcome),
        is_failed=operation.is_failed,
        num_tokens=outcome.num_tokens,
        engine_s=outcome.engine_seconds,
    )


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
    if payload is None or operation.is_failed:
        return replace(operation, must_rematerialize=must_rematerialize)
    return replace(
        operation,
        must_rematerialize=must_rematerialize,
        payload=b"" if operation.is_final else payload,
        chunks=cut_chunks(decode_pass(payload).lengths, operation.chunk_tokens) if operation.kind.is_pass else (),
    )
