"""`tinkerpool checkpoint`: named, immutable states of adapters."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import (
    TIMEOUT_S,
    JsonOption,
    LimitOption,
    YesOption,
    ask,
    call,
    fetch_list,
    note_rest,
)
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.show import CliError
from tinkerpool.client.archive import ArchiveFile
from tinkerpool.client.calls.methods import (
    DELETE_CHECKPOINT,
    EXPORT_CHECKPOINT,
    GET_CAPABILITIES,
    LIST_CHECKPOINTS,
    SAVE_STATE,
    WAIT_OPERATIONS,
)
from tinkerpool.client.calls.transport import Transport
from tinkerpool.client.export import Exporter, ExportFormat
from tinkerpool.names import CheckpointPath
from tinkerpool.v1 import checkpoints_pb2 as pb
from tinkerpool.v1.operations_pb2 import Operation, WaitOperationsRequest
from tinkerpool.v1.sessions_pb2 import GetCapabilitiesRequest, GetCapabilitiesResponse

app = typer.Typer(no_args_is_help=True)
_LOADERS = {
    ExportFormat.PEFT: "peft.PeftModel.from_pretrained(base, {directory!r}) loads it.",
    ExportFormat.MERGED: "transformers.AutoModelForCausalLM.from_pretrained({directory!r}) loads it.",
    ExportFormat.VLLM: "an adapter without the unembedding.",
}


def _path(text: str) -> str:
    """Check a path of a checkpoint. Raises CliError."""
    try:
        CheckpointPath.parse(text)
    except ValueError as error:
        raise CliError(str(error)) from None
    return text


PathArgument = Annotated[
    str, typer.Argument(parser=_path, metavar="PATH", help="The path in `tinkerpool checkpoint list`, tinker://...")
]


@app.command("list")
@calls_pool
def list_checkpoints(
    target: Target,
    adapter_id: Annotated[str, typer.Option("--adapter", help="List only checkpoints of this adapter.")] = "",
    limit: LimitOption = 50,
    json: JsonOption = False,
) -> None:
    """List your checkpoints, newest first."""
    make_request = partial(pb.ListCheckpointsRequest, adapter_id=adapter_id)
    found = fetch_list(target, LIST_CHECKPOINTS, make_request, "checkpoints", limit)
    if json:
        show.json_message(found)
        return
    if not found.checkpoints:
        show.say("There are no checkpoints yet: training_client.save_state(name) creates one.")
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
    note_rest(found, limit)


@app.command()
@calls_pool
def save(
    target: Target,
    adapter_id: Annotated[str, typer.Argument(help="The id in `tinkerpool adapter list`.")],
    name: Annotated[str, typer.Argument(help="Name of the checkpoint.")],
) -> None:
    """Save an adapter's state as it is now, behind its queued operations. Its client need not run any more."""

    async def save_and_wait(transport: Transport) -> Operation:
        request = pb.SaveStateRequest(adapter_id=adapter_id, name=name, request_id=uuid.uuid4().hex)
        saving = await transport.call(SAVE_STATE, request, timeout_s=TIMEOUT_S)
        waiting = WaitOperationsRequest(names=[saving.operation.name])
        finished = [response.operation async for response in transport.stream(WAIT_OPERATIONS, waiting)]
        return finished[0]

    operation = ask(target, save_and_wait)
    if operation.HasField("error"):
        raise CliError(operation.error.message)
    show.note(
        f"Saved {operation.save_state.path}: ServiceClient().create_training_client_from_state(path) continues it."
    )


@app.command()
@calls_pool
def export(
    target: Target,
    path: PathArgument,
    directory: Annotated[Path, typer.Argument(help="A new directory.", file_okay=False)],
    export_format: Annotated[
        ExportFormat,
        typer.Option("--format", help="An adapter for PEFT, a merged model, or an adapter within vLLM's rules."),
    ] = ExportFormat.PEFT,
    base_model: Annotated[
        str,
        typer.Option(
            "--base-model",
            metavar="PATH_OR_NAME",
            help="The base model: a directory, or ORGANISATION/MODEL. Default: the pool's name for it.",
            show_default=False,
        ),
    ] = "",
    whole_unembedding: Annotated[
        bool,
        typer.Option(
            "--whole-unembedding",
            help="With peft: write a trained unembedding whole, so that merge_and_unload() is right. Needs base files.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint as a directory that PEFT, transformers or vLLM loads."""
    try:
        exporter = Exporter(
            checkpoint=path, format=export_format, base_model=base_model, whole_unembedding=whole_unembedding
        )
        with ArchiveFile(directory) as archive:

            async def fetch(transport: Transport) -> GetCapabilitiesResponse:
                pool = await transport.call(GET_CAPABILITIES, GetCapabilitiesRequest(), timeout_s=TIMEOUT_S)
                async for response in transport.stream(EXPORT_CHECKPOINT, pb.ExportCheckpointRequest(path=path)):
                    archive.write(response.data)
                return pool

            exporter.finish(archive, ask(target, fetch))
    except (OSError, ValueError) as error:
        raise CliError(str(error)) from None
    show.note(f"Wrote {directory}: {_LOADERS[export_format].format(directory=str(directory))}")
    for note in exporter.notes:
        show.note(note)


@app.command()
@calls_pool
def delete(
    target: Target,
    path: PathArgument,
    yes: YesOption = False,
) -> None:
    """Delete a checkpoint for good."""
    if not yes:
        typer.confirm(f"Delete {path} for good?", abort=True)
    call(target, DELETE_CHECKPOINT, pb.DeleteCheckpointRequest(path=path))
    show.note(f"{path} is deleted.")
