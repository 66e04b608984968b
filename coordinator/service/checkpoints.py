"""Checkpoints: list, get, delete, publish, export, copy. Saving is an operation on an adapter, see `training`.

A copy is made by other use cases: they create an adapter from the checkpoint, and save that adapter again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

from coordinator.base.errors import Code, ServiceError, invalid, not_found, unmet
from coordinator.operations.admission import storage_error
from coordinator.operations.holdings import SaveRequest, save_path
from coordinator.payloads.canonical import serialize
from coordinator.runtime.core import Core
from coordinator.service.access import UseCases, check_ttl, metadata_of, streamed, timestamp, uninterrupted
from coordinator.service.adapters import AdapterUseCases
from coordinator.service.listings import Listed
from coordinator.service.operations import OperationUseCases
from coordinator.service.sessions import SessionUseCases
from coordinator.service.training import TrainingUseCases
from coordinator.storage.folders import StateFiles
from coordinator.storage.rows import CheckpointRow, FileUse
from coordinator.storage.sent_files import Sent
from coordinator.storage.sqlite import StorageError
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2, sessions_pb2
from tinkerpool.v1 import checkpoints_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb

ARCHIVE = "checkpoint.tar"
"""File name of the download of a whole checkpoint."""
PEFT_ARCHIVE = "checkpoint-for-peft.tar"
"""The same, as `ExportCheckpoint` streams it."""
Kind: TypeAlias = pb.CheckpointKind.ValueType
OPEN_BYTES = 2 << 20
"""What an open counts as in turns: it reads a header and its digests, which takes as long as eight pieces."""
_KINDS = {
    names.TRAINING: pb.CHECKPOINT_KIND_TRAINING,
    names.SAMPLER: pb.CHECKPOINT_KIND_SAMPLER,
    names.EXTERNAL: pb.CHECKPOINT_KIND_EXTERNAL,
}
KINDS: Collection[Kind] = tuple(_KINDS.values())


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of a checkpoint, to be sent."""

    num_bytes: int
    sha256: str
    """Of the checkpoint. With the same one, a file of the same name has the same bytes."""
    read: Callable[[int, int], AsyncGenerator[bytes]]
    """Yields the bytes from one place up to another. Raises ServiceError, CHECKPOINT_GONE among others."""


