"""`tinkerpool worker`: the workers of a pool, and which of them take work. Draining needs an administrator's key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, call
from tinkerpool.cli.finding import Target, calls_no_other_pool, calls_pool
from tinkerpool.client.calls.methods import DRAIN_WORKER, GET_POOL_STATUS, UNDRAIN_WORKER
from tinkerpool.v1 import pool_pb2

app = typer.Typer(no_args_is_help=True)

WorkerArgument = Annotated[
    str, typer.Argument(metavar="WORKER", help="The worker's id, as in `tinkerpool worker list`.")
]


@app.command("list")
@calls_pool
def list_workers(target: Target, json: JsonOption = False) -> None:
    """List the workers: where they run, what they hold, what they do."""
    response = call(target, GET_POOL_STATUS, pool_pb2.GetPoolStatusRequest(num_cycles=1))
    if json:
        show.json_message(pool_pb2.GetPoolStatusResponse(workers=response.workers))
    else:
        show_workers(response.workers)


@app.command()
@calls_no_other_pool
def drain(target: Target, worker: WorkerArgument) -> None:
    """Take a worker out of work: its adapters go on on other workers, its samples end, and then its process.

    It stays drained over restarts of the pool, until `undrain`. Nothing is lost.
    """
    drained = call(target, DRAIN_WORKER, pool_pb2.DrainWorkerRequest(worker_id=worker)).worker
    adapters = f", with {drained.num_adapters} adapters to move" if drained.num_adapters else ""
    show.note(f"Worker {worker} {state(drained)}{adapters}. To take it back: tinkerpool worker undrain {worker}")


@app.command()
@calls_pool
def undrain(target: Target, worker: WorkerArgument) -> None:
    """Let a drained worker take work again. Its process is started if it has ended: `list` shows when it is ready."""
    call(target, UNDRAIN_WORKER, pool_pb2.UndrainWorkerRequest(worker_id=worker))
    show.note(f"Worker {worker} takes work again.")


def show_workers(workers: Sequence[pool_pb2.Worker]) -> None:
    """Show a table of workers, and one of their losses if there are any."""
    show.table(
        "Workers",
        ("worker", "base model", "host", "device", "slots", "adapters", "held", "pid", "state"),
        (
            (
                worker.worker_id,
                worker.base_model,
                worker.node,
                worker.device,
                str(worker.num_slots or ""),
                str(worker.num_adapters),
                show.size(worker.held_bytes),
                str(worker.pid or ""),
                state(worker),
            )
            for worker in workers
        ),
        right="slots adapters held pid",
    )
    if lost := [worker for worker in workers if worker.num_losses or worker.start_problem]:
        show.console.print()
        _show_losses(lost)


def _show_losses(workers: Iterable[pool_pb2.Worker]) -> None:
    show.table(
        "Losses since the pool started",
        ("worker", "losses", "last one", "why"),
        (
            (
                worker.worker_id,
                str(worker.num_losses),
                show.moment(worker.last_loss_time) if worker.num_losses else "",
                "; ".join(filter(None, (worker.last_loss_reason, _start_problem(worker)))),
            )
            for worker in workers
        ),
        right="losses",
    )


def _start_problem(worker: pool_pb2.Worker) -> str:
    return f"does not start: {worker.start_problem}" if worker.start_problem else ""


def state(worker: pool_pb2.Worker) -> Text:
    """Return what a worker does, for people."""
    match worker.state:
        case pool_pb2.WORKER_STATE_READY:
            shown = Text("ready", "green")
        case pool_pb2.WORKER_STATE_LATE:
            shown = Text("late", "yellow")
        case pool_pb2.WORKER_STATE_DRAINING:
            shown = Text("drains", "yellow")
        case pool_pb2.WORKER_STATE_DRAINED:
            shown = Text("drained", "yellow")
        case pool_pb2.WORKER_STATE_LOST:
            shown = Text("lost, being replaced", "red")
        case _:
            shown = Text("live", "green") if worker.is_live else Text("lost, being replaced", "red")
    if worker.HasField("host_leaves_in_seconds"):
        seconds = worker.host_leaves_in_seconds
        when = "" if math.isinf(seconds) else f" in {show.duration(seconds)}"
        shown.append(f", its host leaves{when}")
    return shown
