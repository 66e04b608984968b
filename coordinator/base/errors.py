"""The kinds of errors in the coordinator: refusals, and fatal errors, after which it must stop, are defined here.

- Refusal: `ServiceError`, here. A use case does not accept a call; the door sends the refusal in its protocol's form.
- Failed outcome: the message `OperationError`. An accepted operation ends in an error, which is committed as its
  outcome and fetched like a result.
- Lost worker: `WorkerLost` in `workers.contract.protocols`. A worker crashed, hangs or cannot be reached. Its
  incarnation ends; the operations in flight there run again.
- Storage: `StorageError` in `coordinator.storage.database`. A write did not become durable. The writer tries again, or
  the call is refused.
- Fatal: any other exception in a task of the coordinator, reported to `Failure`, here. State in memory cannot be
  trusted any more: the process stops with the first such error, and the next start recovers from the operation log.

Refusals and failed outcomes carry a `Code`, a constant `reason` for programs, and a message for people with the mistake
and how to mend it. The client raises them as `ApiError` and `OperationFailed` of `tinkerpool.errors`. The page
`docs/errors.md` has every reason.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from tinkerpool.errors import Code

__all__ = [
    "MESSAGE_LENGTH_MAX",
    "Code",
    "EndableBlock",
    "Failure",
    "Quota",
    "ServiceError",
    "busy",
    "denied",
    "exists",
    "invalid",
    "not_found",
    "over_ceiling",
    "sampler_exists",
    "unavailable",
    "unmet",
]

logger = logging.getLogger(__name__)

MESSAGE_LENGTH_MAX = 1500
"""Characters of a refusal's message. It may repeat the request's contents, and it is logged, stored and sent."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit that refuses a call, and what is in use of it."""

    limit: str
    """What is limited, for people: "adapters of yours"."""
    usage: int
    """How much is in use without the refused call, in the unit that `limit` names."""
    maximum: int
    command: str = field(default="", compare=False)
    """What an administrator types to raise it; empty if it is the same for every tenant."""

    def __str__(self) -> str:
        """Return the start of a message: the limit, its usage and its maximum."""
        return f"{self.limit}: {self.usage} in use, at most {self.maximum}"


class ServiceError(Exception):
    """A refusal, as the caller sees it.

    Attributes:
        code: canonical status code.
        reason: a constant for programs, `QUEUE_FULL`.
        message: a sentence for people; cut at `MESSAGE_LENGTH_MAX` characters.
        retry_delay_s: set exactly when the same call may succeed later; then the call consumed nothing.
        metadata: details by name, for example `expected_seq`; for a quota `limit`, `usage` and `maximum`.
        quota: the limit that is used up, if that is the reason.
        operation: name of the failed operation that records this refusal under the requested sequence number; empty
            unless there is one.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        retry_delay_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        quota: Quota | None = None,
    ) -> None:
        if len(message) > MESSAGE_LENGTH_MAX:
            message = f"{message[: MESSAGE_LENGTH_MAX - 4]} ..."
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_delay_s = retry_delay_s
        self.metadata = dict(metadata or {})
        self.quota = quota
        if quota is not None:
            self.metadata |= {"limit": quota.limit, "usage": str(quota.usage), "maximum": str(quota.maximum)}
        self.operation = ""


exists = functools.partial(ServiceError, Code.ALREADY_EXISTS)
"""A refusal to create an object that exists, or whose request id was used with other contents."""
denied = functools.partial(ServiceError, Code.PERMISSION_DENIED)
"""A refusal of what the caller may not do."""
unmet = functools.partial(ServiceError, Code.FAILED_PRECONDITION)
"""A refusal because a precondition is unmet: the caller has to mend that before the same call may succeed."""
unavailable = functools.partial(ServiceError, Code.UNAVAILABLE, retry_delay_s=1.0)
"""A refusal whose cause passes by itself: the same call may succeed after the delay."""


def invalid(message: str, reason: str = "INVALID_ARGUMENT") -> ServiceError:
    """Return the refusal of a request that is wrong in itself."""
    return ServiceError(Code.INVALID_ARGUMENT, reason, message)


def busy(reason: str, quota: Quota, mend: str, *, delay_s: float = 1.0) -> ServiceError:
    """Return the refusal of a call that waiting clears; `mend` says what frees the quota."""
    raised = f"; an administrator can raise it: {quota.command}" if quota.command else ""
    message = f"{quota}; {mend}, then try again: after {delay_s:g} s at the earliest{raised}"
    return ServiceError(Code.RESOURCE_EXHAUSTED, reason, message, retry_delay_s=delay_s, quota=quota)


def over_ceiling(reason: str, quota: Quota, mend: str) -> ServiceError:
    """Return the refusal of a call that no waiting clears; `mend` says how to free the quota."""
    message = f"{quota}; {mend}, or ask an administrator to raise it: {quota.command}"
    return unmet(reason, message, quota=quota)


def not_found(what: str, name: str, reason: str = "NOT_FOUND", *, other: str = "") -> ServiceError:
    """Return the refusal for an object that does not exist or belongs to another tenant: the two look the same.

    `other`: a further cause, as a sentence.
    """
    otherwise = f"; {other}" if other else ""
    return ServiceError(Code.NOT_FOUND, reason, f"no {what} {name[:200]!r}: check the name and the API key{otherwise}")


def sampler_exists(sampler_id: str) -> ServiceError:
    """Return the refusal of a sampler index that the session already uses for a sampler with other settings."""
    return exists(
        "SAMPLER_EXISTS", f"{sampler_id} was created before with other settings: use another index or request_id"
    )


class EndableBlock:
    """A block of the current task that other tasks may end with a refusal."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._refusal: ServiceError | None = None

    def end(self, refusal: ServiceError) -> None:
        """Cancel the block, once; it raises the refusal."""
        if self._refusal is None:
            self._refusal = refusal
            self._task.cancel()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block. Raises the refusal of `end`, unless the task is cancelled for another reason as well."""
        try:
            yield
        except asyncio.CancelledError:
            if self._refusal is not None and self._task.uncancel() <= self._num_cancels:
                raise self._refusal from None
            raise


class Failure:
    """The first fatal error of an incarnation of the coordinator, if there is one."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_reported = asyncio.Event()

    @property
    def is_reported(self) -> bool:
        """Whether a fatal error was reported."""
        return self._error is not None

    def report(self, error: BaseException) -> None:
        """Record that the coordinator must stop. The first error wins; every error is logged."""
        logger.critical("fatal error: the coordinator stops", exc_info=error)
        if self._error is None:
            self._error = error
            self._is_reported.set()

    async def wait(self) -> NoReturn:
        """Wait for a fatal error and raise it."""
        await self._is_reported.wait()
        assert self._error is not None
        raise self._error
