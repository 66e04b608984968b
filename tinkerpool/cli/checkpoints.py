"""`tinkerpool checkpoint`: named, immutable states of adapters."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tinkerpool.cli import show
from tinkerpool.cli.connection import (
    TIMEOUT_S,
    JsonOption,
    LimitOption,
    YesOption,
    ask,
    call,
    fetch_list,
    interruptible,
    note_rest,
    open_connection,
)
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.cli.references import AdapterArgument, PathArgument, find_adapter, find_checkpoint
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
from tinkerpool.client.imports import Adapter, Import, import_adapter
from tinkerpool.v1 import checkpoints_pb2 as pb
from tinkerpool.v1.operations_pb2 import Operation, WaitOperationsRequest
from tinkerpool.v1.sessions_pb2 import GetCapabilitiesRequest, GetCapabilitiesResponse

app = typer.Typer(no_args_is_help=True)
_LOADERS = {
    ExportFormat.PEFT: "peft.PeftModel.from_pretrained(base, {directory!r}) loads it.",
    ExportFormat.MERGED: "transformers.AutoModelForCausalLM.from_pretrained({directory!r}) loads it.",
    ExportFormat.VLLM: "an adapter without the unembedding.",
}


@app.command("list")
@calls_pool
def list_checkpoints(
    target: Target,
    adapter: Annotated[
        str,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="List only checkpoints of this adapter, also of a deleted one: the beginning of its id, or its name.",
        ),
    ] = "",
    limit: LimitOption = 50,
    json: JsonOption = False,
) -> None:
    """List your checkpoints, newest first."""
    make_request = partial(pb.ListCheckpointsRequest, reference=adapter)
    found = fetch_list(target, LIST_CHECKPOINTS, make_request, "checkpoints", limit)
    if json:
        show.json_message(found)
        return
    if not found.checkpoints:
        show.say("There are no checkpoints yet: training_client.save_state(name) creates one.")
        return
    show.table(
        "Checkpoints",
        ("path", "adapter", "base model", "rank", "seq", "size", "created"),
        (
            (
                checkpoint.path,
                checkpoint.adapter_name,
                checkpoint.base_model,
                str(checkpoint.rank),
                str(checkpoint.seq),
                show.size(checkpoint.size_bytes),
                show.age(checkpoint.create_time),
            )
            for checkpoint in found.checkpoints
        ),
        right="rank seq size",
        whole=("path",),
        spare=("rank", "seq", "base model", "created", "size", "adapter"),
    )
    note_rest(found, limit)


@app.command()
@calls_pool
def save(
    target: Target,
    adapter: AdapterArgument,
    name: Annotated[str, typer.Argument(help="Name of the checkpoint.")],
) -> None:
    """Save an adapter's state as it is now, behind its queued operations. Its client need not run any more."""
    adapter_id = find_adapter(target, adapter).adapter_id

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
    path = find_checkpoint(target, path)
    try:
        exporter = Exporter(
            checkpoint=path, format=export_format, base_model=base_model, whole_unembedding=whole_unembedding
        )
        with interruptible(), ArchiveFile(directory) as archive:

            async def fetch(transport: Transport) -> GetCapabilitiesResponse:
                pool = await transport.call(GET_CAPABILITIES, GetCapabilitiesRequest(), timeout_s=TIMEOUT_S)
                async for response in transport.stream(EXPORT_CHECKPOINT, pb.ExportCheckpointRequest(path=path)):
                    archive.write(response.data)
                return pool

            archive.publish(exporter.finish(archive, ask(target, fetch)))
    except (OSError, ValueError) as error:
        raise CliError(str(error)) from None
    show.note(f"Wrote {directory}: {_LOADERS[export_format].format(directory=str(directory))}")
    for note in exporter.notes:
        show.note(note)


@app.command("import")
@calls_pool
def import_directory(
    target: Target,
    directory: Annotated[
        Path, typer.Argument(help="What PEFT's save_pretrained or `tinkerpool checkpoint export` wrote.")
    ],
    name: Annotated[str, typer.Option("--name", help="Name of the checkpoint.")] = "imported",
    adapter_name: Annotated[str, typer.Option("--adapter-name", metavar="NAME", help="Name of the new adapter.")] = "",
    base_model: Annotated[
        str,
        typer.Option(
            "--base-model",
            metavar="NAME",
            help="The pool's name of the base model. Default: its only one, or the one that the adapter names.",
            show_default=False,
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Make a checkpoint of a PEFT LoRA adapter: adapter_config.json and adapter_model.safetensors.

    The pool checks names, shapes and types before the weights are sent.

    It refuses what it would compute differently: DoRA, rsLoRA, ranks or alphas by module, biases, whole modules.

    The adapter keeps its rank and alpha; its moments begin at zero.

    Example: tinkerpool checkpoint import ./my-adapter --name from-peft
    """
    console = Console(stderr=True)
    try:
        what = Import(name=name, base_model=base_model, adapter_name=adapter_name)
        with (
            Adapter.open(directory) as adapter,
            open_connection(target) as connection,
            Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        ):
            task = bar.add_task("sending", total=adapter.num_bytes)
            imported = connection.start(
                import_adapter(connection, adapter, what, lambda done, _: bar.update(task, completed=done))
            ).result()
    except (OSError, ValueError) as error:
        raise CliError(str(error)) from None
    if json:
        print(dumps(asdict(imported)))
        return
    show.say(imported.path)
    show.note(
        f"Imported {directory} as rank {imported.lora_rank}, alpha {imported.lora_alpha:g}, of {imported.base_model}. "
        "Its adapter is there to train, and the checkpoint to sample from:"
    )
    show.note(f'  ServiceClient().create_training_client_from_state("{imported.path}")')
    show.note(f'  ServiceClient().create_sampling_client("{imported.path}")')
    for each in imported.notes:
        show.note(each)


@app.command()
@calls_no_other_pool
def delete(
    target: Target,
    path: PathArgument,
    yes: YesOption = False,
) -> None:
    """Delete a checkpoint for good."""
    path = find_checkpoint(target, path)
    if not yes:
        typer.confirm(f"Delete {path} for good?", abort=True)
    call(target, DELETE_CHECKPOINT, pb.DeleteCheckpointRequest(path=path))
    show.note(f"{path} is deleted.")
