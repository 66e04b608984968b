"""What all use cases share: lookups of the objects that a tenant owns, pages, and common checks.

`UseCases` is the base of the use cases. Does not depend on a transport. Main invariant: an object of another tenant is
refused exactly like a missing one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.base.errors import Code, ServiceError, exists, invalid, not_found, unmet
from coordinator.observe.timeline import WaitClock
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.sessions import Session
from coordinator.runtime.core import Core
from coordinator.service.listings import Listed, ListRequest, page_bounds
from coordinator.storage.rows import AdapterRow, CheckpointRow, Listing, Place, SessionRow
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1.adapters_pb2 import CreateAdapterRequest
from tinkerpool.v1.history_pb2 import WAIT_REASON_SEQUENCE
from tinkerpool.v1.imports_pb2 import ImportCheckpointRequest
from tinkerpool.v1.sampling_pb2 import CreateSamplerRequest
from workers.contract.messages import ModelInfo

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Message)
T = TypeVar("T")
TTL_SECONDS_MAX = 100 * 365 * 86_400
"""A hundred years, so that the expiry fits into a Timestamp, whose last year is 9999."""


def uninterrupted(
    use_case: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Decorate a use case that writes: it completes even if its caller is cancelled. See `Tasks.uninterrupted`."""

    @functools.wraps(use_case)
    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        core: Core = self._core
        return await core.tasks.uninterrupted(use_case(self, *args, **kwargs))

    return run


def streamed(
    use_case: Callable[[Any, Principal, Any], AsyncGenerator[T, None]],
) -> Callable[[Any, Principal, Any], AsyncGenerator[T, None]]:
    """Decorate a use case that streams: it is one of its tenant's open calls until it is closed.

    Raises ServiceError STREAMS_FULL at the first response.
    """

    @functools.wraps(use_case)
    async def run(self: Any, principal: Principal, request: Any) -> AsyncGenerator[T, None]:
        core: Core = self._core
        with core.ceilings.streams.holding(principal.tenant_id):
            async with aclosing(use_case(self, principal, request)) as responses:
                async for response in responses:
                    yield response

    return run


