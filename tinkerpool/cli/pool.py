"""`status`, `watch` and `usage`: what a pool is doing, and for whom it did how much."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import TIMEOUT_S, JsonOption, KeyOption, UrlOption, ask, call, find_target
from tinkerpool.client.calls.methods import GET_POOL_STATUS, GET_USAGE, WATCH_CYCLES
from tinkerpool.client.calls.transport import Transport
from tinkerpool.v1 import pool_pb2

OTHERS = "(others)"
"""Stands for tenants whose names this key may not see."""
CANCEL_AGAIN_S = 0.2
NODE_CHARS = 12
"""Shown of a node: Ray's ids have 56 hexadecimal digits. JSON has all of it."""


def status(
    num_cycles: Annotated[
        int, typer.Option("--cycles", "-n", min=0, max=1000, help="How many of the last cycles.")
    ] = 8,
    url: UrlOption = "",
    api_key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """Show the workers, the queue, and the last cycles with who was in them."""
    target = find_target(url, api_key)
    request = pool_pb2.GetPoolStatusRequest(num_cycles=num_cycles or 1)
    response = call(target, GET_POOL_STATUS, request)
    if num_cycles == 0:
        del response.cycles[:]
    if json:
        show.json_message(response)
        return
    show.say(
        f"tinkerpool {response.version} at {target.url}, up {show.duration(response.uptime_seconds)}, "
        f"start {response.epoch} on its data"
    )
    show.say(
        f"{_plural(response.num_queued, 'operation')} waiting, {response.num_running} running, "
        f"{_plural(response.num_samples, 'sample request')} open"
    )
    show.console.print()
    show.table(
        "Workers",
        ("worker", "base model", "device", "slots", "adapters", "node", "pid", "state"),
        (
            (
                worker.worker_id,
                worker.base_model,
                worker.device,
                str(worker.num_slots),
                str(worker.num_adapters),
                worker.node[:NODE_CHARS],
                str(worker.pid),
                Text("live", "green") if worker.is_live else Text("lost, being replaced", "red"),
            )
            for worker in response.workers
        ),
        right="slots adapters pid",
    )
    if response.cycles:
        show.console.print()
        show.table(
            "Last cycles",
            ("cycle", "at", "base model", "pass", "step", "commit", "tokens", "who"),
            (
                (
                    str(cycle.cycle_id),
                    show.clock_time(cycle.start_time),
                    cycle.base_model,
                    show.duration(cycle.pass_seconds),
                    show.duration(cycle.step_seconds),
                    show.duration(cycle.commit_seconds),
                    show.count(_num_tokens(cycle)),
                    _who(cycle),
                )
                for cycle in response.cycles
            ),
            right="cycle pass step commit tokens",
        )
    elif num_cycles:
        show.say("No cycle has run yet.")


def watch(
    num_cycles: Annotated[int, typer.Option("--cycles", "-n", min=0, help="Stop after so many; 0: never.")] = 0,
    url: UrlOption = "",
    api_key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """Show each cycle as it happens, with who is in it. Ctrl-C ends it."""
    target = find_target(url, api_key)

    async def follow(transport: Transport) -> None:
        _end_at_ctrl_c()
        # A stream says nothing until there is a cycle; an ordinary call says at once whether somebody is there.
        await transport.call(GET_POOL_STATUS, pool_pb2.GetPoolStatusRequest(num_cycles=1), timeout_s=TIMEOUT_S)
        if not json:
            show.note(f"Watching {target.url}; a line for each cycle. Ctrl-C ends it.")
        num_seen = 0
        async for response in transport.stream(WATCH_CYCLES, pool_pb2.WatchCyclesRequest()):
            if json:
                show.json_line(response.cycle)
            else:
                show.say(_line(response.cycle))
            num_seen += 1
            if num_seen == num_cycles:
                return

    try:
        ask(target, follow)
    except (KeyboardInterrupt, asyncio.CancelledError):
        show.note("")


def _end_at_ctrl_c() -> None:
    """Let Ctrl-C cancel the running task until it ends: a stream that is just being opened swallows the first time."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.done():
            task.cancel()
            loop.call_later(CANCEL_AGAIN_S, cancel)

    with contextlib.suppress(NotImplementedError):  # on Windows asyncio does its best
        loop.add_signal_handler(signal.SIGINT, cancel)


def usage(url: UrlOption = "", api_key: KeyOption = "", json: JsonOption = False) -> None:
    """Show tokens and engine time, by tenant and kind of operation.

    An administrator's key sees every tenant, another one its own.
    """
    response = call(find_target(url, api_key), GET_USAGE, pool_pb2.GetUsageRequest())
    if json:
        show.json_message(response)
        return
    if not response.rows:
        show.say("Nothing has been used yet.")
        return
    rows = [(row.tenant, row.kind, row) for row in response.rows]
    totals: dict[str, pool_pb2.UsageRow] = defaultdict(pool_pb2.UsageRow)
    for tenant, _, row in rows:
        totals[tenant].num_operations += row.num_operations
        totals[tenant].num_tokens += row.num_tokens
        totals[tenant].engine_seconds += row.engine_seconds
    lines: list[tuple[str | Text, ...]] = []
    for tenant, total in totals.items():
        lines += [_usage_line(tenant, kind, row) for name, kind, row in rows if name == tenant]
        lines.append(tuple(Text(str(cell), "bold") for cell in _usage_line(tenant, "all", total)))
    show.table(
        "Usage since the pool's data began",
        ("tenant", "kind", "operations", "tokens", "engine time"),
        lines,
        right="operations tokens engine time",
    )


def _usage_line(tenant: str, kind: str, row: pool_pb2.UsageRow) -> tuple[str, ...]:
    return tenant, kind, show.count(row.num_operations), show.count(row.num_tokens), show.duration(row.engine_seconds)


def _line(cycle: pool_pb2.Cycle) -> str:
    seconds = cycle.pass_seconds + cycle.step_seconds + cycle.commit_seconds
    return (
        f"{show.clock_time(cycle.start_time)}  #{cycle.cycle_id:<6} {cycle.base_model}  {show.duration(seconds):>7}  "
        f"{show.count(_num_tokens(cycle)):>7} tokens  {_who(cycle)}"
    )


def _num_tokens(cycle: pool_pb2.Cycle) -> int:
    return sum(entry.num_tokens for entry in cycle.entries)


def _who(cycle: pool_pb2.Cycle) -> str:
    """`alice 2 adapters, bob, (others) 3 adapters`; a dot after a name: it took an optimizer step."""
    by_tenant: dict[str, list[pool_pb2.CycleEntry]] = defaultdict(list)
    for entry in cycle.entries:
        by_tenant[entry.tenant or OTHERS].append(entry)
    return ", ".join(_part(tenant, by_tenant[tenant]) for tenant in sorted(by_tenant, key=lambda t: (t == OTHERS, t)))


def _part(tenant: str, entries: Iterable[pool_pb2.CycleEntry]) -> str:
    entries = list(entries)
    adapters = {entry.adapter_id for entry in entries} if tenant != OTHERS else set(range(len(entries)))
    several = f" x{len(adapters)}" if len(adapters) > 1 else ""
    return f"{tenant}{several}{' +step' if any(entry.is_step for entry in entries) else ''}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
