"""Refusals in the form of OpenAI's API: `{"error": {message, type, param, code}}`, with a status."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.door import to_refusal
from coordinator.doors.http.responses import headers_of, status_of
from tinkerpool.v1 import operations_pb2 as ops_pb

_PARAM = "param"
"""Key of a refusal's metadata that holds the name of the wrong parameter."""
_CODES = {
    "API_KEY_MISSING": "invalid_api_key",
    "API_KEY_INVALID": "invalid_api_key",
    "API_KEY_EXPIRED": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
    "SAMPLES_FULL": "rate_limit_exceeded",
    "STREAMS_FULL": "rate_limit_exceeded",
    "TOKEN_BUDGET": "insufficient_quota",
}
"""Reasons that OpenAI's API has a different name for."""
_PREFIXES = dict.fromkeys(("API_KEY_INVALID", "API_KEY_EXPIRED"), "Incorrect API key provided: ")
"""What messages begin with, by reason: clients tell a wrong key from other wrong requests by OpenAI's words."""
_TYPES: dict[int, str] = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
"""Types by status; other statuses below 500 are `invalid_request_error`."""


def refused(param: str, message: str, reason: str = "INVALID_VALUE") -> ServiceError:
    """Return the refusal of a parameter's value."""
    return ServiceError(Code.INVALID_ARGUMENT, reason, message, metadata={_PARAM: param})


def unsupported(param: str, instead: str) -> ServiceError:
    """Return the refusal of a parameter that this pool does not support. `instead` tells what to do."""
    return refused(param, f"{param} is not supported by this pool: {instead}", "UNSUPPORTED_PARAMETER")


def no_model(name: str, why: str) -> ServiceError:
    """Return the refusal of a model that does not exist."""
    message = f"the model {name[:200]!r} does not exist: {why}"
    return ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, metadata={_PARAM: "model"})


def failure(error: ops_pb.OperationError) -> ServiceError:
    """Return a failed outcome as a refusal."""
    return ServiceError(Code.of(error.code), error.reason, error.message)


def error_response(error: Exception, where: str, retries: int = 0) -> Response:
    """Return the response to a call that raised.

    `where` names the call, for the log; `retries`: how often the client has repeated it.
    """
    refusal = to_refusal(error, where)
    return JSONResponse(error_body(refusal), status_code=status_of(refusal), headers=headers_of(refusal, retries))


def error_body(refusal: ServiceError) -> dict[str, Any]:
    """Return the JSON body of a refusal."""
    status = status_of(refusal)
    return {
        "error": {
            "message": _PREFIXES.get(refusal.reason, "") + refusal.message,
            "type": _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": refusal.metadata.get(_PARAM),
            "code": _CODES.get(refusal.reason, refusal.reason.lower()),
        }
    }
