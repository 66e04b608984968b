"""Copying a checkpoint: other use cases create an adapter from it, and save that adapter again."""

from __future__ import annotations

from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.service.access import check_ttl, metadata_of
from coordinator.service.adapters import AdapterUseCases
from coordinator.service.auth import Principal
from coordinator.service.checkpoints import CheckpointUseCases
from coordinator.service.operations import OperationUseCases
from coordinator.service.sessions import SessionUseCases
from coordinator.service.training import TrainingUseCases
from coordinator.storage.rows import CheckpointRow
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb


class CopyUseCases(SessionUseCases, AdapterUseCases, TrainingUseCases, CheckpointUseCases, OperationUseCases):
    """CopyCheckpoint of CheckpointService, which combines use cases of several services."""

    async def copy_checkpoint(
        self, principal: Principal, request: checkpoints_pb2.CopyCheckpointRequest
    ) -> checkpoints_pb2.CopyCheckpointResponse:
        """Copy a checkpoint to one of the tenant, of the same kind. Every step is safe to repeat, so the call is."""
        check_ttl(request.ttl_seconds)
        if not request.request_id and not (request.session_id and request.HasField("index")):
            raise invalid(
                "request_id is empty: set it, or session_id and index, so that the call is safe to repeat (over HTTP: "
                "the header X-Idempotency-Key, or session_id and model_seq_id)"
            )
        source = self._readable_checkpoint(principal, request.path)
        session_id = request.session_id or await self._session_for(principal, request.request_id)
        create = adapters_pb2.CreateAdapterRequest(
            session_id=session_id,
            index=request.index if request.HasField("index") else None,
            request_id=request.request_id,
            from_path=request.path,
            with_optimizer=source.kind == names.TRAINING,
        )
        adapter = (await self.create_adapter(principal, create)).adapter
        saving = await self._save_as(principal, adapter.adapter_id, source, request.ttl_seconds)
        path = await self._saved_path(principal, saving.name)
        found = await self.get_checkpoint(principal, checkpoints_pb2.GetCheckpointRequest(path=path))
        return checkpoints_pb2.CopyCheckpointResponse(checkpoint=found.checkpoint)

    async def _save_as(
        self, principal: Principal, adapter_id: str, source: CheckpointRow, ttl_seconds: int
    ) -> ops_pb.Operation:
        """Save an adapter that was made from a checkpoint, with that checkpoint's name, kind and metadata."""
        name, metadata = names.CheckpointPath.parse(source.path).name, metadata_of(source)
        if source.kind == names.TRAINING:
            state = checkpoints_pb2.SaveStateRequest(
                adapter_id=adapter_id, seq=1, name=name, user_metadata=metadata, ttl_seconds=ttl_seconds
            )
            return (await self.save_state(principal, state)).operation
        weights = checkpoints_pb2.SaveWeightsForSamplerRequest(
            adapter_id=adapter_id,
            seq=1,
            name=name,
            user_metadata=metadata,
            ttl_seconds=ttl_seconds,
            for_export=source.kind == names.EXTERNAL,
        )
        return (await self.save_weights_for_sampler(principal, weights)).operation

    async def _session_for(self, principal: Principal, request_id: str) -> str:
        created = await self.create_session(principal, sessions_pb2.CreateSessionRequest(request_id=request_id))
        return created.session.session_id

    async def _saved_path(self, principal: Principal, name: str) -> str:
        """Wait for a save; return its checkpoint's path. Raises ServiceError if it fails."""
        path = ""
        async for response in self.wait_operations(principal, ops_pb.WaitOperationsRequest(names=[name])):
            saving = response.operation
            if saving.state == ops_pb.OPERATION_STATE_FAILED:
                raise ServiceError(Code(saving.error.code), saving.error.reason, saving.error.message)
            path = saving.save_state.path or saving.save_weights_for_sampler.path
        return path
