"""The errors that the client raises. The Tinker SDK's names are classes of the same tree.

    TinkerpoolError                             TinkerError in the SDK
    ├── ConfigurationError (ValueError)         no key, a malformed URL
    ├── ExportError (ValueError)                a checkpoint cannot be exported in this format, or the result is wrong
    ├── NotImportable (ValueError)              a directory has no adapter that can be imported
    ├── ClientClosed                            the client was closed, or belongs to another process
    ├── ApiError                                APIError: a call failed; one class for each canonical code
    │   ├── APIStatusError                      the service refused the call
    │   │   ├── BadRequestError
    │   │   │   ├── InvalidArgument (ValueError)
    │   │   │   ├── AlreadyExists               also ConflictError
    │   │   │   └── Cancelled
    │   │   ├── Unauthenticated                 AuthenticationError
    │   │   ├── PermissionDeniedError
    │   │   │   └── PermissionDenied
    │   │   ├── NotFound (LookupError)          NotFoundError
    │   │   ├── DataLoss                        UnprocessableEntityError
    │   │   ├── FailedPrecondition              also BadRequestError; PermissionDeniedError if a ceiling is met
    │   │   ├── ResourceExhausted               also RateLimitError if waiting helps, else BadRequestError
    │   │   └── InternalError                   InternalServerError; every other code: INTERNAL, UNKNOWN, ...
    │   └── APIConnectionError
    │       ├── Unavailable (ConnectionError)
    │       └── DeadlineExceeded (TimeoutError) APITimeoutError
    ├── RequestFailedError                      an operation did not happen, and its sequence number is used
    │   └── OperationFailed                     an accepted operation ended in an error
    └── OrderBroken                             an earlier refusal broke the sequence numbers of a training client

A refusal has the class that the SDK raises for it, in addition to that of its code: in an ended session, for example,
it is a PermissionDeniedError, too. The refusal of an operation is also a RequestFailedError. So `except` clauses that
were written for the SDK catch the same failures.

The client retries errors that may pass, and never raises them. The exception is `Unavailable` after a while, if no
service has ever replied. `Code` is the one table of status codes, and `http_status` that of HTTP, which the coordinator
uses too. This module does not depend on grpc: the transport passes codes and details.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum, auto
from functools import cache
from http import HTTPStatus
from typing import Any, ClassVar


class Code(IntEnum):
    """Canonical status codes, with gRPC's numbers."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @classmethod
    def of(cls, value: int) -> Code:
        """Return the code of a number; UNKNOWN for a number without a name."""
        return cls(value) if value in cls._value2member_map_ else cls.UNKNOWN


class RequestErrorCategory(StrEnum):
    """Who can mend a failed operation."""

    Unknown = auto()
    Server = auto()
    User = auto()


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
_STATUS = {
    Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.UNKNOWN: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    Code.DATA_LOSS: HTTPStatus.UNPROCESSABLE_ENTITY,
}
_REASON_STATUS = {
    "SESSION_ENDED": HTTPStatus.FORBIDDEN,
    "SESSION_GONE": HTTPStatus.GONE,
    "PROMISE_GONE": HTTPStatus.GONE,
    "REQUEST_TOO_LARGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "RESULT_TOO_LARGE": HTTPStatus.NOT_ACCEPTABLE,
    "CHECKPOINT_OVERWRITTEN": HTTPStatus.PRECONDITION_FAILED,
    "RANGE_OUTSIDE": HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    "SESSION_UNKNOWN": HTTPStatus.FORBIDDEN,
}


def category_of(code: Code) -> RequestErrorCategory:
    """Return who can mend an operation that failed with this code."""
    return RequestErrorCategory.User if code in _USER_CODES else RequestErrorCategory.Server


