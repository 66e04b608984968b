"""From operations to what workers run, and from what they answer to outcomes. Knows neither time nor fairness.

Items of one adapter form a chain: each names the seq before it that a worker ran. What is chained here is what the
worker's fence checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from coordinator.bodies import decode_adam, decode_pass
from coordinator.errors import Code, ServiceError
from coordinator.files import StateFiles
from coordinator.operations import Kind, Operation
from coordinator.queue import AdapterQueue
from coordinator.store import Store
from tinkerpool import names
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import checkpoints_pb2, training_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.messages import (
    AdapterInstall,
    Item,
    ItemResult,
    LoadItem,
    OptimStepItem,
    PassItem,
    SaveItem,
)

SNAPSHOT = "snapshot"
"""`op_id` of a save that is ours, not a user's."""


class BatchBuilder:
    """Makes installs and items, reading bodies and states back where they have left memory."""

    def __init__(self, store: Store, checkpoints: StateFiles, snapshots: StateFiles) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._snapshots = snapshots

    def installer(self, adapter: AdapterQueue) -> Callable[[], AdapterInstall]:
        """What reads a copy of the adapter as of its newest snapshot; for a thread of its own, files may be large.

        It raises ServiceError DATA_LOSS.
        """
        spec = adapter.spec
        row = self._store.read_one("SELECT * FROM snapshots WHERE adapter_id = ?", (adapter.adapter_id,))

        def install() -> AdapterInstall:
            if row is None:
                return AdapterInstall(spec=spec, state=None)
            state = self._snapshots.read(row["folder"], row["sha256"])
            return AdapterInstall(spec=spec, state=replace(state, applied_seq=row["seq"]))

        return install

    def pass_items(self, adapter: AdapterQueue, num_chunks: int) -> list[tuple[Operation, PassItem]]:
        """The adapter's next `num_chunks` chunks, in order."""
        items: list[tuple[Operation, PassItem]] = []
        prev_seq = adapter.placed_seq
        for operation in adapter.ready_passes():
            if not operation.data:
                self._load_pass(operation)
            loss_fn, loss_config = operation.loss
            for index in range(operation.next_chunk, len(operation.chunks)):
                if len(items) == num_chunks:
                    return items
                chunk = operation.chunks[index]
                item = PassItem(
                    op_id=operation.name,
                    adapter_id=adapter.adapter_id,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=adapter.must_drop_gradient,
                    chunk_index=index,
                    num_chunks=len(operation.chunks),
                    data=operation.data[chunk.start : chunk.stop],
                    loss_fn=loss_fn,
                    loss_config=loss_config,
                    backward=operation.kind is Kind.FORWARD_BACKWARD,
                )
                adapter.must_drop_gradient = False
                items.append((operation, item))
            prev_seq = operation.seq
        return items

    def state_items(self, adapter: AdapterQueue) -> list[tuple[Operation, Item]]:
        """What the step phase runs for the adapter.

        Behind a load stands a snapshot of what it loaded: its checkpoint may be deleted at any time, and then nobody
        could run it again. An operation that cannot even start is failed here and ends the chain. Raises ServiceError
        if it is a replay: then the adapter cannot be rebuilt.
        """
        items: list[tuple[Operation, Item]] = []
        prev_seq = adapter.placed_seq
        for operation in adapter.ready_states():
            try:
                item = self._state_item(adapter, operation, prev_seq)
            except ServiceError as error:
                if operation.is_final:
                    raise
                operation.fail(service_error(error))
                adapter.decided.append(operation)
                break
            adapter.must_drop_gradient = False
            items.append((operation, item))
            prev_seq = operation.seq
            if operation.kind is Kind.LOAD_STATE and not operation.is_final:
                items.append((operation, self._snapshot_item(adapter, prev_seq, drop_gradient=False)))
        return items

    def snapshot_item(self, adapter: AdapterQueue) -> SaveItem:
        """A save for recovery; it stands where the adapter stands."""
        drop = adapter.must_drop_gradient
        adapter.must_drop_gradient = False
        return self._snapshot_item(adapter, adapter.placed_seq, drop_gradient=drop)

    @staticmethod
    def _snapshot_item(adapter: AdapterQueue, seq: int, *, drop_gradient: bool) -> SaveItem:
        return SaveItem(
            op_id=SNAPSHOT,
            adapter_id=adapter.adapter_id,
            prev_seq=seq,
            seq=seq,
            drop_gradient=drop_gradient,
            with_optimizer=True,
            with_gradient=True,
        )

    def _state_item(self, adapter: AdapterQueue, operation: Operation, prev_seq: int) -> Item:
        body = operation.body or self._store.read_body(operation.target_id, operation.seq)
        ids = {"op_id": operation.name, "adapter_id": adapter.adapter_id}
        drop = adapter.must_drop_gradient
        match operation.kind:
            case Kind.OPTIM_STEP:
                params = decode_adam(body)
                return OptimStepItem(**ids, prev_seq=prev_seq, seq=operation.seq, drop_gradient=drop, params=params)
            case Kind.SAVE_STATE:
                return SaveItem(
                    **ids,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=drop,
                    with_optimizer=True,
                    with_gradient=False,
                )
            case Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                return SaveItem(
                    **ids,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=drop,
                    with_optimizer=False,
                    with_gradient=False,
                    publish_as=operation.name,
                )
            case Kind.LOAD_STATE:
                request = training_pb2.LoadStateRequest.FromString(body)
                row = self._store.read_one("SELECT * FROM checkpoints WHERE path = ?", (request.path,))
                if row is None or not (row["tenant_id"] == adapter.tenant_id or row["is_public"]):
                    raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"no checkpoint {request.path!r} any more")
                return LoadItem(
                    **ids,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=drop,
                    state=self._checkpoints.read(row["folder"], row["sha256"]),
                    with_optimizer=request.with_optimizer,
                )
            case _:
                raise AssertionError(f"{operation.kind} has no place in the step phase")

    def _load_pass(self, operation: Operation) -> None:
        body = operation.body or self._store.read_body(operation.target_id, operation.seq)
        loss_fn, loss_config, data = decode_pass(body)
        operation.loss, operation.data = (loss_fn, loss_config), data


