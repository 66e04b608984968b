"""The page's files, and the sign-in of a browser: a key in exchange for a cookie. No key is ever in a URL.

The files are read once. Everything that the page loads comes from this origin, which its content security policy says
to the browser too: no inline script, no frame around it, nothing from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call, api_key
from coordinator.doors.http.sign_ins import check_origin

HOME = "/ui/"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
}
"""Of every file."""


def files() -> list[BaseRoute]:
    """Return the routes of the page's files, which need no key."""
    return [Route("/", _home), Route("/ui", _home), Route(HOME + "{file:path}", _file(_files()))]


async def _home(_request: Request) -> Response:
    return RedirectResponse(HOME, status_code=HTTPStatus.TEMPORARY_REDIRECT)


def _files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return the content and the headers of each file, by name; the empty name is the page."""
    found = {}
    for file in resources.files("coordinator.doors.web").joinpath("static").iterdir():
        content, suffix = file.read_bytes(), "." + file.name.rpartition(".")[2]
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        kind = f"{_TYPES[suffix]}; charset=utf-8"
        found[file.name] = content, {**_HEADERS, "content-type": kind, "etag": etag, "cache-control": "no-cache"}
    found[""] = found["index.html"]
    return found


def _file(files: dict[str, tuple[bytes, dict[str, str]]]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in files:
            return Response(f"the page has no file {name[:100]!r}", status_code=HTTPStatus.NOT_FOUND, headers=_HEADERS)
        content, headers = files[name]
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers)

    return respond


async def sign_in(call: Call) -> Response:
    """POST with the key as a bearer token: sign the browser in, and tell who that is. A cookie cannot renew itself."""
    check_origin(call.request)
    if not api_key(call.request):
        raise ServiceError(Code.UNAUTHENTICATED, "API_KEY_MISSING", "a sign-in needs the API key as a bearer token")
    principal = call.principal
    response = JSONResponse({"tenant": principal.tenant_name, "role": str(principal.role)})
    call.door.sign_ins.begin(call.request, response, principal.key_id)
    return response


async def sign_out(call: Call) -> Response:
    """POST: sign the browser out."""
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    call.door.sign_ins.end(call.request, response)
    return response
