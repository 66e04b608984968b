"""Builds the items that workers run from operations, and the copies that they install from snapshots.

`PhaseWork` holds those of one phase, by worker. Depends on adapter logs, payloads and stored states; not on time,
fairness or workers. Main invariants: the items of one adapter form a chain, in which each names the seq that its worker
ran before it (the worker's fence checks this chain); an item belongs to one generation of its adapter's copy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.base.errors import Code, ServiceError
from coordinator.fleet.fleet import Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.copy import Ahead
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.operation import Kind, Operation, service_error
from coordinator.operations.windows import window_of
from coordinator.payloads.passes import INLINE_BYTES_MAX, DecodedPass, decode_adam, decode_pass
from coordinator.storage.folders import StateFolders
from coordinator.storage.store import Store
from tinkerpool.v1 import training_pb2
from workers.contract.messages import (
    AdapterInstall,
    AdapterState,
    Item,
    ItemResult,
    LoadItem,
    OptimStepItem,
    PassItem,
    SaveItem,
)

SNAPSHOT = "snapshot"
"""`op_id` of a save for recovery."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An item on its way to its adapter's worker."""

    log: AdapterLog
    generation: int
    """The generation of the copy that the item was built for; the result is dropped if the copy has another one."""
    operation: Operation | None
    """None: the item is a snapshot for recovery."""
    item: Item

    @property
    def chunk(self) -> int:
        """Which part of its operation the item is: a pass's chunk; of a load, 1 is the snapshot behind it."""
        return self.item.chunk_index if isinstance(self.item, PassItem) else int(self.item.op_id == SNAPSHOT)

    @property
    def is_current(self) -> bool:
        """Whether the copy that the item was built for is still the adapter's copy."""
        return self.log.copy.generation == self.generation


@dataclass(slots=True)
class MovedState:
    """What the items of one save or load took."""

    operation: Operation
    log: AdapterLog
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, entry: Entry, result: ItemResult, applying_s: float) -> None:
        """Add an item; `applying_s`: to write its state."""
        states = [result.state, entry.item.state if isinstance(entry.item, LoadItem) else None]
        self.num_bytes += sum(state.num_bytes for state in states if state is not None)
        self.seconds += result.engine_s + applying_s


class PhaseWork:
    """The chunks, other items and copies that one phase of a cycle sends to each worker."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._installs: dict[str, list[tuple[AdapterLog, int, AdapterInstall]]] = {}
        self._expected: dict[str, list[str]] = {}
        self._extra_tokens: defaultdict[str, float] = defaultdict(float)
        self.num_install_bytes = 0
        """Of the states in the copies."""

    def add(self, log: AdapterLog, operation: Operation | None, item: Item) -> None:
        """Send an item to the home of the adapter's copy."""
        self._entries.setdefault(log.home, []).append(Entry(log, log.copy.generation, operation, item))

    def install(self, log: AdapterLog, install: AdapterInstall) -> None:
        """Send a copy of the adapter to its home, where it was just placed."""
        self._installs.setdefault(log.home, []).append((log, log.copy.generation, install))
        self.num_install_bytes += install.state.num_bytes if install.state is not None else 0

    def ask(self, worker_id: str) -> None:
        """Send a batch to the worker although it gets nothing, for the report in its reply."""
        self._entries.setdefault(worker_id, [])

    def expect(self, log: AdapterLog) -> None:
        """Add a hint for the adapter's home: the next phase is likely to have it."""
        self._expected.setdefault(log.home, []).append(log.adapter_id)

    def weigh(self, worker_id: str, extra_tokens: float) -> None:
        """Count what the chunks of an adapter cost there besides their tokens, in tokens."""
        self._extra_tokens[worker_id] += extra_tokens

    def extra_tokens(self, worker_id: str) -> float:
        """Return what the chunks for a worker cost besides their tokens, in tokens."""
        return self._extra_tokens[worker_id]

    def worker_ids(self) -> list[str]:
        """Return the workers that get copies or items."""
        return list(dict.fromkeys((*self._installs, *self._entries)))

    def entries(self, worker_id: str) -> list[Entry]:
        """Return the items for a worker whose copies are still current."""
        return [entry for entry in self._entries.get(worker_id, ()) if entry.is_current]

    def installs(self, worker_id: str) -> tuple[AdapterInstall, ...]:
        """Return the copies for a worker that are still current."""
        found = self._installs.get(worker_id, ())
        return tuple(install for log, generation, install in found if log.copy.generation == generation)

    def expected(self, worker_id: str) -> tuple[str, ...]:
        """Return the adapters that the worker may load ahead."""
        return tuple(self._expected.get(worker_id, ()))


