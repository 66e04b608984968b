"""A client's settings, its session, and the pool's capabilities."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.tinker import schemas
from tinkerpool.v1 import sessions_pb2 as pb

_PREFIX = "tinker:"
"""Prefix of metadata keys under which a session holds fields of the protocol: tags, display name, project."""


async def client_config(call: Call) -> Response:
    """POST /client/config: how the client is to send."""
    await call.json(schemas.Nothing)
    capabilities = await call.service.get_capabilities(call.principal, pb.GetCapabilitiesRequest())
    return JSONResponse(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            # On one machine, compression costs more time than it saves.
            "proto_compress_fwdbwd": call.door.config.is_remote,
            "fwdbwd_max_chunk_len": capabilities.max_datums,
            "sample_use_retrieve_futures": True,  # one open call for each sampling client, not for each sample
            "sample_join_sampling_session": True,
            # With its default transport the SDK loses cancellations now and then, and then its close waits forever.
            "use_pyqwest_transport": False,
            "custom_loss_server_side": False,
        }
    )


async def dynamic_config(call: Call) -> Response:
    """POST /client/dynamic_config."""
    await call.json(schemas.Nothing)
    return JSONResponse(
        {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
    )


async def telemetry(call: Call) -> Response:
    """POST /telemetry: accepted and dropped."""
    await call.body()
    return JSONResponse({"status": "accepted"})


async def create_session(call: Call) -> Response:
    """POST /create_session. The SDK's idempotency key makes it safe to repeat."""
    asked = await call.json(schemas.CreateSession)
    own = {"tags": ",".join(asked.tags), "display_name": asked.display_name, "project_id": asked.project_id}
    metadata = {**(asked.user_metadata or {}), **{_PREFIX + key: text for key, text in own.items() if text}}
    request_id = call.request.headers.get("x-idempotency-key", "")
    request = pb.CreateSessionRequest(user_metadata=metadata, request_id=request_id)
    created = await call.service.create_session(call.principal, request)
    return JSONResponse({"type": "create_session", "session_id": created.session.session_id})


async def get_session(call: Call) -> Response:
    """GET /sessions/{session}."""
    request = pb.GetSessionRequest(session_id=call.path("session"))
    session = (await call.service.get_session(call.principal, request)).session
    metadata = dict(session.user_metadata)
    body: dict[str, Any] = {
        "training_run_ids": list(session.adapter_ids),
        "sampler_ids": list(session.sampler_ids),
        "user_metadata": {key: text for key, text in metadata.items() if not key.startswith(_PREFIX)},
    }
    if (display_name := metadata.get(f"{_PREFIX}display_name")) is not None:
        body["display_name"] = display_name
    return JSONResponse(body)


async def list_sessions(call: Call) -> Response:
    """GET /sessions: live sessions of the tenant, newest first."""
    ids = await call.service.session_ids(call.principal, call.number("limit", 20), call.number("offset", 0))
    return JSONResponse({"sessions": ids})


async def heartbeat(call: Call) -> Response:
    """POST /session_heartbeat. For an ended session the status is 410, which ends the SDK's heartbeats."""
    asked = await call.json(schemas.OfSession)
    try:
        await call.service.heartbeat(call.principal, pb.HeartbeatRequest(session_id=asked.session_id))
    except ServiceError as error:
        if error.reason != "SESSION_ENDED":
            raise
        raise ServiceError(error.code, "SESSION_GONE", error.message) from None
    return JSONResponse({"type": "session_heartbeat"})


async def finish_session(call: Call) -> Response:
    """POST /sessions/{session}/finish."""
    await call.json(schemas.Nothing)
    await call.service.finish_session(call.principal, pb.FinishSessionRequest(session_id=call.path("session")))
    return JSONResponse({})


async def server_capabilities(call: Call) -> Response:
    """GET /get_server_capabilities."""
    capabilities = await call.service.get_capabilities(call.principal, pb.GetCapabilitiesRequest())
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.max_sequence_tokens,
            "trainable": True,
            "sampleable": True,
        }
        for model in capabilities.base_models
    ]
    return JSONResponse({"supported_models": models})
