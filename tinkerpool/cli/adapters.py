"""`tinkerpool adapter`: the LoRAs being trained."""

from __future__ import annotations

from typing import Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, LimitOption, YesOption, call, fetch_list, note_rest
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.client.calls.methods import DELETE_ADAPTER, LIST_ADAPTERS, MOVE_ADAPTER
from tinkerpool.v1 import adapters_pb2

app = typer.Typer(no_args_is_help=True)


@app.command("list")
@calls_pool
def list_adapters(
    target: Target,
    limit: LimitOption = 50,
    json: JsonOption = False,
) -> None:
    """List your adapters, newest first."""
    found = fetch_list(target, LIST_ADAPTERS, adapters_pb2.ListAdaptersRequest, "adapters", limit)
    if json:
        show.json_message(found)
        return
    if not found.adapters:
        show.say("There are no adapters yet: ServiceClient().create_lora_training_client(...) creates one.")
        return
    show.table(
        "Adapters",
        ("adapter", "base model", "rank", "trains", "done", "queued", "created"),
        (
            (
                adapter.adapter_id,
                adapter.base_model,
                str(adapter.rank),
                "+".join(
                    name
                    for name, is_trained in (
                        ("attn", adapter.train_attn),
                        ("mlp", adapter.train_mlp),
                        ("unembed", adapter.train_unembed),
                    )
                    if is_trained
                ),
                str(adapter.applied_seq),
                str(adapter.next_seq - 1 - adapter.applied_seq),
                show.age(adapter.create_time),
            )
            for adapter in found.adapters
        ),
        right="rank done queued",
    )
    note_rest(found, limit)


@app.command()
@calls_no_other_pool
def delete(
    target: Target,
    adapter_id: Annotated[str, typer.Argument(help="The id in `tinkerpool adapter list`.")],
    yes: YesOption = False,
) -> None:
    """Delete an adapter and its training state for good. Its checkpoints stay."""
    if not yes:
        typer.confirm(f"Delete {adapter_id} and its training state for good?", abort=True)
    call(target, DELETE_ADAPTER, adapters_pb2.DeleteAdapterRequest(adapter_id=adapter_id))
    show.note(f"{adapter_id} is deleted.")


@app.command()
@calls_pool
def move(
    target: Target,
    adapter_id: Annotated[str, typer.Argument(help="The id in `tinkerpool adapter list`.")],
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The id in `tinkerpool worker list`.")],
) -> None:
    """Let an adapter go on on a worker, for example because it waits for one with the numerics of before.

    Its training goes on where it was. If the worker has other numerics, results may differ in the last bits.
    """
    request = adapters_pb2.MoveAdapterRequest(adapter_id=adapter_id, worker_id=worker)
    moved = call(target, MOVE_ADAPTER, request)
    note = " It has other numerics: results may differ in the last bits from now on." if moved.changes_numerics else ""
    show.note(f"{adapter_id} goes on on worker {worker} with its next operation.{note}")
