"""`top`: what a pool does at the moment, on one screen that is drawn again and again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeAlias, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption, follow
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.pool import problems_of, queue_line, rate, tenant_cells, tokens_line
from tinkerpool.cli.workers import state
from tinkerpool.client.calls.methods import GET_POOL_STATUS
from tinkerpool.client.calls.transport import Transport
from tinkerpool.errors import DeadlineExceeded, Unavailable
from tinkerpool.history import WAITS, reason_of
from tinkerpool.v1 import pool_pb2
from tinkerpool.v1.history_pb2 import WaitReason

T = TypeVar("T")
Status: TypeAlias = pool_pb2.GetPoolStatusResponse
REPLY_S = 5.0
"""Deadline of a call: a pool that takes longer is said not to reply."""
WIDE = 100
"""Columns of a terminal from which on tables are spaced out."""
NAME_WIDTH, NAME_WIDTH_WIDE = 18, 32
"""Characters of a name in a table's first column."""
QUEUE_ROWS = 4
"""Reasons that are shown however many workers and tenants there are."""


@calls_pool
def top(
    target: Target,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what the pool does now, by worker and tenant: queues, tokens a second, memory. Ctrl-C ends it.

    Tokens a second are those of the last ten seconds. Without a terminal it prints one table after another, and with
    --json one object a line.
    """

    async def look(transport: Transport) -> None:
        with _output(target, is_live=not once and not json, is_json=json) as shown:
            last_reply: float | None = None
            while True:
                try:
                    request = pool_pb2.GetPoolStatusRequest(num_cycles=1)
                    status = await transport.call(GET_POOL_STATUS, request, timeout_s=REPLY_S)
                except (Unavailable, DeadlineExceeded):
                    if last_reply is None:
                        raise
                    shown(None, last_reply)
                else:
                    last_reply = time.time()
                    shown(status, last_reply)
                if once:
                    return
                await asyncio.sleep(interval)

    follow(target, look)


@contextmanager
def _output(target: Target, *, is_live: bool, is_json: bool) -> Iterator[Callable[[Status | None, float], None]]:
    """Return a function that shows a status, or None if there is no reply since a time of day in seconds."""
    if is_live and show.console.is_terminal:
        with Live(console=show.console, screen=True, auto_refresh=False) as live:

            def draw(status: Status | None, at: float) -> None:
                size = show.console.size
                shown = Group(*_screen(status, target, size.height)) if status is not None else _away(target, at)
                live.update(shown, refresh=True)

            yield draw
        return

    def write(status: Status | None, at: float) -> None:
        if status is None:
            show.note(_away(target, at).plain)
        elif is_json:
            show.json_line(status)
        else:
            show.console.print(*_screen(status, target), "", sep="\n")

    yield write


def _away(target: Target, at: float) -> Text:
    since = time.strftime("%H:%M:%S", time.localtime(at))
    return Text(f"No pool replies at {target.url} since {since}. Trying again ...", "yellow")


def _screen(status: Status, target: Target, height: int | None = None) -> list[RenderableType]:
    """Return the lines and tables of a screen; at most `height` lines, if that is given."""
    lines = [
        _line(
            f"tinkerpool {status.version} at {target.url}, up {show.duration(status.uptime_seconds)}, "
            f"{time.strftime('%H:%M:%S')}",
            "bold",
        ),
        _line(queue_line(status)),
        _line(tokens_line(status) + _last_cycle(status)),
    ]
    lines += [_line(f"Problem: {each.text}", "red" if each.is_severe else "yellow") for each in problems_of(status)]
    waiting: Counter[WaitReason.ValueType] = Counter()
    for tenant in status.tenants:
        waiting.update({each.reason: each.num_operations for each in tenant.waiting})
    reasons = [
        (show.count(number), Text(reason_of(reason)), Text(WAITS.get(reason, "for its turn")))
        for reason, number in waiting.most_common()
    ]
    num_tables = 1 + bool(status.tenants) + bool(reasons)
    num_rows = None if height is None else max(num_tables, height - len(lines) - 2 * num_tables)
    for_workers, for_tenants, for_reasons = _shares(num_rows, len(status.workers), len(status.tenants), len(reasons))
    parts: list[RenderableType] = [*lines, "", *_workers(status.workers, for_workers)]
    if status.tenants:
        parts += ["", *_tenants(status.tenants, for_tenants)]
    if reasons:
        parts += ["", *_table(("queued", "waits for", ""), reasons, for_reasons, right="queued")]
    return parts


def _shares(num_rows: int | None, workers: int, tenants: int, reasons: int) -> tuple[int, int, int]:
    """Return how many rows workers, tenants and reasons get of `num_rows`; None: as many as they have."""
    if num_rows is None:
        return workers, tenants, reasons
    for_reasons = min(reasons, max(QUEUE_ROWS, num_rows - workers - tenants))
    rest = num_rows - for_reasons
    for_workers = min(workers, max(rest // 2, rest - tenants))
    return for_workers, min(tenants, rest - for_workers), for_reasons


def _workers(workers: Sequence[pool_pb2.Worker], num_rows: int) -> list[RenderableType]:
    has_models = len({worker.base_model for worker in workers}) > 1
    memory = {"memory": "resident_bytes", "GPU": "device_bytes"}
    memory = {column: name for column, name in memory.items() if any(getattr(each, name) for each in workers)}
    kept = _kept(workers, num_rows, lambda each: (each.state != pool_pb2.WORKER_STATE_READY, _tokens(each)))
    columns = ["worker", *(["base model"] if has_models else []), "adapters", "samples"]
    columns += [*memory, "trained/s", "sampled/s", "state"]
    rows: list[Sequence[str | Text]] = [
        (
            Text(worker.worker_id),
            *([Text(worker.base_model)] if has_models else []),
            f"{worker.num_adapters}/{worker.num_slots}" if worker.num_slots else "",
            str(worker.num_samples),
            *(show.size(getattr(worker, name)) for name in memory.values()),
            rate(worker.trained_tokens_per_second),
            rate(worker.sampled_tokens_per_second),
            state(worker),
        )
        for worker in kept
    ]
    right = "adapters samples memory GPU trained/s sampled/s"
    return _table(columns, rows, num_rows, num_left_out=len(workers) - len(kept), right=right)


def _tenants(tenants: Sequence[pool_pb2.TenantActivity], num_rows: int) -> list[RenderableType]:
    kept = _kept(tenants, num_rows, lambda each: (each.num_queued + each.num_running, _tokens(each)))
    columns = ("tenant", "queued", "running", "adapters", "oldest", "trained/s", "sampled/s", "waits for")
    rows = [tenant_cells(each) for each in kept]
    right = "queued running adapters oldest trained/s sampled/s"
    return _table(columns, rows, num_rows, num_left_out=len(tenants) - len(kept), right=right)


def _kept(items: Sequence[T], num_rows: int, weight: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return those of the items, in their order, that weigh most and fit with a line about the others."""
    if len(items) <= num_rows:
        return list(items)
    heaviest = sorted(range(len(items)), key=lambda index: weight(items[index]), reverse=True)[: max(0, num_rows - 1)]
    return [items[index] for index in sorted(heaviest)]


def _tokens(each: pool_pb2.Worker | pool_pb2.TenantActivity) -> float:
    return each.trained_tokens_per_second + each.sampled_tokens_per_second


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    num_rows: int,
    *,
    num_left_out: int = 0,
    right: str = "",
) -> list[RenderableType]:
    """Return a table with a line for each row, and one about rows that are left out: at most `num_rows` lines.

    `right`: as of `show.table`. Names in the first column are cut at their length, then those in the others.
    """
    if len(rows) > num_rows:
        num_left_out, rows = len(rows) - num_rows + 1, rows[: num_rows - 1]
    is_wide = show.console.width >= WIDE
    shown = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2 if is_wide else 1, 0, 0))
    numbers = set(right.split())
    for index, column in enumerate(columns):
        is_number = column in numbers
        shown.add_column(
            _line(column),
            justify="right" if is_number else "left",
            no_wrap=is_number or index == 0,
            max_width=(NAME_WIDTH_WIDE if is_wide else NAME_WIDTH) if index == 0 else None,
        )
    for row in rows:
        shown.add_row(*(_line(cell) if isinstance(cell, Text) else Text(cell) for cell in row))
    return [shown, _line(f"... and {num_left_out:,} more", "dim")] if num_left_out else [shown]


def _line(text: str | Text, style: str = "") -> Text:
    """Return a text that is cut at the end of its line."""
    line = text.copy() if isinstance(text, Text) else Text(text, style)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _last_cycle(status: Status) -> str:
    if not status.cycles:
        return ""
    cycle = status.cycles[-1]
    return (
        f"; last cycle {show.age(cycle.start_time)}: pass {show.duration(cycle.pass_seconds)}, "
        f"step {show.duration(cycle.step_seconds)}"
    )