def http_status(code: Code, reason: str, *, is_ceiling: bool) -> int:
    """Return the HTTP status of a refusal that no waiting clears. `is_ceiling`: it is for a used-up quota.

    OpenAI's client retries 408, 409, 429 and everything from 500 on a few times, and the Tinker SDK for minutes. So
    these statuses are for refusals of calls that may succeed later; a permanent refusal gets another 4xx.
    """
    if is_ceiling:
        return HTTPStatus.FORBIDDEN
    return _REASON_STATUS.get(reason) or _STATUS.get(code, HTTPStatus.BAD_REQUEST)


class TinkerpoolError(Exception):
    """Base class of the client's errors."""

    _kinds: ClassVar[tuple[type[TinkerpoolError], ...]] = ()
    """Of a class that `_all_of` made: what it was made of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._kinds or (type(self),), self.args), self.__dict__


class ConfigurationError(TinkerpoolError, ValueError):
    """The client's arguments or environment cannot work; nothing was sent."""


class ExportError(TinkerpoolError, ValueError):
    """A checkpoint cannot be exported as asked, or the result failed its check. No directory is left."""


class NotImportable(TinkerpoolError, ValueError):
    """A directory has no adapter that can be imported. Nothing was sent, or nothing of it is left."""


class ClientClosed(TinkerpoolError):
    """The client was closed before the reply came, or its process was forked from one with a client."""


class OrderBroken(TinkerpoolError):
    """This training client's sequence numbers are broken; continue with `ServiceClient.get_training_client`."""


