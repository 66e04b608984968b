"""Checkpoints: list, get, delete, publish, export. Saving is an operation on an adapter, see `training`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from coordinator.base.errors import Code, ServiceError, not_found
from coordinator.operations.admission import storage_error
from coordinator.service.access import UseCases, check_ttl, metadata_of, timestamp, uninterrupted
from coordinator.service.auth import Principal
from coordinator.storage.database import StorageError
from coordinator.storage.folders import CONFIG, WEIGHTS
from coordinator.storage.rows import CheckpointRow
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2 as pb

_INLINE_BYTES_MAX = 256 << 10
"""Metadata of a page above this size is parsed on a thread."""
_KINDS = {
    names.TRAINING: pb.CHECKPOINT_KIND_TRAINING,
    names.SAMPLER: pb.CHECKPOINT_KIND_SAMPLER,
    names.EXTERNAL: pb.CHECKPOINT_KIND_EXTERNAL,
}


class CheckpointUseCases(UseCases):
    """CheckpointService."""

    async def list_checkpoints(
        self, principal: Principal, request: pb.ListCheckpointsRequest
    ) -> pb.ListCheckpointsResponse:
        """List the checkpoints of an adapter, or of the tenant, newest first."""
        kinds = [kind for kind, value in _KINDS.items() if request.kind in (pb.CHECKPOINT_KIND_UNSPECIFIED, value)]
        page = functools.partial(self._core.store.checkpoints.page, principal.tenant_id, kinds, request.adapter_id)
        rows, token, total = self._page(page, request, 100)
        if sum(len(row.user_metadata) for row in rows) > _INLINE_BYTES_MAX:
            messages = await asyncio.to_thread(lambda: [_message(row) for row in rows])
        else:
            messages = [_message(row) for row in rows]
        return pb.ListCheckpointsResponse(checkpoints=messages, next_page_token=token, total_size=total)

    async def newest_checkpoints(
        self, principal: Principal, adapter_ids: Sequence[str]
    ) -> dict[tuple[str, pb.CheckpointKind.ValueType], pb.Checkpoint]:
        """Return the newest checkpoint of each adapter and kind, by one query."""
        rows = self._core.store.checkpoints.newest(principal.tenant_id, adapter_ids)
        return {(row.adapter_id, _KINDS[row.kind]): _message(row) for row in rows}

    async def trained_modules(self, principal: Principal, path: str) -> dict[str, bool]:
        """Return the groups of modules that a readable checkpoint's adapter trained, also for a deleted adapter."""
        spec = self._core.registry.spec(self._readable_checkpoint(principal, path).adapter_id)
        return {"train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn}

    async def get_checkpoint(self, principal: Principal, request: pb.GetCheckpointRequest) -> pb.GetCheckpointResponse:
        """Return a checkpoint."""
        return pb.GetCheckpointResponse(checkpoint=_message(self._readable_checkpoint(principal, request.path)))

    @uninterrupted
    async def delete_checkpoint(
        self, principal: Principal, request: pb.DeleteCheckpointRequest
    ) -> pb.DeleteCheckpointResponse:
        """Delete a checkpoint."""
        await self._core.states.delete_checkpoint(self._checkpoint(principal, request.path))
        return pb.DeleteCheckpointResponse()

    @uninterrupted
    async def set_checkpoint_ttl(
        self, principal: Principal, request: pb.SetCheckpointTtlRequest
    ) -> pb.SetCheckpointTtlResponse:
        """Set the time after which a checkpoint is deleted."""
        check_ttl(request.ttl_seconds)
        self._checkpoint(principal, request.path)
        core, ttl_s = self._core, request.ttl_seconds
        expires_at = core.time.wall() + ttl_s if ttl_s else None
        expires_service_s = core.store.service_time() + ttl_s if ttl_s else None
        await core.store.checkpoints.set_expiry(request.path, expires_at, expires_service_s)
        return pb.SetCheckpointTtlResponse(checkpoint=_message(self._checkpoint(principal, request.path)))

    @uninterrupted
    async def set_checkpoint_access(
        self, principal: Principal, request: pb.SetCheckpointAccessRequest
    ) -> pb.SetCheckpointAccessResponse:
        """Publish a checkpoint, or make it private."""
        self._checkpoint(principal, request.path)
        await self._core.store.checkpoints.set_public(request.path, is_public=request.is_public)
        return pb.SetCheckpointAccessResponse(checkpoint=_message(self._checkpoint(principal, request.path)))

    async def export_checkpoint(
        self, principal: Principal, request: pb.ExportCheckpointRequest
    ) -> AsyncIterator[pb.ExportCheckpointResponse]:
        """Stream a checkpoint as a tar archive of a PEFT directory."""
        row = await self._with_file(self._readable_checkpoint(principal, request.path))
        async for piece in _read(self._core.states.folders.checkpoints.tar(row.folder, row.sha256), request.path):
            yield pb.ExportCheckpointResponse(data=piece)

    async def export_file(self, principal: Principal, path: str, file: str) -> AsyncGenerator[bytes]:
        """Stream one file of a checkpoint's PEFT directory."""
        row = self._readable_checkpoint(principal, path)
        if file not in (CONFIG, WEIGHTS):
            raise not_found("file", file)
        row = await self._with_file(row)
        async for piece in _read(self._core.states.folders.checkpoints.piecewise(row.folder, row.sha256, file), path):
            yield piece

    async def _with_file(self, row: CheckpointRow) -> CheckpointRow:
        try:
            return await self._core.states.with_file(row)
        except StorageError as error:
            raise storage_error(error) from None


async def _read(pieces: Iterator[bytes], path: str) -> AsyncIterator[bytes]:
    """Yield pieces of files, each read on a thread."""
    try:
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece
    except OSError as error:
        raise ServiceError(
            Code.ABORTED,
            "CHECKPOINT_GONE",
            f"{path} was deleted during the download, or cannot be read: {error.strerror}",
        ) from None


def _message(row: CheckpointRow) -> pb.Checkpoint:
    return pb.Checkpoint(
        path=row.path,
        adapter_id=row.adapter_id,
        kind=_KINDS[row.kind],
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        create_time=timestamp(row.created_at),
        seq=row.seq,
        base_model=row.base_model,
        rank=row.rank,
        user_metadata=metadata_of(row),
        fingerprint=row.fingerprint,
        is_public=row.is_public,
        expire_time=timestamp(row.expires_at) if row.expires_at is not None else None,
    )
