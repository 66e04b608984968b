"""API keys: which calls they admit, their life from creation to revocation, and the calls that run with them.

The form of a key is `tp_<key id>_<secret>`; the database has the id and the SHA-256 of the secret. The secret is 32
random bytes, so it cannot be guessed from a plain hash. The prefix `tml-` is allowed, for clients that require it.

`Authenticator.admit` is the one place that decides whether a call may run: it checks the key, its expiry, the client's
certificate and the role. Does not depend on a transport or on use cases. Main invariant: every wrong key is refused
alike, without reading the database.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.base.errors import Code, EndableBlock, Quota, ServiceError, busy, denied, invalid, not_found, unmet
from coordinator.base.time import Time
from coordinator.storage.access.admins import NoAdminError
from coordinator.storage.access.api_keys import NewKey, Pace, TooManyRotationsError
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import ApiKeyRow
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store
from coordinator.tenants.accounts import Accounts, check_tenant_name, last_admin_key, new_tenant_id, tenant_deleting
from coordinator.tenants.principals import Caller, Principal, Role

EXPIRY_INTERVAL_S = 0.5
"""Seconds between two looks for expired keys with running calls."""
USE_INTERVAL_S = 3600.0
"""Seconds after which the last use of keys is stored again. It is in memory at once."""
GRACE_S_DEFAULT = 86_400
"""Seconds for which a rotated key stays valid, unless its owner chooses."""
GRACE_S_MAX = 30 * 86_400
"""Longest such time: a key that is replaced because it leaked must end."""
PACE = Pace(100, within_s=86_400)
"""Rotations of a tenant's keys by their owners. Each one leaves a row, and an entry in the audit log for good."""
_KEY = re.compile(r"(?:tml-)?tp_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


class Authenticator:
    """Checks, creates, rotates and revokes API keys.

    The rows of all keys that are not revoked are in memory: about 300 bytes a key. Only administrators create keys, and
    members replace a bounded number. So a flood of unknown keys reads nothing from the database.
    """

    def __init__(self, store: Store, accounts: Accounts, wall: Callable[[], float]) -> None:
        """`wall` returns the time of day: keys expire by it, because their owners do."""
        self._store = store
        self._accounts = accounts
        self._wall = wall
        self._rows = {row.key_id: row for row in store.api_keys.unrevoked()}
        self._used: dict[str, float] = {}
        """Key id to its last use in this epoch."""
        self._noted: dict[str, float] = {}
        """The uses that are stored."""
        self._holders: defaultdict[str, dict[EndableBlock, None]] = defaultdict(dict)
        """Key id to its running calls, which end in the order in which they began."""

    def admit(self, key: str, caller: Caller, least: Role) -> Principal:
        """Return the principal of a call that needs at least a role. Raises ServiceError.

        UNAUTHENTICATED, the same for every wrong key: it is unknown, revoked or expired. PERMISSION_DENIED: its role
        does not suffice, also because of where the call comes from; it needs a client certificate; its tenant is
        suspended or being deleted.
        """
        return self._admitted(self._row_of(key), caller, least)

    def admit_holder(self, key_id: str, caller: Caller, least: Role) -> Principal:
        """Return what `admit` returns, for the id of a key that the caller has shown before. Raises as `admit` does."""
        row = self._rows.get(key_id)
        if row is None:
            raise _revoked(key_id)
        self._check_expiry(row)
        return self._admitted(row, caller, least)

    def _admitted(self, row: ApiKeyRow, caller: Caller, least: Role) -> Principal:
        self._check_tenant(row)
        if row.certificate_sha256 and not hmac.compare_digest(row.certificate_sha256, caller.certificate_sha256):
            raise denied(
                "CERTIFICATE_REQUIRED",
                "this key works only with the client certificate that it was created for: connect with it over TLS",
            )
        role = Role(row.role)
        if row.is_local and not caller.is_local:
            role = Role.MEMBER if role is Role.ADMIN else role
        if not role.covers(least):
            raise _insufficient(least, is_remote=role is not Role(row.role))
        self._used[row.key_id] = self._wall()
        return _principal(row, role)

    def authenticate(self, key: str) -> Principal:
        """Return the principal of a key with the role that it has at most. Raises ServiceError UNAUTHENTICATED."""
        row = self._row_of(key)
        return _principal(row, Role(row.role))

    def holder(self, key_id: str) -> Principal:
        """Return the principal of a key by its id. Raises ServiceError once no call may run with it."""
        row = self._rows.get(key_id)
        if row is None:
            raise _revoked(key_id)
        self._check_expiry(row)
        self._check_tenant(row)
        return _principal(row, Role(row.role))

    @contextmanager
    def while_valid(self, principal: Principal) -> Iterator[None]:
        """Run a block of the current task while the caller's key is valid: the whole of a call, with its waits.

        The key's revocation or expiry, or its tenant's suspension, cancels the block, which then raises ServiceError.
        """
        self.holder(principal.key_id)
        call = EndableBlock()
        self._holders[principal.key_id][call] = None
        try:
            with call.running():
                yield
        finally:
            del self._holders[principal.key_id][call]
            if not self._holders[principal.key_id]:
                del self._holders[principal.key_id]

    async def keep(self, time: Time) -> None:
        """End the calls of keys that expire, and store when keys were last used; runs until it is cancelled."""
        noted = time.monotonic()
        try:
            while True:
                await time.sleep(EXPIRY_INTERVAL_S)
                self._end_expired()
                if time.monotonic() - noted >= USE_INTERVAL_S:
                    noted = time.monotonic()
                    await self._note_uses()
        finally:
            await self._note_uses()

    async def _note_uses(self) -> None:
        """Store when keys were last used. A database that refuses it gets it at the next time."""
        uses = {key_id: wall for key_id, wall in self._used.items() if self._noted.get(key_id) != wall}
        if uses:
            try:
                await self._store.api_keys.note_uses(uses)
                self._noted |= uses
            except StorageError as error:
                logger.warning("the last use of keys cannot be stored: %s; trying again later", error)

    async def create_key(
        self,
        tenant: str,
        *,
        role: Role = Role.MEMBER,
        ttl_s: float = 0.0,
        is_local: bool = False,
        certificate_sha256: str = "",
        by: Principal | None = None,
    ) -> tuple[str, ApiKeyRow]:
        """Create a key, and the tenant if it is new. Return the key, which is stored nowhere, and its row.

        `ttl_s`: seconds until it expires; 0: never. `is_local`: an administrator's for callers on this machine only.
        `by`: the administrator; None: the operator of the pool. Raises ServiceError for a wrong argument, or a tenant
        that is being deleted.
        """
        check_tenant_name(tenant)
        fingerprint = _fingerprint(certificate_sha256)
        key_id, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), self._wall()
        new = NewKey(
            key_id=key_id,
            secret_sha256=_hash(secret),
            role=role,
            expires_at=now + ttl_s if ttl_s else None,
            is_local=is_local,
            certificate_sha256=fingerprint,
        )
        details = {"tenant": tenant, "role": str(role)}
        details |= {"ttl_seconds": f"{ttl_s:g}"} if ttl_s else {}
        details |= {"certificate_sha256": fingerprint} if fingerprint else {}
        act = self._act("key.create", key_id, by, details, now)
        if not await self._store.api_keys.create(new, tenant, new_tenant_id(), act):
            raise tenant_deleting(tenant)
        return f"tp_{key_id}_{secret}", self._take(key_id)

    async def rotate_key(self, key_id: str, *, grace_s: float, by: Principal) -> tuple[str, ApiKeyRow, ApiKeyRow]:
        """Replace a key: return the new one, its row, and the old key's row. The old key ends `grace_s` seconds later.

        The new key has the same tenant, role, expiry and bindings: a rotation never makes access last longer. Raises
        ServiceError for an unknown key, or one that is not valid or was rotated before; RATE_LIMITED for one more than
        `PACE`, except by an administrator.
        """
        if not 0 <= grace_s <= GRACE_S_MAX:
            raise invalid(f"grace_seconds must be 0 to {GRACE_S_MAX} (30 days), not {grace_s:g}")
        if self._store.api_keys.get(key_id) is None:
            raise not_found("API key", key_id)
        successor, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), self._wall()
        act = self._act("key.rotate", key_id, by, {"successor": successor, "grace_seconds": f"{grace_s:g}"}, now)
        pace = None if by.is_admin else PACE
        try:
            is_rotated = await self._store.api_keys.rotate(key_id, successor, _hash(secret), grace_s, act, pace)
        except TooManyRotationsError as error:
            quota = Quota("keys of yours replaced within a day", PACE.rotations_max, PACE.rotations_max)
            mend = "keep the key, or ask an administrator to replace it"
            raise busy("RATE_LIMITED", quota, mend, delay_s=math.ceil(error.delay_s * 1000) / 1000) from None
        if not is_rotated:
            raise unmet(
                "KEY_NOT_ROTATED",
                f"the API key {key_id!r} was rotated before, is revoked, or has expired: use its successor, or have an "
                "administrator create a key",
            )
        if not grace_s:
            self._end(key_id)
        return f"tp_{successor}_{secret}", self._take(successor), self._take(key_id)

    def last_use(self, row: ApiKeyRow) -> float | None:
        """Return when a key was last used, as a time of day; None: never, or in the hour before a crash alone."""
        return self._used.get(row.key_id, row.last_used_at)

    async def revoke_key(self, key_id: str, *, by: Principal | None = None) -> list[str]:
        """Revoke a key, and end the calls that run with it. Return the ids of its successors that are still valid.

        Their owner may need them; but the thief of a leaked key may have replaced it.

        Raises ServiceError if it is unknown, or if no administrator's key without an expiry would remain.
        """
        if self._store.api_keys.get(key_id) is None:
            raise not_found("API key", key_id)
        try:
            await self._store.api_keys.revoke(key_id, self._act("key.revoke", key_id, by, {}, self._wall()))
        except NoAdminError:
            raise last_admin_key() from None
        self._end(key_id)
        return self._store.api_keys.live_successors(key_id)

    def end_calls_of(self, tenant_id: str) -> None:
        """End the running calls of a tenant that is suspended or being deleted."""
        for key_id in list(self._holders):
            row = self._rows.get(key_id)
            if row is not None and row.tenant_id == tenant_id and self._accounts.is_held(tenant_id):
                self._end_calls(key_id, functools.partial(self._refusal, row))

    def _row_of(self, key: str) -> ApiKeyRow:
        match = _KEY.fullmatch(key.strip())
        row = self._rows.get(match[1]) if match else None
        # Compare for an unknown id too, so that the time of a refusal does not reveal which ids exist.
        expected = row.secret_sha256 if row else bytes(32)
        if not hmac.compare_digest(expected, _hash(match[2] if match else "")) or row is None:
            raise ServiceError(
                Code.UNAUTHENTICATED,
                "API_KEY_INVALID" if key else "API_KEY_MISSING",
                "no API key in the metadata: send 'authorization: Bearer <key>'"
                if not key
                else "the API key is unknown or revoked: use the one in ~/.tinkerpool/credentials.json on the pool's "
                "machine, or a new one",
            )
        self._check_expiry(row)
        return row

    def _check_expiry(self, row: ApiKeyRow) -> None:
        if row.expires_at is not None and row.expires_at <= self._wall():
            raise _expired(row)

    def _check_tenant(self, row: ApiKeyRow) -> None:
        if (refusal := self._accounts.refusal(row.tenant_id)) is not None:
            raise refusal

    def _refusal(self, row: ApiKeyRow) -> ServiceError:
        return self._accounts.refusal(row.tenant_id) or _revoked(row.key_id)

    def _end_expired(self) -> None:
        now = self._wall()
        for key_id in list(self._holders):
            row = self._rows.get(key_id)
            if row is not None and row.expires_at is not None and row.expires_at <= now:
                self._end_calls(key_id, functools.partial(_expired, row))

    def _take(self, key_id: str) -> ApiKeyRow:
        """Read a key that was written, also into memory unless it is revoked, and return it."""
        row = self._store.api_keys.get(key_id)
        assert row is not None
        if row.revoked_at is None:
            self._rows[key_id] = row
        return row

    def _end(self, key_id: str) -> None:
        """Accept a revoked key no more, and end its calls."""
        self._rows.pop(key_id, None)
        self._end_calls(key_id, lambda: _revoked(key_id))

    def _end_calls(self, key_id: str, refusal: Callable[[], ServiceError]) -> None:
        for call in list(self._holders.get(key_id, ())):
            call.end(refusal())

    def _act(self, act: str, key_id: str, by: Principal | None, details: dict[str, str], now: float) -> Act:
        return Act(
            at=now,
            key_id=by.key_id if by is not None else "",
            tenant=by.tenant_name if by is not None else "",
            act=act,
            subject=key_id,
            details=details,
        )