class UseCases:
    """The base of the use cases. A lookup finds only objects of the caller's tenant, unless it says otherwise."""

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        self._core = core
        self._authenticator = authenticator

    def _adapter(self, principal: Principal, adapter_id: str) -> AdapterLog:
        adapter = self._core.registry.get(adapter_id)
        if adapter is None or adapter.tenant_id != principal.tenant_id:
            raise not_found("adapter", adapter_id)
        return adapter

    def _is_running(self, operation: Operation) -> bool:
        """Return whether a worker has the operation."""
        if operation.kind is Kind.SAMPLE:
            return self._core.samples.is_running(operation.name)
        log = self._core.registry.get(operation.target_id)
        return log is not None and log.copy.is_running(operation)

    def _wait_clock(self, operation: Operation) -> WaitClock | None:
        """Return the clock of what an operation waits for; None: a worker has it, or it is decided."""
        if operation.is_final or self._is_running(operation):
            return None
        if operation.kind is Kind.SAMPLE:
            return self._core.samples.waits(operation.name)
        log = self._core.registry.get(operation.target_id)
        if log is None:
            return None
        missing = log.missing_seq()
        is_behind_gap = missing is not None and missing < operation.seq
        return WaitClock(WAIT_REASON_SEQUENCE) if is_behind_gap else log.waits

    def _live_session(self, principal: Principal, session_id: str) -> Session:
        session = self._core.sessions.get(session_id)
        if session is not None and session.tenant_id == principal.tenant_id:
            self._core.sessions.keep_alive(session_id)
            return session
        self._session_row(principal, session_id, "SESSION_UNKNOWN")
        raise unmet(
            "SESSION_ENDED",
            f"session {session_id} has ended (it was finished, or sent no heartbeat for "
            f"{self._core.config.session_timeout_s:.0f} s): create a new one; its adapters and checkpoints still exist",
        )

    def _session_row(self, principal: Principal, session_id: str, reason: str = "NOT_FOUND") -> SessionRow:
        row = self._core.store.sessions.of_tenant(principal.tenant_id, session_id)
        if row is None:
            raise not_found("session", session_id, reason)
        return row

    def _checkpoint(self, principal: Principal, path: str) -> CheckpointRow:
        """Return a checkpoint of the tenant, for a change."""
        return self._readable_checkpoint(principal, path, is_public_enough=False)

    def _readable_checkpoint(self, principal: Principal, path: str, *, is_public_enough: bool = True) -> CheckpointRow:
        """Return a checkpoint of the tenant, or a public one."""
        row = self._core.store.checkpoints.readable(principal.tenant_id, path, is_public_enough=is_public_enough)
        if row is None:
            raise not_found("checkpoint", path, other="it may have expired, or was deleted")
        return row

    def _charge_files(self, tenant_id: str, base_model: str, began: float) -> float:
        """Charge the time since `began`, in which files were used, to the tenant's virtual counter; return it."""
        seconds = self._core.time.monotonic() - began
        if (loop := self._core.loops.get(base_model)) is not None:
            loop.planning.charge({tenant_id: seconds})
        return seconds

    def _model(self, name: str) -> ModelInfo:
        model = self._core.fleet.models.get(name)
        if model is None:
            served = ", ".join(self._core.fleet.models) or "none"
            raise ServiceError(
                Code.NOT_FOUND, "NOT_FOUND", f"this pool does not serve base model {name[:200]!r}; it serves: {served}"
            )
        return model

    def _listed(
        self,
        principal: Principal,
        read: Callable[[int, Place], Listing[R]],
        request: ListRequest,
        default_size: int,
        make: Callable[[R], M | None],
    ) -> Listed[R, M]:
        """Return the part of a list that a request asks for. `read` takes its limit and its place."""
        listing = read(*page_bounds(request, default_size))
        return Listed(listing, make, self._core.listing_turns, principal.tenant_id)


def refusal_of(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> ServiceError | None:
    """Return the refusal that a check raises, if it raises one."""
    try:
        check(*args, **kwargs)
    except ServiceError as error:
        return error
    return None


def check_index(request: CreateAdapterRequest | CreateSamplerRequest | ImportCheckpointRequest) -> None:
    """Refuse an index that no id can hold."""
    if request.HasField("index"):
        check_number("index", request.index)


def check_number(name: str, index: int) -> None:
    """Refuse a number outside the range of an index; `name` is its field."""
    if not 0 <= index <= names.INDEX_MAX:
        raise invalid(f"{name} must be 0 to {names.INDEX_MAX}, not {index}")


def check_adapter_name(name: str) -> None:
    """Refuse a name that no adapter can have; an empty one takes the name away."""
    if name and not names.is_adapter_name(name):
        raise invalid(
            f"name {name[:120]!r} is not allowed: take at most 100 printable characters, no '/', no space at the ends, "
            "and not the form of an adapter's id"
        )


def check_ttl(ttl_seconds: int) -> None:
    """Refuse a time to live out of range."""
    if ttl_seconds < 0:
        raise invalid(f"ttl_seconds must be 0 (unlimited) or more, not {ttl_seconds}")
    if ttl_seconds > TTL_SECONDS_MAX:
        raise invalid(f"ttl_seconds must be at most {TTL_SECONDS_MAX} (100 years), not {ttl_seconds}: 0 is unlimited")


def request_id_taken() -> ServiceError:
    """Return the refusal of a new index with a request id that was used before."""
    return exists("REQUEST_ID_TAKEN", "this request_id was used before, with another index: use a new one")


def timestamp(seconds: float) -> Timestamp:
    """Convert wall-clock seconds to the contract's form."""
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def metadata_of(row: SessionRow | AdapterRow | CheckpointRow) -> dict[str, str]:
    """Return a row's user metadata."""
    metadata: dict[str, str] = json.loads(row.user_metadata)
    return metadata
