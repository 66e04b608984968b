"""Checkpoints, listings and the state of a pool. The name is the SDK's.

Every method returns a future at once; `await` it, or call its `result()`. Where the SDK has no type, the result is a
message of the contract.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tinkerpool import types
from tinkerpool.client.archive import ArchiveFile
from tinkerpool.client.calls import methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.encoding import string_map, ttl
from tinkerpool.client.calls.futures import APIFuture, BackgroundStream, awaited
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport
from tinkerpool.client.export import Exporter
from tinkerpool.client.imports import Adapter, Import, OnProgress, import_adapter
from tinkerpool.errors import ApiError
from tinkerpool.foreign_names import refuse
from tinkerpool.names import CheckpointPath
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    sampling_pb2,
    sessions_pb2,
)

T = TypeVar("T")
Owned = Literal["owned"]
"""What a listing or look-up covers: the SDK has other scopes, a pool this one."""
_log = logging.getLogger("tinkerpool")
PAGE_SIZE_MAX = 1000
_KEY_ID = re.compile(r"tp_([a-z0-9]+)_")
"""The part of an API key that is not secret."""


class RestClient:
    """Made by `ServiceClient.create_rest_client`, whose connection it shares, or by itself: it needs no session."""

    def __init__(
        self,
        connection: Connection | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        root_certificates: bytes | None = None,
        client_certificate: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
    ) -> None:
        """Without a connection, one is made to the pool that `ServiceClient` would find with these arguments.

        Raises ConfigurationError if there is no key, or for a malformed URL.
        """
        if connection is None:
            endpoint = Endpoint.find(base_url, api_key, root_certificates, client_certificate, client_key)
            connection = Connection(GrpcTransport(endpoint))
        self._connection = connection

    def __repr__(self) -> str:
        return f"<RestClient of {self._connection.address}: {'closed' if self._connection.is_closed else 'open'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RestClient cannot be pickled: make a new ServiceClient in the other process")

    def get_server_capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """Return the pool's base models and limits."""
        return self._start(fetch_capabilities(self._connection))

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: Owned = "owned",
        project_id: None = None,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """List your adapters, newest first: those whose name begins with `name_prefix` and that have all `labels`."""
        refuse(access_scope=access_scope, project_id=project_id)
        wanted = partial(adapters_pb2.ListAdaptersRequest, name_prefix=name_prefix, labels=string_map(labels))
        return self._start(self._list_training_runs(wanted, limit, offset))

    def get_training_run(self, training_run_id: str, access_scope: Owned = "owned") -> APIFuture[types.TrainingRun]:
        """Return an adapter. Raises NotFound."""
        refuse(access_scope=access_scope)
        request = partial(adapters_pb2.GetAdapterRequest, adapter_id=training_run_id)
        return self._ask(methods.GET_ADAPTER, request, lambda response: _training_run(response.adapter))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: Owned = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """Return the adapter of a checkpoint. Raises NotFound, and ValueError for a malformed path."""
        return self.get_training_run(CheckpointPath.parse(tinker_path).adapter_id, access_scope)

    def rename_training_run(self, training_run_id: str, name: str) -> APIFuture[types.TrainingRun]:
        """Give an adapter another name, empty: none; return it. Not in the SDK. Raises NotFound and InvalidArgument."""
        request = partial(adapters_pb2.RenameAdapterRequest, adapter_id=training_run_id, name=name)
        return self._ask(methods.RENAME_ADAPTER, request, lambda response: _training_run(response.adapter))

    def delete_training_run(self, training_run_id: str) -> APIFuture[None]:
        """Delete an adapter and its training state; its checkpoints stay. Raises NotFound."""
        request = partial(adapters_pb2.DeleteAdapterRequest, adapter_id=training_run_id)
        return self._ask(methods.DELETE_ADAPTER, request, lambda response: None)

    def list_checkpoints(self, training_run_id: str) -> APIFuture[types.CheckpointsListResponse]:
        """List all checkpoints of an adapter, newest first."""
        return self._start(self._list_checkpoints(training_run_id, None, 0))

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[types.CheckpointsListResponse]:
        """List your checkpoints, newest first."""
        return self._start(self._list_checkpoints("", limit, offset))

    def get_checkpoint(self, tinker_path: str) -> APIFuture[types.Checkpoint]:
        """Return a checkpoint. Raises NotFound."""
        request = checkpoints_pb2.GetCheckpointRequest(path=tinker_path)
        return self._start(self._checkpoint(methods.GET_CHECKPOINT, request))

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint for good. Raises NotFound."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint for good. Raises NotFound."""
        request = partial(checkpoints_pb2.DeleteCheckpointRequest, path=tinker_path)
        return self._ask(methods.DELETE_CHECKPOINT, request, lambda response: None)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[types.Checkpoint]:
        """Delete a checkpoint `ttl_seconds` from now; None keeps it. Raises NotFound."""
        request = checkpoints_pb2.SetCheckpointTtlRequest(path=tinker_path, ttl_seconds=ttl(ttl_seconds))
        return self._start(self._checkpoint(methods.SET_CHECKPOINT_TTL, request))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[types.Checkpoint]:
        """Let every tenant load, sample from and export a checkpoint of yours, without its user_metadata.

        Raises NotFound.
        """
        request = checkpoints_pb2.SetCheckpointAccessRequest(path=tinker_path, is_public=True)
        return self._start(self._checkpoint(methods.SET_CHECKPOINT_ACCESS, request))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[types.Checkpoint]:
        """Make a published checkpoint private again. Copies of it stay; samplers of others take no new samples.

        Raises NotFound.
        """
        request = checkpoints_pb2.SetCheckpointAccessRequest(path=tinker_path)
        return self._start(self._checkpoint(methods.SET_CHECKPOINT_ACCESS, request))

    def copy_weights(
        self,
        path: str,
        destination_project_id: None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: None = None,
    ) -> APIFuture[types.Checkpoint]:
        """Copy a training checkpoint, yours or a public one, with its moments, to a new adapter of yours.

        Raises NotFound, and InvalidArgument for any other checkpoint.
        """
        refuse(destination_project_id=destination_project_id, weights_access_token=weights_access_token)
        request = checkpoints_pb2.CopyCheckpointRequest(
            path=path, request_id=uuid.uuid4().hex, ttl_seconds=ttl(ttl_seconds)
        )
        return self._start(self._checkpoint(methods.COPY_CHECKPOINT, request))

    def export_checkpoint(
        self,
        tinker_path: str,
        directory: str | Path,
        *,
        format: str = "peft",  # noqa: A002 - as in the command
        base_model: str | Path | None = None,
        whole_unembedding: bool = False,
    ) -> APIFuture[Path]:
        """Write a checkpoint as a directory that other programs load; returns it. See docs/export.md.

        The directory is created whole or not at all. What whoever loads it must know is in its `tinkerpool.json`, and
        in the log.

        Args:
            tinker_path: the checkpoint.
            directory: a new one.
            format: "peft", an adapter for PEFT; "merged", a model with the adapter merged into it; or "vllm", an
                adapter within vLLM's rules. Merging needs `tinkerpool[pool]` and the base model's files.
            base_model: a directory, or a name in the hub. None: the pool's name for it.
            whole_unembedding: with "peft": write a trained unembedding whole, so that PEFT's `merge_and_unload` is
                right also where the base model ties it to the embedding. Needs what merging needs.

        Raises:
            ExportError: the format cannot hold this adapter, something is missing, or the check of a merged model
                failed.
            FileExistsError: the directory exists, and is not empty or cannot be replaced.
            NotFound: there is no such checkpoint.
            DataLoss: the pool's file is damaged.
        """
        exporter = Exporter(
            checkpoint=tinker_path,
            format=format,
            base_model=str(base_model or ""),
            whole_unembedding=whole_unembedding,
        )
        return self._start(self._export(exporter, Path(directory).expanduser()))

    def import_checkpoint(
        self,
        directory: str | Path,
        name: str = "imported",
        *,
        base_model: str | None = None,
        seed: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        on_progress: OnProgress | None = None,
        adapter_name: str = "",
    ) -> APIFuture[types.ImportCheckpointResponse]:
        """Make a checkpoint of an adapter in PEFT's format. Not in the SDK; see docs/export.md.

        It computes what PEFT computes. Notes of the result are logged, too.

        Args:
            directory: what PEFT's `save_pretrained` wrote: `adapter_config.json` and `adapter_model.safetensors`.
            name: of the checkpoint.
            base_model: name of a base model of the pool. None: the pool's only one, or the one that the adapter names.
            seed: of the first weights of modules that the adapter lacks. None: 0.
            user_metadata: labels for adapter and checkpoint.
            ttl_seconds: delete the checkpoint after so many seconds. None: keep it.
            on_progress: called with the bytes sent so far and those of the whole upload, on another thread.
            adapter_name: what people call the new adapter, as of `create_lora_training_client`.

        Raises:
            NotImportable: there is no adapter in safetensors in the directory.
            InvalidArgument: the adapter cannot be imported: the message names the first difference and what to do.
            NotFound: the pool does not serve that base model.
            FailedPrecondition: there is no room for another checkpoint of yours.
        """
        what = Import(
            name=name,
            base_model=base_model or "",
            seed=seed,
            user_metadata=string_map(user_metadata),
            ttl_seconds=ttl(ttl_seconds),
            adapter_name=adapter_name,
        )
        return self._start(self._import(Adapter.open(Path(directory)), what, on_progress))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: Owned = "owned"
    ) -> APIFuture[types.ListSessionsResponse]:
        """List the ids of your live sessions, newest first."""
        refuse(access_scope=access_scope)
        return self._start(self._list_sessions(limit, offset))

    def get_session(self, session_id: str, access_scope: Owned = "owned") -> APIFuture[types.SessionInfo]:
        """Return a session, live or not. Raises NotFound."""
        refuse(access_scope=access_scope)
        request = partial(sessions_pb2.GetSessionRequest, session_id=session_id)
        return self._ask(methods.GET_SESSION, request, lambda response: _session(response.session))

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """Return a sampler. Raises NotFound."""
        request = partial(sampling_pb2.GetSamplerRequest, sampler_id=sampler_id)
        return self._ask(methods.GET_SAMPLER, request, lambda response: _sampler(response.sampler))

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """Return which key and tenant the calls are made with. Raises Unauthenticated."""
        return self._start(self._whoami())

    def get_operation(self, name: str) -> APIFuture[operations_pb2.Operation]:
        """Return an operation in its current state. Raises NotFound, also after its retention."""
        request = partial(operations_pb2.GetOperationRequest, name=name)
        return self._ask(methods.GET_OPERATION, request, lambda response: response.operation)

    def cancel_operation(self, name: str) -> APIFuture[operations_pb2.Operation]:
        """Ask to cancel an operation; return its state after that. Raises NotFound."""
        request = partial(operations_pb2.CancelOperationRequest, name=name)
        return self._ask(methods.CANCEL_OPERATION, request, lambda response: response.operation)

    def get_pool_status(self, num_cycles: int = 20) -> APIFuture[pool_pb2.GetPoolStatusResponse]:
        """Return workers, queued operations, and the last cycles with their tenants."""
        request = pool_pb2.GetPoolStatusRequest(num_cycles=num_cycles)
        return self._start(self._connection.call(methods.GET_POOL_STATUS, request))

    def get_usage(
        self, since: str = "", group_by: Iterable[pool_pb2.UsageGroup.ValueType] = ()
    ) -> APIFuture[pool_pb2.GetUsageResponse]:
        """Return tokens, operations and engine seconds per tenant and kind of operation, or of other groups.

        `since`: the first day to count, in UTC, as 2026-11-26; empty: since the beginning.
        """
        request = pool_pb2.GetUsageRequest(since=since, group_by=group_by)
        return self._start(self._connection.call(methods.GET_USAGE, request))

    def watch_cycles(self) -> BackgroundStream[pool_pb2.Cycle]:
        """Yield every clock cycle when it has committed, from now on, without end: `for` or `async for`.

        A slow reader, or one whose connection broke, misses cycles; the cycle ids show it.
        """
        return self._connection.stream_of(self._watch_cycles)

    get_server_capabilities_async = awaited(get_server_capabilities)
    list_training_runs_async = awaited(list_training_runs)
    get_training_run_async = awaited(get_training_run)
    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)
    rename_training_run_async = awaited(rename_training_run)
    delete_training_run_async = awaited(delete_training_run)
    list_checkpoints_async = awaited(list_checkpoints)
    list_user_checkpoints_async = awaited(list_user_checkpoints)
    get_checkpoint_async = awaited(get_checkpoint)
    delete_checkpoint_async = awaited(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)
    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)
    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)
    copy_weights_async = awaited(copy_weights)
    export_checkpoint_async = awaited(export_checkpoint)
    import_checkpoint_async = awaited(import_checkpoint)
    list_sessions_async = awaited(list_sessions)
    get_session_async = awaited(get_session)
    get_sampler_async = awaited(get_sampler)
    get_operation_async = awaited(get_operation)
    cancel_operation_async = awaited(cancel_operation)
    get_pool_status_async = awaited(get_pool_status)
    get_usage_async = awaited(get_usage)

    def _start(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        return self._connection.start(work, is_cancellable=True)

    def _ask(
        self,
        method: methods.Unary[methods.RequestT, methods.ResponseT],
        make_request: Callable[[], methods.RequestT],
        convert: Callable[[methods.ResponseT], T],
    ) -> APIFuture[T]:
        """Make a call; the future has the converted response, and raises the error of a request that cannot be made."""

        async def ask() -> T:
            return convert(await self._connection.call(method, make_request()))

        return self._start(ask())

    async def _list(
        self,
        method: methods.Unary[Any, methods.ResponseT],
        make_request: Callable[..., Message],
        items_of: Callable[[methods.ResponseT], Iterable[T]],
        limit: int | None,
        offset: int,
    ) -> list[T]:
        """Return items `offset` to `offset + limit` of a listing in pages; all from `offset` on if `limit` is None."""
        if offset < 0 or (limit is not None and limit < 1):
            raise ValueError(f"limit must be at least 1 and offset at least 0, got {limit} and {offset}")
        items: list[T] = []
        end = None if limit is None else offset + limit
        token = ""
        while True:
            size = PAGE_SIZE_MAX if end is None else min(end - len(items), PAGE_SIZE_MAX)
            page: Any = await self._connection.call(method, make_request(page_size=size, page_token=token))
            items += items_of(page)
            token = page.next_page_token
            if not token or (end is not None and len(items) >= end):
                return items[offset:end]

    async def _list_training_runs(
        self, make_request: Callable[..., adapters_pb2.ListAdaptersRequest], limit: int, offset: int
    ) -> types.TrainingRunsResponse:
        adapters = await self._list(methods.LIST_ADAPTERS, make_request, lambda page: page.adapters, limit, offset)
        return types.TrainingRunsResponse(training_runs=[_training_run(adapter) for adapter in adapters])

    async def _list_checkpoints(self, adapter_id: str, limit: int | None, offset: int) -> types.CheckpointsListResponse:
        request = partial(checkpoints_pb2.ListCheckpointsRequest, adapter_id=adapter_id)
        checkpoints = await self._list(methods.LIST_CHECKPOINTS, request, lambda page: page.checkpoints, limit, offset)
        return types.CheckpointsListResponse(checkpoints=[_checkpoint(checkpoint) for checkpoint in checkpoints])

    async def _checkpoint(self, method: methods.Unary[Any, Any], request: Message) -> types.Checkpoint:
        return _checkpoint((await self._connection.call(method, request)).checkpoint)

    async def _export(self, exporter: Exporter, directory: Path) -> Path:
        pool = await self._connection.call(methods.GET_CAPABILITIES, sessions_pb2.GetCapabilitiesRequest())
        backoff = self._connection.start_retries()
        request = checkpoints_pb2.ExportCheckpointRequest(path=exporter.checkpoint)
        while True:
            with ArchiveFile(directory) as archive:
                try:
                    async with aclosing(self._connection.stream(methods.EXPORT_CHECKPOINT, request)) as pieces:
                        async for piece in pieces:
                            archive.write(piece.data)
                except ApiError as error:  # a broken stream starts again from the beginning
                    await self._connection.pause(backoff, error)
                else:
                    archive.publish(await _in_thread(lambda: exporter.finish(archive, pool)))
                    for note in exporter.notes:
                        log_note(note)
                    return directory

    async def _import(
        self, adapter: Adapter, what: Import, on_progress: OnProgress | None
    ) -> types.ImportCheckpointResponse:
        with adapter:
            imported = await import_adapter(self._connection, adapter, what, on_progress)
        for note in imported.notes:
            log_note(note)
        return imported

    async def _list_sessions(self, limit: int, offset: int) -> types.ListSessionsResponse:
        request = sessions_pb2.ListSessionsRequest
        sessions = await self._list(methods.LIST_SESSIONS, request, lambda page: page.sessions, limit, offset)
        return types.ListSessionsResponse(sessions=[session.session_id for session in sessions])

    async def _whoami(self) -> types.WhoamiResponse:
        limits = await self._connection.call(methods.GET_TENANT_LIMITS, limits_pb2.GetTenantLimitsRequest())
        [key_id] = _KEY_ID.findall(self._connection.endpoint.api_key)
        return types.WhoamiResponse(
            user_urn=f"urn:tinkerpool:key:{key_id}", org_urn=f"urn:tinkerpool:tenant:{limits.tenant}"
        )

    async def _watch_cycles(self) -> AsyncGenerator[pool_pb2.Cycle, None]:
        backoff = self._connection.start_retries()
        while True:
            try:
                stream = self._connection.stream(methods.WATCH_CYCLES, pool_pb2.WatchCyclesRequest())
                async with aclosing(stream) as responses:
                    async for response in responses:
                        backoff.reset()
                        yield response.cycle
            except ApiError as error:
                await self._connection.pause(backoff, error)
            else:
                return


async def _in_thread(work: Callable[[], T]) -> T:
    """Call a function on a thread. If cancelled, wait for its end: the caller removes the files that it works with."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])


@cache  # once a process, however many checkpoints a program exports or imports
def log_note(note: str) -> None:
    """Log what an export or an import says to the person who makes it."""
    _log.warning("%s", note)


async def fetch_capabilities(connection: Connection) -> types.GetServerCapabilitiesResponse:
    """Return the pool's base models and limits."""
    response = await connection.call(methods.GET_CAPABILITIES, sessions_pb2.GetCapabilitiesRequest())
    models = [
        types.SupportedModel(
            model_name=model.name,
            max_context_length=model.max_sequence_tokens,
            vocab_size=model.vocab_size,
            max_rank=model.max_rank,
            num_params=model.num_params,
            num_workers=model.num_workers,
            has_tied_unembedding=model.has_tied_unembedding if model.HasField("has_tied_unembedding") else None,
            weights_id=model.weights_id,
        )
        for model in response.base_models
    ]
    return types.GetServerCapabilitiesResponse(
        supported_models=models,
        version=response.version,
        loss_functions=list(response.loss_functions),
        max_datums=response.max_datums,
        max_message_bytes=response.max_message_bytes,
    )


def _time(timestamp: Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)


def _training_run(adapter: adapters_pb2.Adapter) -> types.TrainingRun:
    return types.TrainingRun(
        training_run_id=adapter.adapter_id,
        base_model=adapter.base_model,
        lora_rank=adapter.rank,
        create_time=_time(adapter.create_time),
        num_operations=adapter.applied_seq,
        user_metadata=dict(adapter.user_metadata),
        name=adapter.name,
        last_request_time=_time(adapter.last_use_time),
    )


def _checkpoint(checkpoint: checkpoints_pb2.Checkpoint) -> types.Checkpoint:
    path = CheckpointPath.parse(checkpoint.path)
    return types.Checkpoint(
        checkpoint_id=f"{path.kind}/{path.name}",
        checkpoint_type=types.CHECKPOINT_TYPES[path.kind],
        time=_time(checkpoint.create_time),
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        base_model=checkpoint.base_model,
        lora_rank=checkpoint.rank,
        sha256=checkpoint.sha256,
        user_metadata=dict(checkpoint.user_metadata),
        expires_at=_time(checkpoint.expire_time) if checkpoint.HasField("expire_time") else None,
        public=checkpoint.is_public,
    )


def _session(session: sessions_pb2.Session) -> types.SessionInfo:
    return types.SessionInfo(
        session_id=session.session_id,
        training_run_ids=list(session.adapter_ids),
        sampler_ids=list(session.sampler_ids),
        create_time=_time(session.create_time),
        is_live=session.is_live,
        user_metadata=dict(session.user_metadata),
    )


def _sampler(sampler: sampling_pb2.Sampler) -> types.GetSamplerResponse:
    return types.GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path or None
    )
