"""The coordinator as a door sees it."""

from __future__ import annotations

from typing import Protocol

from coordinator.service import Service
from coordinator.service.auth import Principal


class Keys(Protocol):
    """The API keys of a pool."""

    def authenticate(self, key: str) -> Principal:
        """Return the principal of a key, which may be empty. Raises ServiceError UNAUTHENTICATED."""


class Backend(Protocol):
    """A started coordinator."""

    @property
    def service(self) -> Service:
        """The use cases."""

    @property
    def authenticator(self) -> Keys:
        """The API keys."""

    def health(self) -> bool:
        """Return whether cycles can make progress."""
