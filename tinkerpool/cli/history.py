"""`why` and `history`: what an operation waited for, and an adapter's operations with their metrics."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, LimitOption, call
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.references import SAMPLER_PART, find_adapter, find_operation
from tinkerpool.client.calls.methods import GET_HISTORY_ENTRY, LIST_HISTORY
from tinkerpool.history import WAITS, kind_of, progress_of
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb

LEFT_OUT = ("tokens", "clock_cycle", "num_datums", "adapter_norm", "update_norm", "weight_norm")
"""Metrics that the table leaves out; `--json` has all."""


@calls_pool
def why(
    target: Target,
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            help="Its name, ADAPTER:SEQ, as futures and errors show it; a unique beginning of the adapter's id, or its "
            "name, is enough.",
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Tell why an operation took as long as it did, or what it waits for."""
    request = pb.GetHistoryEntryRequest(name=find_operation(target, operation))
    entry = call(target, GET_HISTORY_ENTRY, request).entry
    if json:
        show.json_message(entry)
        return
    for name, text in _lines(entry):
        show.say(f"{name:<10} {text}")


def _lines(entry: pb.HistoryEntry) -> list[tuple[str, str]]:
    lines = [("operation", f"{entry.operation} ({kind_of(entry)})")]
    if entry.HasField("arrive_time"):
        lines.append(("arrived", show.moment(entry.arrive_time)))
    else:
        lines.append(("arrived", "before the pool's last start"))
    if progress := progress_of(entry):
        lines.append(("now", progress.partition(") ")[2]))
    if entry.waits:
        lines.append(("waited", show.duration(sum(each.seconds for each in entry.waits))))
        lines += [("", f"{show.duration(each.seconds):>7} {WAITS.get(each.reason, '')}") for each in entry.waits]
    if entry.worker_id:
        lines.append(("ran", _run(entry)))
    if entry.HasField("end_time"):
        took = ""
        if entry.HasField("arrive_time"):
            seconds = (entry.end_time.ToNanoseconds() - entry.arrive_time.ToNanoseconds()) / 1e9
            took = f", {show.duration(max(0.0, seconds))} after it came"
        ended = f"failed with {entry.error_reason}" if entry.error_reason else "succeeded"
        lines.append(("ended", f"{ended}{took}"))
    return lines


def _run(entry: pb.HistoryEntry) -> str:
    text = f"on worker {entry.worker_id}"
    if entry.cycle_id:
        others = entry.num_tenants - 1
        with_others = f" with {others} other tenant{'' if others == 1 else 's'}" if others > 0 else ""
        text += f", in cycle {entry.cycle_id}{with_others} (pass {show.duration(entry.pass_seconds)}, steps "
        text += f"{show.duration(entry.step_seconds)})"
    if entry.state not in (ops_pb.OPERATION_STATE_QUEUED, ops_pb.OPERATION_STATE_RUNNING):
        text += f": {show.count(entry.num_tokens)} tokens, {show.duration(entry.engine_seconds)} of the engine"
    return text + (f"; begun {entry.num_begins} times" if entry.num_begins > 1 else "")


@calls_pool
def history(
    target: Target,
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER", help="An adapter: its id, a unique beginning of it, or its name. Or the id of a sampler."
        ),
    ],
    limit: LimitOption = 20,
    json: JsonOption = False,
) -> None:
    """Show the last operations of an adapter: how long each waited and ran, and its metrics."""
    adapter_id = adapter if SAMPLER_PART in adapter else find_adapter(target, adapter).adapter_id
    entries = _last(target, adapter_id, limit)
    if json:
        show.json_message(pb.ListHistoryResponse(entries=entries))
        return
    if not entries:
        show.say(f"The history has nothing of {adapter_id}.")
        return
    show.table(
        f"History of {adapter_id}",
        ("seq", "kind", "arrived", "waited", "took", "tokens", "metrics"),
        (
            (
                entry.operation.rpartition(":")[2] or f"step {entry.step}",
                kind_of(entry),
                show.clock_time(entry.arrive_time) if entry.HasField("arrive_time") else "",
                show.duration(sum(each.seconds for each in entry.waits)),
                _took(entry),
                show.count(entry.num_tokens),
                entry.error_reason or _metrics(entry),
            )
            for entry in entries
        ),
        right="seq waited took tokens",
    )


def _last(target: Target, adapter_id: str, limit: int) -> list[pb.HistoryEntry]:
    entries: list[pb.HistoryEntry] = []
    request = pb.ListHistoryRequest(target_id=adapter_id)
    while True:
        page = call(target, LIST_HISTORY, request)
        entries = [*entries, *page.entries][-limit:]
        if not page.has_more:
            return entries
        request.page_token = page.next_page_token


def _took(entry: pb.HistoryEntry) -> str:
    if not (entry.HasField("begin_time") and entry.HasField("end_time")):
        return ""
    return show.duration(max(0.0, (entry.end_time.ToNanoseconds() - entry.begin_time.ToNanoseconds()) / 1e9))


def _metrics(entry: pb.HistoryEntry) -> str:
    uses = Counter(name.partition(":")[0] for name in entry.metrics)
    return ", ".join(
        f"{short if uses[short] == 1 else name} {value:.4g}"
        for name, value in sorted(entry.metrics.items())
        if (short := name.partition(":")[0]) not in LEFT_OUT
    )
