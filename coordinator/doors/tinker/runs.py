"""Training runs and their checkpoints: list, publish, set the time to live, copy, delete, download; and timelines.

A training run of the protocol is an adapter of the contract.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call, DoorContext
from coordinator.doors.http.downloads import WAIT_S
from coordinator.doors.http.files import File, FileResponse, asked_range, head_response
from coordinator.doors.http.responses import json_list
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.errors import error_response, unsupported
from coordinator.doors.tinker.models import ADAMW, adapter_of
from coordinator.doors.tinker.sdk_versions import known_kinds
from coordinator.doors.tinker.training import no_access_tokens
from coordinator.service.checkpoints import ARCHIVE, PEFT_ARCHIVE, Kind
from coordinator.tenants.principals import Principal, Role
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2
from tinkerpool.v1 import checkpoints_pb2 as pb

RUNS_MAX = 100
"""Most runs on a page; a page's cursor has the limit that was applied."""
CHECKPOINTS_MAX = 1000
"""Most checkpoints on a page; a page's cursor has the limit that was applied."""
SLICE_BYTES = 512 << 10
"""Room that the slices of a listing take while it is sent."""
_KINDS: Mapping[Kind, str] = {
    pb.CHECKPOINT_KIND_TRAINING: "training",
    pb.CHECKPOINT_KIND_SAMPLER: "sampler",
    pb.CHECKPOINT_KIND_EXTERNAL: "external",
}
_SESSIONS = "sessions/"
"""Begins the path of a timeline; those of checkpoints begin with a scheme. Then come the role of the caller, which may
be less than its key's, and the session's id."""
_UNCACHED = {"cache-control": "no-store"}
"""A signed URL is for its caller alone, and may name the host that the caller has sent."""
Newest = Mapping[tuple[str, Kind], pb.Checkpoint]
"""By adapter and kind."""


async def list_runs(call: Call) -> Response:
    """GET /training_runs: runs of the tenant, newest first."""
    limit, offset = min(call.number("limit", 20), RUNS_MAX), call.number("offset", 0)
    if call.request.query_params.get("project_id"):
        raise unsupported("a listing by project", "leave project_id out: the runs of all your sessions are listed")
    listed = call.service.listed_adapters(
        call.principal, adapters_pb2.ListAdaptersRequest(page_size=limit, skip=offset)
    )

    async def slices() -> AsyncGenerator[list[dict[str, Any]]]:
        async with aclosing(listed.slices()) as found:
            async for adapters in found:
                newest = await _newest(call, adapters)
                yield [_run_json(call, adapter, newest) for adapter in adapters]

    await call.room.take(SLICE_BYTES)
    return await json_list("training_runs", slices(), {"cursor": _cursor(limit, offset, listed.num_total)})


async def get_run(call: Call) -> Response:
    """GET /training_runs/{run}."""
    adapter = await adapter_of(call, call.path("run"))
    return JSONResponse(_run_json(call, adapter, await _newest(call, [adapter])))


async def list_all(call: Call) -> Response:
    """GET /checkpoints: all checkpoints of the tenant."""
    response, _ = await _list(call, "", call.number("limit", 100), call.number("offset", 0))
    return response


async def list_of_run(call: Call) -> Response:
    """GET /training_runs/{run}/checkpoints: the newest thousand, which the SDK takes for all.

    A deleted run may still have checkpoints, so the run is looked up only if there are none.
    """
    run, limit, offset = call.path("run"), call.number("limit", CHECKPOINTS_MAX), call.number("offset", 0)
    response, total = await _list(call, run, limit, offset)
    if not total:
        await adapter_of(call, run)
    return response


async def weights_info(call: Call) -> Response:
    """POST /weights_info: the settings of a model that is created from a checkpoint."""
    asked = await call.json(schemas.OfPath)
    found = await call.service.get_checkpoint(call.principal, pb.GetCheckpointRequest(path=asked.tinker_path))
    checkpoint = found.checkpoint
    body = {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": checkpoint.rank,
        "optimizer_config": ADAMW,
    }
    return JSONResponse(body | await call.service.trained_modules(call.principal, checkpoint.path))


