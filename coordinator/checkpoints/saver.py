"""Saves and loads of a cycle: the states that it stages, the rows that its commit stores, and the folders it replaces.

Main invariant: a user's state is in its file before the commit, and a replaced folder is removed only after it. Weights
for sampling are the exception: they are committed first, and until their file exists the log can rematerialize them
(`published_weights`). Does not depend on workers, or on the order of operations.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from coordinator.base.errors import exists, sampler_exists
from coordinator.base.time import Time
from coordinator.checkpoints.published_weights import named, unnamed, version_of
from coordinator.checkpoints.states import States
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import SaveRequest, save_path
from coordinator.operations.operation import Operation, Usage, save_request, service_error
from coordinator.operations.sessions import SessionTable
from coordinator.storage.cycles import StagedStates
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.store import Store
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract.logs import about
from workers.contract.messages import AdapterState, ItemResult

logger = logging.getLogger(__name__)


class Saver:
    """The saves and loads of cycles."""

    def __init__(self, states: States, store: Store, sessions: SessionTable, time: Time) -> None:
        self.states = states
        self._store = store
        self._sessions = sessions
        self._time = time

    # ---- saves and loads of a cycle

    async def save(
        self,
        staged: StagedStates,
        cycle_id: int,
        log: AdapterLog,
        operation: Operation,
        usage: Usage,
        result: ItemResult,
    ) -> None:
        """Write a user's checkpoint, or publish weights, and decide the operation. Raises ServiceError."""
        request, state = save_request(operation), result.state
        assert state is not None
        if not request.name:
            assert isinstance(request, checkpoints_pb2.SaveWeightsForSamplerRequest)
            sampler = await self._publish(log, operation, request, state)
            staged.samplers.append(sampler)
            operation.succeed(cycle_id, usage).save_weights_for_sampler.sampler_id = sampler.sampler_id
            return
        path = save_path(operation.target_id, request)
        if not request.overwrite:
            self._check_free(staged, str(path))
        row = self._checkpoint_row(path, log, operation.seq, request, state)
        if path.kind == names.SAMPLER and self.states.publishing.can_hold(log.base_model, state):
            self.states.publishing.hold(named(row, log.spec, state))
        else:
            recipients = () if isinstance(request, checkpoints_pb2.SaveStateRequest) else request.age_recipients
            saved = await self.states.write(self.states.folders.checkpoints, log, state, recipients)
            row = replace(row, folder=saved.folder, sha256=saved.sha256, size_bytes=saved.size_bytes)
        staged.add_checkpoint(row, self._store.checkpoints.by_path(str(path)))  # only now is there a replacement
        outcome = operation.succeed(cycle_id, usage)
        if isinstance(request, checkpoints_pb2.SaveStateRequest):
            outcome.save_state.path = str(path)
        else:
            outcome.save_weights_for_sampler.path = str(path)

    def _checkpoint_row(
        self, path: names.CheckpointPath, log: AdapterLog, seq: int, request: SaveRequest, state: AdapterState
    ) -> CheckpointRow:
        now = self._time.wall()
        ttl_s = request.ttl_seconds
        return CheckpointRow(
            path=str(path),
            tenant_id=log.tenant_id,
            adapter_id=log.adapter_id,
            kind=path.kind,
            size_bytes=len(state.weights),
            seq=seq,
            base_model=log.base_model,
            rank=log.spec.rank,
            fingerprint=state.fingerprint,
            user_metadata=json.dumps(dict(request.user_metadata)),
            created_at=now,
            expires_at=now + ttl_s if ttl_s else None,
            expires_service_s=self._store.service_time() + ttl_s if ttl_s else None,
        )

    async def _publish(
        self,
        log: AdapterLog,
        operation: Operation,
        request: checkpoints_pb2.SaveWeightsForSamplerRequest,
        state: AdapterState,
    ) -> SamplerRow:
        """Return the row of an unnamed sampler: it can be sampled from once the cycle commits; its file may follow."""
        wanted = request.sampler_index if request.HasField("sampler_index") else None
        index = self._sessions.take_sampler_index(log.session_id, operation.name, wanted)
        row = SamplerRow(
            sampler_id=names.sampler_id(log.session_id, index),
            tenant_id=log.tenant_id,
            session_id=log.session_id,
            base_model=log.base_model,
            adapter_id=log.adapter_id,
            version=operation.name,
            created_at=self._time.wall(),
            is_inflight=request.is_inflight,
            file_bytes=self.states.holdings.weights_bytes(log.spec, log.base_model),
        )
        if self.states.publishing.can_hold(log.base_model, state):
            self.states.publishing.hold(unnamed(row, log.spec, state))
            return row
        saved = await self.states.write(self.states.folders.samplers, log, state)
        return replace(row, folder=saved.folder, sha256=saved.sha256)

    async def save_loaded(self, staged: StagedStates, log: AdapterLog, result: ItemResult) -> None:
        """Stage a loaded state as its adapter's snapshot, for the same commit. Raises ServiceError."""
        assert result.state is not None
        replaced = self._store.snapshots.get(log.adapter_id)
        start = await self.states.write_start(log, result.state)
        staged.add_snapshot(replace(start, seq=result.state.applied_seq), replaced)

    def refuse_taken(self, staged: StagedStates, finished: Iterable[Operation]) -> bool:
        """Fail the saves whose sampler ids another row has taken since; return whether there are any."""
        taken = {row.version: row for row in staged.samplers if self._store.samplers.get(row.sampler_id) is not None}
        for operation in finished:
            if (row := taken.get(operation.name)) is not None:
                ids = about(operation=operation.name, adapter=operation.target_id)
                logger.error("%s: the sampler %s exists already", operation.name, row.sampler_id, extra=ids)
                assert operation.outcome is not None
                outcome = operation.outcome
                operation.undecide()
                usage = Usage(outcome.num_tokens, outcome.engine_seconds)
                operation.fail(service_error(sampler_exists(row.sampler_id)), usage, cycle_id=outcome.cycle_id)
                self._discard(row)
        staged.drop_samplers(taken)
        return bool(taken)

    def committed(self, staged: StagedStates, lost: Collection[str]) -> None:
        """Remove the folders that a durable commit replaced, and write the weights that it published.

        Nothing of the adapters `lost` was stored: drop their weights and new folders.
        """
        for row in staged.samplers:
            if row.adapter_id in lost:
                self._discard(row)
            else:
                is_live = self._sessions.count_samplers(row.session_id, 1)
                self.states.publishing.committed(row.version)
                if row.folder and not is_live:  # its session ended, with its folders, before the row was there
                    self.states.remove_soon(self.states.folders.samplers, row.folder)
        for checkpoint in staged.checkpoints:
            if checkpoint.adapter_id not in lost:
                self.states.holdings.add(checkpoint)
                self.states.publishing.committed(version_of(checkpoint))
            else:
                self._discard_checkpoint(checkpoint)
        for superseded in staged.superseded_checkpoints:
            self._discard_checkpoint(superseded)
        for deleted in staged.deleted_checkpoints:
            self.states.holdings.remove(deleted)
            self.states.publishing.deleted(version_of(deleted))
            if deleted.folder:
                self.states.remove_soon(self.states.folders.checkpoints, deleted.folder)
        for adapter_id, folder in staged.replaced_snapshots:
            if adapter_id not in lost:
                self.states.remove_soon(self.states.folders.snapshots, folder)

    def _discard_checkpoint(self, row: CheckpointRow) -> None:
        """Drop the weights of a checkpoint whose row was not stored."""
        if row.folder:
            self.states.remove_soon(self.states.folders.checkpoints, row.folder)
        else:
            self.states.publishing.drop(version_of(row))

    def _discard(self, row: SamplerRow) -> None:
        """Drop the weights of an unnamed sampler whose row was not stored."""
        self.states.publishing.drop(row.version)
        if row.folder:
            self.states.remove_soon(self.states.folders.samplers, row.folder)

    def _check_free(self, staged: StagedStates, path: str) -> None:
        """Raise ServiceError if a checkpoint has this path."""
        if staged.has_path(path) or self._store.checkpoints.by_path(path) is not None:
            raise exists(
                "CHECKPOINT_EXISTS", f"{path} exists already: choose another name, delete it first, or set overwrite"
            )
