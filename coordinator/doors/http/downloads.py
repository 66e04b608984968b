"""Addresses of files that work without a key, for a while. Knows no checkpoints and no HTTP.

An address carries which key it was given to, what it is for and until when, under a signature with a secret that only
this life of the door has: after a restart addresses are asked for again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlencode

from coordinator.base.errors import Code, ServiceError

DOWNLOAD_S = 3600
"""How long an address works."""
AT_ONCE_MAX = 4
"""Files that a tenant may be sent at once."""


class Downloads:
    """Signs addresses and checks them."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """`wall` is the time of day, in seconds."""
        self._wall = wall
        self._secret = secrets.token_bytes(32)
        self._num_running: Counter[str] = Counter()

    def expiry(self) -> int:
        """Until when an address that is signed now works, in seconds since 1970."""
        return int(self._wall()) + DOWNLOAD_S

    def query(self, key_id: str, path: str, file: str, expires: int) -> str:
        """The query of an address. The id of a key is no secret."""
        signature = self._signature(key_id, path, file, str(expires))
        return urlencode({"path": path, "key": key_id, "expires": expires, "signature": signature})

    def check(self, query: Mapping[str, str], file: str) -> tuple[str, str]:
        """Key id and path of an address that is good. Raises ServiceError PERMISSION_DENIED."""
        key_id, path, expires = query.get("key", ""), query.get("path", ""), query.get("expires", "")
        expected = self._signature(key_id, path, file, expires)
        if not hmac.compare_digest(expected.encode(), query.get("signature", "").encode()):
            raise _refused("was not given out by this pool since it started")
        if int(expires) < self._wall():
            raise _refused("has expired")
        return key_id, path

    @contextmanager
    def running(self, tenant_id: str) -> Iterator[None]:
        """A file is sent while the block runs. Raises ServiceError RESOURCE_EXHAUSTED if enough are."""
        if self._num_running[tenant_id] >= AT_ONCE_MAX:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "DOWNLOADS_BUSY",
                f"{AT_ONCE_MAX} downloads are running, the most at once: wait for one to end, then try again",
                retry_delay_s=1.0,
            )
        self._num_running[tenant_id] += 1
        try:
            yield
        finally:
            self._num_running[tenant_id] -= 1
            if not self._num_running[tenant_id]:
                del self._num_running[tenant_id]

    def _signature(self, *parts: str) -> str:
        return hmac.new(self._secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def _refused(why: str) -> ServiceError:
    return ServiceError(
        Code.PERMISSION_DENIED, "DOWNLOAD_REFUSED", f"this download address {why}: ask for the checkpoint's URLs again"
    )