async def copy_weights(call: Call) -> Response:
    """POST /copy_weights: into a new run of the caller. The SDK's idempotency key makes it safe to repeat."""
    asked = await call.json(schemas.CopyWeights)
    if asked.weights_access_token or call.request.headers.get("x-tinker-weights-access-token"):
        raise no_access_tokens()
    request = pb.CopyCheckpointRequest(
        path=asked.source_path,
        session_id=asked.session_id or "",
        index=asked.model_seq_id,
        request_id=call.request.headers.get("x-idempotency-key", ""),
        ttl_seconds=asked.ttl_seconds or 0,
    )
    copied = await call.service.copy_checkpoint(call.principal, request)
    return JSONResponse({"tinker_path": copied.checkpoint.path})


async def publish(call: Call) -> Response:
    """POST /training_runs/{run}/checkpoints/{checkpoint}/publish. Does nothing to a public checkpoint."""
    return await _set_access(call, is_public=True)


async def unpublish(call: Call) -> Response:
    """Handle DELETE of a checkpoint's /publish. Does nothing to a private checkpoint."""
    return await _set_access(call, is_public=False)


async def set_ttl(call: Call) -> Response:
    """PUT of a checkpoint's /ttl: its time to live from now in seconds; null keeps it."""
    ttl_seconds = (await call.json(schemas.SetTtl)).ttl_seconds
    request = pb.SetCheckpointTtlRequest(path=_path(call), ttl_seconds=ttl_seconds or 0)
    await call.service.set_checkpoint_ttl(call.principal, request)
    return JSONResponse({})


async def delete(call: Call) -> Response:
    """Handle DELETE of a checkpoint."""
    path = f"{names.SCHEME}{call.path('run')}/{call.path('checkpoint')}"
    await call.service.delete_checkpoint(call.principal, pb.DeleteCheckpointRequest(path=path))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def download_urls(call: Call) -> Response:
    """GET of a checkpoint's /external_weights_urls: a URL for each file of its PEFT directory."""
    path = _path(call)
    version = await _version(call, path)
    files = await call.service.exported_files(call.principal, path)
    expires = call.door.downloads.expiry()
    urls = {file: _url(call, path, version, file, expires) for file in files}
    body = {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}
    return JSONResponse(body, headers=_UNCACHED)


