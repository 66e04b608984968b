"""From options, environment and credentials file to a pool, and from its refusals to sentences for the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from tinkerpool.cli.errors import CliError
from tinkerpool.client.calls.methods import RequestT, ResponseT, Unary
from tinkerpool.client.calls.transport import GrpcTransport, Transport, parse_target
from tinkerpool.client.discovery import find_service
from tinkerpool.credentials import credentials_file
from tinkerpool.errors import (
    Code,
    ConfigurationError,
    DeadlineExceeded,
    TinkerpoolError,
    Unauthenticated,
    Unavailable,
)

T = TypeVar("T")
TIMEOUT_S = 20.0

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="TINKERPOOL_BASE_URL",
        help="Address of the pool, http://HOST:PORT (https:// for TLS). Default: the one started on this machine.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="TINKERPOOL_API_KEY",
        help="API key. Default: the one that the pool left on this machine.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A pool to talk to."""

    url: str
    api_key: str
    key_source: str
    """Where the key came from, for people."""


def find_target(url: str, api_key: str) -> Target:
    """The pool that is meant, found as ServiceClient finds it. Raises CliError."""
    try:
        found_url, found_key = find_service(url or None, api_key or None)
    except ConfigurationError as error:
        if not url and not credentials_file().exists():
            raise CliError(
                "no pool was started on this machine yet: start one with `tinkerpool up`, or give the --url and the "
                "--api-key of another (or set TINKERPOOL_BASE_URL and TINKERPOOL_API_KEY)"
            ) from None
        raise CliError(str(error)) from None
    source = "--api-key or TINKERPOOL_API_KEY" if api_key else str(credentials_file())
    return Target(url=found_url, api_key=found_key, key_source=source)


@asynccontextmanager
async def open_transport(target: Target) -> AsyncIterator[Transport]:
    """A connection for the time of a command. Raises CliError for refusals, inside too."""
    transport = GrpcTransport(target.url, target.api_key)
    try:
        yield transport
    except TinkerpoolError as error:
        raise CliError(_explain(error, target)) from None
    finally:
        await transport.close()


def ask(target: Target, work: Callable[[Transport], Awaitable[T]]) -> T:
    """Run one command's conversation with a pool. Raises CliError."""

    async def converse() -> T:
        async with open_transport(target) as transport:
            return await work(transport)

    return asyncio.run(converse())


def call(target: Target, method: Unary[RequestT, ResponseT], request: RequestT) -> ResponseT:
    """One call. Raises CliError."""
    return ask(target, lambda transport: transport.call(method, request, timeout_s=TIMEOUT_S))


def _explain(error: TinkerpoolError, target: Target) -> str:
    """An error of the client's for somebody at a terminal."""
    has_answered = getattr(error, "reason", "") != ""
    match error:
        case Unavailable() if not has_answered and _is_certificate_trouble(error):
            return (
                f"the certificate of {target.url} is not trusted on this machine; the environment variable "
                "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names a file (PEM) with the authorities to trust"
            )
        case Unavailable() if not has_answered:
            host = parse_target(target.url)[0].rpartition(":")[0]
            if host in {"127.0.0.1", "localhost", "[::1]"}:
                return f"no pool is running at {target.url}; start one with `tinkerpool up`"
            return f"no pool answers at {target.url}: is it running, and can this machine reach it?"
        case DeadlineExceeded():
            return f"the pool at {target.url} did not answer within {TIMEOUT_S:.0f} s; is it still starting?"
        case Unauthenticated():
            return (
                f"the pool at {target.url} does not know the API key from {target.key_source}; give another with "
                "--api-key, or start the pool with --new-key to have one written to the credentials file"
            )
        case _ if getattr(error, "code", None) is Code.UNIMPLEMENTED:
            return f"what listens at {target.url} is no tinkerpool, or one of another version"
        case _:
            return str(getattr(error, "message", error))


def _is_certificate_trouble(error: TinkerpoolError) -> bool:
    return "certificate" in str(error).lower()
