"""Signed download URLs, which work without an API key for a limited time. Does not depend on what they name, or on
HTTP.

A URL names the key that requested it, the file, its version and its expiry, and is signed. A restart of the coordinator
invalidates all URLs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from urllib.parse import urlencode

from coordinator.base.errors import ServiceError, denied
from coordinator.base.time import Time
from coordinator.doors.http.signatures import Signer
from coordinator.limits.budget import PARTS, Budget, Held
from coordinator.limits.ceiling import Refusal

DOWNLOAD_S = 3600
"""Lifetime of a URL in seconds."""
AT_ONCE_MAX = 4
"""Downloads of a tenant at once."""
WAITING_MAX = 16
"""Downloads of a tenant that wait for one of these to end."""
WAIT_S = 30.0
"""How long they wait. The command line of the Tinker SDK gives up after 60 s without a byte."""


class Downloads:
    """Signs and checks URLs, and limits the downloads of a tenant."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self._signer = Signer()
        self.running = Budget(
            sys.maxsize,
            AT_ONCE_MAX,
            PARTS * WAITING_MAX,
            unit="places",
            what="downloads",
            refusal=Refusal("DOWNLOADS_BUSY", "wait for one to end"),
        )

    def place(self, tenant_id: str) -> Held:
        """Return what will hold the place of a download: `take(1, WAIT_S)` waits for it."""
        return Held(self.running, tenant_id)

    def expiry(self) -> int:
        """Return the expiry of a URL that is signed now, in seconds since 1970."""
        return int(self._time.wall()) + DOWNLOAD_S

    def query(self, key_id: str, path: str, version: str, file: str, expires: int) -> str:
        """Return the query of a URL. It holds the id of the API key, which is not secret."""
        signature = self._signer.sign(key_id, path, version, file, str(expires))
        fields = {"path": path, "version": version, "key": key_id, "expires": expires, "signature": signature}
        return urlencode({name: value for name, value in fields.items() if value != ""})

    def check(self, query: Mapping[str, str], file: str) -> tuple[str, str, str]:
        """Check the query of a URL; return its key id, path and version. Raises ServiceError PERMISSION_DENIED."""
        key_id, path, version, expires = (query.get(name, "") for name in ("key", "path", "version", "expires"))
        if not self._signer.has_signed(query.get("signature", ""), key_id, path, version, file, expires):
            raise _refused("was not made by this pool since its last start")
        if int(expires) < self._time.wall():
            raise _refused("has expired")
        return key_id, path, version


def _refused(why: str) -> ServiceError:
    return denied("DOWNLOAD_REFUSED", f"this download URL {why}: request a new one")
