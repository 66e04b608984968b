"""From operations to what workers run, and from what they answer to outcomes. Knows neither time nor fairness.

Items of one adapter form a chain: each names the seq before it that a worker ran. What is chained here is what the
worker's fence checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coordinator.base.errors import Code, ServiceError
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.outcomes import service_error
from coordinator.operations.payloads import decode_adam, decode_pass
from coordinator.storage.folders import StateFiles
from coordinator.storage.store import Store
from tinkerpool.v1 import training_pb2
from workers.contract.messages import (
    AdapterInstall,
    Item,
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
        row = self._store.snapshots.get(adapter.adapter_id)

        def install() -> AdapterInstall:
            if row is None:
                return AdapterInstall(spec=spec, state=None)
            state = self._snapshots.read(row.folder, row.sha256)
            return AdapterInstall(spec=spec, state=replace(state, applied_seq=row.seq))

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
        body = operation.body or self._store.operations.payload(operation.target_id, operation.seq)
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
                row = self._store.checkpoints.by_path(request.path)
                if row is None or not (row.tenant_id == adapter.tenant_id or row.is_public):
                    raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"no checkpoint {request.path!r} any more")
                return LoadItem(
                    **ids,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=drop,
                    state=self._checkpoints.read(row.folder, row.sha256),
                    with_optimizer=request.with_optimizer,
                )
            case _:
                raise AssertionError(f"{operation.kind} has no place in the step phase")

    def _load_pass(self, operation: Operation) -> None:
        body = operation.body or self._store.operations.payload(operation.target_id, operation.seq)
        decoded = decode_pass(body)
        operation.loss, operation.data = (decoded.loss_fn, dict(decoded.loss_config)), decoded.data