class CheckpointUseCases(UseCases):
    """CheckpointService."""

    async def list_checkpoints(
        self, principal: Principal, request: pb.ListCheckpointsRequest
    ) -> pb.ListCheckpointsResponse:
        """List the checkpoints of an adapter, or of the tenant, newest first."""
        checkpoints, token, total = await self.listed_checkpoints(principal, request).page()
        return pb.ListCheckpointsResponse(checkpoints=checkpoints, next_page_token=token, total_size=total)

    def listed_checkpoints(
        self, principal: Principal, request: pb.ListCheckpointsRequest, known: Collection[Kind] = KINDS
    ) -> Listed[CheckpointRow, pb.Checkpoint]:
        """Return a part of the list of an adapter's checkpoints, or of the tenant's, to be read in slices.

        Without a kind in the request it has those of the kinds that are `known`.
        """
        wanted = known if request.kind == pb.CHECKPOINT_KIND_UNSPECIFIED else (request.kind,)
        kinds = [kind for kind, value in _KINDS.items() if value in wanted]
        read = functools.partial(
            self._core.store.checkpoints.listing,
            principal.tenant_id,
            kinds,
            request.adapter_id,
            reference=request.reference.removeprefix(names.SCHEME),
        )
        return self._listed(principal, read, request, 100, functools.partial(self._message_of, principal))

    async def newest_checkpoints(
        self, principal: Principal, adapter_ids: Sequence[str]
    ) -> dict[tuple[str, Kind], pb.Checkpoint]:
        """Return the newest checkpoint of each of these adapters and kinds."""
        async with self._core.listing_turns.turn(principal.tenant_id) as turn:
            rows = self._core.store.checkpoints.newest(principal.tenant_id, adapter_ids, list(_KINDS))
            turn.use(sum(len(row.user_metadata) for row in rows))
            return {(row.adapter_id, _KINDS[row.kind]): self._message_of(principal, row) for row in rows}

    async def trained_modules(self, principal: Principal, path: str) -> dict[str, bool]:
        """Return the groups of modules that a readable checkpoint's adapter trained, also for a deleted adapter."""
        spec = self._core.registry.spec(self._readable_checkpoint(principal, path).adapter_id)
        return {"train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn}

    async def get_checkpoint(self, principal: Principal, request: pb.GetCheckpointRequest) -> pb.GetCheckpointResponse:
        """Return a checkpoint."""
        checkpoint = self._message_of(principal, self._readable_checkpoint(principal, request.path))
        return pb.GetCheckpointResponse(checkpoint=checkpoint)

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
        checkpoint = self._message_of(principal, self._checkpoint(principal, request.path))
        return pb.SetCheckpointTtlResponse(checkpoint=checkpoint)

    @uninterrupted
    async def set_checkpoint_access(
        self, principal: Principal, request: pb.SetCheckpointAccessRequest
    ) -> pb.SetCheckpointAccessResponse:
        """Publish a checkpoint, or make it private."""
        self._checkpoint(principal, request.path)
        await self._core.store.checkpoints.set_public(request.path, is_public=request.is_public)
        checkpoint = self._message_of(principal, self._checkpoint(principal, request.path))
        return pb.SetCheckpointAccessResponse(checkpoint=checkpoint)

    @streamed
    async def export_checkpoint(
        self, principal: Principal, request: pb.ExportCheckpointRequest
    ) -> AsyncGenerator[pb.ExportCheckpointResponse, None]:
        """Stream a checkpoint as a tar archive of a PEFT directory."""
        row = await self._with_file(self._readable_checkpoint(principal, request.path))
        sent = await self._opened(principal, row, lambda files: files.archive(row.folder, row.sha256))
        async for piece in self._read(principal, row, sent, 0, sent.num_bytes):
            yield pb.ExportCheckpointResponse(data=piece)

    async def exported_files(self, principal: Principal, path: str) -> list[str]:
        """Return the names of the files in a checkpoint's PEFT directory."""
        return await self._exported(await self._with_file(self._readable_checkpoint(principal, path)))

    async def file_for_tinker(self, principal: Principal, path: str, seq: int, file: str) -> ExportedFile:
        """Return a file of a checkpoint's PEFT directory, or all as `ARCHIVE`, with the tensors' names of Tinker.

        As `PEFT_ARCHIVE` all with those of PEFT. Raises ServiceError CHECKPOINT_OVERWRITTEN if the checkpoint is not
        that of the save `seq` any more.
        """
        row = self._readable_checkpoint(principal, path)
        if row.seq != seq:
            raise unmet("CHECKPOINT_OVERWRITTEN", f"{path} was saved again since this URL was made: request a new one")
        row = await self._with_file(row)
        is_archive = file in (ARCHIVE, PEFT_ARCHIVE)
        if not is_archive and file not in await self._exported(row):
            raise not_found("file", file)

        def open_(files: StateFiles) -> Sent:
            if is_archive:
                return files.archive(row.folder, row.sha256, for_tinker=file == ARCHIVE)
            return files.file(row.folder, row.sha256, file, for_tinker=True)

        sent = await self._opened(principal, row, open_)
        return ExportedFile(sent.num_bytes, row.sha256, functools.partial(self._read, principal, row, sent))

    async def _exported(self, row: CheckpointRow) -> list[str]:
        with self._while_there(row):
            return await asyncio.to_thread(self._core.states.folders.checkpoints.exported, row.folder)

    async def _opened(self, principal: Principal, row: CheckpointRow, open_: Callable[[StateFiles], Sent]) -> Sent:
        """Return what `open_` finds in the row's folder, on a thread, in a turn of the tenant."""
        with self._while_there(row):
            async with self._core.file_turns.turn(principal.tenant_id) as turn:
                turn.use(OPEN_BYTES)
                began = self._core.time.monotonic()
                try:
                    return await asyncio.to_thread(open_, self._core.states.folders.checkpoints)
                finally:
                    self._charge_files(principal.tenant_id, row.base_model, began)

    @contextmanager
    def _while_there(self, row: CheckpointRow) -> Iterator[None]:
        """Raise CHECKPOINT_GONE for the errors of a block that reads a folder which was removed meanwhile."""
        try:
            yield
        except OSError as error:
            raise _gone(row, error.strerror) from None
        except ServiceError as error:
            if error.code is Code.DATA_LOSS and self._core.store.checkpoints.of_save(row.path, row.seq) is None:
                raise _gone(row) from None  # rows are deleted before folders: its folder was not lost
            raise

    async def _with_file(self, row: CheckpointRow) -> CheckpointRow:
        try:
            return await self._core.states.with_file(row)
        except StorageError as error:
            raise storage_error(error) from None

    async def _read(
        self, principal: Principal, row: CheckpointRow, sent: Sent, start: int, stop: int
    ) -> AsyncGenerator[bytes]:
        """Yield the bytes from `start` up to `stop`, each piece read on a thread, in a turn charged by its bytes.

        The measured seconds count as work on the checkpoint's base model. A reader of another tenant is refused from
        the next piece on when the checkpoint is not public any more.
        """
        num_bytes, seconds, pieces = 0, 0.0, sent.pieces(start, stop)
        try:
            with self._while_there(row):
                while True:
                    if principal.tenant_id != row.tenant_id:
                        self._readable_checkpoint(principal, row.path)
                    async with self._core.file_turns.turn(principal.tenant_id) as turn:
                        began = self._core.time.monotonic()
                        piece = await asyncio.to_thread(next, pieces, None)
                        turn.use(piece.num_read if piece is not None else 0)
                        seconds += self._charge_files(principal.tenant_id, row.base_model, began)
                        num_bytes += piece.num_read if piece is not None else 0
                    if piece is None:
                        return
                    if piece.data:
                        yield piece.data
        finally:
            use = FileUse(
                adapter_id=row.adapter_id,
                base_model=row.base_model,
                tenant_id=principal.tenant_id,
                kind="export",
                num_bytes=num_bytes,
                seconds=seconds,
            )
            self._core.store.usage.note(use)

    def _message_of(self, principal: Principal, row: CheckpointRow) -> pb.Checkpoint:
        is_own = row.tenant_id == principal.tenant_id
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
            user_metadata=_metadata(principal, row),
            fingerprint=row.fingerprint,
            is_public=row.is_public,
            expire_time=timestamp(row.expires_at) if row.expires_at is not None else None,
            adapter_name=self._core.registry.name(row.adapter_id) if is_own else "",
        )


