"""From a refusal to its HTTP answer. Main invariant: every error has a JSON body that says what was wrong.

The SDK tries 408, 409, 429 and everything from 500 on again, for minutes. So these stand only where the same call may
succeed later; what is refused for good gets another 4xx. It takes a 400 without a body for a proxy's.
"""

from __future__ import annotations

import logging
import secrets
from http import HTTPStatus

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from tinkerpool.v1 import operations_pb2 as ops_pb

_log = logging.getLogger(__name__)

_STATUS = {
    Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.DATA_LOSS: HTTPStatus.UNPROCESSABLE_ENTITY,
}
_REASON_STATUS = {
    "SESSION_ENDED": HTTPStatus.FORBIDDEN,
    "SESSION_GONE": HTTPStatus.GONE,
    "PROMISE_GONE": HTTPStatus.GONE,
    "REQUEST_TOO_LARGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "RESULT_TOO_LARGE": HTTPStatus.NOT_ACCEPTABLE,
    "SESSION_UNKNOWN": HTTPStatus.FORBIDDEN,
}
_USER_CODES = frozenset(
    {
        Code.CANCELLED,
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.PERMISSION_DENIED,
        Code.FAILED_PRECONDITION,
        Code.ABORTED,
    }
)
"""Failures that the user can mend."""


def error_response(error: Exception, where: str) -> Response:
    """The answer to a call that failed."""
    refusal = refusal_of(error, where)
    body = {"detail": refusal.message, "reason": refusal.reason, **refusal.metadata}
    return JSONResponse(body, status_code=status_of(refusal), headers=headers_of(refusal))


def refusal_of(error: Exception, where: str) -> ServiceError:
    """What may be told of an error. A fault of ours is logged under a new id, and the id is all that is told."""
    if isinstance(error, ServiceError):
        return error
    error_id = secrets.token_hex(6)
    _log.error("error %s in %s", error_id, where, exc_info=error)
    message = f"internal error {error_id}: a fault of the pool's; its log has more under this id"
    return ServiceError(Code.INTERNAL, "INTERNAL", message)


def unsupported(what: str, instead: str) -> ServiceError:
    """Something that the SDK can ask and this pool cannot do. `instead` says what to do."""
    return ServiceError(Code.INVALID_ARGUMENT, "UNSUPPORTED", f"{what} is not supported by this pool: {instead}")


def failure(error: ops_pb.OperationError) -> dict[str, str]:
    """The result of an operation that failed."""
    category = "user" if error.code in _USER_CODES else "server"
    return {"error": f"{error.reason}: {error.message}", "category": category}


def status_of(error: ServiceError) -> int:
    """The HTTP status of a refusal."""
    if error.retry_delay_s is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE if error.code is Code.UNAVAILABLE else HTTPStatus.TOO_MANY_REQUESTS
    return _REASON_STATUS.get(error.reason) or _STATUS.get(error.code, HTTPStatus.BAD_REQUEST)


def headers_of(error: ServiceError) -> dict[str, str]:
    """When to try again, if that makes sense."""
    if error.retry_delay_s is None:
        return {}
    return {"retry-after-ms": str(round(error.retry_delay_s * 1000))}
