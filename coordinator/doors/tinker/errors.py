"""Refusals and failed outcomes in the Tinker protocol.

Main invariant: every error has a JSON body with its message. The SDK takes a 400 without a body for a proxy's response.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.door import to_refusal
from coordinator.doors.http.responses import headers_of, status_of
from tinkerpool.errors import category_of
from tinkerpool.v1 import operations_pb2 as ops_pb


def error_response(error: Exception, where: str, retries: int = 0) -> Response:
    """Return the response to a call that raised.

    `where` names the call, for the log; `retries`: how often the client has repeated it. Every refusal with a delay is
    a 429: with a 503 the SDK would fetch a result again at once, without any pause.
    """
    refusal = to_refusal(error, where)
    body = {"detail": refusal.message, "reason": refusal.reason, **refusal.metadata}
    status = status_of(refusal) if refusal.retry_delay_s is None else HTTPStatus.TOO_MANY_REQUESTS
    return JSONResponse(body, status_code=status, headers=headers_of(refusal, retries))


def unsupported(what: str, instead: str) -> ServiceError:
    """Return the refusal of a feature of the SDK that this pool does not have. `instead` tells what to do."""
    return ServiceError(Code.INVALID_ARGUMENT, "UNSUPPORTED", f"{what} is not supported by this pool: {instead}")


def failure(error: ops_pb.OperationError) -> dict[str, str]:
    """Return the result of a failed operation."""
    return {"error": f"{error.reason}: {error.message}", "category": category_of(Code.of(error.code))}
