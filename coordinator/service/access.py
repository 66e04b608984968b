"""The caller and its objects: API keys and their tenants, and lookups of the objects that a tenant owns.

`Authenticator` maps keys to principals. The form of a key is `tp_<key id>_<secret>`; the database has the id and the
SHA-256 of the secret. The secret is 32 random bytes, so it cannot be guessed from a plain hash. The prefix `tml-` is
allowed, for clients that require it. `UseCases` is the base of the use cases, with lookups, pages and common checks.

Does not depend on a transport. Main invariants: every wrong key is refused alike, without reading the database; an
object of another tenant is refused exactly like a missing one.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.base.errors import Code, ServiceError, invalid, not_found
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.sessions import Session
from coordinator.runtime.core import Core
from coordinator.storage.rows import AdapterRow, ApiKeyRow, CheckpointRow, Page, SessionRow
from coordinator.storage.store import Store
from tinkerpool.names import is_tenant_name
from tinkerpool.v1.adapters_pb2 import CreateAdapterRequest, ListAdaptersRequest
from tinkerpool.v1.checkpoints_pb2 import ListCheckpointsRequest
from tinkerpool.v1.sampling_pb2 import CreateSamplerRequest
from tinkerpool.v1.sessions_pb2 import ListSessionsRequest
from workers.contract.messages import ModelInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
ListRequest = ListAdaptersRequest | ListCheckpointsRequest | ListSessionsRequest
PAGE_TOKEN_LENGTH_MAX = 16
INDEX_MAX = 999_999_999
TTL_SECONDS_MAX = 100 * 365 * 86_400
"""A hundred years, so that the expiry fits into a Timestamp, whose last year is 9999."""

_KEY = re.compile(r"(?:tml-)?tp_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a tenant, and the API key that it used."""

    tenant_id: str
    tenant_name: str
    key_id: str
    is_admin: bool


class Authenticator:
    """Checks, creates and revokes API keys.

    The rows of all keys that are not revoked are in memory: about 300 bytes a key, and only administrators create
    keys. So a flood of unknown keys reads nothing from the database.
    """

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._rows = {row.key_id: row for row in store.api_keys.all() if row.revoked_at is None}
        self._holders: defaultdict[str, set[_Holder]] = defaultdict(set)

    def authenticate(self, key: str) -> Principal:
        """Return the principal of a key. Raises ServiceError UNAUTHENTICATED, the same for every wrong key."""
        match = _KEY.fullmatch(key.strip())
        row = self._rows.get(match[1]) if match else None
        # Compare for an unknown id too, so that the time of a refusal does not reveal which ids exist.
        expected = row.secret_sha256 if row else bytes(32)
        secret_hash = hashlib.sha256((match[2] if match else "").encode()).digest()
        if not hmac.compare_digest(expected, secret_hash) or row is None:
            raise ServiceError(
                Code.UNAUTHENTICATED,
                "API_KEY_INVALID" if key else "API_KEY_MISSING",
                "no API key in the metadata: send 'authorization: Bearer <key>'"
                if not key
                else "the API key is unknown or revoked: use the one that `tinkerpool serve` wrote, or a new one",
            )
        return _principal(row)

    def holder(self, key_id: str) -> Principal:
        """Return the principal of a key by its id. Raises ServiceError UNAUTHENTICATED once it is revoked."""
        row = self._rows.get(key_id)
        if row is None:
            raise _revoked(key_id)
        return _principal(row)

    @contextmanager
    def while_valid(self, principal: Principal) -> Iterator[None]:
        """Run a block of the current task while the caller's key is valid: the whole of a call, with its waits.

        The key's revocation cancels the block, which then raises ServiceError UNAUTHENTICATED.
        """
        task = asyncio.current_task()
        assert task is not None
        self.holder(principal.key_id)
        holder, num_cancels = _Holder(task), task.cancelling()
        self._holders[principal.key_id].add(holder)
        try:
            yield
        except asyncio.CancelledError:
            if holder.is_revoked and task.uncancel() <= num_cancels:
                raise _revoked(principal.key_id) from None
            raise
        finally:
            self._holders[principal.key_id].discard(holder)
            if not self._holders[principal.key_id]:
                del self._holders[principal.key_id]

    async def create_key(self, tenant: str, *, is_admin: bool = False) -> tuple[str, ApiKeyRow]:
        """Create a key, and the tenant if it is new. Return the key, which is stored nowhere, and its row."""
        if not is_tenant_name(tenant):
            raise invalid(f"tenant must be 1 to 64 letters, digits, '-' and '_', not {tenant[:80]!r}")
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now = self._wall()
        secret_sha256 = hashlib.sha256(secret.encode()).digest()
        await self._store.tenants.create(secrets.token_hex(8), tenant, now)
        await self._store.api_keys.create(key_id, tenant, secret_sha256, is_admin=is_admin, wall=now)
        row = self._store.api_keys.get(key_id)
        assert row is not None
        self._rows[key_id] = row
        return f"tp_{key_id}_{secret}", row

    def list_keys(self) -> list[ApiKeyRow]:
        """Return the rows of all keys, oldest first."""
        return self._store.api_keys.all()

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key, and end the calls that run with it.

        Raises ServiceError if it is unknown or the last administrator's.
        """
        if self._store.api_keys.get(key_id) is None:
            raise not_found("API key", key_id)
        num_revoked = await self._store.api_keys.revoke(key_id, self._wall())
        if not num_revoked:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "LAST_ADMIN_KEY",
                "this is the last administrator's key: create another one first",
            )
        self._rows.pop(key_id, None)
        for holder in list(self._holders.get(key_id, ())):
            holder.revoke()


class _Holder:
    """A task with a call that runs with a key."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.is_revoked = False

    def revoke(self) -> None:
        """Cancel the call, once."""
        if not self.is_revoked:
            self.is_revoked = True
            self._task.cancel()


