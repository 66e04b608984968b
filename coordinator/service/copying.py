"""Copying a checkpoint: a new adapter is made from it and saves it again. Only other use cases, one after another."""

from __future__ import annotations

from coordinator.auth import Principal
from coordinator.errors import Code, ServiceError, invalid
from coordinator.service.adapters import AdapterUseCases
from coordinator.service.base import metadata_of
from coordinator.service.checkpoints import CheckpointUseCases
from coordinator.service.operations import OperationUseCases
from coordinator.service.sessions import SessionUseCases
from coordinator.service.training import TrainingUseCases
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb


class CopyUseCases(SessionUseCases, AdapterUseCases, TrainingUseCases, CheckpointUseCases, OperationUseCases):
    """The one method of CheckpointService that needs the others' use cases."""

    async def copy_checkpoint(
        self, principal: Principal, request: checkpoints_pb2.CopyCheckpointRequest
    ) -> checkpoints_pb2.CopyCheckpointResponse:
        """A copy of the tenant's own. Every step is safe to repeat, so the whole is."""
        source = self._readable_checkpoint(principal, request.path)
        if source["kind"] != names.TRAINING:
            raise invalid(f"{request.path} has weights alone: copy a checkpoint made by save_state")
        if not request.session_id and not request.request_id:
            raise invalid("session_id and request_id are empty: set one of them, so that the call is safe to repeat")
        session_id = request.session_id or await self._session_for(principal, request.request_id)
        create = adapters_pb2.CreateAdapterRequest(
            session_id=session_id,
            index=request.index if request.HasField("index") else None,
            request_id=request.request_id,
            from_path=request.path,
            with_optimizer=True,
        )
        adapter = (await self.create_adapter(principal, create)).adapter
        save = checkpoints_pb2.SaveStateRequest(
            adapter_id=adapter.adapter_id,
            seq=1,
            name=names.CheckpointPath.parse(request.path).name,
            user_metadata=metadata_of(source),
            ttl_seconds=request.ttl_seconds,
        )
        saving = (await self.save_state(principal, save)).operation
        path = await self._saved_path(principal, saving.name)
        found = await self.get_checkpoint(principal, checkpoints_pb2.GetCheckpointRequest(path=path))
        return checkpoints_pb2.CopyCheckpointResponse(checkpoint=found.checkpoint)

    async def _session_for(self, principal: Principal, request_id: str) -> str:
        created = await self.create_session(principal, sessions_pb2.CreateSessionRequest(request_id=request_id))
        return created.session.session_id

    async def _saved_path(self, principal: Principal, name: str) -> str:
        """Wait for a save; its checkpoint's path. Raises ServiceError if it fails."""
        path = ""
        async for response in self.wait_operations(principal, ops_pb.WaitOperationsRequest(names=[name])):
            error = response.operation.error
            if response.operation.state == ops_pb.OPERATION_STATE_FAILED:
                raise ServiceError(Code(error.code), error.reason, error.message)
            path = response.operation.save_state.path
        return path