def fill_pass(operation: Operation, cycle_id: int) -> None:
    """Decide a forward or forward_backward whose chunks have all succeeded."""
    result = operation.succeed(cycle_id).forward_backward
    for part in operation.parts:
        result.logprobs.extend(to_tensor(logprobs) for logprobs in part.logprobs)
    for key, value in merged_metrics(operation.parts).items():
        result.metrics[key] = value
    result.metrics["tokens:sum"] = float(operation.num_tokens)
    result.metrics["clock_cycle:unique"] = float(cycle_id)


def fill_step(operation: Operation, result: ItemResult, cycle_id: int) -> None:
    """Decide an optim_step that has succeeded."""
    metrics = operation.succeed(cycle_id).optim_step.metrics
    for key, value in result.metrics.items():
        metrics[key] = value
    metrics["clock_cycle:unique"] = float(cycle_id)


def fill_load(operation: Operation, cycle_id: int) -> None:
    """Decide a load_state that has succeeded."""
    path = training_pb2.LoadStateRequest.FromString(operation.body).path
    operation.succeed(cycle_id).load_state.path = path


def save_request(
    operation: Operation,
) -> checkpoints_pb2.SaveStateRequest | checkpoints_pb2.SaveWeightsForSamplerRequest:
    """The request of a save."""
    if operation.kind is Kind.SAVE_STATE:
        return checkpoints_pb2.SaveStateRequest.FromString(operation.body)
    return checkpoints_pb2.SaveWeightsForSamplerRequest.FromString(operation.body)


def save_path(operation: Operation, name: str) -> names.CheckpointPath:
    """Where a named save goes."""
    request = save_request(operation)
    if isinstance(request, checkpoints_pb2.SaveStateRequest):
        kind = names.TRAINING
    else:
        kind = names.EXTERNAL if request.for_export else names.SAMPLER
    return names.CheckpointPath(operation.target_id, kind, name)


def merged_metrics(parts: Iterable[ItemResult]) -> Mapping[str, float]:
    """Metrics of a request's chunks as one, each by the reduction that its key names (means by tokens)."""
    merged: dict[str, float] = {}
    weights: dict[str, float] = {}
    for part in parts:
        for key, value in part.metrics.items():
            reduction = key.rpartition(":")[2]
            if key not in merged:
                merged[key], weights[key] = value, float(part.num_tokens)
            elif reduction == "sum":
                merged[key] += value
            elif reduction == "max":
                merged[key] = max(merged[key], value)
            elif reduction == "min":
                merged[key] = min(merged[key], value)
            elif reduction == "mean":
                weight = weights[key] + part.num_tokens
                merged[key] += (value - merged[key]) * part.num_tokens / weight if weight else 0.0
                weights[key] = weight
    return merged


def service_error(error: ServiceError) -> ops_pb.OperationError:
    """A refusal as the outcome of an operation."""
    return ops_pb.OperationError(code=int(error.code), reason=error.reason, message=error.message)


def worker_died(operation: Operation) -> ops_pb.OperationError:
    """Why an operation that ends its worker whenever it runs is run no more."""
    return ops_pb.OperationError(
        code=int(Code.INTERNAL),
        reason="WORKER_DIED",
        message=f"{operation.name} ended its worker each time that it ran, alone the last times: it does not fit into "
        "memory, takes far too long, or has found a fault of the engine; send less at once",
    )
