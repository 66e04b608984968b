"""The errors that the client raises.

    TinkerpoolError
    ├── ConfigurationError (ValueError)     no key, a malformed URL
    ├── ExportError (ValueError)            a checkpoint cannot be exported in this format, or the result is wrong
    ├── NotImportable (ValueError)          a directory has no adapter that can be imported
    ├── ClientClosed                        the client was closed, or belongs to another process
    ├── ApiError                            the service refused a call; one class for each canonical code
    │   ├── InvalidArgument (ValueError)
    │   ├── NotFound (LookupError)
    │   ├── AlreadyExists
    │   ├── FailedPrecondition
    │   ├── PermissionDenied
    │   ├── Unauthenticated
    │   ├── ResourceExhausted
    │   ├── Unavailable (ConnectionError)
    │   ├── DeadlineExceeded (TimeoutError)
    │   ├── Cancelled
    │   ├── DataLoss
    │   └── InternalError                   every other code: INTERNAL, UNKNOWN, ...
    ├── OrderBroken                         an earlier refusal broke the sequence numbers of a training client
    └── OperationFailed                     an accepted operation ended in an error

The client retries errors that may pass, and never raises them. The exception is `Unavailable` after a while, if no
service has ever replied. `Code` is the one table of status codes, which the coordinator uses too. This module does not
depend on grpc: the transport passes codes and details.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


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


class TinkerpoolError(Exception):
    """Base class of the client's errors."""


class ConfigurationError(TinkerpoolError, ValueError):
    """The client's arguments or environment cannot work; nothing was sent."""


class ExportError(TinkerpoolError, ValueError):
    """A checkpoint cannot be exported as asked, or the result failed its check. No directory is left."""


class NotImportable(TinkerpoolError, ValueError):
    """A directory has no adapter that can be imported. Nothing was sent, or nothing of it is left."""


class ClientClosed(TinkerpoolError):
    """The client was closed before the reply came, or belongs to another process."""


class OrderBroken(TinkerpoolError):
    """This training client's sequence numbers are broken; continue with `ServiceClient.get_training_client`."""


class ApiError(TinkerpoolError):
    """The service refused a call.

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

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidArgument(ApiError, ValueError):
    """The request itself is wrong; the message names the field and the limit."""


class NotFound(ApiError, LookupError):
    """The object does not exist or belongs to another tenant: the two look the same."""


class AlreadyExists(ApiError):
    """The name, seq or request id was used with other contents: is a second client writing to the adapter?"""


class FailedPrecondition(ApiError):
    """The state of the object forbids the call: its session ended, its gradient window is closed."""


class PermissionDenied(ApiError):
    """The API key does not permit the call."""


class Unauthenticated(ApiError):
    """The API key is missing, unknown or revoked."""


class ResourceExhausted(ApiError):
    """A quota is used up, or a message is too large. Overload is retried and never raised."""


class Unavailable(ApiError, ConnectionError):
    """No service replies at the address."""


class DeadlineExceeded(ApiError, TimeoutError):
    """The service did not reply to a call in time."""


class Cancelled(ApiError):
    """The call was cancelled by the service."""


class DataLoss(ApiError):
    """A stored file no longer matches its checksum."""


class InternalError(ApiError):
    """The service failed unexpectedly; its log says more."""


class OperationFailed(TinkerpoolError):
    """An accepted operation ended in an error. It changed nothing, and its sequence number is used.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `NON_FINITE`.
        message: a sentence for people: what was wrong, and how to mend it.
        operation: the operation's name.
    """

    def __init__(self, message: str, *, code: Code, reason: str, operation: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation}: {self.code.name}: {self.message}"


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


def api_error(
    code: Code,
    message: str,
    *,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_delay_s: float | None = None,
) -> ApiError:
    """Return an exception of the class for a canonical code."""
    error_class = _CLASSES.get(code, InternalError)
    return error_class(message, code=code, reason=reason, metadata=metadata, retry_delay_s=retry_delay_s)