async def download_archive(call: Call) -> Response:
    """GET of a checkpoint's /archive, for clients up to 0.35; with `form=peft` for people, who want PEFT's names."""
    path = _path(call)
    file = PEFT_ARCHIVE if call.request.query_params.get("form") == "peft" else ARCHIVE
    version = await _version(call, path)
    expires = call.door.downloads.expiry()
    headers = _UNCACHED | {
        "location": _url(call, path, version, file, expires),
        "expires": datetime.fromtimestamp(expires, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
    }
    return Response(status_code=HTTPStatus.FOUND, headers=headers)


async def trace_export(call: Call) -> Response:
    """GET /sessions/{session}/trace_export: the URL of a session's timeline, which is made while it is downloaded."""
    session_id, caller = call.path("session"), call.principal
    await call.service.check_session_trace(caller, session_id)
    path = f"{_SESSIONS}{caller.role}/{session_id}"
    url = _url(call, path, "", f"{session_id}.pftrace", call.door.downloads.expiry())
    return JSONResponse({"status": "ready", "url": url, "error": None}, headers=_UNCACHED)


async def download(request: Request, door: DoorContext) -> Response:
    """GET /download/{file}: a file of a checkpoint or a timeline, while the API key that requested its URL is valid."""
    name = request.path_params["file"]
    key_id, path, version = door.downloads.check(request.query_params, name)
    reader = await door.service.holder_of_key(key_id)
    while_valid = functools.partial(door.backend.authenticator.while_valid, reader)
    place = door.downloads.place(reader.tenant_id)
    with ExitStack() as held:
        held.callback(place.close)
        with while_valid():
            await place.take(1, WAIT_S)
            door.gate.check_open()
            file = await _file(door, reader, path, version, name)
            asked = asked_range(request, file)
            if asked is not None and not asked:
                return _outside(file)
            if request.method == "HEAD":
                return head_response(file)
            part = range(file.num_bytes or 0) if asked is None else asked
            pieces = file.read(part.start, part.stop)
            first = await anext(pieces)  # after the first piece, an error can only cut the connection
        return FileResponse(file, asked, first, pieces, while_valid(), held.pop_all())


async def _file(door: DoorContext, reader: Principal, path: str, version: str, name: str) -> File:
    """Return what a URL names. Raises ServiceError."""
    if path.startswith(_SESSIONS):
        role, _, session_id = path.removeprefix(_SESSIONS).partition("/")
        viewer = replace(reader, role=Role(role))
        return File(name, None, "", lambda _start, _stop: door.service.session_trace(viewer, session_id))
    exported = await door.service.file_for_tinker(reader, path, int(version), name)
    shown = f"{path.rpartition('/')[2]}.tar" if name in (ARCHIVE, PEFT_ARCHIVE) else name
    return File(shown, exported.num_bytes, f"{exported.sha256}-{name}", exported.read)


def _outside(file: File) -> Response:
    """Return the refusal of a range that begins behind the end of a file."""
    message = f"{file.name} has {file.num_bytes} bytes: begin the range before its end"
    response = error_response(ServiceError(Code.OUT_OF_RANGE, "RANGE_OUTSIDE", message), "a download")
    response.headers["content-range"] = f"bytes */{file.num_bytes}"
    return response


async def _newest(call: Call, adapters: Sequence[adapters_pb2.Adapter]) -> Newest:
    return await call.service.newest_checkpoints(call.principal, [adapter.adapter_id for adapter in adapters])


def _run_json(call: Call, adapter: adapters_pb2.Adapter, newest: Newest) -> dict[str, Any]:
    found = {
        "last_checkpoint": newest.get((adapter.adapter_id, pb.CHECKPOINT_KIND_TRAINING)),
        "last_sampler_checkpoint": newest.get((adapter.adapter_id, pb.CHECKPOINT_KIND_SAMPLER)),
    }
    times = [
        adapter.last_use_time,
        *(checkpoint.create_time for checkpoint in found.values() if checkpoint is not None),
    ]
    return {
        "training_run_id": adapter.adapter_id,
        "base_model": adapter.base_model,
        "model_owner": call.principal.tenant_name,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": adapter.rank,
        "last_request_time": max(times, key=lambda time: time.ToNanoseconds()).ToJsonString(),
        "user_metadata": dict(adapter.user_metadata),
        **{name: _checkpoint_json(checkpoint) for name, checkpoint in found.items() if checkpoint is not None},
    }


def _checkpoint_json(checkpoint: pb.Checkpoint) -> dict[str, Any]:
    """Return a checkpoint in the protocol's form."""
    parsed = names.CheckpointPath.parse(checkpoint.path)
    body: dict[str, Any] = {
        "checkpoint_id": f"{parsed.kind}/{parsed.name}",
        "checkpoint_type": _KINDS[checkpoint.kind],
        "time": checkpoint.create_time.ToJsonString(),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": dict(checkpoint.user_metadata),
    }
    if checkpoint.HasField("expire_time"):
        body["expires_at"] = checkpoint.expire_time.ToJsonString()
    return body


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    """Return the cursor of a page."""
    return {"offset": offset, "limit": limit, "total_count": total}


async def _list(call: Call, run: str, limit: int, offset: int) -> tuple[Response, int]:
    """Return a page of a run's checkpoints, or of all for an empty `run`, and the number on all pages."""
    limit = min(limit, CHECKPOINTS_MAX)
    request = pb.ListCheckpointsRequest(adapter_id=run, page_size=limit, skip=offset)
    listed = call.service.listed_checkpoints(call.principal, request, known_kinds(call))

    async def slices() -> AsyncGenerator[list[dict[str, Any]]]:
        async with aclosing(listed.slices()) as found:
            async for checkpoints in found:
                yield [_checkpoint_json(checkpoint) for checkpoint in checkpoints]

    await call.room.take(SLICE_BYTES)
    cursor = _cursor(limit, offset, listed.num_total)
    return await json_list("checkpoints", slices(), {"cursor": cursor}), listed.num_total


async def _set_access(call: Call, *, is_public: bool) -> Response:
    request = pb.SetCheckpointAccessRequest(path=_path(call), is_public=is_public)
    await call.service.set_checkpoint_access(call.principal, request)
    return JSONResponse({})


def _path(call: Call) -> str:
    return f"{names.SCHEME}{call.path('run')}/{call.path('kind')}/{call.path('name')}"


async def _version(call: Call, path: str) -> str:
    """Return the version of a checkpoint, which its URLs name: the number of its save."""
    found = await call.service.get_checkpoint(call.principal, pb.GetCheckpointRequest(path=path))
    return str(found.checkpoint.seq)


def _url(call: Call, path: str, version: str, file: str, expires: int) -> str:
    """Return the signed URL of a file. Without a public URL it names the host that the caller has named."""
    base = (call.door.config.public_url or str(call.request.base_url)).rstrip("/")
    query = call.door.downloads.query(call.principal.key_id, path, version, file, expires)
    return f"{base}{call.request.app.url_path_for('download', file=file)}?{query}"
