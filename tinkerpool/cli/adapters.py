"""`tinkerpool adapter`: the LoRAs being trained."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
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
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.cli.references import AdapterArgument, find_adapter
from tinkerpool.cli.show import CliError
from tinkerpool.cli.times import seconds_of
from tinkerpool.client.calls.methods import (
    DELETE_ADAPTER,
    LIST_ADAPTERS,
    LIST_CHECKPOINTS,
    MOVE_ADAPTER,
    RENAME_ADAPTER,
)
from tinkerpool.client.calls.transport import Transport
from tinkerpool.errors import FailedPrecondition
from tinkerpool.v1 import adapters_pb2 as pb
from tinkerpool.v1.checkpoints_pb2 import ListCheckpointsRequest

app = typer.Typer(no_args_is_help=True)

ADAPTERS_MAX = 1_000_000
"""More adapters than a tenant has."""
NameOption = Annotated[
    str, typer.Option("--name", metavar="PREFIX", help="Only adapters whose name begins with this.", show_default=False)
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="KEY=VALUE",
        help="Only adapters with this label. Given several times: with all of them.",
        show_default=False,
    ),
]


@app.command("list")
@calls_pool
def list_adapters(
    target: Target,
    name: NameOption = "",
    label: LabelOption = None,
    limit: LimitOption = 50,
    json: JsonOption = False,
) -> None:
    """List your adapters, newest first."""
    make_request = partial(pb.ListAdaptersRequest, name_prefix=name, labels=_labels(label))
    found = fetch_list(target, LIST_ADAPTERS, make_request, "adapters", limit)
    if json:
        show.json_message(found)
        return
    if not found.adapters and (name or label):
        show.say("No adapter has this name and these labels.")
        return
    if not found.adapters:
        show.say("There are no adapters yet: ServiceClient().create_lora_training_client(...) creates one.")
        return
    show.table(
        "Adapters",
        ("adapter", "name", "base model", "rank", "trains", "done", "queued", "used", "created"),
        (
            (
                adapter.adapter_id,
                adapter.name,
                adapter.base_model,
                str(adapter.rank),
                "+".join(
                    module
                    for module, is_trained in (
                        ("attn", adapter.train_attn),
                        ("mlp", adapter.train_mlp),
                        ("unembed", adapter.train_unembed),
                    )
                    if is_trained
                ),
                str(adapter.applied_seq),
                str(_num_unfinished(adapter)),
                show.age(adapter.last_use_time),
                show.age(adapter.create_time),
            )
            for adapter in found.adapters
        ),
        right="rank done queued",
        whole=("adapter",),
        spare=("trains", "rank", "created", "base model", "queued", "done", "used"),
    )
    note_rest(found, limit)


@app.command()
@calls_pool
def rename(
    target: Target,
    adapter: AdapterArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name; '' takes the name away.")],
) -> None:
    """Give an adapter another name, at most 100 printable characters without '/'. Several may have one name."""
    adapter_id = find_adapter(target, adapter).adapter_id
    call(target, RENAME_ADAPTER, pb.RenameAdapterRequest(adapter_id=adapter_id, name=name))
    show.note(f"{adapter_id} is called {name!r}." if name else f"{adapter_id} has no name.")


@app.command()
@calls_no_other_pool
def delete(target: Target, adapter: AdapterArgument, yes: YesOption = False) -> None:
    """Delete an adapter and its training state for good. Its checkpoints stay."""
    found = find_adapter(target, adapter)
    if not yes:
        typer.confirm(f"Delete {_called(found)} and its training state for good?", abort=True)
    call(target, DELETE_ADAPTER, pb.DeleteAdapterRequest(adapter_id=found.adapter_id))
    show.note(f"{_called(found)} is deleted.")


@app.command()
@calls_no_other_pool
def prune(
    target: Target,
    idle: Annotated[
        str, typer.Option(metavar="DURATION", help="No operation was accepted for at least so long: 30d, 12h.")
    ],
    name: NameOption = "",
    label: LabelOption = None,
    yes: YesOption = False,
) -> None:
    """Delete your adapters that nobody has used for a while, and their training states. Their checkpoints stay.

    It shows them and asks first; without a terminal it needs --yes.

    Adapters with unfinished operations stay, and those that are used meanwhile.

    Example: tinkerpool adapter prune --idle 30d --label team=nlp
    """
    make_request = partial(pb.ListAdaptersRequest, name_prefix=name, labels=_labels(label))
    found = fetch_list(target, LIST_ADAPTERS, make_request, "adapters", ADAPTERS_MAX)
    before = time.time() - seconds_of(idle)
    idle_ones = [each for each in found.adapters if each.last_use_time.ToNanoseconds() / 1e9 <= before]
    busy = [each for each in idle_ones if _num_unfinished(each)]
    for adapter in busy:
        show.note(f"Skipped {_called(adapter)}: it has unfinished operations.")
    adapters = [each for each in idle_ones if not _num_unfinished(each)]
    if not idle_ones:
        show.note(f"No adapter has been idle for {idle}.")
    if not adapters:
        return
    _show_idle(target, adapters)
    if not yes:
        if not sys.stdin.isatty():
            raise CliError("there is no terminal to ask: --yes deletes them")
        typer.confirm(f"Delete {_plural(len(adapters))} for good? Checkpoints stay.", abort=True)
    show.note(f"Deleted {_plural(ask(target, partial(_delete_idle, adapters)))}.")


@app.command()
@calls_pool
def move(
    target: Target,
    adapter: AdapterArgument,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The id in `tinkerpool worker list`.")],
) -> None:
    """Let an adapter go on on a worker, for example because it waits for one with the numerics of before.

    Its training goes on where it was. If the worker has other numerics, results may differ in the last bits.
    """
    adapter_id = find_adapter(target, adapter).adapter_id
    moved = call(target, MOVE_ADAPTER, pb.MoveAdapterRequest(adapter_id=adapter_id, worker_id=worker))
    note = " It has other numerics: results may differ in the last bits from now on." if moved.changes_numerics else ""
    show.note(f"{adapter_id} goes on on worker {worker} with its next operation.{note}")


def _labels(texts: Sequence[str] | None) -> dict[str, str]:
    """Return labels of KEY=VALUE. Raises CliError."""
    labels: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise CliError(f"{text!r} is no label: write KEY=VALUE")
        if labels.setdefault(key, value) != value:
            raise CliError(f"no adapter has two values of the label {key!r}: give one")
    return labels


def _num_unfinished(adapter: pb.Adapter) -> int:
    return adapter.next_seq - 1 - adapter.applied_seq


def _plural(number: int) -> str:
    return f"{number} adapter{'' if number == 1 else 's'}"


def _called(adapter: pb.Adapter) -> str:
    return f"{adapter.adapter_id} ({adapter.name})" if adapter.name else adapter.adapter_id


def _show_idle(target: Target, adapters: Sequence[pb.Adapter]) -> None:
    """Show what would be deleted, with the number of each adapter's checkpoints, which stay."""

    async def count(transport: Transport) -> list[int]:
        numbers = []
        for adapter in adapters:
            request = ListCheckpointsRequest(adapter_id=adapter.adapter_id, page_size=1)
            numbers.append((await transport.call(LIST_CHECKPOINTS, request, timeout_s=TIMEOUT_S)).total_size)
        return numbers

    show.table(
        "Idle adapters",
        ("adapter", "name", "used", "checkpoints"),
        (
            (adapter.adapter_id, adapter.name, show.age(adapter.last_use_time), str(number))
            for adapter, number in zip(adapters, ask(target, count), strict=True)
        ),
        right="checkpoints",
        whole=("adapter",),
        spare=("used",),
    )


async def _delete_idle(adapters: Sequence[pb.Adapter], transport: Transport) -> int:
    """Delete adapters, unless they were used since they were listed; return how many were deleted."""
    num_deleted = 0
    for adapter in adapters:
        request = pb.DeleteAdapterRequest(adapter_id=adapter.adapter_id, unless_used_after=adapter.last_use_time)
        try:
            await transport.call(DELETE_ADAPTER, request, timeout_s=TIMEOUT_S)
        except FailedPrecondition as error:
            show.note(f"Skipped {_called(adapter)}: {error.message}.")
        else:
            num_deleted += 1
    return num_deleted
