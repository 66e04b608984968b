"""The callers: API keys, the principals that they name, and the calls that run with them.

The form of a key is `tp_<key id>_<secret>`; the database has the id and the SHA-256 of the secret. The secret is 32
random bytes, so it cannot be guessed from a plain hash. The prefix `tml-` is allowed, for clients that require it.

Does not depend on a transport or on use cases. Main invariant: every wrong key is refused alike, without reading the
database.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coordinator.base.errors import Code, ServiceError, not_found
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import ApiKeyRow
from coordinator.storage.store import Store
from coordinator.tenants.accounts import check_tenant_name, new_tenant_id

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
        check_tenant_name(tenant)
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now = self._wall()
        secret_sha256 = hashlib.sha256(secret.encode()).digest()
        await self._store.tenants.create(new_tenant_id(), Act(at=now, act="tenant.create", subject=tenant))
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
