"""Promises: the ids that the SDK polls, and their results.

The id of a promise is the name of its operation. Work that is done at once (a new model) gets a promise too, because
the SDK expects one; its id tells the kind and the model. So a promise needs no state in the door, and survives restarts
of the coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.results import PROTOBUF, result_response
from tinkerpool.v1 import adapters_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

CREATED, LOADED, UNLOADED = "create_model", "load_weights", "unload_model"
"""Kinds of promises of work on a model that is done at once."""
METADATA_BYTES_MIN = 1 << 20
"""Larger results are announced by their size first, to clients that accept that, so that they can make room."""
NO_WORKER = "no worker of the pool can make progress at the moment; the pool is replacing it"


def promise(request_id: str, **more: Any) -> Response:
    """Return the response to a request whose result is fetched later."""
    return JSONResponse({"request_id": request_id, **more})


def promise_of_model(kind: str, adapter_id: str) -> Response:
    """Return the promise of work on a model that is already done."""
    return promise(f"{kind}={adapter_id}")


async def submit(call: Call, use_case: Callable[..., Awaitable[Any]], *request: Any) -> Response:
    """Submit an operation; return its promise.

    A refusal that consumed the sequence number gets a promise too, whose result is the refusal: so the SDK goes on with
    the next sequence number, also while it sends the parts of one batch independently.
    """
    try:
        response = await use_case(call.principal, *request)
    except ServiceError as error:
        if not error.operation:
            raise
        return promise(error.operation)
    return promise(response.operation.name)


async def retrieve_future(call: Call) -> Response:
    """POST /retrieve_future: the result, its size if it is large, or after `poll_s` seconds the answer to ask again."""
    asked = await call.json(schemas.RetrieveFuture)
    request_id = asked.request_id
    kind, _, adapter_id = request_id.partition("=")
    if kind in (CREATED, LOADED, UNLOADED):
        await call.service.get_adapter(call.principal, adapters_pb2.GetAdapterRequest(adapter_id=adapter_id))
        return JSONResponse({"type": kind, "model_id": adapter_id})
    operation = await finished(call, request_id, call.door.config.poll_s)
    if operation is None:
        return await _try_again(call, request_id)
    is_binary = PROTOBUF in call.request.headers.get("accept", "")
    size = operation.ByteSize()
    if is_binary and asked.allow_metadata_only and size > METADATA_BYTES_MIN:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    return await call.in_turn(size, lambda: result_response(operation, is_binary=is_binary))


async def retrieve_futures(call: Call) -> Response:
    """POST /retrieve_futures: the samples of one client that have finished since its cursor.

    A client asks with one open call for all its samples, and fetches the finished ones one by one. The call is held
    while none has finished, but no longer than the client wants.
    """
    asked = await call.json(schemas.RetrieveFutures)
    timeout_s = call.door.config.poll_s if asked.timeout is None else min(asked.timeout, call.door.config.poll_s)
    target = asked.target
    try:
        async with call.door.polls.held(call.principal.tenant_id, 2 * call.door.config.poll_s):
            samples, cursor = await call.service.finished_samples(
                call.principal, target.sampling_session_id, target.cloned_sampler_id, asked.prev_cursor, timeout_s
            )
    except TimeoutError:  # other polls needed the room
        samples, cursor = [], asked.prev_cursor
    completions = [
        {"state": "failed", "request_id": sample.name}
        if sample.is_failed
        else {
            "state": "finished",
            "request_id": sample.name,
            "response_payload_uncompressed_size": sample.num_bytes,
        }
        for sample in samples
    ]
    return JSONResponse({"completions": completions, "cursor": cursor})


async def cancel_future(call: Call) -> Response:
    """POST /cancel_future. Succeeds for an unknown promise, too."""
    request_id = (await call.json(schemas.RetrieveFuture)).request_id
    try:
        await call.service.cancel_operation(call.principal, ops_pb.CancelOperationRequest(name=request_id))
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
    return JSONResponse({})


async def finished(call: Call, name: str, timeout_s: float) -> ops_pb.Operation | None:
    """Return the operation once it is finished and there is room for it, or None after `timeout_s` seconds.

    Raises ServiceError.
    """
    try:
        async with call.door.polls.held(call.principal.tenant_id, timeout_s):
            [found] = await call.service.finished_operations(call.principal, [name], call.room, is_poll=True)
            return found
    except TimeoutError:
        return None
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise ServiceError(
            Code.NOT_FOUND,
            "PROMISE_GONE",
            f"no result of {name[:200]!r}: this API key was never promised it, or its lifetime is over and it was "
            "dropped",
        ) from None


async def _try_again(call: Call, request_id: str) -> Response:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if reason := await call.service.queue_reason(call.principal, request_id):
        body |= {"queue_state": "paused_rate_limit", "queue_state_reason": reason}
    elif not call.door.backend.health():
        body |= {"queue_state": "paused_capacity", "queue_state_reason": NO_WORKER}
    return JSONResponse(body, status_code=HTTPStatus.REQUEST_TIMEOUT)
