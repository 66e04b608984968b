"""The callers: roles, where a call comes from, and the principal that a key names. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a key may do. Each role may do everything that those before it may."""

    READ_ONLY = "read-only"
    """Read, list, download and wait for results: nothing that changes state or costs engine time."""
    MEMBER = "member"
    """Everything with what its tenant owns."""
    ADMIN = "admin"
    """Also administer tenants and keys, and see all tenants."""

    def covers(self, least: Role) -> bool:
        """Return whether this role may do what needs at least the other one."""
        return _RANKS[self] >= _RANKS[least]


_RANKS = {role: rank for rank, role in enumerate(Role)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a call comes from."""

    is_local: bool
    """Whether the peer of its connection is this machine: a client, or a relay."""
    certificate_sha256: str = ""
    """The fingerprint of the client's certificate, 64 hexadecimal digits; empty: it has sent none."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller as use cases see it: a tenant, the API key that was used, and what that key may do in this call."""

    tenant_id: str
    tenant_name: str
    key_id: str
    role: Role

    @property
    def is_admin(self) -> bool:
        """Whether it may see and administer all tenants."""
        return self.role is Role.ADMIN
