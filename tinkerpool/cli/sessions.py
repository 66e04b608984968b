"""`tinkerpool session`: the timeline of a client's session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import ask, interruptible
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.show import CliError
from tinkerpool.client.calls.methods import EXPORT_SESSION_TRACE
from tinkerpool.client.calls.transport import Transport
from tinkerpool.v1 import history_pb2 as pb

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `trace` a command of the group: typer would make a single one the group itself."""


@app.command()
@calls_pool
def trace(
    target: Target,
    session: Annotated[
        str,
        typer.Argument(
            metavar="SESSION",
            help="Its id, which the ids of its adapters and samplers begin with; or one of these ids.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write. Default: stdout.", dir_okay=False),
    ] = None,
) -> None:
    """Write the timeline of a session for Perfetto: its requests, what they waited for, and the cycles that ran them.

    Open it at https://ui.perfetto.dev, with "Open trace file"; the page reads the file in your browser.

    Example: tinkerpool session trace 3f2c... > session.pftrace
    """
    if output is None and sys.stdout.isatty():
        raise CliError("the trace is not text: add `> session.pftrace`, or --output FILE")
    session_id, num_bytes = session.partition(":")[0], 0
    with interruptible(), _opened(output) as file:

        async def fetch(transport: Transport) -> None:
            nonlocal num_bytes
            request = pb.ExportSessionTraceRequest(session_id=session_id)
            async for response in transport.stream(EXPORT_SESSION_TRACE, request):
                num_bytes += file.write(response.data)

        ask(target, fetch)
    name = output if output is not None else "the trace"
    show.note(f'Wrote {name} ({show.size(num_bytes)}): open it at https://ui.perfetto.dev with "Open trace file".')


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    """Open stdout, or a file that has its name once it is whole. Raises CliError if it cannot be written."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    temporary = output.with_name(f".{output.name}.new")
    try:
        try:
            with temporary.open("wb") as file:
                yield file
            temporary.replace(output)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from None
