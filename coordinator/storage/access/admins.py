"""Whether the pool can always be administered. Changes that would end that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.storage.sqlite import Connection

HAS_ADMIN = """SELECT 1 FROM api_keys JOIN tenants USING (tenant_id)
    WHERE role = 'admin' AND revoked_at IS NULL AND expires_at IS NULL AND suspended_at IS NULL AND deletion_at IS NULL
    LIMIT 1"""


class NoAdminError(Exception):
    """The change would leave no administrator's key without an expiry, of an active tenant."""


@contextmanager
def keeping_admins(db: Connection) -> Iterator[None]:
    """Raise NoAdminError if the block takes the last key that can always administer the pool."""
    had_admin = _has_admin(db)
    yield
    if had_admin and not _has_admin(db):
        raise NoAdminError


def _has_admin(db: Connection) -> bool:
    return db.execute(HAS_ADMIN).fetchone() is not None