class CopyUseCases(SessionUseCases, AdapterUseCases, TrainingUseCases, CheckpointUseCases, OperationUseCases):
    """CopyCheckpoint of CheckpointService, which combines use cases of several services."""

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        super().__init__(core, authenticator)
        self._copying = WeakValueDictionary[tuple[str, bytes], asyncio.Lock]()
        """The lock of the running calls with one request, by tenant and request."""

    async def copy_checkpoint(
        self, principal: Principal, request: pb.CopyCheckpointRequest
    ) -> pb.CopyCheckpointResponse:
        """Copy a checkpoint to one of the tenant, of the same kind. Every step is safe to repeat, so the call is.

        A repeat of a copy that was saved needs neither its source nor a live session.
        """
        check_ttl(request.ttl_seconds)
        if not request.request_id and not (request.session_id and request.HasField("index")):
            raise invalid(
                "request_id is empty: set it, or session_id and index, so that the call is safe to repeat (over HTTP: "
                "the header X-Idempotency-Key, or session_id and model_seq_id)"
            )
        save = await self._begin_copy(principal, request)
        return pb.CopyCheckpointResponse(checkpoint=await self._saved(principal, save))

    @uninterrupted
    async def _begin_copy(self, principal: Principal, request: pb.CopyCheckpointRequest) -> SaveRequest:
        """Make the adapter of a copy and begin its save, unless an earlier call has; return the save.

        Calls of one request follow each other: a repeat at the tenant's last place is not refused for the first call.
        """
        async with self._copying.setdefault((principal.tenant_id, serialize(request)), asyncio.Lock()):
            session_id = request.session_id
            if not session_id and (
                row := self._core.store.sessions.of_request(principal.tenant_id, request.request_id)
            ):
                session_id = row.session_id
            create = adapters_pb2.CreateAdapterRequest(
                session_id=session_id,
                index=request.index if request.HasField("index") else None,
                request_id=request.request_id,
                from_path=request.path,
                with_optimizer=_parsed(request.path).kind == names.TRAINING,
            )
            made = self._made_before(principal, create) if session_id else None
            source = self._core.store.checkpoints.readable(principal.tenant_id, request.path, is_public_enough=True)
            save = _save_like(principal, request, source)
            if made is not None:
                save.adapter_id = self._message(made).adapter_id
                if self._is_accepted(save):
                    return save
            if source is None:
                raise not_found("checkpoint", request.path)
            if made is None:
                save.adapter_id = await self._adapter_of_copy(principal, create, source, save)
            if not self._is_accepted(save):
                await self._save_copy(principal, save)
            return save

    async def _adapter_of_copy(
        self,
        principal: Principal,
        create: adapters_pb2.CreateAdapterRequest,
        source: CheckpointRow,
        save: SaveRequest,
    ) -> str:
        """Make the adapter of a copy, in a new session if it has none, and return its id. Raises ServiceError.

        The save counts from the start, because a refused one would leave the adapter behind. Accept it before anything
        else is awaited: it claims its room itself.
        """
        core, tenant_id = self._core, principal.tenant_id
        model, spec = self._spec(create, source)
        claim = core.holdings.claim_of_save(spec, model.name, save)
        with (
            core.ceilings.checkpoints.holding(tenant_id, claim.num_checkpoints),
            core.ceilings.stored_bytes.holding(tenant_id, claim.num_bytes),
        ):
            if not create.session_id:
                # What the creation of the adapter will check: its refusal would leave an empty session behind.
                core.quotas.check_permitted(tenant_id, model.name, spec.rank)
                core.ceilings.adapters.check(tenant_id)
                core.ceilings.stored_bytes.check(tenant_id, core.holdings.state_bytes(spec, model.name))
                session = sessions_pb2.CreateSessionRequest(request_id=create.request_id)
                create.session_id = (await self.create_session(principal, session)).session.session_id
            return (await self.create_adapter(principal, create)).adapter.adapter_id

    async def _save_copy(self, principal: Principal, save: SaveRequest) -> None:
        if isinstance(save, pb.SaveStateRequest):
            await self.save_state(principal, save)
        else:
            await self.save_weights_for_sampler(principal, save)

    def _is_accepted(self, save: SaveRequest) -> bool:
        """Return whether the save of an adapter that was made for it is in the log; set its seq.

        A save that failed, say on a full disk, is followed by another attempt at the next seq.
        """
        save.seq = 1
        while (found := self._core.admission.find(save.adapter_id, save.seq)) is not None and found.kind.is_save:
            if not found.is_failed:
                return found.is_durable
            save.seq += 1
        return False

    async def _saved(self, principal: Principal, save: SaveRequest) -> pb.Checkpoint:
        """Wait for an accepted save; return its checkpoint. Raises ServiceError if it fails."""
        found = self._core.admission.find(save.adapter_id, save.seq)
        if found is not None and not found.is_dropped:
            async for response in self.wait_operations(principal, ops_pb.WaitOperationsRequest(names=[found.name])):
                saving = response.operation
                if saving.state == ops_pb.OPERATION_STATE_FAILED:
                    raise ServiceError(Code(saving.error.code), saving.error.reason, saving.error.message)
        path = save_path(save.adapter_id, save)
        return (await self.get_checkpoint(principal, pb.GetCheckpointRequest(path=str(path)))).checkpoint