def _revoked(key_id: str) -> ServiceError:
    return ServiceError(
        Code.UNAUTHENTICATED, "API_KEY_INVALID", f"the API key {key_id[:40]!r} was revoked: use another one"
    )


def _principal(row: ApiKeyRow) -> Principal:
    return Principal(row.tenant_id, row.tenant_name, row.key_id, row.is_admin)


def uninterrupted(
    use_case: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Decorate a use case that writes: it completes even if its caller is cancelled. See `Tasks.uninterrupted`."""

    @functools.wraps(use_case)
    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        core: Core = self._core
        return await core.tasks.uninterrupted(use_case(self, *args, **kwargs))

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
        return log is not None and log.is_running(operation)

    def _live_session(self, principal: Principal, session_id: str) -> Session:
        session = self._core.sessions.get(session_id)
        if session is not None and session.tenant_id == principal.tenant_id:
            self._core.sessions.keep_alive(session_id)
            return session
        self._session_row(principal, session_id, "SESSION_UNKNOWN")
        raise ServiceError(
            Code.FAILED_PRECONDITION,
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
            raise not_found("checkpoint", path)
        return row

    def _model(self, name: str) -> ModelInfo:
        model = self._core.fleet.models.get(name)
        if model is None:
            served = ", ".join(self._core.fleet.models) or "none"
            raise ServiceError(
                Code.NOT_FOUND, "NOT_FOUND", f"this pool does not serve base model {name[:200]!r}; it serves: {served}"
            )
        return model

    def _page(
        self, read: Callable[[int, int], Page[R]], request: ListRequest, default_size: int
    ) -> tuple[list[R], str, int]:
        """Return a page of a list, the next page's token, and the number of rows on all pages.

        `read` takes the page's limit and offset. The token is the offset.
        """
        token, size = request.page_token, request.page_size
        if token and not (token.isascii() and token.isdecimal() and len(token) < PAGE_TOKEN_LENGTH_MAX):
            raise invalid(
                f"page_token {token[:40]!r} is not a token of this service: send the next_page_token of the page before"
            )
        if size < 0:
            raise invalid(f"page_size must be 0 or more, not {size}")
        if request.skip < 0:
            raise invalid(f"skip must be 0 or more, not {request.skip}")
        limit, offset = min(size or default_size, 1000), int(token or 0) + request.skip
        page = read(limit, offset)
        return page.rows, str(offset + limit) if page.has_more else "", page.num_total


def refusal_of(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> ServiceError | None:
    """Return the refusal that a check raises, if it raises one."""
    try:
        check(*args, **kwargs)
    except ServiceError as error:
        return error
    return None


def check_index(request: CreateAdapterRequest | CreateSamplerRequest) -> None:
    """Refuse an index that no id can hold."""
    if request.HasField("index"):
        check_number("index", request.index)


def check_number(name: str, index: int) -> None:
    """Refuse a number outside the range of an index; `name` is its field."""
    if not 0 <= index <= INDEX_MAX:
        raise invalid(f"{name} must be 0 to {INDEX_MAX}, not {index}")


def check_ttl(ttl_seconds: int) -> None:
    """Refuse a time to live out of range."""
    if ttl_seconds < 0:
        raise invalid(f"ttl_seconds must be 0 (unlimited) or more, not {ttl_seconds}")
    if ttl_seconds > TTL_SECONDS_MAX:
        raise invalid(f"ttl_seconds must be at most {TTL_SECONDS_MAX} (100 years), not {ttl_seconds}: 0 is unlimited")


def request_id_taken() -> ServiceError:
    """Return the refusal of a new index with a request id that was used before."""
    return ServiceError(
        Code.ALREADY_EXISTS, "REQUEST_ID_TAKEN", "this request_id was used before, with another index: use a new one"
    )


def timestamp(seconds: float) -> Timestamp:
    """Convert wall-clock seconds to the contract's form."""
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def metadata_of(row: SessionRow | AdapterRow | CheckpointRow) -> dict[str, str]:
    """Return a row's user metadata."""
    metadata: dict[str, str] = json.loads(row.user_metadata)
    return metadata
