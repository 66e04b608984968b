"""Signed download URLs, which work without an API key for a limited time. Does not depend on what they name, or on
HTTP.

A URL names the key that requested it, the file and its expiry, and is signed. A restart of the coordinator invalidates
all URLs.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from coordinator.base.errors import ServiceError, denied
from coordinator.base.time import Time
from coordinator.doors.http.signatures import Signer
from coordinator.limits.ceiling import Ceiling, Refusal

DOWNLOAD_S = 3600
"""Lifetime of a URL in seconds."""
AT_ONCE_MAX = 4
"""Downloads of a tenant at once."""


class RunningDownloads(Ceiling):
    """The downloads that run, by tenant."""

    def maximum(self, _tenant_id: str) -> int:
        """Return the same for every tenant."""
        return AT_ONCE_MAX


class Downloads:
    """Signs and checks URLs, and limits the downloads of a tenant."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self._signer = Signer()
        self.running = RunningDownloads(
            Refusal("DOWNLOADS_BUSY", "wait for one to end"), "downloads of yours that are running"
        )

    def expiry(self) -> int:
        """Return the expiry of a URL that is signed now, in seconds since 1970."""
        return int(self._time.wall()) + DOWNLOAD_S

    def query(self, key_id: str, path: str, file: str, expires: int) -> str:
        """Return the query of a URL. It holds the id of the API key, which is not secret."""
        signature = self._signer.sign(key_id, path, file, str(expires))
        return urlencode({"path": path, "key": key_id, "expires": expires, "signature": signature})

    def check(self, query: Mapping[str, str], file: str) -> tuple[str, str]:
        """Check the query of a URL; return its key id and path. Raises ServiceError PERMISSION_DENIED."""
        key_id, path, expires = query.get("key", ""), query.get("path", ""), query.get("expires", "")
        if not self._signer.has_signed(query.get("signature", ""), key_id, path, file, expires):
            raise _refused("was not made by this pool since its last start")
        if int(expires) < self._time.wall():
            raise _refused("has expired")
        return key_id, path


def _refused(why: str) -> ServiceError:
    return denied("DOWNLOAD_REFUSED", f"this download URL {why}: request a new one")