class ApiError(TinkerpoolError):
    """A call failed: the service refused it, or could not be reached.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `QUEUE_FULL`; empty if the error is the network's and not the service's.
        message: a sentence for people.
        metadata: details by name, for example `expected_seq`.
        retry_delay_s: set exactly when the same call may succeed later, according to the service.
    """

    def __init__(
        self,
        message: str,
        *,
        code: Code,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_delay_s = retry_delay_s


class APIStatusError(ApiError):
    """The service refused a call."""

    @property
    def status_code(self) -> int:
        """The HTTP status with which the pool refuses the same call of the Tinker SDK."""
        if self.retry_delay_s is not None:
            return HTTPStatus.TOO_MANY_REQUESTS
        return http_status(self.code, self.reason, is_ceiling="maximum" in self.metadata)


class APIConnectionError(ApiError):
    """No reply of the service."""


class BadRequestError(APIStatusError):
    """The request, or the state of its object, forbids the call (HTTP 400)."""


class ConflictError(APIStatusError):
    """The name or number is in use (HTTP 409 at Tinker; at a pool 400, because the SDK repeats what gets a 409)."""


class PermissionDeniedError(APIStatusError):
    """The key, a ceiling of the tenant or the end of the session forbids the call (HTTP 403)."""


class RateLimitError(APIStatusError):
    """The same call may succeed later (HTTP 429). Raised only with `ServiceClient(retry_timeout_s=...)`."""


class InvalidArgument(BadRequestError, ValueError):
    """The request itself is wrong; the message names the field and the limit."""


class NotFound(APIStatusError, LookupError):
    """The object does not exist or belongs to another tenant: the two look the same."""


class AlreadyExists(BadRequestError, ConflictError):
    """The name, seq or request id was used with other contents: is a second client writing to the adapter?"""


class FailedPrecondition(APIStatusError):
    """The state of the object forbids the call: its session ended, its gradient window is closed."""


class PermissionDenied(PermissionDeniedError):
    """The API key does not permit the call."""


class Unauthenticated(APIStatusError):
    """The API key is missing, unknown or revoked."""


class ResourceExhausted(APIStatusError):
    """A quota is used up, or a message is too large. Overload is retried and never raised."""


class Unavailable(APIConnectionError, ConnectionError):
    """No service replies at the address."""


class DeadlineExceeded(APIConnectionError, TimeoutError):
    """The service did not reply to a call in time."""


class Cancelled(BadRequestError):
    """The call was cancelled by the service."""


class DataLoss(APIStatusError):
    """A stored file no longer matches its checksum."""


class InternalError(APIStatusError):
    """The service failed unexpectedly; its log says more."""

    def __str__(self) -> str:
        return self.message if self.code is Code.INTERNAL else f"{self.code.name}: {self.message}"


class RequestFailedError(TinkerpoolError):
    """An operation did not happen: it was refused, or ended in an error. Its sequence number is used.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `NON_FINITE`.
        message: a sentence for people: what was wrong, and how to mend it.
        operation: the operation's name.
    """

    code: Code
    reason: str
    message: str
    operation: str

    @property
    def request_id(self) -> str:
        """The operation's name, as the Tinker SDK calls it."""
        return self.operation

    @property
    def category(self) -> RequestErrorCategory:
        """Who can mend it: the user or the server."""
        return category_of(self.code)


class OperationFailed(RequestFailedError):
    """An accepted operation ended in an error. It changed nothing, and its sequence number is used."""

    def __init__(self, message: str, *, code: Code, reason: str, operation: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation}: {self.message}"


# The Tinker SDK's names of classes that are here under another one.
TinkerError = TinkerpoolError
APIError = ApiError
APITimeoutError = DeadlineExceeded
AuthenticationError = Unauthenticated
InternalServerError = InternalError
NotFoundError = NotFound
UnprocessableEntityError = DataLoss

_CLASSES: dict[Code, type[ApiError]] = {
    Code.CANCELLED: Cancelled,
    Code.INVALID_ARGUMENT: InvalidArgument,
    Code.OUT_OF_RANGE: InvalidArgument,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.NOT_FOUND: NotFound,
    Code.ALREADY_EXISTS: AlreadyExists,
    Code.PERMISSION_DENIED: PermissionDenied,
    Code.RESOURCE_EXHAUSTED: ResourceExhausted,
    Code.FAILED_PRECONDITION: FailedPrecondition,
    Code.UNAVAILABLE: Unavailable,
    Code.DATA_LOSS: DataLoss,
    Code.UNAUTHENTICATED: Unauthenticated,
}


_SDK_CLASSES: dict[int, Any] = {
    HTTPStatus.BAD_REQUEST: BadRequestError,
    HTTPStatus.FORBIDDEN: PermissionDeniedError,
    HTTPStatus.TOO_MANY_REQUESTS: RateLimitError,
}
"""By HTTP status, where the class of the code does not determine the SDK's class."""


def api_error(
    code: Code,
    message: str,
    *,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_delay_s: float | None = None,
) -> ApiError:
    """Return an exception of the class for a canonical code, and of the SDK's class if the service made it."""
    error_class: Any = _CLASSES.get(code, InternalError)
    error = APIStatusError(message, code=code, reason=reason, metadata=metadata, retry_delay_s=retry_delay_s)
    if reason and (sdk_class := _SDK_CLASSES.get(error.status_code)):
        error_class = _all_of(error_class, sdk_class)
    made: ApiError = error_class(message, code=code, reason=reason, metadata=metadata, retry_delay_s=retry_delay_s)
    return made


def of_operation(refusal: ApiError, operation: str) -> ApiError:
    """Return the refusal of an operation that used its sequence number: also a RequestFailedError."""
    restore, (kinds, args), attributes = refusal.__reduce__()
    error: ApiError = restore((*kinds, RequestFailedError), args)
    error.__dict__.update(attributes, operation=operation)
    return error


@cache
def _all_of(first: Any, *others: Any) -> Any:
    """Return a class that is all of these classes, under the name of the first."""
    more = [other for other in others if not issubclass(first, other)]
    if not more:
        return first
    body = {"__doc__": first.__doc__, "__module__": first.__module__, "_kinds": (first, *others)}
    return type(first.__name__, (first, *more), body)


def _restored(kinds: tuple[Any, ...], args: tuple[Any, ...]) -> TinkerpoolError:
    """Return an exception without its attributes, for copies and pickles."""
    error_class = _all_of(*kinds)
    error: TinkerpoolError = error_class.__new__(error_class)
    error.args = args
    return error
