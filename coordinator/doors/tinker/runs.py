"""Listings of sessions and training runs. A training run of the protocol is an adapter of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.doors.http.calls import Call
from coordinator.doors.http.responses import PiecewiseJson, make_response
from coordinator.doors.tinker.checkpoints import checkpoint_json, cursor
from coordinator.doors.tinker.errors import unsupported
from coordinator.doors.tinker.models import adapter_of
from coordinator.doors.tinker.sessions import split_metadata
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, sessions_pb2

RUNS_MAX = 100
"""Most runs on a page; a page's cursor has the limit that was applied."""
_SESSIONS_AT_ONCE = 100
"""Sessions that are read in one query: each lists its adapters and samplers."""
Newest = Mapping[tuple[str, checkpoints_pb2.CheckpointKind.ValueType], checkpoints_pb2.Checkpoint]
"""By adapter and kind."""


async def list_runs(call: Call) -> Response:
    """GET /training_runs: runs of the tenant, newest first."""
    limit, offset = min(call.number("limit", 20), RUNS_MAX), call.number("offset", 0)
    if call.request.query_params.get("project_id"):
        raise unsupported("a listing by project", "leave project_id out: the runs of all your sessions are listed")
    request = adapters_pb2.ListAdaptersRequest(page_size=limit, skip=offset)
    found = await call.service.list_adapters(call.principal, request)
    newest = await _newest(call, found.adapters)

    def make() -> Response:
        runs = [_run_json(call, adapter, newest) for adapter in found.adapters]
        return PiecewiseJson({"training_runs": runs, "cursor": cursor(limit, offset, found.total_size)})

    return await make_response(found.ByteSize(), make)


async def get_run(call: Call) -> Response:
    """GET /training_runs/{run}."""
    adapter = await adapter_of(call, call.path("run"))
    return JSONResponse(_run_json(call, adapter, await _newest(call, [adapter])))


async def list_sessions(call: Call) -> Response:
    """GET /sessions: live sessions of the tenant, newest first."""
    limit, offset = call.number("limit", 20), call.number("offset", 0)
    found: list[str] = []
    is_more = True
    while is_more and len(found) < limit:
        size = min(limit - len(found), _SESSIONS_AT_ONCE)
        request = sessions_pb2.ListSessionsRequest(page_size=size, skip=offset + len(found))
        page = await call.service.list_sessions(call.principal, request)
        found += [session.session_id for session in page.sessions]
        is_more = bool(page.next_page_token)
        await asyncio.sleep(0)  # let other calls run
    return JSONResponse({"sessions": list(dict.fromkeys(found))})  # a session created meanwhile shifts the pages


async def get_session(call: Call) -> Response:
    """GET /sessions/{session}."""
    request = sessions_pb2.GetSessionRequest(session_id=call.path("session"))
    session = (await call.service.get_session(call.principal, request)).session
    own, users = split_metadata(session.user_metadata)
    body: dict[str, Any] = {
        "training_run_ids": list(session.adapter_ids),
        "sampler_ids": list(session.sampler_ids),
        "user_metadata": users,
    }
    return JSONResponse(body | {name: text for name, text in own.items() if name == "display_name"})


async def _newest(call: Call, adapters: Sequence[adapters_pb2.Adapter]) -> Newest:
    return await call.service.newest_checkpoints(call.principal, [adapter.adapter_id for adapter in adapters])


def _run_json(call: Call, adapter: adapters_pb2.Adapter, newest: Newest) -> dict[str, Any]:
    found = {
        "last_checkpoint": newest.get((adapter.adapter_id, checkpoints_pb2.CHECKPOINT_KIND_TRAINING)),
        "last_sampler_checkpoint": newest.get((adapter.adapter_id, checkpoints_pb2.CHECKPOINT_KIND_SAMPLER)),
    }
    times = [adapter.create_time, *(checkpoint.create_time for checkpoint in found.values() if checkpoint is not None)]
    return {
        "training_run_id": adapter.adapter_id,
        "base_model": adapter.base_model,
        "model_owner": call.principal.tenant_name,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": adapter.rank,
        "last_request_time": max(times, key=lambda time: time.ToNanoseconds()).ToJsonString(),
        "user_metadata": dict(adapter.user_metadata),
        **{name: checkpoint_json(checkpoint) for name, checkpoint in found.items() if checkpoint is not None},
    }
