"""Status and headers of a refusal over HTTP; the protocols differ in the body alone.

The Tinker SDK retries 408, 409, 429 and everything from 500 on for minutes, and OpenAI's client retries them a few
times. So these statuses are for refusals of calls that may succeed later; a permanent refusal gets another 4xx.
"""

from __future__ import annotations

from http import HTTPStatus

from coordinator.base.errors import Code, ServiceError

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


def status_of(error: ServiceError) -> int:
    """Return the HTTP status of a refusal."""
    if error.retry_delay_s is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE if error.code is Code.UNAVAILABLE else HTTPStatus.TOO_MANY_REQUESTS
    return _REASON_STATUS.get(error.reason) or _STATUS.get(error.code, HTTPStatus.BAD_REQUEST)


def headers_of(error: ServiceError) -> dict[str, str]:
    """Return the headers of a refusal: the delay before a retry, where a retry makes sense."""
    if error.retry_delay_s is None:
        return {}
    return {"retry-after-ms": str(round(error.retry_delay_s * 1000))}
