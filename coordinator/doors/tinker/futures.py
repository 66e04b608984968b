"""Promises: their ids, and waiting for what they promise.

The id of a promise is the operation's name. What is done when it returns (a new model) is promised, too, because the
SDK expects that; its id says what it was. So a promise needs no state here, and holds in every life of the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.http.rendering import rendered
from coordinator.doors.tinker.results import PROTOBUF, result_response
from coordinator.doors.tinker.shapes import RetrieveFuture
from tinkerpool.v1 import adapters_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

CREATED, LOADED, UNLOADED = "create_model", "load_weights", "unload_model"
"""Kinds of promises of what was done at once, to a model."""
METADATA_BYTES_MIN = 1 << 20
"""What is larger is announced first, to who can do with that: it makes room for it then."""
NO_WORKER = "no worker of the pool can make progress at the moment; it is being replaced"


def promise(request_id: str, **more: Any) -> Response:
    """The answer to a request whose result is to be asked for."""
    return JSONResponse({"request_id": request_id, **more})


def promise_of_model(kind: str, adapter_id: str) -> Response:
    """The same, for a model that is there already."""
    return promise(f"{kind}={adapter_id}")


async def submit(call: Call, use_case: Callable[..., Awaitable[Any]], *request: Any) -> Response:
    """Hand an operation in; the answer is its promise.

    A refusal that took the operation's place is promised as well, and is its result: so the SDK goes on with the next
    place, also where it sends the parts of one batch apart from each other.
    """
    try:
        response = await use_case(call.principal, *request)
    except ServiceError as error:
        if not error.operation:
            raise
        return promise(error.operation)
    return promise(response.operation.name)


async def retrieve_future(call: Call) -> Response:
    """POST /retrieve_future: the result, its size if it is large, or after a while the request to ask again."""
    asked = await call.json(RetrieveFuture)
    request_id = asked.request_id
    kind, _, adapter_id = request_id.partition("=")
    if kind in (CREATED, LOADED, UNLOADED):
        await call.service.get_adapter(call.principal, adapters_pb2.GetAdapterRequest(adapter_id=adapter_id))
        return JSONResponse({"type": kind, "model_id": adapter_id})
    operation = await finished(call, request_id, call.door.poll_s)
    if operation is None:
        return _try_again(call, request_id)
    is_binary = PROTOBUF in call.request.headers.get("accept", "")
    size = operation.ByteSize()
    if is_binary and asked.allow_metadata_only and size > METADATA_BYTES_MIN:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    return await rendered(size, lambda: result_response(operation, is_binary=is_binary))


async def cancel_future(call: Call) -> Response:
    """POST /cancel_future. A promise that is gone needs no cancelling."""
    request_id = (await call.json(RetrieveFuture)).request_id
    try:
        await call.service.cancel_operation(call.principal, ops_pb.CancelOperationRequest(name=request_id))
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
    return JSONResponse({})


async def finished(call: Call, name: str, timeout_s: float) -> ops_pb.Operation | None:
    """The operation once it is finished; None after `timeout_s` seconds. Raises ServiceError."""
    found = None
    try:
        async with asyncio.timeout(timeout_s):
            waiting = call.service.wait_operations(call.principal, ops_pb.WaitOperationsRequest(names=[name]))
            async with aclosing(waiting) as responses:  # type: ignore[type-var]
                async for response in responses:
                    found = response.operation
    except TimeoutError:
        pass
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise ServiceError(
            Code.NOT_FOUND,
            "PROMISE_GONE",
            f"no result of {name[:200]!r}: it was never promised to this API key, or was kept its time and dropped",
        ) from None
    return found


def _try_again(call: Call, request_id: str) -> Response:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if not call.door.is_healthy():
        body |= {"queue_state": "paused_capacity", "queue_state_reason": NO_WORKER}
    return JSONResponse(body, status_code=HTTPStatus.REQUEST_TIMEOUT)
