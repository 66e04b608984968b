"""API keys and their tenants. Does not check ownership: the use cases do.

The form of a key is `tp_<key id>_<secret>`; the database has the id and the SHA-256 of the secret. The secret is 32
random bytes, so it cannot be guessed from a plain hash. The prefix `tml-` is allowed, for clients that require it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.base.errors import Code, ServiceError, invalid, not_found
from coordinator.storage.rows import ApiKeyRow
from coordinator.storage.store import Store
from tinkerpool.names import is_tenant_name

_KEY = re.compile(r"(?:tml-)?tp_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a tenant, and the API key that it used."""

    tenant_id: str
    tenant_name: str
    key_id: str
    is_admin: bool


class Authenticator:
    """Checks, creates and revokes API keys. Rows of used keys are cached; a revoked key leaves the cache at once."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._rows: dict[str, ApiKeyRow] = {}

    def authenticate(self, key: str) -> Principal:
        """Return the principal of a key. Raises ServiceError UNAUTHENTICATED, the same for every wrong key."""
        match = _KEY.fullmatch(key.strip())
        row = self._row(match[1]) if match else None
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
        row = self._row(key_id)
        if row is None:
            raise ServiceError(
                Code.UNAUTHENTICATED, "API_KEY_INVALID", f"the API key {key_id[:40]!r} was revoked: use another one"
            )
        return _principal(row)

    async def create_key(self, tenant: str, *, is_admin: bool = False) -> tuple[str, ApiKeyRow]:
        """Create a key, and the tenant if it is new. Return the key, which is stored nowhere, and its row."""
        if not is_tenant_name(tenant):
            raise invalid(f"tenant must be 1 to 64 letters, digits, '-' and '_', not {tenant[:80]!r}")
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now = self._wall()
        secret_sha256 = hashlib.sha256(secret.encode()).digest()
        await self._store.tenants.create(secrets.token_hex(8), tenant, now)
        await self._store.api_keys.create(key_id, tenant, secret_sha256, is_admin=is_admin, wall=now)
        row = self._row(key_id)
        assert row is not None
        return f"tp_{key_id}_{secret}", row

    def list_keys(self) -> list[ApiKeyRow]:
        """Return the rows of all keys, oldest first."""
        return self._store.api_keys.all()

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key. Raises ServiceError if it is unknown or the last administrator's."""
        if self._store.api_keys.get(key_id) is None:
            raise not_found("API key", key_id)
        self._rows.pop(key_id, None)
        num_revoked = await self._store.api_keys.revoke(key_id, self._wall())
        self._rows.pop(key_id, None)
        if not num_revoked:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "LAST_ADMIN_KEY",
                "this is the last administrator's key: create another one first",
            )

    def _row(self, key_id: str) -> ApiKeyRow | None:
        row = self._rows.get(key_id)
        if row is None:
            row = self._store.api_keys.get(key_id)
            if row is None or row.revoked_at is not None:
                return None
            self._rows[key_id] = row
        return row


def _principal(row: ApiKeyRow) -> Principal:
    return Principal(row.tenant_id, row.tenant_name, row.key_id, row.is_admin)