def _fingerprint(text: str) -> str:
    """Return a certificate's fingerprint in its stored form, from forms with colons or capitals."""
    fingerprint = text.replace(":", "").lower()
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        raise invalid(
            "certificate_sha256 must be the SHA-256 of the certificate (DER), 64 hexadecimal digits, as "
            f"`openssl x509 -noout -fingerprint -sha256` prints it, not {text[:100]!r}"
        )
    return fingerprint


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _revoked(key_id: str) -> ServiceError:
    return ServiceError(
        Code.UNAUTHENTICATED, "API_KEY_INVALID", f"the API key {key_id[:40]!r} was revoked: use another one"
    )


def _expired(row: ApiKeyRow) -> ServiceError:
    successor = f" It was replaced by key {row.successor!r}." if row.successor else ""
    return ServiceError(
        Code.UNAUTHENTICATED,
        "API_KEY_EXPIRED",
        f"the API key {row.key_id!r} has expired: ask the administrator of the pool for another one.{successor}",
    )


def _insufficient(least: Role, *, is_remote: bool) -> ServiceError:
    if least is not Role.ADMIN:
        return denied(
            "READ_ONLY_KEY",
            "this key may only read: use a member's key of the same tenant for calls that change something or compute",
        )
    where = (
        "this key is an administrator's for programs on the pool's machine only: make the call there, or create an "
        "administrator's key for this machine there, with `tinkerpool key create TENANT --role admin`"
    )
    return denied(
        "ADMIN_ONLY",
        where if is_remote else "this call needs an administrator's key: ask the administrator of the pool",
    )


def _principal(row: ApiKeyRow, role: Role) -> Principal:
    return Principal(row.tenant_id, row.tenant_name, row.key_id, role)