def flights(entries: Iterable[Entry]) -> tuple[Flight, ...]:
    """Return the operations of these items as records for the fleet."""
    operations = [entry.operation for entry in entries if entry.operation is not None]
    return tuple(Flight(o.name, o.target_id, o.seq, o.append_id, o.tenant_id) for o in operations)


class ItemBuilder:
    """Makes installs and items; reads payloads and states that have left memory from the store."""

    def __init__(self, store: Store, folders: StateFolders, in_flight: InFlightTable) -> None:
        self._in_flight = in_flight
        self._store = store
        self._folders = folders

    def has_snapshot(self, log: AdapterLog) -> bool:
        """Return whether a copy of the adapter begins with a state that must be read."""
        return self._store.snapshots.get(log.adapter_id) is not None

    async def read_copy(self, log: AdapterLog) -> AdapterInstall:
        """Read a copy of the adapter as of its newest snapshot, its files off the event loop. Raises ServiceError."""
        row = self._store.snapshots.get(log.adapter_id)
        if row is None:
            return AdapterInstall(spec=log.spec, state=None)
        state = await asyncio.to_thread(self._folders.snapshots.read, row.folder, row.sha256)
        window = window_of(row.window)
        batch = window.batch if window.has_gradient else None
        return AdapterInstall(spec=log.spec, state=replace(state, applied_seq=row.seq), batch=batch)

    async def decode_large(self, ahead: Ahead, num_chunks: int, bytes_max: float) -> dict[str, DecodedPass] | None:
        """Decode the large payloads among the next `num_chunks` chunks on a thread, by operation.

        Small ones, and those that are in memory decoded, are left to `pass_items`. Returns None if there are large ones
        of more than `bytes_max` bytes.
        """
        large: list[Operation] = []
        for operation in ahead.passes():
            if num_chunks <= 0:
                break
            num_chunks -= len(operation.chunks) - ahead.copy.num_chunks_done(operation)
            if operation.decoded is None and operation.num_bytes > INLINE_BYTES_MAX:
                large.append(operation)
        if large and sum(operation.num_bytes for operation in large) > bytes_max:
            return None
        return {each.name: await asyncio.to_thread(decode_pass, self._payload(each)) for each in large}

    def pass_items(
        self, ahead: Ahead, num_chunks: int, decoded_ahead: Mapping[str, DecodedPass]
    ) -> list[tuple[Operation, PassItem]]:
        """Return the adapter's next `num_chunks` chunks, in order; `decoded_ahead` is from `decode_large`."""
        items: list[tuple[Operation, PassItem]] = []
        copy, prev_seq = ahead.copy, ahead.copy.applied_seq
        for operation in ahead.passes():
            decoded = self._decoded(operation, decoded_ahead.get(operation.name))
            for index in range(copy.num_chunks_done(operation), len(operation.chunks)):
                if len(items) == num_chunks:
                    return items
                chunk = operation.chunks[index]
                item = PassItem(
                    op_id=operation.name,
                    adapter_id=operation.target_id,
                    prev_seq=prev_seq,
                    seq=operation.seq,
                    drop_gradient=copy.must_drop_gradient,
                    chunk_index=index,
                    num_chunks=len(operation.chunks),
                    data=decoded.data[chunk.start : chunk.stop],
                    loss_fn=decoded.loss_fn,
                    loss_config=decoded.loss_config,
                    backward=operation.kind is Kind.FORWARD_BACKWARD,
                    batch=operation.batch,
                )
                copy.took_gradient_drop()
                items.append((operation, item))
            prev_seq = operation.seq
        return items

    async def read_load(self, ahead: Ahead, num_operations: int) -> AdapterState | ServiceError | None:
        """Read the checkpoint of the load that `state_items` will have, if it has one, off the event loop.

        Returns the refusal of a load that cannot start.
        """
        due = itertools.islice(ahead.states(), num_operations)
        operation = next((each for each in due if each.kind is Kind.LOAD_STATE), None)
        if operation is None:
            return None
        path = training_pb2.LoadStateRequest.FromString(self._payload(operation)).path
        row = self._store.checkpoints.by_path(path)
        gone = ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"no checkpoint {path!r} any more")
        if row is None or not (row.tenant_id == operation.tenant_id or row.is_public):
            return gone
        try:
            return await asyncio.to_thread(self._folders.checkpoints.read, row.folder, row.sha256)
        except ServiceError as error:
            # Rows are deleted before folders: a folder whose row is gone was not lost.
            was_deleted = error.code is Code.DATA_LOSS and self._store.checkpoints.of_save(path, row.seq) is None
            return gone if was_deleted else error

    def state_items(
        self, log: AdapterLog, ahead: Ahead, num_operations: int, loaded: AdapterState | ServiceError | None
    ) -> list[tuple[Operation, Item]]:
        """Return the items that the step phase runs for the adapter, of at most `num_operations` operations.

        `loaded` is what `read_load` returned: a load that arrived after it waits. A load is followed by a snapshot of
        the loaded state, because its checkpoint may be deleted at any time, and the load could not be replayed then. An
        operation that cannot start is failed here and ends the chain. Raises ServiceError if that operation is a
        replay: the adapter cannot be rebuilt then.
        """
        items: list[tuple[Operation, Item]] = []
        prev_seq = log.copy.applied_seq
        for operation in itertools.islice(ahead.states(), num_operations):
            if operation.kind is Kind.LOAD_STATE and loaded is None:
                break  # it arrived since
            try:
                item = self._state_item(log, operation, prev_seq, loaded)
            except ServiceError as error:
                if operation.is_final:
                    raise
                log.fail(operation, service_error(error))
                break
            log.copy.took_gradient_drop()
            items.append((operation, item))
            prev_seq = operation.seq
            if operation.kind is Kind.LOAD_STATE and not operation.is_final:
                items.append((operation, self._snapshot_item(log, prev_seq, drop_gradient=False)))
        return items

    def snapshot_item(self, log: AdapterLog) -> SaveItem:
        """Return a save for recovery of the copy as it is."""
        drop = log.copy.must_drop_gradient
        log.copy.took_gradient_drop()
        return self._snapshot_item(log, log.copy.applied_seq, drop_gradient=drop)

    @staticmethod
    def _snapshot_item(log: AdapterLog, seq: int, *, drop_gradient: bool) -> SaveItem:
        return SaveItem(
            op_id=SNAPSHOT,
            adapter_id=log.adapter_id,
            prev_seq=seq,
            seq=seq,
            drop_gradient=drop_gradient,
            with_optimizer=True,
            with_gradient=True,
        )

    def _state_item(
        self, log: AdapterLog, operation: Operation, prev_seq: int, loaded: AdapterState | ServiceError | None
    ) -> Item:
        payload = self._payload(operation)
        op_id, adapter_id, seq = operation.name, log.adapter_id, operation.seq
        drop = log.copy.must_drop_gradient
        match operation.kind:
            case Kind.OPTIM_STEP:
                return OptimStepItem(
                    op_id=op_id,
                    adapter_id=adapter_id,
                    prev_seq=prev_seq,
                    seq=seq,
                    drop_gradient=drop,
                    params=decode_adam(payload),
                )
            case Kind.SAVE_STATE | Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                is_state = operation.kind is Kind.SAVE_STATE
                return SaveItem(
                    op_id=op_id,
                    adapter_id=adapter_id,
                    prev_seq=prev_seq,
                    seq=seq,
                    drop_gradient=drop,
                    with_optimizer=is_state,
                    publish_as="" if is_state else op_id,
                )
            case Kind.LOAD_STATE:
                if isinstance(loaded, ServiceError):
                    raise loaded
                assert loaded is not None
                return LoadItem(
                    op_id=op_id,
                    adapter_id=adapter_id,
                    prev_seq=prev_seq,
                    seq=seq,
                    drop_gradient=drop,
                    state=loaded,
                    with_optimizer=training_pb2.LoadStateRequest.FromString(payload).with_optimizer,
                )
            case _:
                raise AssertionError(f"{operation.kind} does not run in the step phase")

    def _decoded(self, operation: Operation, decoded_ahead: DecodedPass | None) -> DecodedPass:
        if operation.decoded is not None:
            return operation.decoded
        decoded = decoded_ahead or decode_pass(self._payload(operation))
        if operation.is_final:
            operation.keep_decoded(decoded)  # a replay; its last chunk drops it
        else:
            self._in_flight.keep_decoded(operation, decoded)
        return decoded

    def _payload(self, operation: Operation) -> bytes:
        return operation.payload or self._store.operations.payload(operation.target_id, operation.seq)
