"""`tinkerpool checkpoint`: named, immutable states of adapters; `export` makes a directory that PEFT and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import TIMEOUT_S, JsonOption, KeyOption, UrlOption, ask, call, find_target
from tinkerpool.cli.errors import CliError
from tinkerpool.client.archive import ArchiveFile
from tinkerpool.client.calls.methods import DELETE_CHECKPOINT, EXPORT_CHECKPOINT, LIST_CHECKPOINTS
from tinkerpool.client.calls.transport import Transport
from tinkerpool.names import CheckpointPath
from tinkerpool.v1 import checkpoints_pb2 as pb

PAGE_SIZE = 1000
app = typer.Typer(no_args_is_help=True)
PathArgument = Annotated[str, typer.Argument(help="tinker://... as `tinkerpool checkpoint list` shows it.")]


@app.command("list")
def list_checkpoints(
    adapter_id: Annotated[str, typer.Option("--adapter", help="Only of this adapter.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest first.")] = 50,
    url: UrlOption = "",
    api_key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """List your checkpoints, newest first."""

    async def fetch(transport: Transport) -> pb.ListCheckpointsResponse:
        found = pb.ListCheckpointsResponse()
        while True:
            request = pb.ListCheckpointsRequest(
                adapter_id=adapter_id,
                page_size=min(PAGE_SIZE, limit - len(found.checkpoints)),
                page_token=found.next_page_token,
            )
            page = await transport.call(LIST_CHECKPOINTS, request, timeout_s=TIMEOUT_S)
            found.checkpoints.extend(page.checkpoints)
            found.next_page_token = page.next_page_token
            if not page.next_page_token or len(found.checkpoints) >= limit:
                return found

    found = ask(find_target(url, api_key), fetch)
    if json:
        show.json_message(found)
        return
    if not found.checkpoints:
        show.say("There are no checkpoints yet: training_client.save_state(name) makes one.")
        return
    show.table(
        "Checkpoints",
        ("path", "base model", "rank", "seq", "size", "created"),
        (
            (
                checkpoint.path,
                checkpoint.base_model,
                str(checkpoint.rank),
                str(checkpoint.seq),
                show.size(checkpoint.size_bytes),
                show.age(checkpoint.create_time),
            )
            for checkpoint in found.checkpoints
        ),
        right="rank seq size",
    )
    if found.next_page_token:
        show.note(f"There are more; --limit {limit * 4} shows them.")


@app.command()
def export(
    path: PathArgument,
    directory: Annotated[Path, typer.Argument(help="A new directory.", file_okay=False)],
    url: UrlOption = "",
    api_key: KeyOption = "",
) -> None:
    """Write a checkpoint as a PEFT directory, which PEFT, transformers and vLLM load."""
    _check_path(path)
    target = find_target(url, api_key)
    try:
        with ArchiveFile(directory) as archive:

            async def fetch(transport: Transport) -> None:
                async for response in transport.stream(EXPORT_CHECKPOINT, pb.ExportCheckpointRequest(path=path)):
                    archive.write(response.data)

            ask(target, fetch)
            archive.unpack()
    except (OSError, ValueError) as error:
        raise CliError(str(error)) from None
    show.note(f"Wrote {directory}: peft.PeftModel.from_pretrained(base, {str(directory)!r}) loads it.")


@app.command()
def delete(
    path: PathArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = "",
    api_key: KeyOption = "",
) -> None:
    """Delete a checkpoint for good."""
    _check_path(path)
    target = find_target(url, api_key)
    if not yes:
        typer.confirm(f"Delete {path} for good?", abort=True)
    call(target, DELETE_CHECKPOINT, pb.DeleteCheckpointRequest(path=path))
    show.note(f"{path} is deleted.")


def _check_path(path: str) -> None:
    try:
        CheckpointPath.parse(path)
    except ValueError as error:
        raise CliError(str(error)) from None
