"""Sign-ins of browsers: a cookie that stands for an API key until it expires. Does not depend on a page.

A cookie names the key by its id, and an expiry; it is signed with a secret that is in memory alone, so a restart of the
coordinator ends all sign-ins. Each call is admitted with the key's present standing: a revoked key ends its sign-ins.

Main invariants: no script can read the cookie (`HttpOnly`), and no other site makes a browser change anything with it:
`SameSite=Strict` keeps it from requests of other sites, and what is not a read needs an `Origin` of the page's own.
"""

from __future__ import annotations

from http import HTTPMethod
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from coordinator.base.errors import Code, ServiceError, denied
from coordinator.base.time import Time
from coordinator.doors.http.signatures import Signer

SIGN_IN_S = 12 * 3600
"""Lifetime of a sign-in in seconds."""
_READS = (HTTPMethod.GET, HTTPMethod.HEAD)


class SignIns:
    """Makes and checks the cookies."""

    def __init__(self, time: Time, *, is_tls: bool) -> None:
        """`is_tls`: the door serves HTTPS, so browsers send the cookie over HTTPS only."""
        self._time = time
        self._is_tls = is_tls
        self._signer = Signer()

    def begin(self, request: Request, response: Response, key_id: str) -> None:
        """Sign the browser in: set its cookie."""
        expires = int(self._time.wall()) + SIGN_IN_S
        value = f"{key_id}.{expires}.{self._signer.sign(key_id, str(expires))}"
        self._set(request, response, value, SIGN_IN_S)

    def end(self, request: Request, response: Response) -> None:
        """Sign the browser out: delete its cookie."""
        self._set(request, response, "", 0)

    def key_id(self, request: Request) -> str:
        """Return the id of the key that the browser has signed in with; empty if it has no cookie.

        Raises ServiceError: UNAUTHENTICATED if the cookie has expired or is of an earlier start, PERMISSION_DENIED for
        a change that another site asks for.
        """
        value = request.cookies.get(_name(request), "")
        if not value:
            return ""
        key_id, _, rest = value.partition(".")
        expires, _, signature = rest.partition(".")
        if not self._signer.has_signed(signature, key_id, expires) or int(expires) < self._time.wall():
            raise ServiceError(
                Code.UNAUTHENTICATED,
                "SIGN_IN_EXPIRED",
                "the sign-in has expired, or the pool was restarted since: sign in again",
            )
        if request.method not in _READS:
            check_origin(request)
        return key_id

    def _set(self, request: Request, response: Response, value: str, max_age: int) -> None:
        response.set_cookie(
            _name(request), value, max_age=max_age, httponly=True, samesite="strict", secure=self._is_tls, path="/"
        )


def check_origin(request: Request) -> None:
    """Raise ServiceError PERMISSION_DENIED unless the request says that a page of this door has made it."""
    origin = request.headers.get("origin", "")
    try:
        host = urlsplit(origin).netloc
    except ValueError:  # its brackets hold no IPv6 address
        host = ""
    if not host or host != request.headers.get("host", ""):
        raise denied(
            "FOREIGN_ORIGIN",
            "a browser's sign-in changes something only from the pool's own page: open that, or send an API key",
        )


def _name(request: Request) -> str:
    """Return the cookie's name. Cookies are shared by the ports of a host, and so by pools on one machine."""
    server = request.scope.get("server")
    return f"tinkerpool_{server[1] if server else 0}"
