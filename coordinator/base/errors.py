"""The one exception that use cases raise for callers.

Doors turn it into their protocol's error; the text is for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

MESSAGE_LENGTH_MAX = 1500
"""Characters of a refusal's text: it may repeat what was sent, and is logged, kept in memory and sent."""


class Code(IntEnum):
    """Canonical status codes, with gRPC's numbers."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ServiceError(Exception):
    """A refusal, as the caller shall see it: canonical code, constant for programs, sentence for people.

    `retry_delay_s` is set exactly when the same call may succeed later; nothing was consumed then. `operation` is set
    once the refusal is on record: it names the failed operation that took the place that the request asked for. A
    message above `MESSAGE_LENGTH_MAX` is cut.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        retry_delay_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MESSAGE_LENGTH_MAX:
            message = f"{message[: MESSAGE_LENGTH_MAX - 4]} ..."
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_delay_s = retry_delay_s
        self.metadata = dict(metadata or {})
        self.operation = ""


def invalid(message: str, reason: str = "INVALID_ARGUMENT") -> ServiceError:
    """The request itself is wrong."""
    return ServiceError(Code.INVALID_ARGUMENT, reason, message)


def not_found(what: str, name: str, reason: str = "NOT_FOUND") -> ServiceError:
    """No such thing, or another tenant's: the two look the same."""
    return ServiceError(Code.NOT_FOUND, reason, f"no {what} {name[:200]!r}: check the name and the API key")


def sampler_exists(sampler_id: str) -> ServiceError:
    """A number in a session that another sampler has."""
    return ServiceError(
        Code.ALREADY_EXISTS,
        "SAMPLER_EXISTS",
        f"{sampler_id} was created before with other settings: use another index or request_id",
    )
