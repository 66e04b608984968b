"""Everything that the client raises on purpose.

    TinkerpoolError
    ├── ConfigurationError (ValueError)     no key, a malformed URL
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
    ├── OrderBroken                         an earlier refusal keeps a training client from going on
    └── OperationFailed                     the service accepted an operation, and it ended in an error

What can succeed later is retried by the client and never raised, except while no service was ever reached: then
`Unavailable` says so after a while. Knows nothing of grpc: the transport hands over codes and details.
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
        """The code of that number; UNKNOWN for one that has no name."""
        return cls(value) if value in cls._value2member_map_ else cls.UNKNOWN


class TinkerpoolError(Exception):
    """Base of all of them."""


class ConfigurationError(TinkerpoolError, ValueError):
    """The client was told something that cannot work; nothing was sent."""


class ClientClosed(TinkerpoolError):
    """The client was closed before the answer came."""


class OrderBroken(TinkerpoolError):
    """This training client lost its place in the adapter's order; `ServiceClient.get_training_client` goes on."""


class ApiError(TinkerpoolError):
    """The service refused a call.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `QUEUE_FULL`; empty if the refusal came from the network and not the service.
        message: a sentence for people.
        metadata: details by name, for example `expected_seq`.
        retry_delay_s: set exactly when the service says that the same call may succeed later.
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
    """No such thing, or another tenant's: the two look the same."""


class AlreadyExists(ApiError):
    """That name, seq or request id was used with other contents: is a second client writing to the same adapter?"""


class FailedPrecondition(ApiError):
    """The thing is in a state that forbids it: its session ended, its gradient window is closed."""


class PermissionDenied(ApiError):
    """The key may not do that."""


class Unauthenticated(ApiError):
    """The API key is missing, unknown or revoked."""


class ResourceExhausted(ApiError):
    """A quota is used up or a message is too large; what only needs patience is retried and never raised."""


class Unavailable(ApiError, ConnectionError):
    """No service answers at the address."""


class DeadlineExceeded(ApiError, TimeoutError):
    """The service did not answer a call in time."""


class Cancelled(ApiError):
    """The call was cancelled by the service."""


class DataLoss(ApiError):
    """A stored file no longer matches its checksum."""


class InternalError(ApiError):
    """The service failed in a way that it did not foresee; its log says more."""


class OperationFailed(TinkerpoolError):
    """An accepted operation ended in an error. It changed nothing, and it consumed its place in the order.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `NON_FINITE`.
        message: a sentence for people: what was wrong and how to mend it.
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
    """The exception of the class that belongs to a canonical code."""
    error_class = _CLASSES.get(code, InternalError)
    return error_class(message, code=code, reason=reason, metadata=metadata, retry_delay_s=retry_delay_s)
