"""Recovery: adapter logs, published weights and unfinished samples of the last epoch, from the operation log to memory.

Writes nothing; does not depend on workers. An adapter log gets all operations after its snapshot. When the adapter is
next installed, its finished operations are replayed without new outcomes, and the unfinished ones run for the first
time. Main invariant: every acknowledged operation is finished or in the in-flight table afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from coordinator.checkpoints.published_weights import named, unnamed
from coordinator.checkpoints.states import States
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import Claim, claim_of_pass, claim_of_sample
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.operation import Operation, operation_of_row, save_request
from coordinator.operations.registry import AdapterRegistry, adapter_of_row
from coordinator.operations.windows import window_of
from coordinator.payloads.passes import cut_chunks, decode_pass
from coordinator.payloads.samples import decode_sample
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.virtual_counters import FairState, Share
from coordinator.storage.rows import OperationRow
from coordinator.storage.store import Store
from workers.contract.logs import about

logger = logging.getLogger(__name__)


class Recovery:
    """Loads the state of the last epoch."""

    def __init__(
        self,
        store: Store,
        registry: AdapterRegistry,
        in_flight: InFlightTable,
        states: States,
        samples: SampleScheduler,
    ) -> None:
        self._store = store
        self._registry = registry
        self._in_flight = in_flight
        self._states = states
        self._samples = samples

    def run(self) -> None:
        """Recover everything."""
        for cycle_id, adapter_ids in self._store.cycles.plans().items():
            ids = about(cycle=cycle_id)
            logger.warning(
                "the last epoch ended in cycle %d, which ran %s", cycle_id, ", ".join(adapter_ids), extra=ids
            )
        spec = self._registry.spec
        versions = [unnamed(row, spec(row.adapter_id)) for row in self._store.samplers.unwritten()]
        versions += [named(row, spec(row.adapter_id)) for row in self._store.checkpoints.unwritten()]
        in_log = self._load_adapters({version.name for version in versions})
        for version in versions:
            self._states.publishing.expect(version, is_in_log=version.name in in_log)
        for row, payload in self._store.operations.unfinished_samples():
            decoded = decode_sample(payload or b"")
            operation = replace(restored_operation(row, payload), claim=claim_of_sample(decoded))
            self._in_flight.add(operation)
            sampler = self._store.samplers.get(operation.target_id)
            assert sampler is not None
            self._samples.submit(operation, sampler, decoded)

    def _load_adapters(self, unwritten: set[str]) -> set[str]:
        """Load every adapter that is not deleted, with its operations since its snapshot.

        `unwritten`: saves whose weights have no file. Returns those of them that are in the log, and so can be
        rematerialized.
        """
        in_log: set[str] = set()
        for row in self._store.adapters.not_deleted():
            log = adapter_of_row(row)
            if (snapshot := self._store.snapshots.get(log.adapter_id)) is not None:
                log.cover(snapshot.seq, window_of(snapshot.window), 0.0)
            log.restore(max(self._store.operations.last_seq(log.adapter_id), log.snapshot_seq) + 1)
            for operation_row, payload in self._store.operations.since(log.adapter_id, log.snapshot_seq):
                name = f"{operation_row.target_id}:{operation_row.seq}"
                operation = restored_operation(operation_row, payload, must_rematerialize=name in unwritten)
                if name in unwritten:
                    in_log.add(name)
                log.add(operation)
                if not operation.is_final:
                    operation.claim = self._claim(log, operation)
                    self._in_flight.add(operation)
            self._registry.add(log)
            self._registry.group_of(log).submitted(log)
        return in_log

    def _claim(self, log: AdapterLog, operation: Operation) -> Claim:
        """Return what an unfinished operation may add to what its tenant holds: the same as when it was accepted."""
        if operation.kind.is_save:
            return self._states.holdings.claim_of_save(log.spec, log.base_model, save_request(operation))
        return claim_of_pass(operation.chunks)


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


def load_fair_state(store: Store, weights: Mapping[str, float]) -> FairState:
    """Return every tenant's virtual counter, and its weight if that is not 1."""
    return FairState(
        shares={
            row.tenant_id: Share(weight=weights.get(row.tenant_id, 1.0), virtual_tokens=row.virtual_tokens)
            for row in store.tenants.all()
        }
    )
