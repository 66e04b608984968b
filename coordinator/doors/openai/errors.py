"""Refusals as OpenAI's clients expect them: `{"error": {message, type, param, code}}`, and a status to act on."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.tinker.errors import headers_of, refusal_of, status_of
from tinkerpool.v1 import operations_pb2 as ops_pb

_PARAM = "param"
"""Where a refusal's metadata has the name of the parameter."""
_CODES = {
    "API_KEY_MISSING": "invalid_api_key",
    "API_KEY_INVALID": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
}
"""Where OpenAI has a word of its own."""
_TYPES: dict[int, str] = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
"""By status, but for the rest of its hundred."""


def refused(param: str, message: str, reason: str = "INVALID_VALUE") -> ServiceError:
    """A parameter that cannot be as it is."""
    return ServiceError(Code.INVALID_ARGUMENT, reason, message, metadata={_PARAM: param})


def unsupported(param: str, instead: str) -> ServiceError:
    """A parameter of OpenAI's that does nothing here. `instead` says what to do."""
    return refused(param, f"{param} is not supported by this pool: {instead}", "UNSUPPORTED_PARAMETER")


def no_model(name: str, why: str) -> ServiceError:
    """A model that cannot be sampled from because it is not there."""
    message = f"the model {name[:200]!r} does not exist: {why}"
    return ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, metadata={_PARAM: "model"})


def failure(error: ops_pb.OperationError) -> ServiceError:
    """Why a sample failed."""
    try:
        code = Code(error.code)
    except ValueError:
        code = Code.UNKNOWN
    return ServiceError(code, error.reason, error.message)


def error_response(error: Exception, where: str) -> Response:
    """The answer to a call that failed."""
    refusal = refusal_of(error, where)
    headers = headers_of(refusal)
    if refusal.retry_delay_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_delay_s))
    return JSONResponse(error_body(refusal), status_code=status_of(refusal), headers=headers)


def error_body(refusal: ServiceError) -> dict[str, Any]:
    """A refusal in JSON."""
    status = status_of(refusal)
    return {
        "error": {
            "message": refusal.message,
            "type": _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": refusal.metadata.get(_PARAM),
            "code": _CODES.get(refusal.reason, refusal.reason.lower()),
        }
    }
