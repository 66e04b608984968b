"""Calls of a command to a pool; turns the client's errors into sentences for the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, TypeVar

import typer

from tinkerpool.cli import show
from tinkerpool.cli.finding import Target
from tinkerpool.cli.show import CliError
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.methods import RequestT, ResponseT, Unary
from tinkerpool.client.calls.retry import RetryPolicy
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport, Transport
from tinkerpool.credentials import parse_target
from tinkerpool.errors import (
    Code,
    DeadlineExceeded,
    TinkerpoolError,
    Unauthenticated,
    Unavailable,
)

T = TypeVar("T")
TIMEOUT_S = 20.0
"""Deadline of a call."""
RETRY_S = 60.0
"""How long a call of many is tried again."""
PAGE_SIZE = 1000
CANCEL_AGAIN_S = 0.2
"""Between two cancellations after Ctrl-C."""

LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Most items to list.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@asynccontextmanager
async def open_transport(target: Target) -> AsyncIterator[Transport]:
    """Open a connection for one command. Raises CliError for any error of the client, also from inside the block."""
    transport = GrpcTransport(_endpoint(target))
    try:
        yield transport
    except TinkerpoolError as error:
        raise CliError(_explain(error, target)) from None
    finally:
        await transport.close()


@contextmanager
def open_connection(target: Target) -> Iterator[Connection]:
    """Open a connection whose calls are tried again for `RETRY_S`. Raises CliError as `open_transport`."""
    policy = RetryPolicy(timeout_s=RETRY_S, connect_timeout_s=0)
    connection = Connection(GrpcTransport(_endpoint(target)), policy)
    try:
        yield connection
    except TinkerpoolError as error:
        raise CliError(_explain(error, target)) from None
    finally:
        connection.start(connection.close()).result(TIMEOUT_S)


def ask(target: Target, work: Callable[[Transport], Awaitable[T]]) -> T:
    """Run the calls of one command. Raises CliError."""

    async def converse() -> T:
        async with open_transport(target) as transport:
            return await work(transport)

    return asyncio.run(converse())


def follow(target: Target, work: Callable[[Transport], Awaitable[None]]) -> None:
    """Run the calls of a command that Ctrl-C ends. Raises CliError."""

    async def until_ctrl_c(transport: Transport) -> None:
        _end_at_ctrl_c()
        await work(transport)

    try:
        ask(target, until_ctrl_c)
    except (KeyboardInterrupt, asyncio.CancelledError):
        show.note("")


def _end_at_ctrl_c() -> None:
    """Make Ctrl-C cancel the current task again and again: a stream that is being opened swallows the first time."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.done():
            task.cancel()
            loop.call_later(CANCEL_AGAIN_S, cancel)

    with contextlib.suppress(NotImplementedError):  # on Windows, where asyncio raises KeyboardInterrupt
        loop.add_signal_handler(signal.SIGINT, cancel)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C, so that the block removes its files; an ignored one (nohup) stays so."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    replaced = [signum for name in names if signal.getsignal(signum := signal.Signals[name]) is signal.SIG_DFL]
    for signum in replaced:
        signal.signal(signum, signal.default_int_handler)
    try:
        yield
    finally:
        for signum in replaced:
            signal.signal(signum, signal.SIG_DFL)


def call(target: Target, method: Unary[RequestT, ResponseT], request: RequestT) -> ResponseT:
    """Make one call. Raises CliError."""
    return ask(target, lambda transport: transport.call(method, request, timeout_s=TIMEOUT_S))


def fetch_list(
    target: Target, method: Unary[RequestT, ResponseT], make_request: Callable[..., RequestT], items: str, limit: int
) -> ResponseT:
    """Fetch up to `limit` items of a listing, page by page, into one response. Raises CliError.

    `make_request` takes `page_size` and `page_token`; `items` names the field with the items. The response has a
    `next_page_token` if the listing has more.
    """

    async def fetch(transport: Transport) -> ResponseT:
        found, token = method.response_type(), ""
        while True:
            request = make_request(page_size=min(PAGE_SIZE, limit - len(getattr(found, items))), page_token=token)
            page: Any = await transport.call(method, request, timeout_s=TIMEOUT_S)
            found.ClearField("next_page_token")
            found.MergeFrom(page)
            token = page.next_page_token
            if not token or len(getattr(found, items)) >= limit:
                return found

    return ask(target, fetch)


def note_rest(response: Any, limit: int) -> None:
    """Say how to see the rest of a listing, if there is one."""
    if response.next_page_token:
        show.note(f"There are more; --limit {limit * 4} shows them.")


def _endpoint(target: Target) -> Endpoint:
    return Endpoint(
        target.url,
        target.api_key,
        certificate=target.certificate,
        client_certificate=target.client_certificate,
    )


def _explain(error: TinkerpoolError, target: Target) -> str:
    """Return a sentence about an error of the client."""
    is_refusal = getattr(error, "reason", "") != ""
    match error:
        case Unavailable() if not is_refusal:
            host = parse_target(target.url)[0].rpartition(":")[0]
            if target.place.data_dir is not None or host in {"127.0.0.1", "localhost", "[::1]"}:
                return str(target.place.no_pool())
            source = target.place.source
            return f"no pool replies at {target.url} ({source}): is it running, and can this machine reach it?"
        case DeadlineExceeded():
            return f"the pool at {target.url} did not reply within {TIMEOUT_S:.0f} s; is it still starting?"
        case Unauthenticated():
            return (
                f"the pool at {target.url} refused the API key from {target.key_source}; give another with "
                "--api-key, or start the pool with --new-key, which writes one to the credentials file"
            )
        case _ if getattr(error, "code", None) is Code.UNIMPLEMENTED:
            return f"the server at {target.url} is no tinkerpool, or one of another version"
        case _:
            return str(getattr(error, "message", error))