def _gone(row: CheckpointRow, problem: str | None = None) -> ServiceError:
    or_else = f", or cannot be read: {problem}" if problem else ""
    return ServiceError(Code.ABORTED, "CHECKPOINT_GONE", f"{row.path} was deleted during the download{or_else}")


def _parsed(path: str) -> names.CheckpointPath:
    """Parse the path of a checkpoint. Raises ServiceError if no checkpoint can have it."""
    try:
        return names.CheckpointPath.parse(path)
    except ValueError:
        raise not_found("checkpoint", path) from None


def _save_like(principal: Principal, request: pb.CopyCheckpointRequest, source: CheckpointRow | None) -> SaveRequest:
    """Return the save of a checkpoint's copy, with its name, kind and, if own, metadata; without adapter and seq."""
    path, ttl_seconds = _parsed(request.path), request.ttl_seconds
    metadata = _metadata(principal, source) if source is not None else {}
    if path.kind == names.TRAINING:
        return pb.SaveStateRequest(name=path.name, user_metadata=metadata, ttl_seconds=ttl_seconds)
    for_export = path.kind == names.EXTERNAL
    return pb.SaveWeightsForSamplerRequest(
        name=path.name, user_metadata=metadata, ttl_seconds=ttl_seconds, for_export=for_export
    )


def _metadata(principal: Principal, row: CheckpointRow) -> dict[str, str]:
    """Return what the owner has noted with a checkpoint; nothing for others, who may read a public one."""
    return metadata_of(row) if row.tenant_id == principal.tenant_id else {}
